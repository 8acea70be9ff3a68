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
        P + "reporting/metrics.py",
        'if event["step"] <= step:',
        'if event["step"] < step:',
        METRICS,
        "the step of the resume is lost",
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
        "lambda x: np.log(known + relative @ x)",
        "lambda x: known + relative @ x - 1",
        BENCHMARK,
        "noise makes a network look faster",
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


MID_RUN = "tests/parallel/test_mid_run.py"
RUN_DIR = "tests/single/test_run_dir.py"
PROGRESS = "tests/single/test_progress.py"
REPLICAS = "tests/parallel/test_replicas.py"
CHECKPOINT = "tests/single/test_checkpoint.py"
API = "tests/parallel/test_api.py -k twice_in_one_process"

TRAINING = [
    # The first of the two swaps is the one before the evaluation.
    Fault(
        P + "training/callbacks.py",
        "            found = self.evaluate(six_views)\n            if self.averages:\n                self.averages.swap()\n",
        "            found = self.evaluate(six_views)\n",
        MID_RUN,
        "averaged weights stay after an evaluation",
    ),
    Fault(
        P + "training/callbacks.py",
        "            if self.averages:\n                self.averages.swap()\n            found = self.evaluate(six_views)\n            if self.averages:\n                self.averages.swap()\n",
        "            found = self.evaluate(six_views)\n",
        MID_RUN,
        "an evaluation uses the plain weights",
    ),
    Fault(
        P + "training/callbacks.py",
        "            self.statistics.average(run.step)\n            if self.averages:",
        "            if self.averages:",
        MID_RUN,
        "moving statistics are not averaged before an evaluation",
    ),
    Fault(
        P + "training/callbacks.py",
        '            self.statistics.average(run.step)\n            self.tell("before_checkpoint")',
        '            self.tell("before_checkpoint")',
        "tests/parallel/test_training.py -k resnet_ranks_agree",
        "a checkpoint holds rank 0's moving statistics",
    ),
    Fault(
        P + "training/callbacks.py",
        "if run.step < run.total_steps and run.is_due(run.plan.evaluation_steps):",
        "if False:",
        API,
        "no evaluation is ever due",
    ),
    Fault(
        P + "training/callbacks.py",
        "if run.is_due(run.settings.checkpoint_every) or",
        "if",
        API,
        "no checkpoint is ever due",
    ),
    Fault(
        P + "training/callbacks.py",
        "self.replicas.checked_step == run.step and len(set(digests)) == 1",
        "self.replicas.checked_step == run.step",
        REPLICAS + " -k summary_says",
        "replicas_identical is true of ranks that differ",
    ),
    Fault(
        P + "training/callbacks.py",
        "[] if everything else self.statistics.variables",
        "[]",
        API,
        "local moving statistics count as drift",
    ),
    Fault(
        P + "training/callbacks.py",
        "                self.state.mended.assign_add(1)\n",
        "",
        REPLICAS + " -k mended",
        "a mended run does not say so",
    ),
    Fault(
        P + "training/progress.py",
        "first = self.step - len(self._unseen) + 1",
        "first = self.step - len(self._unseen)",
        PROGRESS,
        '"diverged at step N" names another step',
    ),
    Fault(
        P + "training/progress.py",
        "if self.saved_step >= 0 else",
        "if self.saved_step > 0 else",
        PROGRESS,
        "a checkpoint of step 0 is not told of",
    ),
    Fault(
        P + "training/progress.py", "        self._unseen.clear()\n", "", PROGRESS, "old losses are told as new ones"
    ),
    Fault(
        P + "training/progress.py",
        "        if not self._pauses:\n            self._seconds +=",
        "        if True:\n            self._seconds +=",
        PROGRESS,
        "time of nested pauses counts as training",
    ),
    Fault(
        P + "training/run_dir.py", "        lock.acquire(timeout=0)\n", "", RUN_DIR, "two runs write into one folder"
    ),
    Fault(P + "training/run_dir.py", '    "clip_norm",\n', "", RUN_DIR, "a run goes on with another clip_norm"),
    Fault(P + "training/run_dir.py", '    "seed",\n', "", RUN_DIR, "a run goes on with another seed"),
    Fault(
        P + "training/run_dir.py",
        '"dataset", "examples_sha256", "seed", "global_batch_size")',
        '"dataset", "seed", "global_batch_size")',
        RUN_DIR,
        "a run starts from a checkpoint of other data",
    ),
    Fault(
        P + "training/assemble.py",
        '"examples_sha256": collectives.on_root(lambda: work.dataset.train.digest)',
        '"examples_sha256": ""',
        "tests/parallel/test_data.py tests/parallel/test_resume.py -k 'own_data or digest or other_data'",
        "a run goes on with other data of the same name",
    ),
    Fault(
        P + "training/assemble.py",
        'newest is not None and newest.parent == folder / "checkpoints"',
        "newest is not None",
        MID_RUN,
        "another run's step counts as saved here",
    ),
    Fault(
        P + "training/checkpoint.py",
        '            raise TrainingError(\n                f"model diverged: {spoilt[0]} is not',
        '            print(\n                f"model diverged: {spoilt[0]} is not',
        CHECKPOINT,
        "weights that are not finite are saved",
    ),
    Fault(
        P + "training/checkpoint.py",
        "        if found != expected:",
        "        if found[0] != expected[0]:",
        CHECKPOINT,
        "a checkpoint of another batch is taken",
    ),
    Fault(
        P + "training/checkpoint.py",
        "steps[max(steps)]",
        "steps[min(steps)]",
        CHECKPOINT,
        "a run goes on from its oldest checkpoint",
    ),
    Fault(
        P + "training/evaluate.py",
        "plain / seen, 6 if many else 1)",
        "right / seen, 6 if many else 1)",
        MID_RUN,
        "the accuracy of one view is that of six",
    ),
    Fault(
        P + "training/evaluate.py",
        "correct(label, found[0][1])",
        "correct(label, found[-1][1])",
        MID_RUN,
        "the accuracy of one view is that of a mirrored one",
    ),
    Fault(
        P + "training/step.py",
        "statistic.assign(tf.where(present > 0, statistic.value, before))",
        "statistic.assign(statistic.value)",
        MID_RUN,
        "a rank without an example learns statistics from a stand-in",
    ),
    Fault(
        P + "training/step.py",
        "pull = present / count * spec.weight_decay",
        "pull = spec.weight_decay",
        "tests/parallel/test_exactness.py -k 'as_one_rank and not slow'",
        "weight decay grows with the ranks",
    ),
    Fault(
        P + "training/plan.py",
        'min(global_batch_size / batch.reference, batch.largest_scale or float("inf"))',
        "global_batch_size / batch.reference",
        "tests/single/test_plan.py",
        "the learning rate is scaled without a limit",
    ),
]

