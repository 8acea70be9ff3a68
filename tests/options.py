"""Options that many tests share."""

# A small net on a set that needs no download; the folder of the set follows.
TUTORIAL = ("--model", "tutorial", "--dataset", "synthetic", "--data-dir")
# It has the kinds of layers of resnet20, and fewer of them.
RESNET8 = "benchmarks.nets:resnet8"
