// A GPU made up on the CPU, under Horovod's real library: cudart, the driver's functions and NCCL are defined here, and
// the kernels' own source runs, one thread after the other. Each process is a rank with a device of its own.
//
//   mpirun -np 2 fake_gpu                           every kind of collective, its results compared with known ones
//   mpirun -np 2 fake_gpu CALL [RANK] [KERNEL]      CALL fails on that rank, or on all (-1); each rank says what it got

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "horovod/common/operations.h"
#include "horovod/common/ops/cuda/cuda_kernels.h"

struct Dim {
  unsigned x;
} block, thread, blocks, threads;
#define blockIdx block
#define threadIdx thread
#define gridDim blocks
#define blockDim threads
#define __CUDACC_RTC__ // no host half
#include "horovod/common/ops/cuda/cuda_kernels.cu"
#undef __CUDACC_RTC__

namespace hvd = horovod::common;

static int rank, size, faulty_rank = -1;
static std::string faulty_call, faulty_kernel;

static bool Fails(const std::string& call) {
  return call == faulty_call && (faulty_rank < 0 || faulty_rank == rank);
}

// The device: its work in order, as on one stream, in a thread of its own. Never ended: the process ends it.
static std::mutex mutex;
static std::condition_variable arrived;
static std::deque<std::function<void()>> work;

static void OnDevice(std::function<void()> item) {
  static auto* worker = new std::thread([] {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex);
      arrived.wait(lock, [] { return !work.empty(); });
      auto next = work.front();
      work.pop_front();
      lock.unlock();
      next();
    }
  });
  (void)worker;
  std::lock_guard<std::mutex> guard(mutex);
  work.push_back(item);
  arrived.notify_one();
}

// Kernels: by their names in the PTX. A launch copies its arguments, and gives what one thread does.
using Kernel = std::function<std::function<void()>(void**)>;
template <typename T> static T At(void** arguments, int index) { return *static_cast<T*>(arguments[index]); }

template <typename T, typename S> static Kernel Scale(void (*kernel)(const T*, T*, int64_t, S)) {
  return [=](void** a) {
    return [=, from = At<const T*>(a, 0), to = At<T*>(a, 1), count = At<int64_t>(a, 2), factor = At<S>(a, 3)] {
      kernel(from, to, count, factor);
    };
  };
}

// `type`, `factor`: as the names in the PTX have them.
template <typename T, typename S>
static void AddKernels(std::map<std::string, Kernel>& all, const std::string& type, const std::string& factor) {
  all["scale_buffer_kI" + type + factor] = Scale<T, S>(hvd::scale_buffer_k<T, S>);
  all["batched_scaled_memcpy_kI" + type + "Li8E" + factor] = [](void** a) {
    return [batch = At<hvd::BatchedD2DParams>(a, 0), factor = At<S>(a, 1)] {
      hvd::batched_scaled_memcpy_k<T, 8, S>(batch, factor);
    };
  };
}

static const std::map<std::string, Kernel>& Kernels() {
  static const std::map<std::string, Kernel> kernels = [] {
    std::map<std::string, Kernel> all;
    all["batched_memcpy_kILi8E"] = [](void** a) {
      return [batch = At<hvd::BatchedD2DParams>(a, 0)] { hvd::batched_memcpy_k<8>(batch); };
    };
    all["scale_buffer_half2_k"] = Scale<__half, __half>(hvd::scale_buffer_half2_k);
    AddKernels<uint8_t, double>(all, "h", "d");
    AddKernels<int8_t, double>(all, "a", "d");
    AddKernels<int32_t, double>(all, "i", "d");
    AddKernels<int64_t, double>(all, "x", "d");
    AddKernels<__half, __half>(all, "6__half", "S2_");
    AddKernels<float, float>(all, "f", "f");
    AddKernels<double, double>(all, "d", "d");
    return all;
  }();
  return kernels;
}

static CUresult LibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*,
                                void**, unsigned) {
  *library = reinterpret_cast<CUlibrary>(const_cast<void*>(code));
  return Fails("cuLibraryLoadData") ? CUDA_ERROR_UNSUPPORTED_PTX_VERSION : CUDA_SUCCESS;
}