OPTIM_AND_DATA = [
    Fault(
        P + "optim/muon.py",
        "(tf.norm(x) + tf.constant(1e-12, x.dtype))",
        "tf.norm(x)",
        "tests/single/test_muon.py",
        "a gradient of zero makes a kernel NaN",
    ),
    Fault(
        P + "optim/averages.py",
        "tf.minimum(tf.constant(self.decay, tf.float64), (1.0 + n) / (10.0 + n))",
        "tf.constant(self.decay, tf.float64)",
        "tests/single/test_averages.py",
        "first averages are mostly initial weights",
    ),
    Fault(
        P + "optim/averages.py",
        "            average.assign(kept)\n",
        "",
        "tests/single/test_averages.py",
        "a swap loses the weights",
    ),
    Fault(
        P + "optim/averages.py",
        "        tf.cond(done == self.total_steps, end, lambda: None)\n",
        "",
        "tests/single/test_averages.py",
        "look-ahead does not end on the slow weights",
    ),
    Fault(
        P + "data/replicate.py",
        "and not psutil.pid_exists(int(pid))",
        "",
        "tests/single/test_replicate.py",
        "a living receiver's folder is cleared",
    ),
    Fault(
        P + "data/replicate.py",
        "            except OSError as error:\n                self._failure = error\n\n    def finish(self, place",
        "            except OSError as error:\n                pass\n\n    def finish(self, place",
        "tests/single/test_replicate.py",
        "a receiver swallows an error of the disk",
    ),
    Fault(
        P + "data/replicate.py",
        "(errno.ENOTEMPTY, errno.EEXIST)",
        "(errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.ENOTDIR, errno.EROFS)",
        "tests/single/test_replicate.py",
        "a set that could not be put in its place passes",
    ),
    Fault(
        P + "data/replicate.py",
        "if len(read) == block.length:",
        "if True:",
        "tests/single/test_replicate.py",
        "a source that shrinks is sent",
    ),
    Fault(
        P + "data/sampler.py",
        "return np.pad(part, (0, missing), constant_values=PADDING)[index::shards]",
        "return part[index::shards]",
        "tests/single/test_sampler.py",
        "a shard may be empty",
    ),
    Fault(
        P + "data/sampler.py",
        "part = batch[j * len(batch) // parts : (j + 1) * len(batch) // parts]",
        "part = batch[j * (len(batch) // parts) : (j + 1) * (len(batch) // parts)]",
        "tests/single/test_sampler.py",
        "examples of a ragged micro-batch are lost",
    ),
]

