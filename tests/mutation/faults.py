"""The faults: the change of each, and the tests that should fail with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One small fault.

    Attributes:
        file: within the checkout.
        old, new: a text that occurs exactly once in the file, and its replacement.
        tests: arguments of pytest: files, optionally followed by " -k EXPRESSION".
        why: the effect of the fault.
    """

    file: str
    old: str
    new: str
    tests: str
    why: str


P = "hvd_cifar/"
METRICS = "tests/single/test_metrics.py"
RUN_FILES = "tests/single/test_run_files.py"
REPORT_PAGE = "tests/single/test_report_page.py"
DOCTOR = "tests/single/test_doctor.py"
BENCHMARK = "tests/single/test_benchmark.py"
BOARD = "tests/single/test_board.py"
SUMMARIES = "tests/parallel/test_summaries.py"

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
        "path.with_name(path.name + PART)",
        "path",
        "tests/single/test_files.py",
        "a full disk spoils the old text",
    ),
    Fault(P + "reporting/board.py", ".step <= step]", ".step < step]", METRICS, "the step of the resume disappears"),
    Fault(
        P + "reporting/board.py",
        "        _drop_events_after(path, first_step)\n",
        "        pass\n",
        METRICS,
        "TensorBoard shows steps twice",
    ),
    Fault(P + "reporting/board.py", "flat[np.isfinite(flat)]", "np.nan_to_num(flat)", BOARD, "a NaN is counted as 0"),
    Fault(P + "reporting/board.py", "counts.sum(axis=1,", "counts.sum(axis=0,", BOARD, "shares of the wrong class"),
    Fault(
        P + "distributed/optimizer.py",
        "            self._watch(reduced)\n        super().apply(reduced, variables)",
        "            self._watch(reduced[::-1])\n        super().apply(reduced, variables)",
        SUMMARIES,
        "a variable has another one's gradient",
    ),
    Fault(
        P + "training/record.py", "        self.ask(False)\n", "        pass\n", SUMMARIES, "every later step is copied"
    ),
    Fault(
        P + "training/progress.py",
        "Losses(loss - penalty, penalty, loss)",
        "Losses(loss, penalty, loss + penalty)",
        SUMMARIES,
        "weight decay counts twice",
    ),
    Fault(
        P + "training/step.py",
        "share, penalty = share + decay, penalty + decay",
        "share, penalty = share + decay, decay / (present / count)",
        SUMMARIES,
        "each rank adds the whole weight decay",
    ),
    Fault(
        P + "training/summaries.py",
        "if not collectives.broadcast_object(is_due):",
        "if not is_due:",
        SUMMARIES,
        "each rank decides by its own clock, and one waits for ever",
    ),
    Fault(
        P + "training/summaries.py", "return_index=True", "return_inverse=True", SUMMARIES, "images of other classes"
    ),
    Fault(
        P + "reporting/metrics.py",
        'event["step"] <= step',
        'event["step"] < step',
        METRICS,
        "the step of the resume is lost",
    ),
    Fault(
        P + "reporting/metrics.py",
        "if step in self.evaluated[part]:",
        "if False:",
        METRICS,
        "an evaluation repeated after a resume is written twice",
    ),
    Fault(
        P + "reporting/metrics.py",
        "                damaged += 1\n                continue\n",
        "                return\n",
        METRICS,
        "a damaged line costs all lines after it",
    ),
    Fault(
        P + "reporting/metrics.py",
        "        with contextlib.suppress(OSError):\n            append(path",
        "        with contextlib.suppress():\n            append(path",
        METRICS,
        "a line that cannot be written ends the run without a checkpoint",
    ),
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
    Fault(
        P + "reporting/run_files.py",
        "                    self._offset = 0\n",
        "                    pass\n",
        RUN_FILES,
        "what a resumed run writes is not seen",
    ),
    Fault(
        P + "reporting/run_files.py",
        '.rpartition(b"\\n")[0]',
        "",
        RUN_FILES,
        "a line that is being written is taken for a whole one",
    ),
    Fault(
        P + "reporting/run_files.py",
        "    except OSError:\n        return True\n",
        "    except OSError:\n        return False\n",
        RUN_FILES,
        "a run that lives is said to be gone",
    ),
    Fault(
        P + "reporting/run_files.py",
        'Field(pattern=r"^data:image/png;base64,[A-Za-z0-9+/=]+$")',
        "Field()",
        RUN_FILES,
        "a picture of a report may come from anywhere",
    ),
    Fault(
        P + "reporting/story.py",
        'ends.pop(0) if is_same_job and ends else ""',
        '""',
        "tests/single/test_story.py",
        "a lost rank has no reason",
    ),
    Fault(
        P + "reporting/view.py",
        "+ ROWS_FOR_LINES <= console.height",
        "<= console.height",
        "tests/single/test_view.py",
        "ranks push the log off the terminal",
    ),
    Fault(
        P + "tools/report/command.py",
        "        autoescape=True,\n",
        "",
        "tests/single/test_report.py -k stays_text",
        "a run's name is markup",
    ),
    Fault(
        P + "tools/report/content.py",
        "weights = [max(1, b - a)",
        "weights = [1",
        "tests/single/test_report.py -k newest_set",
        "a record of few steps counts as much as one of many",
    ),
    Fault(
        P + "tools/report/charts.py",
        "shown[-1] + gap if shown",
        "shown[-1] if shown",
        REPORT_PAGE,
        "numbers on the time axis overlap",
    ),
    Fault(
        P + "tools/report/page.html",
        "--muted: #a6abb4;",
        "--muted: #666b74;",
        REPORT_PAGE,
        "grey text cannot be read in the dark",
    ),
]

