"""`benchmark predict`: scaling efficiency at any number of ranks, from what was measured on a few. Pure functions.

A step takes what it computes, and an all-reduce: of all gradients after the backward pass, or beside it, as they get
ready. Efficiency is the computation over that; every rank is taken to compute as it does where most were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvd_cifar.tools.benchmark.fits import Fit, end_of_overlapped
from hvd_cifar.tools.benchmark.results import AllreduceResult, Prediction, PredictResult, StepResult


def predict_one(step: StepResult, fit: Fit, ranks: int, compute_seconds: float) -> Prediction:
    """The efficiency on `ranks` ranks, each of which computes a step in `compute_seconds`."""
    phases = step.phases
    sizes = [gradient.bytes for gradient in phases.gradients]
    communication = fit.seconds(ranks, sum(sizes))
    # The phases were measured on the most ranks; where a step takes longer or shorter, they do in proportion.
    whole = phases.forward_seconds + phases.backward_seconds + phases.update_seconds
    scale = compute_seconds / whole
    before_update = (phases.forward_seconds + phases.backward_seconds) * scale
    ready = [(phases.forward_seconds + gradient.ready_seconds) * scale for gradient in phases.gradients]
    end = end_of_overlapped(ready, sizes, fit, ranks) if ranks > 1 else before_update
    overlapped = compute_seconds + max(0.0, end - before_update)
    return Prediction(
        ranks=ranks,
        communication_seconds=communication,
        efficiency=compute_seconds / (compute_seconds + communication),
        efficiency_overlapped=compute_seconds / overlapped,
    )


def predict(
    step: StepResult,
    allreduce: AllreduceResult,
    ranks: Sequence[int],
    link: float | None = None,
    latency: float | None = None,
) -> PredictResult:
    """Predictions for `ranks`, and checks against all numbers of ranks that were measured.

    Args:
        link: bytes a second of each host's link, in place of the measured bandwidth.
        latency: seconds of a message, in place of the measured one.
    """
    fit = allreduce.fits["horovod"]
    link_fit = replace(
        fit,
        alpha=fit.alpha if latency is None else latency,
        beta=fit.beta if link is None else 1 / link,
        errors=() if link or latency is not None else fit.errors,
    )
    checks = [
        predict_one(step, fit, world.ranks, world.compute_seconds.mean).model_copy(
            update={
                "measured": world.efficiency.mean,
                "measured_standard_error": world.efficiency.standard_error,
            }
        )
        for world in step.worlds
        if world.ranks > 1
    ]
    compute = max(step.worlds, key=lambda world: world.ranks).compute_seconds.mean
    return PredictResult(
        model=step.model,
        precision=step.precision,
        per_rank_batch_size=step.per_rank_batch_size,
        gradient_bytes=sum(gradient.bytes for gradient in step.phases.gradients),
        compute_seconds=compute,
        fit=fit,
        link_fit=link_fit,
        checks=checks,
        predictions=[predict_one(step, link_fit, n, compute) for n in ranks],
    )
