"""`benchmark predict`: scaling efficiency at any number of ranks, from what was measured on a few. Pure functions.

The time of a step is the computation of its slowest rank and an all-reduce: of all gradients after the backward pass,
or beside it, as gradients get ready. Efficiency is the mean computation of the ranks over that time. Computation, and
how far the slowest rank is behind, are taken from the measurement on the most ranks. Predictions from the fewest ranks
alone, compared with the measurements on more, show how good this is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvd_cifar.distributed.overlap import end_of_messages
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import provenance
from hvd_cifar.tools.benchmark.fits import Fit, fits_by_way
from hvd_cifar.tools.benchmark.results import (
    AllreduceResult,
    Prediction,
    PredictResult,
    StepResult,
    WorldResult,
    points_by_way,
)


def predict_one(step: StepResult, fit: Fit, ranks: int, like: WorldResult) -> Prediction:
    """The efficiency on `ranks` ranks, with the computation measured in `like`."""
    phases = step.phases
    sizes = [gradient.bytes for gradient in phases.gradients]
    communication = fit.seconds(ranks, sum(sizes))
    lockstep = like.lockstep_seconds.mean if ranks > 1 else like.compute_seconds.mean
    # The phases were measured alone. They are scaled to the time of a whole step.
    whole = phases.forward_seconds + phases.backward_seconds + phases.update_seconds
    scale = lockstep / whole
    before_update = (phases.forward_seconds + phases.backward_seconds) * scale
    ready = [(phases.forward_seconds + gradient.ready_seconds) * scale for gradient in phases.gradients]
    end = before_update
    if ranks > 1:
        end = end_of_messages(ready, sizes, fit.start, lambda size: fit.seconds(ranks, size) - fit.start)
    overlapped = lockstep + max(0.0, end - before_update)
    return Prediction(
        ranks=ranks,
        measured_on=like.ranks,
        communication_seconds=communication,
        efficiency=like.compute_seconds.mean / (lockstep + communication),
        efficiency_overlapped=like.compute_seconds.mean / overlapped,
    )


def predict(
    step: StepResult,
    allreduce: AllreduceResult,
    ranks: Sequence[int],
    link: float | None = None,
    latency: float | None = None,
) -> PredictResult:
    """Predictions for `ranks`, and checks against all numbers of ranks that were measured.

    There are two checks of p ranks. The first takes the computation measured on p ranks and the fit to all all-reduces:
    it tests the formula. The second takes computation and all-reduces of the fewest ranks alone, as a prediction does;
    it needs all-reduces of so few ranks.

    Args:
        link: bytes a second of each host's link, instead of the measured bandwidth.
        latency: seconds of a message, instead of the measured one.

    Raises:
        UserError: where no fit of Horovod's all-reduce is among the results.
    """
    if "horovod" not in allreduce.fits:
        raise UserError("the all-reduces hold no fit of Horovod's: measure them again, with more sizes or ranks")
    fit = allreduce.fits["horovod"]
    link_fit = replace(
        fit,
        alpha=fit.alpha if latency is None else latency,
        alpha_known=fit.alpha_known or latency is not None,
        beta=fit.beta if link is None else 1 / link,
        errors=() if link or latency is not None else fit.errors,
    )
    worlds = sorted((world for world in step.worlds if world.ranks > 1), key=lambda world: world.ranks)
    fewest = worlds[0].ranks if worlds else 0
    of_fewest = fits_by_way(points_by_way(allreduce.points, fewest)).get("horovod")
    pairs = [(world, world, fit) for world in worlds]
    pairs += [(world, worlds[0], of_fewest) for world in worlds[1:] if of_fewest]
    checks = [
        predict_one(step, by, world.ranks, like).model_copy(
            update={
                "measured": world.efficiency.mean,
                "measured_standard_error": world.efficiency.standard_error,
            }
        )
        for world, like, by in pairs
    ]
    most = max(step.worlds, key=lambda world: world.ranks)
    return PredictResult(
        command=provenance.command(),
        step_facts=step.facts,
        allreduce_facts=allreduce.facts,
        model=step.model,
        precision=step.precision,
        per_rank_batch_size=step.per_rank_batch_size,
        gradient_bytes=sum(gradient.bytes for gradient in step.phases.gradients),
        most_bytes=max(p.bytes for p in allreduce.points if p.way == "horovod"),
        most_ranks=max(p.ranks for p in allreduce.points if p.way == "horovod"),
        compute_seconds=most.compute_seconds.mean,
        lockstep_seconds=most.lockstep_seconds.mean,
        fit=fit,
        link_fit=link_fit,
        checks=checks,
        predictions=[predict_one(step, link_fit, n, most) for n in ranks],
    )