static CUresult LibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  const std::string entry = std::string(".entry ") + name + "(";
  if (Fails("cuLibraryGetKernel") || !strstr(reinterpret_cast<const char*>(library), entry.c_str())) {
    return CUDA_ERROR_NOT_FOUND;
  }
  for (auto& known : Kernels()) {
    if (entry.find(known.first) != std::string::npos) {
      *kernel = reinterpret_cast<CUkernel>(const_cast<std::pair<const std::string, Kernel>*>(&known));
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_NOT_FOUND;
}

static std::map<std::string, int> launches;

static CUresult LaunchKernel(CUfunction function, unsigned grid, unsigned, unsigned, unsigned width, unsigned, unsigned,
                             unsigned, CUstream, void** arguments, void**) {
  auto& known = *reinterpret_cast<const std::pair<const std::string, Kernel>*>(function);
  if (grid == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (Fails("cuLaunchKernel") && known.first.find(faulty_kernel) == 0) {
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  ++launches[known.first];
  OnDevice([grid, width, one = known.second(arguments)] {
    blocks.x = grid;
    threads.x = width;
    for (block.x = 0; block.x < grid; ++block.x) {
      for (thread.x = 0; thread.x < width; ++thread.x) {
        one();
      }
    }
  });
  return CUDA_SUCCESS;
}

template <typename T> static void Add(const char* all, void* sums, size_t count, bool average) {
  for (size_t i = 0; i < count; ++i) {
    double sum = 0;
    for (int r = 0; r < size; ++r) {
      sum += static_cast<double>(static_cast<float>(reinterpret_cast<const T*>(all)[r * count + i]));
    }
    static_cast<T*>(sums)[i] = static_cast<T>(static_cast<float>(average ? sum / size : sum));
  }
}

// cudart
struct CUevent_st {
  std::atomic<int> pending{0};
};

extern "C" {
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> DRIVER = {{"cuLibraryLoadData", (void*)LibraryLoadData},
                                                      {"cuLibraryGetKernel", (void*)LibraryGetKernel},
                                                      {"cuLaunchKernel", (void*)LaunchKernel}};
  const bool found = DRIVER.count(name) && !Fails("cudaGetDriverEntryPoint");
  *function = found ? DRIVER.at(name) : nullptr;
  *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "made-up CUDA error"; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return Fails("cudaSetDevice") ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int*, int* greatest) { return *greatest = 0, cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(1);
  return Fails("cudaStreamCreateWithPriority") ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return Fails("cudaEventCreateWithFlags") ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  ++event->pending;
  OnDevice([event] { --event->pending; });
  return Fails("cudaEventRecord") ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return Fails("cudaEventQuery") ? cudaErrorIllegalAddress : event->pending ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  OnDevice([=] { memcpy(to, from, bytes); });
  return Fails("cudaMemcpyAsync") ? cudaErrorInvalidValue : cudaSuccess;
}

// NCCL: each operation is a set of MPI's, on the device's thread, until they end or the communicator is aborted.
struct ncclComm {
  MPI_Comm mpi;
  std::atomic<bool> aborted{false};
};
using Post = std::function<void(MPI_Request*)>;
static std::vector<Post> group;
static bool grouping = false;

static ncclResult_t Run(const char* call, ncclComm_t comm, std::vector<Post> posts, std::function<void()> then = [] {}) {
  if (Fails(call)) {
    return ncclSystemError;
  }
  OnDevice([=] {
    const bool lost = Fails("ncclCommGetAsyncError"); // the operation hangs until it is aborted
    std::vector<MPI_Request> requests(lost ? 0 : posts.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      posts[i](&requests[i]);
    }
    int done = 0;
    while (!comm->aborted && !done) {
      MPI_Testall(requests.size(), requests.data(), &done, MPI_STATUSES_IGNORE);
      done = done && !lost;
      std::this_thread::yield();
    }
    if (done) {
      then();
    }
  });
  return ncclSuccess;
}

static size_t Width(ncclDataType_t type) {
  return type == ncclFloat64 || type == ncclInt64 ? 8 : type == ncclFloat32 || type == ncclInt32 ? 4
                                                    : type == ncclFloat16                        ? 2
                                                                                                 : 1;
}

const char* ncclGetErrorString(ncclResult_t) { return "made-up NCCL error"; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof(*id));
  return Fails("ncclGetUniqueId") ? ncclSystemError : ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int, ncclUniqueId, int) {
  *comm = new ncclComm;
  MPI_Comm_dup(MPI_COMM_WORLD, &(*comm)->mpi);
  return Fails("ncclCommInitRank") ? ncclSystemError : ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = Fails("ncclCommGetAsyncError") ? ncclRemoteError : ncclSuccess;
  return comm ? ncclSuccess : ncclInvalidArgument;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm && comm->aborted.exchange(true)) {
    fprintf(stderr, "a communicator is freed twice\n");
    abort();
  }
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommAbort(comm); }

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t) {
  const size_t bytes = count * Width(type);
  auto own = std::make_shared<std::vector<char>>(bytes);
  return Run("ncclAllGather", comm, {[=](MPI_Request* request) {
               memcpy(own->data(), from, bytes); // it may lie in `to`
               MPI_Iallgather(own->data(), bytes, MPI_BYTE, to, bytes, MPI_BYTE, comm->mpi, request);
             }});
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t) {
  const size_t bytes = count * Width(type);
  auto own = std::make_shared<std::vector<char>>(bytes), all = std::make_shared<std::vector<char>>(bytes * size);
  auto post = [=](MPI_Request* request) {
    memcpy(own->data(), from, bytes);
    MPI_Iallgather(own->data(), bytes, MPI_BYTE, all->data(), bytes, MPI_BYTE, comm->mpi, request);
  };
  return Run("ncclAllReduce", comm, {post}, [=] {
    static const std::map<ncclDataType_t, decltype(&Add<float>)> ADD = {
        {ncclUint8, Add<uint8_t>}, {ncclInt8, Add<int8_t>},   {ncclInt32, Add<int32_t>}, {ncclInt64, Add<int64_t>},
        {ncclFloat16, Add<__half>}, {ncclFloat32, Add<float>}, {ncclFloat64, Add<double>}};
    ADD.at(type)(all->data(), to, count, op == ncclAvg);
  });
}

