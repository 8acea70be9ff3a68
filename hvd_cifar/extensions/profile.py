"""--profile-steps: one trace of what all ranks do in some steps, on one time base."""

from __future__ import annotations

import contextlib
import gzip
import json
import secrets
import shutil
import tempfile
import time
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hvd_cifar import fields
from hvd_cifar.errors import UserError
from hvd_cifar.fields import Steps
from hvd_cifar.files import replace_bytes
from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.distributed.clocks import Comparison

MOST_EVENTS = 240_000  # of the trace, about as many bytes before compression


class Settings(fields.Settings):
    """Options of this extension."""

    profile_steps: Steps | None = Field(
        None,
        description="First and last step to profile, such as 100:110. The trace of all ranks is one file in the folder "
        "profile of the run; docs/profile.md. [default: none]",
        json_schema_extra={"metavar": "N:N"},
    )


def make(run: Run) -> Callback | None:
    """The profiler, where steps are given."""
    steps = run.options(Settings).profile_steps
    return Profiler(steps) if steps else None


class Profiler(Callback):
    """Profiles the steps from a first to a last one on all ranks; rank 0 writes the trace."""

    def __init__(self, steps: tuple[int, int]) -> None:
        self.first, self.last = steps
        self.folder: Path | None = None  # of this rank's profile while it runs; TensorFlow makes it at the end
        self.started: Comparison | None = None
        self.edges: list[int] = []  # times between the steps in ns, by this rank's clock
        self.is_over = False

    def on_build(self, run: Run) -> None:
        """Refuse steps after the run's end."""
        if self.last > run.total_steps:
            raise UserError(
                f"--profile-steps {self.first}:{self.last}: the run ends after step {run.total_steps}; give steps up "
                "to it"
            )

    def on_start(self, run: Run) -> None:
        """Skip the profile if the run resumes after its first step."""
        if run.step >= self.first:
            self._leave_out(run, f"the run goes on after step {run.step}")

    def before_steps(self, run: Run) -> None:
        """Begin if the next step is the first one."""
        self._begin_where_due(run)

    def on_step(self, run: Run) -> None:
        """Begin before the first step, and end after the last, or where the run stops."""
        if self.folder:
            run.progress.check_losses()  # waits for the device
            self.edges.append(time.time_ns())
            if run.step == self.last or run.progress.stop_requested:
                self._end(run)
        self._begin_where_due(run)

    def on_rollback(self, run: Run) -> None:
        """Drop a profile in progress, whose steps are repeated. Begin where the run is back before the first step."""
        import tensorflow as tf

        if self.folder:
            tf.profiler.experimental.stop(save=False)
            self.folder = None
            self._leave_out(run, f"the run went back to step {run.step}")
        self._begin_where_due(run)

    def on_end(self, run: Run) -> None:
        """End a profile in progress when the run ends early."""
        if self.folder:
            self._end(run)
        elif not self.is_over:
            self._leave_out(run, f"the run ended after step {run.step}")

    def _leave_out(self, run: Run, why: str) -> None:
        run.warn(f"--profile-steps {self.first}:{self.last}: no profile: {why}", run.step)
        self.is_over = True

    def _begin_where_due(self, run: Run) -> None:
        import tensorflow as tf

        from hvd_cifar.distributed import clocks

        if self.is_over or self.folder or run.step != self.first - 1:
            return
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
        run.progress.check_losses()
        with run.progress.clock.paused():
            self.folder = Path(tempfile.gettempdir()) / f"hvd_cifar-profile-{secrets.token_hex(8)}"
            # An earlier run in this process may have failed while it profiled.
            with contextlib.suppress(tf.errors.UnavailableError):
                tf.profiler.experimental.stop(save=False)
            self.started = clocks.compare()
            tf.profiler.experimental.start(str(self.folder), options)
            run.ranks.barrier()  # else a rank whose profiler starts late would delay the first step of the others
            self.edges = [time.time_ns()]

    def _end(self, run: Run) -> None:
        """End the profile, and write it. A collective."""
        import tensorflow as tf

        from hvd_cifar.distributed import clocks

        assert self.folder and self.started, "it was begun"
        self.is_over = True
        with run.progress.clock.paused():
            # Before the profiler stops: after these collectives Horovod's thread has recorded the last step.
            ended = clocks.compare()
            content, failure = b"", ""
            try:
                tf.profiler.experimental.stop()
                content = next(self.folder.rglob("*.xplane.pb")).read_bytes()
            except (OSError, StopIteration, tf.errors.OpError) as error:
                failure = f"rank {run.world.rank} on {run.world.host}: {type(error).__name__}: {error}"
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None
            failures = list(filter(None, run.ranks.gather(failure)))
            if failures:
                self._leave_out(run, " ".join(failures[0].split()))
                return
            self._merge(run, content, self.started, ended)

    def _merge(self, run: Run, content: bytes, started: Comparison, ended: Comparison) -> None:
        """Merge all ranks' profiles on rank 0. A collective."""
        from hvd_cifar.distributed import clocks, collectives
        from hvd_cifar.reporting import trace

        world = run.world
        on_root = partial(clocks.on_root, first=started, last=ended)
        edges = [on_root(edge) for edge in self.edges]
        seen = run.ranks.on_every_rank(lambda: trace.read(content, on_root, edges, self.first))
        messages = trace.begun(seen.messages, run.ranks.gather(seen.messages))
        zero = run.ranks.broadcast(edges[0])
        own_lanes = trace.lanes_of(messages, edges, self.first)
        text, left_out = trace.as_json(world.rank, world.host, own_lanes, seen.events, zero, MOST_EVENTS // world.size)
        told = {
            "host": world.host,
            "clock_ahead_seconds": started.ahead / 1e9,
            "clock_drift_seconds": (ended.ahead - started.ahead) / 1e9,
            "clock_uncertainty_seconds": max(started.uncertainty, ended.uncertainty) / 1e9,
            "hidden_and_communication_seconds": [ns / 1e9 for ns in trace.hidden(messages, seen.computing)],
            "events_left_out": left_out,
        }
        ranks = run.ranks.gather(told)
        parts = collectives.gather_bytes(zlib.compress(text.encode()))
        if world.is_root:
            try:
                path, size = self._write(run, ranks, parts)
                run.say(f"profile: {in_words(ranks)}; {path}, {size / 1e6:.1f} MB")
            except OSError as failure:  # a profile that cannot be written does not end the run
                self._leave_out(run, f"{failure.filename or run.run_dir}: {failure.strerror}")

    def _write(self, run: Run, ranks: list[dict[str, Any]], parts: list[bytes]) -> tuple[Path, int]:
        """Rank 0's part: write the trace; return its path and bytes."""
        events = ",\n".join(zlib.decompress(part).decode() for part in parts)
        about = json.dumps({"ranks": ranks, "steps": [self.first, self.last]})
        whole = f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": [\n{events}\n]}}\n'
        path = run.run_dir / "profile" / f"steps-{self.first}-{self.last}.json.gz"
        path.parent.mkdir(exist_ok=True)
        packed = gzip.compress(whole.encode(), mtime=0)
        replace_bytes(path, packed)
        return path, len(packed)


def in_words(ranks: list[dict[str, Any]]) -> str:
    """The printed summary of a profile: hidden share of communication, uncertainty of clocks, events left out."""
    shares = [part / whole for part, whole in (rank["hidden_and_communication_seconds"] for rank in ranks) if whole]
    said = "no communication"
    if shares:
        hidden, whole = (sum(rank["hidden_and_communication_seconds"][i] for rank in ranks) for i in (0, 1))
        said = f"{hidden / whole:.0%} of the communication is hidden behind backward ({min(shares):.0%} to "
        said += f"{max(shares):.0%} on {len(shares)} ranks)"
    said += f"; clocks agree to {1e3 * max(rank['clock_uncertainty_seconds'] for rank in ranks):.2f} ms"
    if left_out := sum(rank["events_left_out"] for rank in ranks):
        said += f"; the {left_out} shortest events are left out"
    return said
