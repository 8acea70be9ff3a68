"""A report in a real browser: phone and desktop, light, dark and on paper."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from hvd_cifar.config import make
from hvd_cifar.tools.report.command import report
from hvd_cifar.tools.settings import ReportSettings
from tests.run_dirs import CONFIG, CONFUSION, MARKS, PIXEL, write_run

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
LOOK = Path(__file__).with_name("look.js").read_text()
LONG_HOST = "a-host-with-a-long-name.example"
SIZES = {"phone": 390, "desktop": 1280}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium-headless-shell")


def events(steps: int) -> list[dict[str, Any]]:
    chance = random.Random(0)
    found: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        epoch, loss = step / 50, 2.3 * 0.999**step + chance.random() / 5
        train = {"event": "train", "step": step, "epoch": epoch, "loss": loss, "learning_rate": 1e-4 * step}
        found.append({**train, "images_per_second": 900 + 200 * chance.random()})
        if step % 50 == 0:
            tested = {"event": "eval", "step": step, "epoch": epoch, "test_accuracy": 1 - 0.9 * 0.999**step}
            found.append({**tested, "test_loss": loss})
            times = {"compute_seconds": [0.08, 0.1], "wait_seconds": [0.03, 0.01]}
            found.append({"event": "ranks", "step": step, "hosts": ["node1", LONG_HOST], **times})
    return found


def marks() -> list[dict[str, Any]]:
    """A run that loses ranks many times within a short time, and then goes on for long."""
    found: list[dict[str, Any]] = []
    now = 1e9
    for restart in range(5):
        ends = ["rank 1 on node1 was ended by signal 9 (Killed); perhaps the machine ran out of memory"] * restart
        launch = {"mark": "launch", "time": now + 3, "began": 1e9, "restarts": restart, "ranks": 1 + restart % 2}
        found.append({**launch, "ends": ends})
        found.append({"mark": "start", "time": now + 5, "step": 100 * restart})
        found.append({"mark": "lost", "time": now + 20, "step": 100 * restart + 50})
        now += 25
    found[-1] = {"mark": "evaluation", "time": now + 900, "began": now + 880, "step": 1000}
    return [*found, {"mark": "end", "time": now + 2000, "step": 1000, "how": "complete"}]


def confusion() -> dict[str, Any]:
    named = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    matrix = [[1000 if i == j else 13 * i * j % 97 for j in range(10)] for i in range(10)]
    first = {"index": 9999, "label": 1, "predicted": 0, "probabilities": [0.91] + [0.01] * 9}
    mistakes = [{**first, "image": f"data:image/png;base64,{PIXEL}"}] * 7
    return {**CONFUSION, "class_names": named, "matrix": matrix, "mistakes": mistakes}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report on one run, and one on two runs with long names."""
    folder = tmp_path_factory.mktemp("runs")
    facts = {**CONFIG["run"], "command": "python -m hvd_cifar train --run-dir " + "long/" * 30}
    one = write_run(folder / "one", {**CONFIG, "run": facts}, confusion(), events(1000), marks())
    other = write_run(folder / ("a-name-that-is-very-long-" * 4), {**CONFIG, "seed": 3}, CONFUSION, events(700), MARKS)
    report(make(ReportSettings, {"run_dirs": [one]}))
    report(make(ReportSettings, {"run_dirs": [one, other], "output": folder / "both.html"}))
    return {"one": one / "report.html", "both": folder / "both.html"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # As root there is no sandbox; the page is this test's own.
        words = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=words)
        yield browser
        browser.close()


def opened(browser: Browser, path: Path, width: int, scheme: Any) -> tuple[Page, list[str]]:
    """A page, and what it does beside being shown: requests, lines on the console, errors."""
    page, did = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme), []
    page.on("request", lambda request: did.append(request.url))
    page.on("console", lambda line: did.append(line.text))
    page.on("pageerror", lambda error: did.append(str(error)))
    page.goto(path.as_uri())
    return page, did


@pytest.mark.parametrize(("size", "scheme"), [("phone", "light"), ("desktop", "dark")])
@pytest.mark.parametrize("name", ["one", "both"])
def test_a_page_is_readable(browser: Browser, pages: dict[str, Path], name: str, size: str, scheme: str) -> None:
    page, did = opened(browser, pages[name], SIZES[size], scheme)
    page.locator("summary").first.click()  # all settings
    found = page.evaluate(LOOK)
    assert did == [pages[name].as_uri()]
    assert found["wrong"] == [] and found["texts"] > 200
    assert (found["ground"] < 0.05) is (scheme == "dark")
    page.close()


def test_a_page_on_paper_is_light(browser: Browser, pages: dict[str, Path]) -> None:
    page, _ = opened(browser, pages["both"], 794, "dark")
    page.emulate_media(media="print")
    found = page.evaluate(LOOK)
    assert found["wrong"] == [] and found["ground"] > 0.95
    page.close()