static ncclResult_t Join(const char* call, ncclComm_t comm, Post post) {
  if (Fails(call)) {
    return ncclSystemError;
  }
  if (!grouping) {
    return Run(call, comm, {post});
  }
  group.push_back(post);
  return ncclSuccess;
}
static ncclComm_t grouped;
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t) {
  grouped = comm;
  return Join("ncclBroadcast", comm, [=](MPI_Request* request) {
    if (rank == root && from != to) {
      memcpy(to, from, count * Width(type));
    }
    MPI_Ibcast(to, count * Width(type), MPI_BYTE, root, comm->mpi, request);
  });
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t) {
  grouped = comm;
  return Join("ncclSend", comm, [=](MPI_Request* request) {
    MPI_Isend(from, count, MPI_BYTE, peer, 0, comm->mpi, request);
  });
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t) {
  grouped = comm;
  return Join("ncclRecv", comm, [=](MPI_Request* request) {
    MPI_Irecv(to, count, MPI_BYTE, peer, 0, comm->mpi, request);
  });
}
ncclResult_t ncclGroupStart() { return grouping = true, group.clear(), ncclSuccess; }
ncclResult_t ncclGroupEnd() { return grouping = false, Run("ncclGroupEnd", grouped, group); }
} // extern "C"

// Tensors in "device memory", off their alignment by some values.
struct Values : hvd::Tensor {
  hvd::DataType type;
  hvd::TensorShape dims;
  std::vector<char> bytes;
  size_t from;

  Values(hvd::DataType type, hvd::TensorShape dims, int off = 0)
      : type(type), dims(dims), from(off * hvd::DataType_Size(type)) {
    bytes.resize(from + size());
  }
  const hvd::DataType dtype() const override { return type; }
  const hvd::TensorShape shape() const override { return dims; }
  const void* data() const override { return bytes.data() + from; }
  int64_t size() const override { return dims.num_elements() * hvd::DataType_Size(type); }

  template <typename T> T* As() const { return static_cast<T*>(const_cast<void*>(data())); }
  double Get(int64_t i) const {
    return type == hvd::HOROVOD_FLOAT16   ? static_cast<float>(As<__half>()[i])
           : type == hvd::HOROVOD_FLOAT32 ? As<float>()[i]
           : type == hvd::HOROVOD_FLOAT64 ? As<double>()[i]
           : type == hvd::HOROVOD_INT64   ? As<int64_t>()[i]
           : type == hvd::HOROVOD_INT32   ? As<int32_t>()[i]
           : type == hvd::HOROVOD_INT8    ? As<int8_t>()[i]
                                          : As<uint8_t>()[i];
  }
  void Set(int64_t i, double value) {
    type == hvd::HOROVOD_FLOAT16   ? void(As<__half>()[i] = __float2half(float(value)))
    : type == hvd::HOROVOD_FLOAT32 ? void(As<float>()[i] = float(value))
    : type == hvd::HOROVOD_FLOAT64 ? void(As<double>()[i] = value)
    : type == hvd::HOROVOD_INT64   ? void(As<int64_t>()[i] = int64_t(value))
    : type == hvd::HOROVOD_INT32   ? void(As<int32_t>()[i] = int32_t(value))
    : type == hvd::HOROVOD_INT8    ? void(As<int8_t>()[i] = int8_t(value))
                                   : void(As<uint8_t>()[i] = uint8_t(value));
  }
};

