"""The data set of a run: the same one on every host, seen as the run's model sees it."""

from __future__ import annotations

from hvd_cifar import config
from hvd_cifar.data.augment import STANDARD_VIEWS, TUTORIAL_VIEWS, Views
from hvd_cifar.data.dataset import Prepared, prepare
from hvd_cifar.distributed import World, sync
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import terminal


def views_of(model: str) -> Views:
    """How a model sees images."""
    return TUTORIAL_VIEWS if model == "tutorial" else STANDARD_VIEWS


def prepare_data(settings: config.DataSettings, world: World) -> Prepared:
    """Find or make the data set on every host; a collective, since it may fail on some hosts only.

    Raises:
        UserError: on every rank, where the data is not to be had on one, or hosts have different data sets.
    """

    def here() -> Prepared:
        return prepare(
            settings.dataset,
            settings.data_dir,
            settings.data_url,
            settings.data_md5,
            show_progress=terminal.is_watched() and world.size == world.local_size,
            warn=terminal.complain if world.local_rank == 0 else (lambda line: None),
        )

    prepared = sync.on_every_rank(here)
    names = sync.gather((prepared.name, world.host))
    if len({name for name, _ in names}) > 1:
        found = ", ".join(f"{name} on {host}" for name, host in sorted(set(names)))
        raise UserError(f"hosts have different data sets ({found}): give --dataset, or one --data-dir alike on all")
    return prepared
