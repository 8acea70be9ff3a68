"""The data set of a run: the same one on every host, seen as the run's model sees it."""

from __future__ import annotations

from hvd_cifar import config
from hvd_cifar.data.augment import FAST_VIEWS, STANDARD_VIEWS, TUTORIAL_VIEWS, Views
from hvd_cifar.data.dataset import Prepared, prepare
from hvd_cifar.distributed import World, sync
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import terminal


def views_of(model: str, augmentation: config.Augmentation = "recipe") -> Views:
    """How a model sees images."""
    views = {"tutorial": TUTORIAL_VIEWS, "fast": FAST_VIEWS}.get(model, STANDARD_VIEWS)
    if augmentation == "none":
        return views._replace(train=lambda images, _: views.test(images))
    return views


def prepare_data(settings: config.DataSettings, world: World) -> Prepared:
    """Find or make the data set on every host; a collective, since it may fail on some hosts only.

    Raises:
        UserError: on every rank, where the data is not to be had on one, or hosts have different data sets.
    """

    def prepare_as(name: config.DatasetName) -> Prepared:
        return prepare(
            name,
            settings.data_dir,
            settings.data_url,
            settings.data_md5,
            show_progress=terminal.is_watched() and world.size == world.local_size,
            warn=terminal.complain,
        )

    # One rank of each host looks, and downloads if need be; where nobody answers, the others need not wait for it too.
    first = sync.on_every_rank(lambda: prepare_as(settings.dataset) if world.local_rank == 0 else None)
    found = sorted({(f.name, host) for f, host in sync.gather((first, world.host)) if f is not None})
    names = {name for name, _ in found}
    if len(names) > 1:
        where = ", ".join(f"{name} on {host}" for name, host in found)
        raise UserError(f"hosts have different data sets ({where}): give --dataset, or one --data-dir alike on all")
    return sync.on_every_rank(lambda: first or prepare_as(names.copy().pop()))