struct Buffer : hvd::PersistentBuffer {
  std::vector<char> bytes;
  const void* AccessData(std::shared_ptr<hvd::OpContext>) const override { return bytes.data(); }
};

struct Context : hvd::OpContext {
  hvd::DataType type;
  std::vector<std::shared_ptr<Values>> outputs;

  Context(hvd::DataType type, int count) : type(type), outputs(count) {}
  hvd::Status AllocatePersistent(int64_t size, std::shared_ptr<hvd::PersistentBuffer>* buffer) override {
    auto made = std::make_shared<Buffer>();
    made->bytes.resize(size);
    *buffer = made;
    return hvd::Status::OK();
  }
  hvd::Status AllocateOutput(hvd::TensorShape shape, std::shared_ptr<hvd::Tensor>* tensor,
                             std::shared_ptr<hvd::ReadyEvent>* event) override {
    return AllocateOutput(0, shape, tensor, event);
  }
  hvd::Status AllocateOutput(int index, hvd::TensorShape shape, std::shared_ptr<hvd::Tensor>* tensor,
                             std::shared_ptr<hvd::ReadyEvent>*) override {
    const bool splits = index == 1 && outputs.size() == 1; // of all-to-all
    auto made = std::make_shared<Values>(splits ? hvd::HOROVOD_INT32 : type, shape);
    if (!splits) {
      outputs[index] = made;
    }
    *tensor = made;
    return hvd::Status::OK();
  }
  hvd::Status AllocateZeros(int64_t, hvd::DataType, std::shared_ptr<hvd::Tensor>*) override {
    return hvd::Status::UnknownError("no zeros here");
  }
  hvd::Framework framework() const override { return hvd::Framework::TENSORFLOW; }
};

// Wait for all operations; the first error of one.
struct Waiting {
  std::vector<std::shared_ptr<std::promise<hvd::Status>>> promises;
  hvd::StatusCallback Callback() {
    promises.push_back(std::make_shared<std::promise<hvd::Status>>());
    return [promise = promises.back()](const hvd::Status& status) { promise->set_value(status); };
  }
  void Check(const hvd::Status& queued) {
    if (!queued.ok()) {
      throw std::runtime_error(queued.reason());
    }
    for (auto& promise : promises) {
      auto status = promise->get_future().get();
      if (!status.ok()) {
        throw std::runtime_error(status.reason());
      }
    }
  }
};

static int checks = 0;
static std::string Unique(const char* kind) { return kind + std::to_string(checks); }
static void Compare(const std::string& what, double found, double expected) {
  if (!(std::abs(found - expected) <= 1e-3 * std::max(1.0, std::abs(expected)))) {
    throw std::runtime_error("WRONG: " + what + " is " + std::to_string(found) + ", not " + std::to_string(expected));
  }
}
static double Value(int of_rank, int tensor, int64_t i) { return 1 + i % 3 + tensor % 3 + 2 * of_rank; }

