"""One image file as pixels: upright, 8 bits a channel, and of one size where files have many.

`--image-size` scales images so that their largest middle part of its proportions has 8/7 of its height and width, as
256 pixels to 224 in the common ImageNet recipe. What lies around this part is kept, for random crops. Training,
`evaluate` and `predict` read files by `decode` alone, and so get the same pixels.
"""

from __future__ import annotations

import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from hvd_cifar.data.dataset import opened, read_into
from hvd_cifar.errors import UserError, reason_of

EXTENSIONS = (
    *(".avif", ".bmp", ".gif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pcx", ".pgm"),
    *(".png", ".pnm", ".ppm", ".qoi", ".tga", ".tif", ".tiff", ".webp"),
)
GREY_MODES = ("1", "L", "LA")  # Pillow's names
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # grey, of 16 bits
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF tag, and its values that exchange height and width
FINER = 2.0  # a JPEG is decoded to at least this many times the pixels that a side needs, not to all that it has
MOST_MARGIN = 8  # times the middle part, before it and after it: a strip of 3000 x 1 pixels would fill the memory
ATTEMPTS = 10  # to cut a random part that fits into the image
CROP_DRAWS = 2 * ATTEMPTS + 2  # random numbers of an image: area and proportions of each attempt, row and column
# Pillow warns of a large image, but refuses one of more than twice the limit: that refusal is enough.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)

Pixels = NDArray[np.uint8]
Size = tuple[int, int]  # height, width


class Unusable(UserError):
    """An image that cannot be decoded, or does not fit the others."""

    def __init__(self, path: Path, reason: str) -> None:
        self.text = f"{path} ({reason})"
        super().__init__(f"cannot read the image {self.text}: restore it, or remove it")


class Head(NamedTuple):
    """What the head of an image file says: its size when upright, and whether it has no colours."""

    size: Size
    is_grey: bool


class Span(NamedTuple):
    """One axis of a scaled image: `length` pixels, which show the whole image's from `low` to `high`."""

    length: int
    low: float
    high: float


