"""`benchmark predict`: scaling efficiency at any number of ranks, from measurements on a few. Pure functions.

The time of a step is the computation of its slowest rank, plus the exposed part of the all-reduces: the part that the
backward pass does not hide (`distributed.overlap`, by which a run chooses its buckets). Efficiency is the ranks' mean
computation over that time. The computation, and the slowest rank's delay, are those measured on the most ranks. To test
this, predictions from the fewest ranks alone are compared with the measurements on more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvd_cifar.distributed.overlap import CANDIDATES, Backward, Link, choose, seconds_with
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import provenance
from hvd_cifar.tools.benchmark.fits import Fit, Layout, fits_by_way
from hvd_cifar.tools.benchmark.results import (
    AllreduceResult,
    EmulatedResult,
    Prediction,
    PredictResult,
    StepResult,
    points_by_way,
)

FREE = Fit()  # takes no time


@dataclass(frozen=True)
class Measured:
    """A step on some ranks.

    Attributes:
        layout: of the ranks.
        mean: seconds of a step without communication, over the ranks.
        backward: of the slowest rank, as part of such a step.
        update: seconds that follow the last sum.
        efficiency, standard_error: as measured.
    """

    layout: Layout
    mean: float
    backward: Backward
    update: float
    efficiency: float
    standard_error: float | None


@dataclass(frozen=True)
class Network:
    """All-reduces.

    Attributes:
        wall: the fit of their time.
        processor: the fit of the processor time that they take from the backward pass.
    """

    wall: Fit
    processor: Fit = FREE

    def link(self, layout: Layout) -> Link:
        """The all-reduce over ranks of a layout."""
        wall, work = self.wall, self.processor
        per_byte = [of.per_byte(layout) for of in (wall, work)]
        return Link(wall.overhead(layout), per_byte[0], min(wall.overhead(layout), work.overhead(layout)), per_byte[1])


def predict_one(
    step: StepResult | EmulatedResult, network: Network, layout: Layout, like: Measured, buckets: int | None | str
) -> Prediction:
    """The efficiency on ranks of `layout`, with the computation measured in `like`.

    Args:
        buckets: their bytes; None: one message; "auto": as a run with the step's options chooses.
    """
    link = network.link(layout)
    messages = _messages(step)
    in_one = like.backward.seconds + sum(map(link.seconds, messages))
    alone = layout.ranks == 1
    # The loss scale of float16 looks at all gradients.
    at_once = isinstance(step, StepResult) and step.precision == "mixed_float16"
    if alone or at_once:
        buckets = None
    elif buckets == "auto":
        buckets = _chosen(step, layout, like.backward, link)
    assert not isinstance(buckets, str)
    end = in_one if buckets is None else seconds_with(like.backward, link, buckets)
    if alone:
        in_one = end = like.mean - like.update
    return Prediction(
        ranks=layout.ranks,
        hosts=layout.hosts,
        measured_on=like.layout.ranks,
        communication_seconds=sum(map(link.seconds, messages)),
        bucket_bytes=buckets,
        step_seconds=end + like.update,
        efficiency=like.mean / (end + like.update),
        efficiency_in_one_message=like.mean / (in_one + like.update),
    )


def _chosen(step: StepResult | EmulatedResult, layout: Layout, backward: Backward, link: Link) -> int | None:
    """Bytes of the buckets of a run, which follows the rules of `training.overlap`; None: one message."""
    if isinstance(step, StepResult):
        overlap, given = step.overlap, step.given_bucket_bytes
    else:  # its buckets are never chosen
        overlap, given = "on" if step.bucket_bytes else "auto", step.bucket_bytes
    measures = layout.hosts > 1 or "GPU" in step.facts.device or overlap == "on" or given is not None
    if overlap == "off" or not measures:
        return None
    if overlap == "on" and given is not None:
        return given
    return choose(backward, link, CANDIDATES if given is None else (given,), always=overlap == "on").bucket_bytes


def predict(
    step: StepResult | EmulatedResult,
    allreduce: AllreduceResult,
    ranks: Sequence[int],
    link: float | None = None,
    latency: float | None = None,
    ranks_per_host: int | None = None,
) -> PredictResult:
    """Predictions for `ranks`, and checks against all numbers of ranks that were measured.

    There are two checks for p ranks. The first uses the computation on p ranks and the fit to all all-reduces: it tests
    the formula. The second uses computation and all-reduces of the fewest ranks alone: it tests a prediction for more
    ranks than were measured, and needs all-reduces on the fewest ranks.

    Args:
        link: bytes a second of each host's link, instead of the measured bandwidth.
        latency: seconds of a message over the link, instead of the measured one.
        ranks_per_host: of the predictions; None: as measured.

    Raises:
        UserError: where no fit of Horovod's all-reduce is among the results.
    """
    if "horovod" not in allreduce.fits:
        raise UserError("the all-reduce results have no fit for Horovod: measure them again, with more sizes or ranks")
    measured = _measured(step)
    several = [m for m in measured if m.layout.ranks > 1]
    fewest = several[0].layout.ranks if several else 0
    of_fewest = fits_by_way(points_by_way(allreduce.points, allreduce.facts.local_ranks, fewest))
    checks = [(m, m, allreduce.fits) for m in several]
    checks += [(m, several[0], of_fewest) for m in several[1:] if "horovod" in of_fewest]
    local_ranks = ranks_per_host or Layout.of(step.facts.local_ranks).local
    wanted = {
        name: value for name, value in (("alpha", latency), ("beta", 1 / link if link else None)) if value is not None
    }
    fit = allreduce.fits["horovod"]
    link_fit = replace(
        fit,
        **wanted,
        unknown=tuple(name for name in fit.unknown if name not in wanted),
        errors=() if wanted else fit.errors,
    )
    of_link = _network(step, {**allreduce.fits, "horovod": link_fit})
    return PredictResult(
        command=provenance.command(),
        step=step,
        allreduce=allreduce,
        local_ranks=local_ranks,
        link_fit=link_fit,
        checks=[
            predict_one(
                step,
                _network(step, fits),
                m.layout,
                like,
                step.bucket_bytes,
            ).model_copy(
                update={
                    "hosts": step.facts.local_ranks[: m.layout.ranks].count(0),
                    "measured": m.efficiency,
                    "measured_standard_error": m.standard_error,
                }
            )
            for m, like, fits in checks
        ],
        predictions=[
            predict_one(step, of_link, Layout.filled(n, local_ranks), measured[-1], "auto").model_copy(
                update={"ranks": n, "hosts": -(-n // local_ranks)}
            )
            for n in ranks
        ],
    )


def _network(step: StepResult | EmulatedResult, fits: dict[str, Fit]) -> Network:
    # A GPU, or a sleep that stands for one, goes on while the processor works for the all-reduce.
    beside = isinstance(step, EmulatedResult) or "GPU" in step.facts.device
    return Network(fits["horovod"], FREE if beside else fits.get("processor", FREE))


def _messages(step: StepResult | EmulatedResult) -> list[int]:
    return step.messages if isinstance(step, StepResult) else [sum(step.gradients)]


def _measured(step: StepResult | EmulatedResult) -> list[Measured]:
    """The step on each number of ranks, ascending."""
    found = _of_emulated(step) if isinstance(step, EmulatedResult) else _of_step(step)
    return sorted(found, key=lambda measured: measured.layout.ranks)


def _of_step(step: StepResult) -> list[Measured]:
    phases = step.phases
    whole = phases.forward_seconds + phases.backward_seconds + phases.update_seconds
    found = []
    for world in step.worlds:
        # The phases are measured apart from a step, so that their sum differs from its time: they are scaled to it.
        scale = (world.lockstep_seconds.mean if world.ranks > 1 else world.compute_seconds.mean) / whole
        found.append(
            Measured(
                layout=Layout.of(step.facts.local_ranks[: world.ranks]),
                mean=world.compute_seconds.mean,
                backward=Backward(
                    phases.forward_seconds * scale,
                    tuple(gradient.ready_seconds * scale for gradient in phases.gradients),
                    tuple(gradient.bytes for gradient in phases.gradients),
                ),
                update=phases.update_seconds * scale,
                efficiency=world.efficiency.mean,
                standard_error=world.efficiency.standard_error,
            )
        )
    return found


def _of_emulated(step: EmulatedResult) -> list[Measured]:
    sent = list(itertools.accumulate(step.gradients))
    return [
        Measured(
            layout=Layout.of(step.facts.local_ranks[: world.ranks]),
            mean=world.alone_seconds.mean,
            backward=Backward(
                0.0, tuple(step.emulated_seconds * done / sent[-1] for done in sent), tuple(step.gradients)
            ),
            update=world.alone_seconds.mean - step.emulated_seconds,
            efficiency=world.alone_seconds.mean / world.step_seconds.mean,
            standard_error=None,
        )
        for world in step.worlds
    ]