static void Allreduce(hvd::DataType type, std::vector<int64_t> lengths, hvd::ReduceOp op, double before, double after) {
  std::vector<std::shared_ptr<hvd::OpContext>> contexts;
  std::vector<std::shared_ptr<hvd::Tensor>> inputs, outputs; // Horovod takes what is in them
  std::vector<std::shared_ptr<Values>> results;
  std::vector<hvd::ReadyEventList> events(lengths.size());
  std::vector<std::string> names;
  std::vector<hvd::StatusCallback> callbacks;
  Waiting waiting;
  for (int k = 0; k < int(lengths.size()); ++k) {
    contexts.push_back(std::make_shared<Context>(type, 1));
    auto input = std::make_shared<Values>(type, std::vector<int64_t>{lengths[k]}, (k + lengths[0] % 2) % 5);
    for (int64_t i = 0; i < lengths[k]; ++i) {
      input->Set(i, Value(rank, k, i));
    }
    inputs.push_back(input);
    results.push_back(std::make_shared<Values>(type, std::vector<int64_t>{lengths[k]}, (k + lengths[0] % 2) % 3));
    outputs.push_back(results.back());
    names.push_back(Unique("allreduce") + "." + std::to_string(k));
    callbacks.push_back(waiting.Callback());
  }
  waiting.Check(EnqueueTensorAllreduces(contexts, inputs, outputs, events, names, 0, callbacks, op, before, after));
  for (int k = 0; k < int(lengths.size()); ++k) {
    for (int64_t i = 0; i < lengths[k]; ++i) {
      double sum = 0;
      for (int r = 0; r < size; ++r) {
        sum += before * Value(r, k, i);
      }
      Compare(hvd::DataType_Name(type) + " sum", results[k]->Get(i),
              after * (op == hvd::ReduceOp::AVERAGE ? sum / size : sum));
    }
  }
  ++checks;
}

static void Broadcast(int root) {
  auto input = std::make_shared<Values>(hvd::HOROVOD_FLOAT32, std::vector<int64_t>{77}, 1);
  auto output = std::make_shared<Values>(hvd::HOROVOD_FLOAT32, std::vector<int64_t>{77});
  for (int i = 0; i < 77; ++i) {
    input->Set(i, Value(rank, 0, i));
  }
  Waiting waiting;
  auto done = waiting.Callback();
  waiting.Check(EnqueueTensorBroadcast(std::make_shared<Context>(hvd::HOROVOD_FLOAT32, 1), input, output, root, {},
                                       Unique("broadcast"), 0, done));
  for (int i = 0; i < 77; ++i) {
    Compare("broadcast", (rank == root ? input : output)->Get(i), Value(root, 0, i));
  }
  ++checks;
}

// Rank r has `rows` rows, and with `uneven` r more.
static void Allgather(int tensors, int rows, bool uneven) {
  auto context = std::make_shared<Context>(hvd::HOROVOD_INT32, tensors);
  std::vector<std::shared_ptr<hvd::OpContext>> contexts(tensors, context);
  std::vector<std::shared_ptr<hvd::Tensor>> inputs;
  std::vector<hvd::ReadyEventList> events(tensors);
  std::vector<std::string> names;
  std::vector<hvd::StatusCallback> callbacks;
  Waiting waiting;
  auto count = [&](int of_rank) { return rows + (uneven ? of_rank : 0); };
  for (int k = 0; k < tensors; ++k) {
    auto input = std::make_shared<Values>(hvd::HOROVOD_INT32, std::vector<int64_t>{count(rank), 3}, k % 2);
    for (int i = 0; i < 3 * count(rank); ++i) {
      input->Set(i, Value(rank, k, i));
    }
    inputs.push_back(input);
    names.push_back(Unique("allgather") + "." + std::to_string(k));
    callbacks.push_back(waiting.Callback());
  }
  waiting.Check(EnqueueTensorAllgathers(contexts, inputs, events, names, 0, callbacks));
  for (int k = 0; k < tensors; ++k) {
    int64_t at = 0;
    for (int r = 0; r < size; ++r) {
      for (int i = 0; i < 3 * count(r); ++i) {
        Compare("all-gather", context->outputs[k]->Get(at++), Value(r, k, i));
      }
    }
    Compare("rows", context->outputs[k]->dims.num_elements(), at);
  }
  ++checks;
}

// Rank r sends s + 1 values to rank s.
static void Alltoall() {
  auto context = std::make_shared<Context>(hvd::HOROVOD_FLOAT32, 1);
  auto splits = std::make_shared<Values>(hvd::HOROVOD_INT32, std::vector<int64_t>{size});
  auto input = std::make_shared<Values>(hvd::HOROVOD_FLOAT32, std::vector<int64_t>{size * (size + 1) / 2});
  for (int s = 0; s < size; ++s) {
    splits->Set(s, s + 1);
  }
  for (int i = 0; i < input->dims.num_elements(); ++i) {
    input->Set(i, Value(rank, 0, i));
  }
  Waiting waiting;
  auto done = waiting.Callback();
  waiting.Check(EnqueueTensorAlltoall(context, input, splits, {}, Unique("alltoall"), 0, done));
  for (int r = 0; r < size; ++r) {
    for (int i = 0; i <= rank; ++i) {
      Compare("all-to-all", context->outputs[0]->Get(r * (rank + 1) + i), Value(r, 0, rank * (rank + 1) / 2 + i));
    }
  }
  ++checks;
}

