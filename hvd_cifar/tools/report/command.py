"""`report`: one self-contained HTML page about one run or several."""

from __future__ import annotations

from typing import Any

import jinja2

from hvd_cifar import __version__
from hvd_cifar.errors import UserError
from hvd_cifar.files import replace_bytes
from hvd_cifar.reporting import story, terminal
from hvd_cifar.reporting.run_files import RunFiles, Train, read_run
from hvd_cifar.tools.report import charts, content
from hvd_cifar.tools.settings import ReportSettings


def report(settings: ReportSettings) -> None:
    """Write the page.

    Raises:
        UserError: where there is no run, a file is damaged, or the page cannot be written.
    """
    output = settings.output or settings.run_dirs[0] / "report.html"
    if output.suffix.lower() not in (".html", ".htm"):  # such as a run's config.json, which it would overwrite
        raise UserError(f"--output {output}: is no name of a page; give a file that ends in .html")
    runs = [read_run(run_dir) for run_dir in dict.fromkeys(settings.run_dirs)]
    for run in runs:
        if not run.of_kind(Train):
            raise UserError(f"{run.run_dir}: no log line is on record yet; wait for the first one (--log-every)")
    text = page(runs)
    try:
        replace_bytes(output, text.encode(errors="replace"))  # a folder's name need not be valid UTF-8
    except OSError as failure:
        raise UserError(f"cannot write {output}: {failure.strerror}; give another --output") from None
    terminal.say(f"{output}")


def page(runs: list[RunFiles]) -> str:
    """The page as HTML. Autoescape escapes what comes from files; only `charts.svg` makes markup."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hvd_cifar.tools.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {"duration": content.duration, "clock": story.clock, "most_ranks": content.MOST_RANKS}
    names = [run.run_dir.name for run in runs]
    named = names if len(set(names)) == len(names) else [str(run.run_dir) for run in runs]
    return environment.get_template("page.html").render(
        runs=[_of_run(*one, number) for number, one in enumerate(zip(runs, named, strict=True), start=1)],
        curves=charts.curves(runs),
        differing=content.differing(runs),
        version=__version__,
    )


def _of_run(run: RunFiles, name: str, number: int) -> dict[str, Any]:
    happened = content.happenings(run)
    by_rank, slowest = content.by_rank(run)
    return {
        "name": name,
        "standing": run.standing,
        "results": content.results(run),
        "facts": content.facts(run),
        "settings": content.settings(run),
        "shares": content.shares(run),
        "by_rank": by_rank,
        "slowest": slowest,
        "time_axis": charts.time_axis(run, happened, f"Steps over time, run {number}") if run.marks else "",
        "happened": happened,
        "classes": content.classes(run.confusion) if run.confusion else None,
        "confusion": run.confusion,
        "pictures": content.pictures(run.confusion) if run.confusion else [],
        "damaged": run.damaged,
    }
