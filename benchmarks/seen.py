"""Pictures of a real run's report and TensorBoard: 10 epochs on two ranks, one of which is lost.

    python -m benchmarks.seen --data-dir D

A run that `--runs` already holds is shown, not made again. Names of this machine and its folders are left out.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import psutil
from PIL import Image
from playwright.sync_api import sync_playwright

from benchmarks import jobs, runs, setting
from hvd_cifar.config import ReportSettings, make
from hvd_cifar.tools.report.command import report

OPTIONS = ["--model", "tutorial", "--dataset", "cifar10", "--epochs", "10", "--checkpoint-every", "300"]
LOST_AFTER = 700  # steps
WIDTH, WIDE = 1100, 1600  # px of the report and of TensorBoard
SECONDS_TO_COME = 60  # until TensorBoard answers
SECONDS_TO_DRAW = 8  # for the charts after its first one
END = "What ran"  # the section that the picture leaves out, since it is text alone


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--data-dir", required=True, type=Path)
@click.option("--runs", "folder", default=Path("runs/seen"), type=Path, show_default=True, help="Folder of the run.")
@click.option("--output", type=Path, default=jobs.CHECKOUT / "docs" / "pictures", show_default=False)
@setting.one_line_for_users()
def main(data_dir: Path, folder: Path, output: Path) -> None:
    """Train where there is no run yet, then write the report and take the pictures."""
    jobs.end_on_signals()
    run_dir, data = folder.absolute() / "tutorial", setting.real_data(data_dir)
    if not (run_dir / "summary.json").exists():
        _train(run_dir, data)
    if not (run_dir / "confusion.json").exists():
        words = [sys.executable, "-m", "hvd_cifar", "evaluate", "--run-dir", str(run_dir), "--confusion"]
        jobs.run(words, run_dir.with_suffix(".log"))
    with tempfile.TemporaryDirectory() as place:
        shown = Path(place) / run_dir.name
        shown.mkdir()
        for path in (*run_dir.glob("*.json"), *run_dir.glob("*.jsonl")):
            (shown / path.name).write_text(_anonymous(path.read_text(), run_dir, data))
        page = output.absolute() / "report.html"
        report(make(ReportSettings, {"run_dirs": [shown], "output": page}))
        _photograph(page.as_uri(), output / "report.png", end=END)
    with _tensorboard(run_dir / "tensorboard") as address:
        _photograph(f"{address}/#timeseries", output / "tensorboard.png")


def _train(run_dir: Path, data: Path) -> None:
    """Train on two ranks, and kill one of them on the way."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "hvd_cifar.launch", "-np", "2", "--max-restarts", "1", "train", *OPTIONS]
    job = jobs.start([*words, "--data-dir", str(data), "--run-dir", str(run_dir)], run_dir.with_suffix(".log"))
    try:
        while max(runs.losses(run_dir), default=0) < LOST_AFTER and job.poll() is None:
            time.sleep(1)
        for process in psutil.Process(job.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.environ().get("OMPI_COMM_WORLD_RANK") == "1" and "hvd_cifar" in process.cmdline():
                    process.send_signal(signal.SIGKILL)
        if job.wait():
            raise SystemExit(f"the run ended with {job.returncode}: see {run_dir.with_suffix('.log')}")
    finally:
        jobs.kill(job)


def _anonymous(text: str, run_dir: Path, data: Path) -> str:
    """The text of a run's file without what only this machine has."""
    host = socket.gethostname()
    for own, other in (
        (f'"{host}"', '"node1"'),
        (f" on {host} ", " on node1 "),
        (f" on {host},", " on node1,"),
        (f"{run_dir.parent}/", "runs/"),
        (str(data), "D"),
    ):
        text = text.replace(own, other)
    return text


@contextmanager
def _tensorboard(folder: Path) -> Iterator[str]:
    """TensorBoard on a folder, while the block runs; its address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(SECONDS_TO_COME):
            with suppress(OSError), socket.create_connection(("localhost", port)):
                break
            time.sleep(1)
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.wait()


def _photograph(address: str, output: Path, end: str = "") -> None:
    """A page as PNG: up to the section with a title, or as much as a screen shows."""
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if chromium is None:
        raise SystemExit("no Chromium is here; apt-get install chromium-headless-shell")
    with sync_playwright() as playwright:
        words = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=words)
        shown = browser.new_page(viewport={"width": WIDTH if end else WIDE, "height": 900})
        shown.goto(address)
        if end:
            box = shown.locator("h3", has_text=end).bounding_box()
            assert box, "each report has this section"
            taken = shown.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": box["y"]})
        else:
            shown.locator("line-chart").first.wait_for()
            shown.wait_for_timeout(SECONDS_TO_DRAW * 1000)
            taken = shown.screenshot()
        browser.close()
    Image.open(io.BytesIO(taken)).quantize().save(output, optimize=True)  # 256 colours


if __name__ == "__main__":
    main()
