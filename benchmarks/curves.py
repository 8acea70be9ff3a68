"""Test accuracy of runs over their steps or epochs, as SVG: the curves of docs/results.md.

    python -m benchmarks.curves tutorial=runs/tutorial "resnet20 in PyTorch=torch.json" --output curves.svg
    python -m benchmarks.curves 128=runs/128 1024=runs/1024 --by epoch --output batches.svg

Each argument is a name and a run directory, or the JSON file of `benchmarks.peers.published`, which knows steps only.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from benchmarks import runs, setting
from hvd_cifar.errors import UserError


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("curves", nargs=-1, required=True, metavar="NAME=RUN_DIR|FILE.json ...")
@click.option("--by", type=click.Choice(["step", "epoch"]), default="step", show_default=True)
@click.option("--output", type=Path, required=True)
@setting.one_line_for_users()
def main(curves: tuple[str, ...], by: str, output: Path) -> None:
    """Read all curves and draw them."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "hvd_cifar"  # the same file from the same runs
    from matplotlib import pyplot

    found: dict[str, dict[float, float]] = {}
    for text in curves:
        name, equals, path = text.partition("=")
        if not equals or name in found:
            raise UserError(f"{text}: give NAME=RUN_DIR or NAME=FILE.json, each with a name of its own")
        found[name] = accuracies(Path(path), by)
    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    for name, curve in found.items():
        percent = [100 * accuracy for accuracy in curve.values()]
        axes.plot(list(curve), percent, ".-", label=f"{name}, at the end {percent[-1]:.2f}%")
    axes.set(xlabel=by, ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(output, metadata={"Date": None})


def accuracies(path: Path, by: str = "step") -> dict[float, float]:
    """Test accuracies by step or epoch, of a run directory or a JSON file.

    Raises:
        UserError: where there are none.
    """
    if path.is_dir():
        found = runs.accuracies(path, by)
    elif by != "step":
        raise UserError(f"{path}: such a file has no epochs; leave out --by")
    else:
        try:
            found = {float(step): float(value) for step, value in json.loads(path.read_text())["test_accuracy"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: no file of benchmarks.peers.published: {error}") from None
    if not found:
        raise UserError(f"{path}: no test accuracies there; train with --eval-every")
    return found


if __name__ == "__main__":
    main()