DISTRIBUTED = [
    Fault(
        P + "distributed/optimizer.py",
        "reduction.process_set, reduction.process_set.size()\n    packed",
        "reduction.process_set, hvd.size()\n    packed",
        "tests/parallel/test_optimizer.py -k process_set",
        "sparse means over a process set are divided by the world's size",
    ),
    Fault(
        P + "distributed/optimizer.py",
        "    ranks = reduction.process_set.size()\n    packed",
        "    ranks = hvd.size()\n    packed",
        "tests/parallel/test_optimizer.py -k process_set",
        "fixed-order means over a process set are divided by the world's size",
    ),
    Fault(
        P + "distributed/optimizer.py",
        "wide if reduction.average else wide * ranks",
        "wide",
        "tests/parallel/test_optimizer.py -k half_precision",
        "small shares underflow on many ranks",
    ),
    Fault(
        P + "distributed/optimizer.py",
        "    if inner.built:\n        inner._make_pass_sums()\n",
        "",
        "tests/parallel/test_optimizer.py -k 'two_ranks or whole_state'",
        "a built optimizer has no sums of its passes",
    ),
    Fault(
        P + "distributed/optimizer.py",
        "            for total in sums:\n                total.assign(tf.zeros_like(total.value))\n",
        "",
        "tests/parallel/test_optimizer.py -k two_ranks",
        "gradients of earlier steps stay in the sums",
    ),
    Fault(
        P + "distributed/batch_norm.py",
        "tf.maximum(sums[channels:-1] / total - tf.square(mean), 0.0)",
        "sums[channels:-1] / total - tf.square(mean)",
        "tests/parallel/test_batch_norm.py",
        "rounding makes a variance negative, and its root NaN",
    ),
    Fault(
        P + "distributed/batch_norm.py",
        "own * tf.cast(_present.get(), real)",
        "own",
        "tests/parallel/test_batch_norm.py tests/parallel/test_api.py -k 'one_process or foreign'",
        "a stand-in counts in the statistics",
    ),
    Fault(
        P + "distributed/collectives.py",
        "state.update(value.tobytes())",
        "state.update(value.tobytes()[:64])",
        "tests/parallel/test_collectives.py " + REPLICAS + " -k 'summary_says or digest'",
        "a digest is of the first values only",
    ),
    Fault(
        P + "distributed/replicas.py",
        "differs |= _bits(first) != _bits(other)",
        "differs |= first != other",
        REPLICAS + " -k named_with_sides",
        "-0.0 and 0.0 are alike",
    ),
    Fault(
        P + "distributed/fixed_order.py",
        "padded = tf.pad(flat, [[0, -length % size]])",
        "padded = flat[: length // size * size]",
        "tests/parallel/test_same_bits.py -k order_of_the_ranks",
        "the last values of a sum are lost",
    ),
]

RUNTIME_AND_CONFIG = [
    Fault(
        P + "runtime/devices.py",
        "sharing = sum(1 for mask in masks if mask & mine)",
        "sharing = sum(1 for mask in masks if mask == mine)",
        "tests/single/test_devices.py",
        "ranks with overlapping CPU masks take too many threads",
    ),
    Fault(
        P + "runtime/devices.py",
        "quota / len(masks)",
        "quota",
        "tests/single/test_devices.py",
        "each rank takes the whole quota",
    ),
    Fault(
        P + "runtime/devices.py",
        "        else:\n            break\n",
        "        else:\n            continue\n",
        "tests/single/test_devices.py",
        "GPUs behind a bad name are taken",
    ),
    Fault(
        P + "runtime/environment.py",
        'environment.pop("SLURM_STEP_ID", None)',
        "pass",
        "tests/single/test_devices.py",
        "a process alone asks srun for other ranks",
    ),
    Fault(
        P + "runtime/environment.py",
        "if tasks > 1 and launched_rank(environment) is None:",
        "if tasks > 2 and launched_rank(environment) is None:",
        "tests/single/test_slurm_variables.py",
        "two tasks of srun each train alone",
    ),
    Fault(P + "config.py", "10**n / 8 for p", "10**n for p", BENCHMARK, "a bit counts as a byte"),
    Fault(
        P + "config.py",
        "return tuple(sorted({int(text) for text in texts}))",
        "return tuple(int(text) for text in texts)",
        BENCHMARK,
        "numbers of ranks repeat",
    ),
]

FAULTS = [*REPORTING, *TOOLS, *TRAINING, *OPTIM_AND_DATA, *DISTRIBUTED, *RUNTIME_AND_CONFIG]
