"""Options that many tests share."""

# A small net on a set that needs no download; the folder of the set follows.
TUTORIAL = ("--model", "tutorial", "--dataset", "synthetic", "--data-dir")
# Starts in half the time of resnet20, and has the same layers.
RESNET8 = "benchmarks.nets:resnet8"