TOOLS = [
    Fault(
        P + "tools/benchmark/fits.py",
        "lambda x: np.log(relative @ x)",
        "lambda x: relative @ x - 1",
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
        "traffic(layout.hosts) * self.beta + traffic(layout.local) * self.local_beta",
        "traffic(layout.ranks) * self.beta",
        BENCHMARK,
        "an all-reduce has one level",
    ),
    Fault(
        P + "tools/benchmark/predict.py",
        "(world.lockstep_seconds.mean if world.ranks > 1 else",
        "(world.compute_seconds.mean if world.ranks > 1 else",
        BENCHMARK,
        "ranks do not wait for the slowest",
    ),
    Fault(
        P + "tools/benchmark/predict.py",
        '("beta", 1 / link if link else None)',
        '("beta", None)',
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
        "return self._step(process_sets.ALONE, 1, lambda: self.in_memory)",
        "return self._step(ranks, k, lambda: self.in_memory)",
        "tests/parallel/test_benchmark.py -k communicates",
        "computation alone communicates",
    ),
    Fault(
        P + "tools/benchmark/emulate.py",
        "inner_of(undivided)",
        "inner_of(optimizer)",
        "tests/parallel/test_benchmark.py -k emulated_step",
        "an all-reduce that is called one message is of several",
    ),
    Fault(
        P + "tools/benchmark/predict.py",
        'if overlap == "off" or not measures:',
        "if not measures:",
        BENCHMARK,
        "predictions of one message are of buckets",
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
        P + "tools/benchmark/feeding.py",
        "n / max(turn.seconds",
        "n / min(turn.seconds",
        BENCHMARK,
        "the fastest rank ends an epoch",
    ),
    Fault(
        P + "tools/benchmark/feeding.py",
        "ranks += uses > 0",
        "ranks += uses",
        BENCHMARK,
        "an example that a rank uses twice counts as one of two ranks",
    ),
    Fault(
        P + "tools/benchmark/feeding.py",
        '"drawn": replace(shard, seed=seed + self.world.rank)',
        '"drawn": replace(shard, seed=seed + 1)',
        "tests/parallel/test_benchmark.py -k fed_in_three_ways",
        "all ranks draw from one order",
    ),
    Fault(
        P + "tools/benchmark/feeding.py",
        "replace(shard, sharding=Sharding(rank=0, size=1))",
        "shard",
        "tests/parallel/test_benchmark.py -k has_the_images_of_the_shards",
        "only the shard of rank 0 is split",
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

SNAPSHOTS = "tests/single/test_snapshots.py"

TRAINING = [
    Fault(
        P + "training/snapshots.py",
        "            if step_of(path) > step:",
        "            if False:",
        SNAPSHOTS,
        "a run that goes back keeps snapshots of later steps",
    ),
    Fault(
        P + "training/snapshots.py",
        "if step_of(path) < step]",
        "if step_of(path) <= step]",
        SNAPSHOTS,
        "a snapshot that is offered is removed at once",
    ),
    Fault(
        P + "training/snapshots.py",
        "if evaluation.step == step and not taken.exists():",
        "if not taken.exists():",
        SNAPSHOTS,
        "the present weights are kept as those of an earlier step",
    ),
    Fault(
        P + "data/dataset.py",
        "return self.images[self.index[index]]",
        "return self.images[index]",
        "tests/single/test_dataset.py",
        "images that are held out are trained on",
    ),
    # The first of the two swaps is the one before the evaluation.
    Fault(
        P + "training/callbacks.py",
        "            found = replace(self.parts[part](six_views), step=run.step)\n            if self.averages:\n                self.averages.swap()\n",
        "            found = replace(self.parts[part](six_views), step=run.step)\n",
        MID_RUN,
        "averaged weights stay after an evaluation",
    ),
    Fault(
        P + "training/callbacks.py",
        "            if self.averages:\n                self.averages.swap()\n            found = replace(self.parts[part](six_views), step=run.step)\n            if self.averages:\n                self.averages.swap()\n",
        "            found = replace(self.parts[part](six_views), step=run.step)\n",
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
        "if self._is_due(run) and not self.progress.stop_requested:",
        "if False:",
        API,
        "no evaluation is ever due",
    ),
    Fault(
        P + "training/callbacks.py",
        "due = run.is_due(run.settings.checkpoint_every) or",
        "due =",
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
        "self.check(run, everything=False)",
        "self.check(run, everything=True)",
        REPLICAS + " -k local_moving_statistics",
        "local moving statistics count as drift",
    ),
    Fault(
        P + "training/callbacks.py",
        ".assign_add(1)\n                self.reporter.warn(",
        ".assign_add(0)\n                self.reporter.warn(",
        REPLICAS + " -k resynced",
        "a run whose ranks were resynced does not say so",
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
        P + "training/progress.py",
        "        self._unseen.clear()\n\n",
        "\n",
        PROGRESS,
        "old losses are told as new ones",
    ),
    Fault(
        P + "training/progress.py",
        "        if not self._pauses:\n            self._seconds +=",
        "        if True:\n            self._seconds +=",
        PROGRESS,
        "time of nested pauses counts as training",
    ),
    Fault(
        P + "training/run_dir.py",
        "lock.acquire(timeout=SECONDS_FOR_READERS)",
        "pass",
        RUN_DIR,
        "two runs write into one folder",
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
        "        if spoilt:\n",
        "        if not self.state:\n",
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
        P + "training/checkpoint_files.py",
        "sorted(found, reverse=True)",
        "sorted(found)",
        CHECKPOINT,
        "a run goes on from its oldest checkpoint",
    ),
    Fault(
        P + "training/checkpoint_files.py",
        "if _differs(path / name, told)]",
        "if not (path / name).exists()]",
        CHECKPOINT,
        "a damaged checkpoint is taken for a whole one",
    ),
    Fault(
        P + "training/checkpoint_files.py",
        "        os.replace(path, gone)\n    except OSError:\n        return False\n",
        "        gone = path\n    except OSError:\n        return False\n",
        CHECKPOINT,
        "a kill leaves half of a removed checkpoint under its name",
    ),
    Fault(
        P + "training/checkpoint.py",
        "for other in (*newest_first[:own], *newest_first[own + kept :]):",
        "for other in newest_first[kept:]:",
        CHECKPOINT,
        "damaged checkpoints push out what is saved now",
    ),
    Fault(
        P + "training/evaluate.py",
        "plain_accuracy=plain_right / examples",
        "plain_accuracy=right / examples",
        MID_RUN,
        "the accuracy of one view is that of six",
    ),
    Fault(
        P + "training/evaluate.py",
        "plain = logits_of(model, image)",
        "plain = logits_of(model, mirror(image))",
        MID_RUN,
        "the accuracy of one view is that of a mirrored one",
    ),
    Fault(
        P + "training/evaluate.py",
        "sum(shifted) / 8",
        "sum(shifted) / 4",
        MID_RUN,
        "shifted views weigh twice as much",
    ),
    Fault(
        P + "training/evaluate.py",
        "logits).part(~sure)",
        "logits).part(sure)",
        MID_RUN,
        "certain images are seen in six views, and uncertain ones are left out",
    ),
    Fault(
        P + "training/evaluate.py",
        "waiting = waiting.part(slice(batch_size, None))",
        "waiting = waiting.part(slice(batch_size))",
        MID_RUN,
        "uncertain images beyond a batch are left out, and others count twice",
    ),
    Fault(
        P + "training/confusion.py",
        "(labels, predicted), 1)",
        "(predicted, labels), 1)",
        "tests/single/test_confusion.py",
        "rows and columns of the confusion matrix change places",
    ),
    Fault(
        P + "training/evaluate.py",
        "world.rank + world.size * (seen",
        "world.rank + (seen",
        "tests/parallel/test_use.py -k confusion",
        "mistakes show the images of other examples",
    ),
    Fault(
        P + "tools/export.py",
        "transforms.shape), seen, trained.six_views)",
        "transforms.shape), seen, False)",
        "tests/parallel/test_use.py -k fast",
        "an exported net takes one view where the run takes six",
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
        "tests/parallel/test_exactness.py -k towers",
        "weight decay grows with the ranks",
    ),
    Fault(
        P + "models/recipe.py",
        "global_batch_size <= self.beyond[0]",
        "global_batch_size < self.beyond[0]",
        "tests/single/test_plan.py",
        "a recipe for larger batches takes over too early",
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
        "        tf.cond(self.steps.value == self.total_steps, end, lambda: None)\n",
        "",
        "tests/single/test_averages.py",
        "look-ahead does not end on the slow weights",
    ),
    Fault(
        P + "data/replicate.py",
        "and not psutil.pid_exists(int(found[1]))",
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
        P + "distributed/clocks.py",
        "    return when - first.ahead - round(",
        "    return when - round(",
        "tests/parallel/test_profile.py",
        "a profile shows each rank by its own clock",
    ),
    Fault(
        P + "reporting/trace.py",
        "    return _overlap(before_last, _union(computing)),",
        "    return sum(end - begin for begin, end in before_last),",
        "tests/single/test_trace.py",
        "communication counts as hidden where nothing is computed",
    ),
    Fault(
        P + "distributed/buckets.py",
        "            operation._add_control_input(message.op)\n",
        "            pass\n",
        "tests/single/test_overlap.py",
        "messages leave after backward",
    ),
    Fault(
        P + "distributed/buckets.py",
        "key=lambda i: before.depth[tensors[i].op.name]",
        "key=lambda i: i",
        "tests/single/test_overlap.py",
        "the first bucket waits for the whole backward pass",
    ),
    Fault(
        P + "distributed/overlap.py",
        "seconds > in_one * (1 - LEAST_GAIN)",
        "seconds > in_one",
        "tests/single/test_overlap.py",
        "buckets that save nothing",
    ),
    Fault(
        P + "training/overlap.py",
        "        variable.assign(value)\n",
        "        pass\n",
        "tests/parallel/test_exactness.py::test_ranks_train_as_one_rank_does[5]",
        "the measurement changes the net",
    ),
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
        "tests/parallel/test_optimizer.py -k two_ranks",
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
        "tests/parallel/test_batch_norm.py::test_ranks_normalise_as_one_process_with_all_images",
        "rounding makes a variance negative, and its root NaN",
    ),
    Fault(
        P + "distributed/batch_norm.py",
        "own * tf.cast(_present.get(), real)",
        "own",
        "tests/parallel/test_batch_norm.py::test_ranks_normalise_as_one_process_with_all_images",
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
        "int(limit) - int(used) + sum(map(int, files))",
        "int(limit) - int(used)",
        "tests/single/test_devices.py",
        "files that a container keeps in memory take room from ranks",
    ),
    Fault(
        P + "launch/install/convolutions.py",
        "if _digest(path) == path.stem",
        "",
        "tests/launch/test_install.py -k convolutions",
        "a damaged library comes from the cache",
    ),
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

FOLDER = "tests/single/test_folder.py"
CIFAR = "tests/single/test_cifar_files.py"
AUGMENT = "tests/single/test_augment.py"

DATA = [
    Fault(
        P + "data/folder.py",
        "\\0{size}\\0{changed}\\n",
        "\\0{size}\\n",
        FOLDER,
        "an image that changed is read from the old cache",
    ),
    Fault(
        P + "data/folder.py",
        'entry.is_dir() and not entry.name.startswith(".")',
        "entry.is_dir()",
        FOLDER,
        "a hidden folder becomes a class",
    ),
    Fault(
        P + "data/folder.py",
        "if channels == 1 and image.mode not in (*GREY_MODES, *DEEP_MODES):",
        "if False:",
        FOLDER,
        "an image with colours becomes grey",
    ),
    Fault(
        P + "data/folder.py",
        'mode="r+" if done else "w+"',
        'mode="w+"',
        FOLDER,
        "a decoding that continues loses its first images",
    ),
    Fault(P + "data/folder.py", "if old.is_dir() and old != place:", "if False:", FOLDER, "old caches fill the disk"),
    Fault(P + "data/folder.py", "if home.name == CACHE:", "if True:", FOLDER, "a host removes another host's cache"),
    Fault(
        P + "data/folder.py",
        "if grey and not _done(part, 3) else 3",
        "if grey else 3",
        FOLDER,
        "a killed decoding of grey and coloured images starts from zero",
    ),
    Fault(
        P + "data/folder.py",
        "pixels.reshape(image.height, image.width, channels)",
        "pixels.reshape(image.width, image.height, channels)",
        FOLDER,
        "height and width change places",
    ),
    Fault(P + "data/folder.py", '("F", "I", "I;16",', '("F", "I",', FOLDER, "images of 16 bits are cut to 8"),
    Fault(
        P + "data/records.py",
        'indices, side="right")',
        'indices, side="left")',
        CIFAR,
        "the first image of a file is taken from the file before",
    ),
    Fault(P + "data/cifar.py", "[part] >= self.classes", "[part] > self.classes", CIFAR, "a label of no class passes"),
    Fault(
        P + "data/cifar.py",
        "images.records(part)[:, self.label_bytes - 1]",
        "images.records(part)[:, 0]",
        CIFAR,
        "coarse labels are checked instead of the fine ones",
    ),
    Fault(P + "data/cifar.py", "if size != expected:", "if size < expected:", CIFAR, "a file that is too long passes"),
    Fault(
        P + "data/augment.py",
        "whole - part + 1 for whole",
        "whole - part for whole",
        AUGMENT,
        "no crop ever takes the last row",
    ),
    Fault(
        P + "data/augment.py",
        "sampler.key(seed, 1, epoch)",
        "sampler.key(seed, 1)",
        AUGMENT,
        "each epoch distorts images in the same way",
    ),
    Fault(
        P + "data/augment.py",
        "np.maximum(deviation, (channels * pixels) ** -0.5)",
        "deviation",
        AUGMENT,
        "an image of one colour is NaN",
    ),
    Fault(
        P + "data/augment.py",
        "np.float32 if pixels <= 2**10 else np.float64",
        "np.float32",
        AUGMENT,
        "sums over a large image are rounded",
    ),
    Fault(
        P + "data/augment.py",
        "first + np.uint64(epoch)",
        "first",
        AUGMENT,
        "the flip that alternates stays on one side",
    ),
]

MODELS = "tests/single/test_models.py"
ACTIVATION = "tests/single/test_activation.py"
COMPILED = "tests/single/test_compiled.py"

MODELS_AND_KERNELS = [
    Fault(
        P + "models/resnet.py",
        "[missing // 2, missing - missing // 2]",
        "[0, missing]",
        MODELS + " -k pad_shortcut",
        "a shortcut's channels are shifted",
    ),
    Fault(
        P + "models/normalization.py",
        "1.5 * alpha * wide",
        "0.75 * alpha * wide",
        MODELS + " -k local_response",
        "the gradient of local responses is off",
    ),
    Fault(
        P + "models/fast.py",
        "np.sqrt(values + epsilon)",
        "np.sqrt(values)",
        MODELS + " -k 'whitening or without_variance'",
        "a direction without variance makes the kernel infinite",
    ),
    Fault(
        P + "models/fast.py",
        "    vectors *= np.sign(",
        "    _ = np.sign(",
        MODELS + " -k 'whitening or without_variance'",
        "machines make whitening kernels of different signs",
    ),
    Fault(
        P + "models/fast.py",
        "1.0 / WIDTHS[-1]",
        "1.0 / WIDTHS[0]",
        MODELS + " -k written_here",
        "logits are four times too large",
    ),
    Fault(
        P + "models/tutorial.py",
        '("local3/kernel", "local4/kernel")',
        '("local3/kernel",)',
        MODELS + " -k weight_decay",
        "the second local layer does not decay",
    ),
    Fault(
        P + "models/resnet.py",
        "stride = 2 if stage > 1 and i == 1 else 1",
        "stride = 2 if i == 1 else 1",
        MODELS + " -k halve",
        "the first stage halves the images",
    ),
    Fault(
        P + "models/activation.py",
        "tf.where(made > 0,",
        "tf.where(made >= 0,",
        ACTIVATION + " -k 'several_consumers and bfloat16'",
        "ReLU passes gradients where it is 0",
    ),
    Fault(
        P + "models/convolution.py",
        " and self.groups == 1",
        "",
        "tests/single/test_convolution.py -k with_any_option",
        "a convolution in groups takes the way of a plain one",
    ),
    Fault(
        P + "kernels/compiled.py",
        "tf.reverse(weights, [0, 1])",
        "weights",
        COMPILED + " -k values_and_gradients",
        "gradients of images go through a kernel that is not turned",
    ),
    Fault(
        P + "kernels/compiled.py",
        'bool(told("dots")) and not told("tiles")',
        'bool(told("dots"))',
        COMPILED + " -k they_are_quicker",
        "a processor with tiles takes the slower way",
    ),
    Fault(
        P + "kernels/compiled.py",
        "    except tf.errors.NotFoundError:",
        "    except ValueError:",
        COMPILED + " -k another_tensorflow",
        "a library of another TensorFlow ends the run",
    ),
    Fault(
        P + "kernels/winograd.py",
        "made.kernel * scale,",
        "made.kernel,",
        "tests/single/test_winograd.py -k a_tile",
        "the transforms of inputs and kernel have other scales",
    ),
]

LAUNCH_COMMAND = "tests/launch/test_launch_command.py -k 'not no_ssh'"  # the copy has no environment to describe
NETWORK = "tests/single/test_network.py"
SLURM = "tests/single/test_slurm_variables.py"
INSTALL = "tests/launch/test_install.py"

LAUNCH = [
    Fault(
        P + "launch/request.py",
        "and ranks > slots:",
        "and ranks >= slots:",
        LAUNCH_COMMAND,
        "as many ranks as slots are refused",
    ),
    Fault(
        P + "launch/command.py",
        'r"(HVD_CIFAR|HOROVOD',
        'r"\\w*(HVD_CIFAR|HOROVOD',
        LAUNCH_COMMAND,
        "secrets of the user go to other hosts",
    ),
    Fault(
        P + "launch/command.py",
        "if ranks == 1 and network is None:",
        "if ranks == 1:",
        LAUNCH_COMMAND,
        "a rank alone on another host starts on this one",
    ),
    Fault(
        P + "launch/cluster/hosts.py",
        "    _check_each_is_there_once(hosts, where)\n",
        "",
        LAUNCH_COMMAND,
        "a host is named twice",
    ),
    Fault(
        P + "launch/cluster/hosts.py",
        "min(gpus or cores,",
        "min(max(gpus, cores),",
        LAUNCH_COMMAND,
        "more ranks than GPUs start",
    ),
    Fault(
        P + "launch/cluster/hosts.py",
        "for _ in range(host.slots)), ranks))",
        "for _ in range(host.slots)), None))",
        NETWORK,
        "hosts without a rank take part",
    ),
    Fault(
        P + "launch/cluster/network.py",
        "if len({card.address for card in there.values()}) == len(reports):",
        "if len(there) == len(reports):",
        NETWORK,
        "a bridge of containers counts as a network",
    ),
    Fault(
        P + "launch/cluster/network.py",
        "-min(card.speed for",
        "-max(card.speed for",
        NETWORK,
        "a network is as fast as its fastest card",
    ),
    Fault(
        P + "launch/cluster/remarks.py",
        "codes.append((int(code[1]), int(code[2])))",
        "codes.insert(0, (int(code[1]), int(code[2])))",
        LAUNCH_COMMAND,
        "the exit code is that of the last rank",
    ),
    Fault(
        P + "launch/cluster/remarks.py",
        "if is_rule or len(block) > BANNER_LINES:",
        "if is_rule:",
        LAUNCH_COMMAND,
        "a rule in a program's own output holds the rest back",
    ),
    Fault(
        P + "launch/cluster/slurm.py", "int(nodes or 1)", "1", SLURM, "nodes that Slurm counts together are one node"
    ),
    Fault(P + "launch/cluster/slurm.py", "said[-1] if said", "said[0] if said", SLURM, "srun's reason is not told"),
    Fault(
        P + "launch/cluster/ssh.py",
        '.replace("\\n", r"\\n")',
        "",
        LAUNCH_COMMAND,
        "csh ends a program at the end of its first line",
    ),
    Fault(
        P + "launch/command.py",
        "if whole_names:",
        "if False:",
        "tests/cluster/test_launch.py -k whole_names",
        "gpu.east and gpu.west are one host",
    ),
    Fault(
        P + "launch/restarts.py",
        "(len(failures) > 1 and last.marks > failures[-2].marks)",
        "True",
        "tests/faults/test_restarts.py -k does_not_start",
        "a host that boots ends a job",
    ),
    Fault(
        P + "training/state_copy.py",
        "int(self.state.rollbacks.numpy()) * (MOST_STEPS + 1) + step",
        "step",
        "tests/parallel/test_state_copy.py",
        "a host that missed a rollback undoes it",
    ),
    Fault(
        P + "launch/cluster/ssh.py",
        "shlex.join(command)",
        '" ".join(command)',
        NETWORK,
        "a command with spaces falls apart on another host",
    ),
    Fault(
        P + "launch/cluster/streams.py",
        "if rank == 0 and line.startswith(OF_ALL):",
        "if line.startswith(OF_ALL):",
        NETWORK,
        "the error of another host has no host",
    ),
    Fault(
        P + "launch/install/patch.py",
        "old[done] != line[1:]:",
        "old[done].strip() != line[1:].strip():",
        INSTALL + " -k agrees_with_diff",
        "a patch is applied to a near match",
    ),
    Fault(
        P + "launch/install/steps.py",
        "pass_fds=[self.lock],",
        "pass_fds=[],",
        INSTALL + " -k outlives",
        "two set-ups run at once",
    ),
    Fault(
        P + "launch/install/packages.py",
        "*uv_options(settings), ",
        "",
        "tests/launch/test_install.py -k pip_installs_what_uv",
        "uv takes packages from an index that pip's settings exclude",
    ),
    Fault(
        P + "launch/install/packages.py",
        "(reversed(settings",
        "((settings",
        "tests/launch/test_install.py -k file_that_pip_takes",
        "uv takes a file from another index than pip",
    ),
    Fault(
        P + "launch/install/packages.py",
        "    if not kinds:",
        "    if True:",
        "tests/launch/test_install.py -k pip_installs_what_uv",
        "uv installs although pip's settings say which kind of file to take",
    ),
    Fault(
        P + "launch/install/installer.py",
        "CHECK.relative_to(CHECKOUT), *sources]:",
        "CHECK.relative_to(CHECKOUT)]:",
        INSTALL + " -k fingerprint",
        "a changed patch does not set up again",
    ),
]

FAULTS = [
    *REPORTING,
    *TOOLS,
    *TRAINING,
    *OPTIM_AND_DATA,
    *DISTRIBUTED,
    *RUNTIME_AND_CONFIG,
    *DATA,
    *MODELS_AND_KERNELS,
    *LAUNCH,
]
