"""The faults: what is changed, and which tests ought to notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One small fault.

    Attributes:
        file: within the checkout.
        old, new: text of the file, found there once, and what it becomes.
        tests: words for pytest: files, then perhaps " -k EXPRESSION".
        why: what goes wrong with it.
    """

    file: str
    old: str
    new: str
    tests: str
    why: str


P = "hvd_cifar/"
METRICS = "tests/single/test_metrics.py"
DOCTOR = "tests/single/test_doctor.py"
BENCHMARK = "tests/single/test_benchmark.py"

REPORTING = [
    Fault(
        P + "files.py",
        "        os.fsync(file.fileno())\n",
        "",
        "tests/single/test_files.py",
        "a crash leaves an empty file",
    ),
    Fault(
        P + "files.py",
        'path.with_name(path.name + ".part")',
        "path",
        "tests/single/test_files.py",
        "a full disk spoils the old text",
    ),
    Fault(P + "reporting/board.py", ".step <= step]", ".step < step]", METRICS, "the step of the resume disappears"),
    Fault(
        P + "reporting/board.py",
        "            _drop_events_after(path, first_step)\n",
        "            pass\n",
        METRICS,
        "TensorBoard shows steps twice",
    ),
    Fault(
        P + "reporting/board.py",
        "        self._writer.flush()",
        "        ",
        METRICS,
        "a kill loses two minutes of TensorBoard",
    ),
    Fault(
        P + "reporting/metrics.py",
        'if event["step"] <= step:',
        'if event["step"] < step:',
        METRICS,
        "the step of the resume is lost",
    ),
    Fault(
        P + "reporting/metrics.py",
        "            break  # the line",
        "            continue  # the line",
        METRICS,
        "a spoilt line is skipped, not the end",
    ),
    Fault(
        P + "reporting/metrics.py",
        'if event == "eval" and self.last_eval.get("step") == values["step"]:',
        'if event == "none":',
        METRICS,
        "an evaluation repeated after a resume is written twice",
    ),
    Fault(P + "reporting/metrics.py", "self._metrics.flush()", "pass", METRICS, "a kill loses events"),
    Fault(
        P + "reporting/quiet.py",
        "        os.dup2(line_filter.stdin.fileno(), 2)\n",
        "",
        "tests/single/test_quiet.py",
        "TensorFlow's notes are printed",
    ),
    Fault(
        P + "reporting/quiet.py",
        "    if not any(note in line for note in notes):",
        "    if False:",
        "tests/single/test_quiet.py -k last_words",
        "what TensorFlow says while it is imported is lost",
    ),
    Fault(
        P + "reporting/quiet.py",
        '("matplotlib", "scipy")',
        '("matplotlib",)',
        "tests/single/test_quiet.py -k plots",
        "every rank imports scipy",
    ),
    Fault(
        P + "reporting/provenance.py",
        '"-dirty" if',
        '"" if',
        "tests/single/test_provenance.py",
        "a changed checkout passes for its commit",
    ),
]