// Two all-reduces in flight, which Horovod does not fuse: they have other factors. TensorFlow's executor waits for both.
static void TwoAtOnce() {
  const double factors[] = {2, 1};
  std::vector<std::shared_ptr<Values>> results;
  Waiting waiting;
  for (double factor : factors) {
    auto input = std::make_shared<Values>(hvd::HOROVOD_FLOAT32, std::vector<int64_t>{100});
    for (int i = 0; i < 100; ++i) {
      input->Set(i, Value(rank, int(factor), i));
    }
    results.push_back(std::make_shared<Values>(hvd::HOROVOD_FLOAT32, std::vector<int64_t>{100}));
    std::vector<std::shared_ptr<hvd::OpContext>> contexts{std::make_shared<Context>(hvd::HOROVOD_FLOAT32, 1)};
    std::vector<std::shared_ptr<hvd::Tensor>> inputs{input}, outputs{results.back()};
    std::vector<hvd::ReadyEventList> events(1);
    std::vector<std::string> names{Unique("at once") + std::to_string(factor)};
    std::vector<hvd::StatusCallback> callbacks{waiting.Callback()};
    EnqueueTensorAllreduces(contexts, inputs, outputs, events, names, 0, callbacks, hvd::ReduceOp::SUM, factor, 1);
  }
  std::string failed;
  for (int k = 0; k < 2; ++k) {
    auto status = waiting.promises[k]->get_future().get();
    if (!status.ok()) {
      failed = failed.empty() ? status.reason() : failed;
      continue;
    }
    for (int i = 0; i < 100; ++i) {
      double sum = 0;
      for (int r = 0; r < size; ++r) {
        sum += factors[k] * Value(r, int(factors[k]), i);
      }
      Compare("sum at once", results[k]->Get(i), sum);
    }
  }
  if (!failed.empty()) {
    throw std::runtime_error(failed);
  }
  ++checks;
}

static void All() {
  const std::vector<int64_t> one = {1000}, odd = {7}, few = {5, 1, 64, 1001}, many(200, 3);
  for (auto type : {hvd::HOROVOD_UINT8, hvd::HOROVOD_INT8, hvd::HOROVOD_INT32, hvd::HOROVOD_INT64, hvd::HOROVOD_FLOAT16,
                    hvd::HOROVOD_FLOAT32, hvd::HOROVOD_FLOAT64}) {
    for (auto& lengths : {one, odd, few, type == hvd::HOROVOD_FLOAT16 ? many : one}) {
      Allreduce(type, lengths, hvd::ReduceOp::SUM, 1, 1);
      Allreduce(type, lengths, hvd::ReduceOp::SUM, 2, 1);
      Allreduce(type, lengths, hvd::ReduceOp::SUM, 2, 2);
    }
  }
  for (auto type : {hvd::HOROVOD_FLOAT16, hvd::HOROVOD_FLOAT32, hvd::HOROVOD_FLOAT64}) {
    Allreduce(type, one, hvd::ReduceOp::AVERAGE, 1, 1);
    Allreduce(type, few, hvd::ReduceOp::AVERAGE, 0.5, 3);
  }
  for (int root = 0; root < size; ++root) {
    Broadcast(root);
  }
  for (bool uneven : {false, true}) {
    Allgather(1, 4, uneven);
    Allgather(3, 2, uneven);
    Allgather(90, 1, uneven);
  }
  Alltoall();
}

int main(int argc, char** argv) {
  int level;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  hvd::horovod_init(nullptr, 0, nullptr, nullptr, 0);
  int code = 0;
  std::string said;
  try {
    if (argc > 1) {
      faulty_call = argv[1];
      faulty_rank = argc > 2 ? std::stoi(argv[2]) : -1;
      faulty_kernel = argc > 3 ? argv[3] : "";
    }
    argc > 4 ? TwoAtOnce() : All();
    said = std::to_string(checks) + " checks, " + std::to_string(launches.size()) + " kernels";
  } catch (const std::exception& error) {
    said = std::string("error: ") + error.what();
    code = 1;
  }
  printf("rank %d: %s\n", rank, said.c_str());
  fflush(stdout);
  hvd::horovod_shutdown();
  MPI_Finalize();
  _exit(code); // the device's thread waits for work
}
