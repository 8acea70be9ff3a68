"""Options that many tests share."""

from pathlib import Path

# A small net on a set that needs no download; the folder of the set follows.
TUTORIAL = ("--model", "tutorial", "--dataset", "synthetic", "--data-dir")
# A net whose graph is built in a moment, for what does not depend on the net; and a pace for its short steps.
SMALL_NET = str(Path(__file__).with_name("small.py")) + ":build"
PACE = str(Path(__file__).with_name("small.py")) + ":Pace"
SLOW = str(Path(__file__).with_name("small.py")) + ":Slow"
SMALL = ("--model", SMALL_NET, "--dataset", "synthetic", "--data-dir")
# It has the kinds of layers of resnet20, and fewer of them.
RESNET8 = "benchmarks.nets:resnet8"
