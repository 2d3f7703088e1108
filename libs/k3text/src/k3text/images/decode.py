"""Encoded bytes to one upright picture, 8 bits a channel, alpha kept.

Enters: bytes whose header was read and passed the limits. Leaves: a Pillow image, RGB or RGBA,
turned upright, exactly as large as the header said. Whatever goes wrong inside Pillow leaves as an
error of the image family, without Pillow's words; half a picture is never returned. Hostile bytes
belong in the sandbox: this code is what runs there.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageCms,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from k3text.images.header import ImageHeader
from k3wire.errors import ImageParseError, ImageTooLarge

_PLUGINS = {
    "image/jpeg": JpegImagePlugin.JpegImageFile.format,
    "image/png": PngImagePlugin.PngImageFile.format,
    "image/gif": GifImagePlugin.GifImageFile.format,
    "image/webp": WebPImagePlugin.WebPImageFile.format,
    "image/avif": AvifImagePlugin.AvifImageFile.format,
    "image/bmp": BmpImagePlugin.BmpImageFile.format,
    "image/tiff": TiffImagePlugin.TiffImageFile.format,
}
"""Pillow's name of each format; naming them also loads the plugins, and no others."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each EXIF orientation. Source: Exif 2.32, section 4.6.4 A, tag 274."""

_UPRIGHT_BY_PILLOW = frozenset({"image/tiff"})
"""Formats that Pillow turns itself while loading."""

_PILLOW_FAULTS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    OverflowError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    ZeroDivisionError,
    AssertionError,
    RuntimeError,
    struct.error,
    zlib.error,
)
"""What Pillow's parsers are known to raise for damaged files."""

MAX_16_BIT = 65_535

STRIP_PIXELS = 1024 * 1024
"""Pixels of wide numbers at a time; as 64-bit integers they take 8 MiB."""

# Pillow decides the type of the numbers: 16 or 32 bits, whole or float.
_Values = NDArray[Any]


def decode(data: bytes, header: ImageHeader) -> Image.Image:
    """Decodes the first frame.

    Args:
        data: the whole encoded image.
        header: of these bytes.

    Returns:
        RGB, or RGBA if any pixel is not opaque.

    Raises:
        ImageParseError: damaged, cut off, or not what its header says.
        ImageTooLarge: too large to decode in the memory there is.
    """
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "half pictures must fail"
    try:
        with warnings.catch_warnings():
            # Pillow warns of damaged metadata and of sizes that our own limits have judged.
            warnings.simplefilter("ignore")
            picture = _load(data, header)
            channels = _to_8_bit(picture)
    except (Image.DecompressionBombError, MemoryError) as error:
        raise ImageTooLarge("The image is too large to decode") from error
    except _PILLOW_FAULTS as error:
        raise ImageParseError("The image is damaged or cut off") from error
    turn = _TURNS.get(header.orientation)
    if turn is not None and header.media_type not in _UPRIGHT_BY_PILLOW:
        channels = channels.transpose(turn)
    if channels.size != (header.width, header.height):
        raise ImageParseError("The image is not as large as its header says")
    return channels


def _load(data: bytes, header: ImageHeader) -> Image.Image:
    plugin = _PLUGINS[header.media_type]
    assert plugin is not None, "every plugin of ours has a name"
    picture = Image.open(io.BytesIO(data), formats=[plugin])
    # A picture that is larger than announced must not be decoded to find that out.
    if picture.width * picture.height != header.width * header.height:
        raise ValueError("size differs from the header's")
    picture.load()
    return picture


def _to_8_bit(picture: Image.Image) -> Image.Image:
    """Gives RGB or RGBA of any of Pillow's modes."""
    mode = picture.mode
    if mode.startswith("I;16") or mode == "I":
        return _from_integers(picture)
    if mode == "F":
        return _from_floats(picture)
    if mode == "LAB":
        return _from_lab(picture)
    if picture.has_transparency_data:
        # Straight to RGB would show the colours that are hidden behind transparent pixels.
        return _without_idle_alpha(picture.convert("RGBA"))
    return picture if mode == "RGB" else picture.convert("RGB")


def _without_idle_alpha(picture: Image.Image) -> Image.Image:
    lowest, _ = picture.getchannel("A").getextrema()
    return picture.convert("RGB") if lowest == 255 else picture


def _from_integers(picture: Image.Image) -> Image.Image:
    """Scales 16-bit grey to 8 bits, rounding; Pillow's own conversion would clip it at 255."""

    def scaled(values: _Values) -> _Values:
        wide = np.clip(values.astype(np.int64), 0, MAX_16_BIT)
        return (wide * 255 + MAX_16_BIT // 2) // MAX_16_BIT

    grey = _map_strips(picture, scaled)
    hidden = picture.info.get("transparency")
    if isinstance(hidden, int):
        alpha = _map_strips(picture, lambda values: np.where(values == hidden, 0, 255))
        return _without_idle_alpha(Image.merge("RGBA", (grey, grey, grey, alpha)))
    return grey.convert("RGB")


def _from_floats(picture: Image.Image) -> Image.Image:
    """Reads float grey as 0 to 1 if no value is above 1, else as 0 to 255."""

    def finite(values: _Values) -> _Values:
        return np.nan_to_num(values, posinf=255.0, neginf=0.0)

    highest = max(float(finite(values).max()) for _, values in _strips(picture))
    scale = np.float32(255.0 if highest <= 1.0 else 1.0)
    grey = _map_strips(picture, lambda values: np.clip(np.rint(finite(values) * scale), 0, 255))
    return grey.convert("RGB")


def _strips(picture: Image.Image) -> Iterator[tuple[int, _Values]]:
    """Gives a one-channel picture from the top, some rows at a time: [rows, width].

    As arrays of wide numbers, a large picture would take many times its memory.
    """
    rows = max(1, STRIP_PIXELS // picture.width)
    for top in range(0, picture.height, rows):
        box = (0, top, picture.width, min(top + rows, picture.height))
        yield top, np.asarray(picture.crop(box))


def _map_strips(picture: Image.Image, to_grey: Callable[[_Values], _Values]) -> Image.Image:
    """Makes 8-bit grey of a one-channel picture, by a function of values to 0 to 255."""
    grey = Image.new("L", picture.size)
    for top, values in _strips(picture):
        grey.paste(Image.fromarray(to_grey(values).astype(np.uint8)), (0, top))
    return grey


def _from_lab(picture: Image.Image) -> Image.Image:
    transform = ImageCms.buildTransform(
        ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB"
    )
    converted = ImageCms.applyTransform(picture, transform)
    assert converted is not None, "a transform that is not in place gives a picture"
    return converted
