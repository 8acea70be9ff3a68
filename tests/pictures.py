"""Draws a folder of pictures as people have them: many sizes and formats; the class is the figure.

python -m tests.pictures FOLDER [COUNT]            # 2,000 by default
python -m tests.pictures FOLDER COUNT 500 400      # JPEGs of this size
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

CLASSES = ("disc", "square", "stripes", "triangle")
KINDS = ("jpg",) * 8 + ("png", "palette", "alpha", "cmyk", "deep", "turned", "grey", "webp", "gif", "tif")


def draw(label: int, width: int, height: int, chance: random.Random) -> Image.Image:
    """A figure of one colour on a ground of another one, with a colour gradient over both."""

    def colour() -> tuple[int, ...]:
        return tuple(chance.randrange(256) for _ in range(3))

    image = Image.linear_gradient("L").rotate(chance.choice((0, 90, 180, 270))).resize((width, height))
    image = Image.merge("RGB", [image.point(lambda v, c=c: c * 3 // 4 + v // 4) for c in colour()])
    radius = min(width, height) * chance.uniform(0.25, 0.4)
    x, y = (side / 2 + chance.uniform(-0.1, 0.1) * side for side in (width, height))
    pen, ink = ImageDraw.Draw(image), colour()
    box = (x - radius, y - radius, x + radius, y + radius)
    if label == 0:
        pen.ellipse(box, fill=ink)
    elif label == 1:
        pen.rectangle(box, fill=ink)
    elif label == 2:
        for part in range(-2, 3, 2):
            middle = y + part * radius / 2.5
            pen.rectangle((box[0], middle - radius / 5, box[2], middle + radius / 5), fill=ink)
    else:
        pen.polygon([(x, box[1]), (box[2], box[3]), (box[0], box[3])], fill=ink)
    return image


def save(image: Image.Image, stem: Path, kind: str) -> Path:
    """Write a picture in the format `kind`, one of `KINDS`."""
    path = stem.with_suffix({"palette": ".png", "alpha": ".PNG", "deep": ".png"}.get(kind, f".{kind}"))
    path = path if path.suffix.lower()[1:] in ("jpg", "png", "webp", "gif", "tif") else stem.with_suffix(".jpeg")
    if kind == "palette":
        image.quantize(200).save(path)
    elif kind == "alpha":
        image.putalpha(image.convert("L").point(lambda v: 255 if v > 20 else 0))
        image.save(path)
    elif kind == "cmyk":
        image.convert("CMYK").save(path, quality=90)
    elif kind == "deep":
        image.convert("L").convert("I").point(lambda v: v * 257).convert("I;16").save(path)
    elif kind == "turned":
        tags = Image.Exif()
        tags[0x0112] = 6  # a camera held upright: the file is to be turned by 90 degrees
        image.transpose(Image.Transpose.ROTATE_90).save(path, quality=90, exif=tags)
    elif kind == "grey":
        image.convert("L").save(path, quality=90)
    else:
        image.save(path)
    return path


def fill(folder: Path, count: int, sides: tuple[int, int] = (90, 400), seed: int = 0, size: Sequence[int] = ()) -> None:
    """Write `count` pictures into folders of classes: of many sizes and formats, or JPEGs of one `size`."""
    chance = random.Random(seed)
    for number in range(count):
        label = number % len(CLASSES)
        width, height = size or (chance.randint(*sides) for _ in range(2))
        stem = folder / CLASSES[label] / f"{number:05d}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        kind = "jpg" if size else KINDS[number // len(CLASSES) % len(KINDS)]
        image = draw(label, width, height, chance)
        if size:  # grain, for files as large as those of photographs
            image = Image.blend(image, Image.effect_noise((width, height), 60).convert("RGB"), 0.2)
        save(image, stem, kind)


if __name__ == "__main__":
    fill(Path(sys.argv[1]), int(sys.argv[2] if len(sys.argv) > 2 else 2000), size=[int(side) for side in sys.argv[3:]])
