"""Options that many tests share."""

# A small net on a set that needs no download; the folder of the set follows.
TUTORIAL = ("--model", "tutorial", "--dataset", "synthetic", "--data-dir")
