"""--profile-steps: TensorFlow's profile of some steps on every rank, as TensorBoard's profile plugin reads it."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from pathlib import Path

from pydantic import Field

from hvd_cifar import fields
from hvd_cifar.errors import UserError
from hvd_cifar.fields import Steps
from hvd_cifar.files import replace_bytes
from hvd_cifar.training.callbacks import Callback, Run

MOST_BYTES = 48_000_000  # of all ranks' files, each of which every rank receives


class Settings(fields.Settings):
    """Options of this extension."""

    profile_steps: Steps | None = Field(
        None,
        description="First and last step to profile, such as 100:110. TensorBoard shows the profile of each rank; "
        "docs/tensorboard.md. [default: none]",
    )


def make(run: Run) -> Callback | None:
    """The profiler, where steps are given."""
    steps = run.options(Settings).profile_steps
    return Profiler(steps) if steps else None


class Profiler(Callback):
    """Profiles the steps from a first to a last one on all ranks; rank 0 writes the files."""

    def __init__(self, steps: tuple[int, int]) -> None:
        self.first, self.last = steps
        self.folder: Path | None = None  # of this rank's profile while it runs; TensorFlow makes it at the end
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

        if self.is_over or self.folder or run.step != self.first - 1:
            return
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
        run.progress.check_losses()
        with run.progress.clock.paused():
            self.folder = Path(tempfile.gettempdir()) / f"hvd_cifar-profile-{secrets.token_hex(8)}"
            # An earlier run in this process may have failed while it profiled.
            with contextlib.suppress(tf.errors.UnavailableError):
                tf.profiler.experimental.stop(save=False)
            tf.profiler.experimental.start(str(self.folder), options)
            run.ranks.barrier()  # else a rank whose profiler starts late would delay the first step of the others

    def _end(self, run: Run) -> None:
        """End the profile, and write all ranks' files on rank 0. A collective."""
        import tensorflow as tf

        from hvd_cifar.distributed.collectives import gather_bytes

        assert self.folder, "it was begun"
        world, content, failure = run.world, b"", ""
        with run.progress.clock.paused():
            try:
                tf.profiler.experimental.stop()
                content = next(self.folder.rglob("*.xplane.pb")).read_bytes()
                if len(content) > MOST_BYTES // world.size:
                    failure = f"its {len(content):,} bytes are too many; give fewer steps"
            except (OSError, StopIteration, tf.errors.OpError) as error:
                failure = f"{type(error).__name__}: {error}"
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder, self.is_over = None, True
            ranks = run.ranks.gather((world.host, failure))
            if failed := [f"rank {rank} on {host}: {why}" for rank, (host, why) in enumerate(ranks) if why]:
                self._leave_out(run, " ".join(failed[0].split()))
                return
            files = gather_bytes(content)
            if not world.is_root:
                return
            folder = run.run_dir / f"tensorboard/plugins/profile/steps-{self.first}-{self.last}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for rank, (host, _) in enumerate(ranks):
                    replace_bytes(folder / f"rank-{rank}-{host}.xplane.pb", files[rank])
                run.say(f"profile: {folder}, {sum(map(len, files)) / 1e6:.1f} MB")
            except OSError as error:  # a profile that cannot be written does not end the run
                self._leave_out(run, f"{error.filename or folder}: {error.strerror}")
