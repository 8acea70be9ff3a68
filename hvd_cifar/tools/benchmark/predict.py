"""`benchmark predict`: scaling efficiency at any number of ranks, from what was measured on a few. Pure functions.

A step takes as long as its slowest rank computes, and an all-reduce: of all gradients after the backward pass, or
beside it, as they get ready. Efficiency is the mean rank's computation over that. What ranks compute, and how far the
slowest is behind, is taken to be as where most ranks were measured; how good that is, is seen by predicting what was
measured from the fewest ranks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvd_cifar.errors import UserError
from hvd_cifar.reporting import provenance
from hvd_cifar.tools.benchmark.fits import Fit, end_of_overlapped, fits_by_way
from hvd_cifar.tools.benchmark.results import (
    AllreduceResult,
    Prediction,
    PredictResult,
    StepResult,
    WorldResult,
    points_by_way,
)


def predict_one(step: StepResult, fit: Fit, ranks: int, like: WorldResult) -> Prediction:
    """The efficiency on `ranks` ranks, whose computation takes as long as it does in `like`."""
    phases = step.phases
    sizes = [gradient.bytes for gradient in phases.gradients]
    communication = fit.seconds(ranks, sum(sizes))
    lockstep = like.lockstep_seconds.mean if ranks > 1 else like.compute_seconds.mean
    # The phases were measured by themselves; where a step takes longer or shorter, they do in proportion.
    whole = phases.forward_seconds + phases.backward_seconds + phases.update_seconds
    scale = lockstep / whole
    before_update = (phases.forward_seconds + phases.backward_seconds) * scale
    ready = [(phases.forward_seconds + gradient.ready_seconds) * scale for gradient in phases.gradients]
    end = end_of_overlapped(ready, sizes, fit, ranks) if ranks > 1 else before_update
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

    A check of p ranks is made twice: with the computation measured on p ranks and the fit to all all-reduces, which
    tests the formula; and with the computation and the all-reduces of the fewest ranks alone, as a prediction is made,
    where all-reduces were measured on so few.

    Args:
        link: bytes a second of each host's link, in place of the measured bandwidth.
        latency: seconds of a message, in place of the measured one.

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
