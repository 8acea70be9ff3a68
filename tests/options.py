"""Options that many tests share."""

from pathlib import Path

# A small net on a set that needs no download; the folder of the set follows.
TUTORIAL = ("--model", "tutorial", "--dataset", "synthetic", "--data-dir")
# A net whose graph is built in a moment, for what does not depend on the net; and a pace for its short steps.
SMALL_NET = str(Path(__file__).with_name("small.py")) + ":build"
PACE = str(Path(__file__).with_name("small.py")) + ":Pace"
OF_ANY_SIZE = str(Path(__file__).with_name("small.py")) + ":build_of_any_size"
FEW = str(Path(__file__).with_name("small.py")) + ":few"
SMALL = ("--model", SMALL_NET, "--dataset", "synthetic", "--data-dir")
# It has the kinds of layers of resnet20, and fewer of them.
RESNET8 = "benchmarks.nets:resnet8"

SLOW = """
import pathlib, time
import hvd_cifar

class Slow(hvd_cifar.Callback):
    def on_step(self, run):
        if not pathlib.Path({file!r}).exists():
            time.sleep(0.1)
"""


def slow_until(file: Path) -> list[str]:
    """Options of a job that makes at most 10 steps a second until there is such a file."""
    callback = file.with_suffix(".py")
    callback.write_text(SLOW.format(file=str(file)))
    return ["--callbacks", f"{callback}:Slow"]