@contextmanager
def _image(path: Path) -> Iterator[Image.Image]:
    """An image file. Raises Unusable where it cannot be opened, or read in the `with` block."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unusable(path, "it is no regular file")  # a FIFO would be waited for
        with Image.open(path) as image:
            yield image
    except UserError:
        raise
    except Exception as error:  # Pillow raises many kinds for a damaged file
        reason = reason_of(error).replace(repr(str(path)), "")  # Pillow's own text names it
        raise Unusable(path, " ".join(reason.split())) from None


def head(path: Path) -> Head | None:
    """What the head of a file says, without its pixels; None where it cannot be read: `decode` says why."""
    try:
        with _image(path) as image:
            return Head(_upright_size(image), image.mode in (*GREY_MODES, *DEEP_MODES))
    except UserError:
        return None


def _upright_size(image: Image.Image) -> Size:
    # Pillow decodes a whole PNG to look for the orientation, unless it has seen one.
    has_tags = image.format != "PNG" or "exif" in image.info
    is_turned = has_tags and image.getexif().get(ORIENTATION) in TURNED
    return (image.width, image.height) if is_turned else (image.height, image.width)


def decode(path: Path, channels: int, image_size: Size | None = None) -> Pixels:
    """The pixels of any image that Pillow reads, uint8 [height, width, channels], upright, scaled for `image_size`.

    `channels` is 1 for grey, or 3; transparency is left out. Raises Unusable where the image cannot be read, or has
    more than 16 bits a channel.
    """
    with _image(path) as image:
        reduced = _reduce(image, image_size) if image_size and image.format in ("JPEG", "MPO") else None
        plain = _of_8_bits(ImageOps.exif_transpose(image), path).convert("L" if channels == 1 else "RGB")
        if image_size:
            whole, factor = reduced or ((plain.height, plain.width), 1)
            rows, columns = scaled(whole, with_margin(image_size))
            box = (columns.low / factor, rows.low / factor, columns.high / factor, rows.high / factor)
            gap = FINER if reduced else None
            plain = plain.resize((columns.length, rows.length), Image.Resampling.BICUBIC, box, reducing_gap=gap)
        return np.asarray(plain).reshape(plain.height, plain.width, channels)


def _reduce(image: Image.Image, image_size: Size) -> tuple[Size, float]:
    """Have a JPEG decoded with 1, 1/2, 1/4 or 1/8 of the pixels of a side: its whole size, and 1, 2, 4 or 8."""
    whole, width = _upright_size(image), image.width
    step = max((span.high - span.low) / span.length for span in scaled(whole, with_margin(image_size)))
    drafted = image.draft(None, (max(1, int(width / step * FINER)), max(1, int(image.height / step * FINER))))
    return whole, width / drafted[1][2] if drafted else 1.0


def _of_8_bits(image: Image.Image, path: Path) -> Image.Image:
    """Grey of 16 bits as grey of 8; other images as they are."""
    if image.mode == "F":
        raise Unusable(path, "floating-point pixels")
    if image.mode not in DEEP_MODES:
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise Unusable(path, f"more than 16 bits a channel, {image.mode}")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def with_margin(image_size: Size) -> Size:
    """The size of the middle part of a scaled image, of which the net sees the middle."""
    return round(image_size[0] * 8 / 7), round(image_size[1] * 8 / 7)


def scaled(whole: Size, part: Size) -> tuple[Span, Span]:
    """The rows and columns of an image of size `whole`, scaled so that its largest middle part has the size `part`.

    The part is cut at whole pixels, and the rest follows its grid: a program that cuts the part and resizes it, as an
    exported net does, gets the same pixels. As many pixels are kept before the part as after it.
    """
    height, width = whole
    rows = max(1, min(height, width * part[0] // part[1]))
    columns = max(1, min(width, height * part[1] // part[0]))

    def span(side: int, cut: int, count: int) -> Span:
        start, step = (side - cut) // 2, cut / count
        margin = min(int(start / step), MOST_MARGIN * count)
        low = max(0.0, start - margin * step)
        return Span(count + 2 * margin, low, min(float(side), low + (count + 2 * margin) * step))

    return span(height, rows, part[0]), span(width, columns, part[1])


def read_image(path: Path, channels: int, image_size: Size | None = None) -> Pixels:
    """As `decode`; with `image_size` the middle of the image, which evaluation sees, uint8 [*image_size, channels]."""
    pixels = decode(path, channels, image_size)
    return middle(pixels, image_size) if image_size else pixels


def middle(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """The middle of an image uint8 [height, width, channels], [*size, channels], without a copy."""
    top, left = (pixels.shape[0] - size[0]) // 2, (pixels.shape[1] - size[1]) // 2
    return pixels[top : top + size[0], left : left + size[1]]


class Pictures:
    """Images of `sizes` [n, 2] in one file, one after the other, as an array of images of one `size`: their middle.

    `digest` is the file's, by which hosts and runs compare it: reading it for that would take minutes.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, file: Path, sizes: NDArray[np.integer[Any]], size: tuple[int, int, int], digest: str) -> None:
        self.sizes, self.size, self.digest, self._file = sizes, size, digest, opened(file)
        self.ends = np.cumsum(sizes.astype(np.int64).prod(axis=1) * size[2])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the middle."""
        return len(self), *self.size

    def __len__(self) -> int:
        return len(self.sizes)

    def rows(self, number: int, top: int = 0, count: int | None = None) -> NDArray[np.uint8]:
        """Rows of a whole image, all by default, uint8 [count, width, channels]; errors as `read_into`."""
        height, width = self.sizes[number].tolist()
        pixels = np.empty((height if count is None else count, width, self.size[2]), np.uint8)
        read_into(pixels, self._file, int(self.ends[number]) - (height - top) * width * self.size[2])
        return pixels

    def __getitem__(self, index: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """The middle of each image of a slice, or of indices [b], uint8 [b, *size]."""
        numbers = np.arange(len(self))[index]
        images = np.empty((len(numbers), *self.size), np.uint8)
        for image, number in zip(images, numbers.tolist(), strict=True):
            image[:] = middle(self.rows(number), self.size[:2])
        return images

    def crops(self, index: NDArray[np.int64], draws: NDArray[np.float32]) -> NDArray[np.uint8]:
        """A random part of each image of indices [b], resized to uint8 [b, *size], by `draws` as for `crop_boxes`."""
        images = np.empty((len(index), *self.size), np.uint8)
        boxes = crop_boxes(self.sizes[index], self.size[:2], draws)
        for image, number, (top, left, height, width) in zip(images, index.tolist(), boxes.tolist(), strict=True):
            part = self.rows(number, top, height)[:, left : left + width]
            part = part if self.size[2] > 1 else part[..., 0]
            resized = Image.fromarray(part).resize(self.size[1::-1], Image.Resampling.BILINEAR)
            image[:] = np.asarray(resized).reshape(self.size)
        return images


def crop_boxes(sizes: NDArray[np.integer[Any]], size: tuple[int, int], draws: NDArray[np.float32]) -> NDArray[np.int64]:
    """Random parts of images, 8% to 100% of the pixels, 3/4 to 4/3 of the proportions of `size`.

    The first of some attempts that fits into the image is taken, or else the largest square part in the middle. Only
    operations that IEEE 754 rounds correctly are used: every machine cuts the same parts.

    Source: Szegedy et al. 2015, "Going deeper with convolutions", section 6.

    Of images of `sizes` [b, 2] and `draws`, uniform in [0, 1), float32 [b, CROP_DRAWS]: top, left, height and width of
    each part, int64 [b, 4].
    """
    sizes, draw = sizes.astype(np.int64), draws.astype(np.float64)
    area = sizes.prod(axis=1)[:, None] * (0.08 + 0.92 * draw[:, :ATTEMPTS])
    ratio = (3 / 4 + 7 / 12 * draw[:, ATTEMPTS : 2 * ATTEMPTS]) * size[1] / size[0]
    parts = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], axis=2))).astype(np.int64)  # [b, ATTEMPTS, 2]
    parts = np.maximum(parts, 1)
    fits = (parts <= sizes[:, None]).all(axis=2)
    part = parts[np.arange(len(parts)), fits.argmax(axis=1)]
    places = (draw[:, -2:] * (sizes - part + 1)).astype(np.int64)
    square = np.repeat(sizes.min(axis=1, keepdims=True), 2, axis=1)
    found = fits.any(axis=1, keepdims=True)
    part, places = np.where(found, part, square), np.where(found, places, (sizes - square) // 2)
    return np.concatenate([places, part], axis=1)