TOOLS = [
    Fault(
        P + "tools/benchmark/fits.py",
        "optimize.nnls(relative, 1 - known)",
        "optimize.nnls(relative, 1 + known)",
        BENCHMARK,
        "a fit starts from elsewhere",
    ),
    Fault(
        P + "tools/benchmark/fits.py",
        "bounds=(0, np.inf),",
        "bounds=(-np.inf, np.inf),",
        BENCHMARK,
        "a fit has numbers below 0",
    ),
    Fault(
        P + "tools/benchmark/fits.py",
        "alpha=mpi.alpha if mpi and single else None",
        "alpha=None",
        BENCHMARK,
        "MPI's alpha does not tell Horovod's start",
    ),
    Fault(
        P + "tools/benchmark/fits.py",
        "now += fit.seconds(ranks, sum(sizes[sent:upto])) - fit.start",
        "now += fit.seconds(ranks, sum(sizes[sent:upto]))",
        BENCHMARK,
        "start counts twice",
    ),
    Fault(
        P + "tools/benchmark/predict.py",
        "like.lockstep_seconds.mean if ranks > 1 else",
        "like.compute_seconds.mean if ranks > 1 else",
        BENCHMARK,
        "ranks do not wait for the slowest",
    ),
    Fault(
        P + "tools/benchmark/predict.py",
        "beta=fit.beta if link is None else 1 / link",
        "beta=fit.beta",
        BENCHMARK,
        "--link is ignored",
    ),
    Fault(
        P + "tools/benchmark/results.py",
        "statistics.stdev(values) / math.sqrt(n)",
        "statistics.stdev(values)",
        BENCHMARK,
        "deviation passes for standard error",
    ),
    Fault(
        P + "tools/benchmark/step.py",
        'step = [max(by_rank) for by_rank in taken["step"]]',
        'step = [min(by_rank) for by_rank in taken["step"]]',
        BENCHMARK,
        "a group is as fast as its fastest rank",
    ),
    Fault(
        P + "tools/benchmark/step.py",
        "np.maximum.accumulate([",
        "np.array([",
        BENCHMARK,
        "noise makes a longer backward pass end earlier",
    ),
    Fault(
        P + "tools/benchmark/step.py",
        "return self._step(process_sets.ALONE, 1, lambda: self.in_memory)",
        "return self._step(ranks, k, lambda: self.in_memory)",
        "tests/parallel/test_benchmark.py -k communicates",
        "computation alone communicates",
    ),
    Fault(
        P + "tools/benchmark/allreduce.py",
        "dtype=np.int32) % PATTERN",
        "dtype=np.float32) % PATTERN",
        BENCHMARK,
        "terms of large messages repeat",
    ),
    Fault(
        P + "tools/benchmark/allreduce.py",
        "if needed > available:",
        "if needed > 2 * available:",
        BENCHMARK,
        "a host runs out of memory",
    ),
    Fault(
        P + "tools/benchmark/allreduce.py",
        "return int((result != expected).sum())",
        "return int((result != expected).all())",
        "tests/parallel/test_benchmark.py -k one_wrong",
        "one wrong value is missed",
    ),
    Fault(
        P + "tools/benchmark/commands.py",
        "world.efficiency.mean < wanted:",
        "world.efficiency.mean <= wanted:",
        BENCHMARK,
        "what is wanted exactly is refused",
    ),
    Fault(
        P + "tools/doctor/probe.py",
        "resource.getrlimit(resource.RLIMIT_NOFILE)[0]",
        "resource.getrlimit(resource.RLIMIT_NOFILE)[1]",
        DOCTOR,
        "the doctor tells the hard limit of open files",
    ),
    Fault(
        P + "tools/doctor/machine.py",
        "FILES_PER_RANK * ranks",
        "FILES_PER_RANK",
        DOCTOR,
        "open files do not grow with the ranks",
    ),
    Fault(P + "tools/doctor/machine.py", "max(need, GOOD_FILES)", "need", DOCTOR, "few open files are no warning"),
    Fault(
        P + "tools/doctor/machine.py",
        'float("inf") if files == -1 else files',
        "files",
        DOCTOR,
        "no limit of open files is the smallest one",
    ),
    Fault(
        P + "tools/doctor/machine.py",
        "facts.memory.available / host.slots",
        "facts.memory.available",
        DOCTOR,
        "ranks share the memory of one",
    ),
    Fault(
        P + "tools/doctor/machine.py",
        "if abs(off) > CLOCK_SECONDS + doubt:",
        "if off > CLOCK_SECONDS + doubt:",
        DOCTOR,
        "a clock that is behind is fine",
    ),
    Fault(
        P + "tools/doctor/findings.py",
        '    "open files",\n',
        "",
        DOCTOR,
        "a host of few open files takes part in the job",
    ),
    Fault(
        P + "tools/doctor/findings.py",
        'if f.level == "failure" and f.check',
        "if f.check",
        DOCTOR,
        "a warning bars a host from the job",
    ),
    Fault(
        P + "tools/doctor/outcome.py",
        "if done.wrong_values:",
        "if done.wrong_values > 99:",
        DOCTOR,
        "few wrong sums are fine",
    ),
    Fault(P + "tools/doctor/job.py", "else -1)", "else 0)", DOCTOR, "pairs that ended count as hung"),
    Fault(
        P + "tools/doctor/software.py",
        "different = differences(wanted, packages)",
        "different = []",
        DOCTOR,
        "other versions are fine",
    ),
    Fault(
        P + "tools/doctor/plan.py",
        "seats = [seats[0], seats[-1], *seats[1:-1]]",
        "seats = [seats[-1], *seats[:-1]]",
        DOCTOR,
        "some hosts never meet",
    ),
]

FAULTS = [*REPORTING, *TOOLS]
