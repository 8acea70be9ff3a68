// Three ways for ranks to meet, with the pauses of this project's patch: see 2026-11-28-negotiation.md.
//   mpicxx -O2 -std=c++17 2026-11-28-negotiation.cc -o meet && mpirun --oversubscribe -np 64 meet PER_HOST ROUNDS
#include <linux/futex.h>
#include <mpi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <vector>

using Word = long long;
using std::chrono::microseconds;

// As in the patch: 30 us of polling, then sleeps of a quarter of the time waited, 20 to 200 us.
static void Wait(std::vector<MPI_Request>& requests) {
  const auto since = std::chrono::steady_clock::now();
  for (int done = 0;;) {
    MPI_Testall(requests.size(), requests.data(), &done, MPI_STATUSES_IGNORE);
    if (done) return;
    const auto waited = std::chrono::duration_cast<microseconds>(std::chrono::steady_clock::now() - since);
    if (waited > microseconds(30))
      std::this_thread::sleep_for(std::max(microseconds(20), std::min(waited / 4, microseconds(200))));
  }
}

// Bitwise and of all ranks' words, through rank 0.
static void ThroughRank0(Word* words, MPI_Comm comm) {
  int rank, size;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  std::vector<Word> terms(2 * size);
  std::vector<MPI_Request> requests(rank == 0 ? size - 1 : 1);
  for (int there = 0; there < 2; ++there) {
    if (rank != 0 && !there) MPI_Isend(words, 2, MPI_LONG_LONG_INT, 0, there, comm, &requests[0]);
    if (rank != 0 && there) MPI_Irecv(words, 2, MPI_LONG_LONG_INT, 0, there, comm, &requests[0]);
    for (int other = 1; rank == 0 && other < size; ++other) {
      if (!there) MPI_Irecv(&terms[2 * other], 2, MPI_LONG_LONG_INT, other, there, comm, &requests[other - 1]);
      if (there) MPI_Isend(words, 2, MPI_LONG_LONG_INT, other, there, comm, &requests[other - 1]);
    }
    Wait(requests);
    for (int i = 2; rank == 0 && !there && i < 2 * size; ++i) words[i % 2] &= terms[i];
  }
}

// One step of a tree: through the local rank 0 of each host, and these through rank 0.
static void TwoLevels(Word* words, MPI_Comm local, MPI_Comm cross) {
  int rank, size;
  MPI_Comm_rank(local, &rank);
  MPI_Comm_size(local, &size);
  std::vector<Word> terms(2 * size);
  std::vector<MPI_Request> requests(rank == 0 ? size - 1 : 1);
  for (int other = 1; rank == 0 && other < size; ++other)
    MPI_Irecv(&terms[2 * other], 2, MPI_LONG_LONG_INT, other, 0, local, &requests[other - 1]);
  if (rank != 0) MPI_Isend(words, 2, MPI_LONG_LONG_INT, 0, 0, local, &requests[0]);
  Wait(requests);
  for (int i = 2; rank == 0 && i < 2 * size; ++i) words[i % 2] &= terms[i];
  if (rank == 0) ThroughRank0(words, cross);
  for (int other = 1; rank == 0 && other < size; ++other)
    MPI_Isend(words, 2, MPI_LONG_LONG_INT, other, 1, local, &requests[other - 1]);
  if (rank != 0) MPI_Irecv(words, 2, MPI_LONG_LONG_INT, 0, 1, local, &requests[0]);
  Wait(requests);
}

// Ranks of a host sleep in the kernel, at a word in shared memory.
struct Meeting {
  std::atomic<int> arrived, full, round;
  std::atomic<Word> words[2];
};
static void SleepAt(std::atomic<int>& word, int old) {
  while (word == old) syscall(SYS_futex, &word, FUTEX_WAIT, old, nullptr, nullptr, 0);
}
static void Wake(std::atomic<int>& word) {
  ++word;
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
static void SharedMemory(Word* words, Meeting& meeting, MPI_Comm local, MPI_Comm cross) {
  int rank, size, hosts;
  MPI_Comm_rank(local, &rank);
  MPI_Comm_size(local, &size);
  MPI_Comm_size(cross, &hosts);
  const int round = meeting.round;
  for (int i = 0; i < 2; ++i) meeting.words[i] &= words[i];
  if (++meeting.arrived == size) Wake(meeting.full);
  if (rank == 0) {
    SleepAt(meeting.full, round);
    for (int i = 0; i < 2; ++i) words[i] = meeting.words[i];
    if (hosts > 1) ThroughRank0(words, cross);
    for (int i = 0; i < 2; ++i) meeting.words[i] = words[i];
    meeting.arrived = 0;
    Wake(meeting.round);
  } else {
    SleepAt(meeting.round, round);
    for (int i = 0; i < 2; ++i) words[i] = meeting.words[i];
  }
}

static double Seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  MPI_Init(&argc, &argv);
  const int per_host = std::atoi(argv[1]), rounds = std::atoi(argv[2]);
  int rank, size, local_rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm local, cross;
  MPI_Comm_split(MPI_COMM_WORLD, rank / per_host, rank, &local);
  MPI_Comm_rank(local, &local_rank);
  MPI_Comm_split(MPI_COMM_WORLD, local_rank, rank, &cross);
  MPI_Win window;
  Meeting* meeting;
  MPI_Aint bytes;
  int unit;
  MPI_Win_allocate_shared(local_rank == 0 ? 4096 : 0, 1, MPI_INFO_NULL, local, &meeting, &window);
  MPI_Win_shared_query(window, 0, &bytes, &unit, &meeting);
  if (local_rank == 0) {
    meeting->arrived = meeting->full = meeting->round = 0;
    meeting->words[0] = meeting->words[1] = -1;
  }
  MPI_Barrier(MPI_COMM_WORLD);
  const char* names[] = {"through rank 0", "in two levels", "in shared memory, then through rank 0"};
  for (int way = 0; way < 3; ++way) {
    std::vector<double> took, worked;
    for (int i = -5; i < rounds; ++i) {
      Word words[2] = {1, 1};
      ThroughRank0(words, MPI_COMM_WORLD);
      // The last rank arrives 15 ms after the others, which sleep by then.
      std::this_thread::sleep_for(std::chrono::milliseconds(rank == size - 1 ? 20 : 5));
      const double work = Seconds(CLOCK_PROCESS_CPUTIME_ID), arrival = Seconds(CLOCK_MONOTONIC);
      if (way == 0) ThroughRank0(words, MPI_COMM_WORLD);
      if (way == 1) TwoLevels(words, local, cross);
      if (way == 2) SharedMemory(words, *meeting, local, cross);
      double departure = Seconds(CLOCK_MONOTONIC), last[2], all;
      const double mine[2] = {arrival, departure}, busy = Seconds(CLOCK_PROCESS_CPUTIME_ID) - work;
      MPI_Reduce(mine, last, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
      MPI_Reduce(&busy, &all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
      if (i >= 0) took.push_back(last[1] - last[0]), worked.push_back(all);
    }
    std::sort(took.begin(), took.end());
    std::sort(worked.begin(), worked.end());
    if (rank == 0)
      std::printf("%d ranks, %d a host, %s: %.0f us (%.0f to %.0f), processors %.1f ms\n", size, per_host, names[way],
                  took[rounds / 2] * 1e6, took[rounds / 4] * 1e6, took[3 * rounds / 4] * 1e6, worked[rounds / 2] * 1e3);
  }
  MPI_Finalize();
}
