"""Made-up results of `benchmark`, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvd_cifar.tools.benchmark.results import (
    AllreducePoint,
    AllreduceResult,
    Estimate,
    Facts,
    Gradient,
    Phases,
    StepResult,
    WorldResult,
)

FACTS = Facts(
    date="2024-01-01T00:00:00+00:00",
    command="python -m hvd_cifar benchmark step",
    git_commit=None,
    versions={"python": "3.12"},
    processor="made up",
    cores=4,
    hosts=["a", "a", "b", "b"],
    local_ranks=[0, 1, 0, 1],
    device="/CPU:0",
    threads=1,
    controller="mpi",
    algorithm="ring",
    transport="TCP",
)
# 1 s forward, 2 s backward, 1 s update; 4 gradients of 100 bytes, every half second of the backward pass.
PHASES = Phases(
    forward_seconds=1.0,
    backward_seconds=2.0,
    update_seconds=1.0,
    gradients=[Gradient(name=f"g{i}", bytes=100, ready_seconds=i / 2) for i in range(1, 5)],
)


def estimate(value: float) -> Estimate:
    """Of one repeat."""
    return Estimate(mean=value, standard_error=None, n=1)


def step_result(compute: float, worlds: Mapping[int, float], lag: float = 1.0) -> StepResult:
    """A rank a host, which compute in `compute` seconds, the slowest in `lag` times; efficiencies by ranks."""
    return StepResult(
        facts=_facts_of(max(worlds)),
        model="resnet20",
        precision="float32",
        dataset="cifar10",
        per_rank_batch_size=100,
        compression="none",
        bucket_bytes=None,
        steps=10,
        worlds=[
            WorldResult(
                ranks=k,
                images_per_second=estimate(k * 100 / compute * efficiency),
                images_per_second_alone=estimate(k * 100 / compute),
                efficiency=estimate(efficiency),
                step_seconds=estimate(compute / efficiency),
                compute_seconds=estimate(compute),
                lockstep_seconds=estimate(compute * lag),
                communication_seconds=estimate(0.02) if k > 1 else None,
                fed_seconds=estimate(compute / efficiency),
                input_cost=estimate(0.0),
                compute_by_rank=[compute] * k,
            )
            for k, efficiency in worlds.items()
        ],
        phases=PHASES,
    )


def allreduce_result(
    ranks: list[int], seconds: Callable[[int, int], float] = lambda n, size: 1e-4 + 1e-9 * size
) -> AllreduceResult:
    """Of a rank a host. `seconds`: of a number of ranks and bytes."""
    points = []
    for n in ranks:
        for size in (2**14 * 4**i for i in range(6)):
            rate = size / seconds(n, size)
            points.append(
                AllreducePoint(
                    ranks=n,
                    bytes=size,
                    iterations=1,
                    seconds=estimate(seconds(n, size)),
                    algorithm_bandwidth=rate,
                    bus_bandwidth=rate * 2 * (n - 1) / n,
                    processor_seconds=0.0,
                    wrong_values=0,
                )
            )
    return AllreduceResult(facts=_facts_of(max(ranks)), points=points)


def _facts_of(ranks: int) -> Facts:
    return FACTS.model_copy(update={"hosts": [f"h{rank}" for rank in range(ranks)], "local_ranks": [0] * ranks})
