"""What an image is, from its first bytes: format, size as seen, frames. No pixel is decoded.

Encoded bytes enter; an `ImageHeader` leaves, or an error of the image family. The declared media
type and any file name are not believed. Pure Python, so that the gateway and the fetcher may run
it on bytes that nobody has checked yet; its work is bounded by the number of blocks in the file.

The size is the one that a person sees: EXIF orientations 5 to 8 swap width and height. Prompt and
token count depend on it, so it must be, and is checked to be, the size that decoding gives.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from k3text.images.formats import avif, bmp, gif, jpeg, png, tiff, webp
from k3text.images.formats.stored import Stored
from k3wire.errors import (
    EmptyImageFile,
    ImageFileTooLarge,
    ImageParseError,
    ImageTooLarge,
    UnsupportedImageMediaType,
)

DEFAULT_MEDIA_TYPES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
"""Formats taken unless settings say otherwise."""

OPTIONAL_MEDIA_TYPES = frozenset({"image/avif", "image/bmp", "image/tiff"})
"""Formats that settings may add."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What is refused before any pixel is decoded.

    Attributes:
        max_bytes: longest encoded image.
        max_pixels: largest width times height; 8192 x 8192 passes by default.
        max_side: longest side, pixels.
        media_types: the formats taken.
    """

    max_bytes: int = 32 * 1024 * 1024
    max_pixels: int = 90_000_000
    max_side: int = 65_535
    media_types: frozenset[str] = DEFAULT_MEDIA_TYPES


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """An image, known by its header.

    Attributes:
        media_type: from its bytes, e.g. `image/png`.
        width: pixels, as seen.
        height: pixels, as seen.
        orientation: EXIF's 1 to 8, already applied to width and height.
        num_frames: frames or pages; only the first is ever decoded.
    """

    media_type: str
    width: int
    height: int
    orientation: int = 1
    num_frames: int = 1


_READERS: dict[str, Callable[[bytes], Stored]] = {
    "image/jpeg": jpeg.read_jpeg,
    "image/png": png.read_png,
    "image/gif": gif.read_gif,
    "image/webp": webp.read_webp,
    "image/avif": avif.read_avif,
    "image/bmp": bmp.read_bmp,
    "image/tiff": tiff.read_tiff,
}

_SWAPPED = frozenset({5, 6, 7, 8})
"""Orientations that turn the picture by a quarter."""


def sniff(data: bytes) -> str:
    """Gives the media type that the first bytes show, or "" for none that we know."""
    if data.startswith(jpeg.SIGNATURE):
        return "image/jpeg"
    if data.startswith(png.SIGNATURE):
        return "image/png"
    if data.startswith(gif.SIGNATURES):
        return "image/gif"
    if webp.is_webp(data):
        return "image/webp"
    if avif.is_avif(data):
        return "image/avif"
    if data.startswith(tiff.SIGNATURES):
        return "image/tiff"
    return "image/bmp" if data.startswith(bmp.SIGNATURE) else ""


def read_header(data: bytes, limits: ImageLimits | None = None, param: str = "") -> ImageHeader:
    """Reads an image's header and refuses what must not be decoded.

    Args:
        data: the whole encoded image.
        limits: what is taken; the defaults of `ImageLimits` if None.
        param: the part's path in the client's request, for errors.

    Raises:
        EmptyImageFile: no bytes.
        ImageFileTooLarge: too many bytes.
        UnsupportedImageMediaType: no format that is taken.
        ImageParseError: the header is damaged or cut off.
        ImageTooLarge: too many pixels, or a side too long.
    """
    limits = limits or ImageLimits()
    named = param or None
    if not data:
        raise EmptyImageFile("The image has no bytes", param=named)
    if len(data) > limits.max_bytes:
        raise ImageFileTooLarge(
            f"An image may have at most {limits.max_bytes} encoded bytes", param=named
        )
    media_type = sniff(data)
    if media_type not in limits.media_types:
        raise UnsupportedImageMediaType(f"Images must be {_names(limits.media_types)}", param=named)
    try:
        stored = _READERS[media_type](data)
    except ImageParseError as error:
        raise ImageParseError(error.message, param=named) from error
    except (struct.error, IndexError) as error:
        raise ImageParseError("The image ends before its picture", param=named) from error
    _check_size(stored, limits, named)
    width, height = stored.width, stored.height
    if stored.orientation in _SWAPPED:
        width, height = height, width
    return ImageHeader(media_type, width, height, stored.orientation, stored.num_frames)


def _check_size(stored: Stored, limits: ImageLimits, param: str | None) -> None:
    if stored.width <= 0 or stored.height <= 0:
        raise ImageParseError("The image has no pixels", param=param)
    if max(stored.width, stored.height) > limits.max_side:
        raise ImageTooLarge(
            f"The image is {stored.width} x {stored.height} pixels; "
            f"a side may have at most {limits.max_side}",
            param=param,
        )
    if stored.width * stored.height > limits.max_pixels:
        raise ImageTooLarge(
            f"The image is {stored.width} x {stored.height} pixels; "
            f"at most {limits.max_pixels} in all are taken",
            param=param,
        )


def _names(media_types: frozenset[str]) -> str:
    order = {"jpeg": 0, "png": 1, "gif": 2, "webp": 3}
    names = sorted(
        (media_type.partition("/")[2] for media_type in media_types),
        key=lambda name: (order.get(name, 9), name),
    )
    shown = [{"webp": "WebP"}.get(name, name.upper()) for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
