"""Images as the world sends them: every mode and depth, broken, lying, huge, and no images at all.

Each case says what must come of it: the right picture, worked out here without our code, or the
code of the right error. A correct picture is the one after K3's background; none is resized.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageCms
from support.pictures import encode, exif_block, gradient, over_chessboard, stored_for
from support.raw_gif import gif_image, raw_gif
from support.raw_png import SIGNATURE, chunk, header, raw_png

WIDTH, HEIGHT = 37, 23
RGB = gradient(WIDTH, HEIGHT)
GREY = RGB[:, :, 0]
ALPHA = np.rint(np.linspace(0, 255, WIDTH * HEIGHT)).astype(np.uint8).reshape(HEIGHT, WIDTH)
RGBA = np.dstack([RGB, ALPHA])

PARSE = "image_parse_error"
TYPE = "unsupported_image_media_type"
LARGE = "image_too_large"


@dataclass(frozen=True, eq=False)
class Case:
    """One file and what must come of it.

    Attributes:
        name: unique.
        data: the file.
        code: of the error, "" if it is a picture.
        picture: what is seen, [height, width, 3]; None where only the size matters.
        tolerance: largest mean difference; lossy formats need some.
        size: width and height where there is no `picture`.
    """

    name: str
    data: bytes
    code: str = ""
    picture: np.ndarray | None = None
    tolerance: float = 0.0
    size: tuple[int, int] | None = None


@cache
def cases_of(item: str) -> tuple[Case, ...]:
    """The cases that show one requirement, by its number; made once a process."""
    return tuple(case for group in GROUPS[item] for case in group())


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case; names are unique."""
    cases = tuple(case for item in GROUPS for case in cases_of(item))
    assert len({case.name for case in cases}) == len(cases)
    return cases


def _grey3(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[:, :, None], 3, axis=2).astype(np.uint8)


def _scaled(samples: np.ndarray, depth: int) -> np.ndarray:
    """Samples of a depth as 8 bits."""
    return np.rint(samples.astype(np.float64) * 255 / (2**depth - 1)).astype(np.uint8)


def _clear_where(y: int, x: int) -> np.ndarray:
    """Alpha that hides every pixel of one grey."""
    hidden = GREY[y, x]
    return np.where(np.equal(GREY, hidden), 0, 255)


def _png_depths() -> Iterator[Case]:
    wide = RGB.astype(np.int64) * 257
    for interlaced in (False, True):
        tail = " interlaced" if interlaced else ""
        for depth in (1, 2, 4, 8, 16):
            samples = (GREY.astype(np.int64) * (2**depth - 1)) // 255
            data = raw_png(samples[:, :, None], depth, 0, interlaced=interlaced)
            yield Case(f"png grey {depth}{tail}", data, picture=_grey3(_scaled(samples, depth)))
        for depth in (1, 2, 4, 8):
            colours = RGB[0, : 2**depth] if depth < 8 else RGB.reshape(-1, 3)[:256]
            indices = np.arange(WIDTH * HEIGHT).reshape(HEIGHT, WIDTH) % len(colours)
            palette = chunk(b"PLTE", colours.astype(np.uint8).tobytes())
            data = raw_png(indices[:, :, None], depth, 3, interlaced=interlaced, before=palette)
            yield Case(f"png palette {depth}{tail}", data, picture=colours[indices])
            hidden = chunk(b"tRNS", bytes([0, 128]))
            data = raw_png(
                indices[:, :, None], depth, 3, interlaced=interlaced, before=palette + hidden
            )
            alpha = np.full(len(colours), 255)
            alpha[:2] = (0, 128)
            seen = over_chessboard(np.dstack([colours[indices], alpha[indices]]))
            yield Case(f"png palette {depth} with alpha{tail}", data, picture=seen)
        for depth, samples in ((8, RGB), (16, wide)):
            data = raw_png(samples, depth, 2, interlaced=interlaced)
            yield Case(f"png rgb {depth}{tail}", data, picture=RGB)
        for depth, scale in ((8, 1), (16, 257)):
            grey_alpha = np.dstack([GREY, ALPHA]).astype(np.int64) * scale
            data = raw_png(grey_alpha, depth, 4, interlaced=interlaced)
            seen = over_chessboard(np.dstack([GREY, GREY, GREY, ALPHA]))
            yield Case(f"png grey alpha {depth}{tail}", data, picture=seen)
            data = raw_png(RGBA.astype(np.int64) * scale, depth, 6, interlaced=interlaced)
            yield Case(f"png rgba {depth}{tail}", data, picture=over_chessboard(RGBA))


def _png_extras() -> Iterator[Case]:
    clear = np.where(GREY[3, 5] == GREY, 0, 255)
    hidden = chunk(b"tRNS", struct.pack(">H", GREY[3, 5]))
    seen = over_chessboard(np.dstack([GREY, GREY, GREY, clear]))
    yield Case("png grey with a clear grey", raw_png(GREY[:, :, None], 8, 0, before=hidden), picture=seen)  # fmt: skip
    wide = GREY.astype(np.int64) * 257
    hidden = chunk(b"tRNS", struct.pack(">H", wide[3, 5]))
    yield Case("png grey 16 with a clear grey", raw_png(wide[:, :, None], 16, 0, before=hidden), picture=seen)  # fmt: skip
    colour = RGB[3, 5]
    clear = np.where((colour == RGB).all(axis=2), 0, 255)
    hidden = chunk(b"tRNS", struct.pack(">HHH", *map(int, colour)))
    seen = over_chessboard(np.dstack([RGB, clear]))
    yield Case("png rgb with a clear colour", raw_png(RGB, 8, 2, before=hidden), picture=seen)
    opaque = np.dstack([RGB, np.full_like(ALPHA, 255)])
    yield Case("png opaque alpha", raw_png(opaque, 8, 6), picture=RGB)
    invisible = np.dstack([RGB, np.zeros_like(ALPHA)])
    yield Case("png all clear", raw_png(invisible, 8, 6), picture=over_chessboard(invisible))
    frame = chunk(b"acTL", struct.pack(">II", 3, 0))
    yield Case("png says it is animated", raw_png(RGB, 8, 2, before=frame), picture=RGB)
    frames = [Image.fromarray(RGB), Image.fromarray(RGB[::-1].copy())]
    data = encode(frames[0], "PNG", save_all=True, append_images=frames[1:])
    yield Case("apng", data, picture=RGB)
    late = chunk(b"eXIf", exif_block(3))
    data = raw_png(stored_for(RGB, 3), 8, 2, after=late)
    yield Case("png with exif behind the pixels", data, picture=RGB)


def _jpegs() -> Iterator[Case]:
    for name, options in (
        ("4:4:4", {"subsampling": 0}), ("4:2:2", {"subsampling": 1}),
        ("4:2:0", {"subsampling": 2}), ("progressive", {"progressive": True}),
        ("optimised", {"optimize": True}), ("restart markers", {"restart_marker_rows": 1}),
    ):  # fmt: skip
        data = encode(RGB, "JPEG", quality=97, **options)
        yield Case(f"jpeg {name}", data, picture=RGB, tolerance=4)
    yield Case("jpeg grey", encode(GREY, "JPEG", quality=97), picture=_grey3(GREY), tolerance=3)
    cmyk = Image.fromarray(RGB).convert("CMYK")
    yield Case("jpeg cmyk", encode(cmyk, "JPEG", quality=97), picture=RGB, tolerance=5)
    yield Case("jpeg ycck", _ycck(), picture=RGB, tolerance=5)
    pages = [Image.fromarray(RGB), Image.fromarray(RGB[::-1].copy())]
    data = encode(pages[0], "MPO", save_all=True, append_images=pages[1:], quality=97)
    yield Case("jpeg with a second picture behind it", data, picture=RGB, tolerance=4)
    plain = encode(RGB, "JPEG", quality=97)
    comment = b"\xff\xfe" + struct.pack(">H", 65535) + b"x" * 65533
    data = plain[:2] + comment * 20 + plain[2:]
    yield Case("jpeg with a megabyte of comments", data, picture=RGB, tolerance=4)
    yield Case("jpeg with bytes behind its end", plain + b"tail" * 100, picture=RGB, tolerance=4)
    for name, block in (
        ("cut off", exif_block(6)[:12]), ("orientation 0", exif_block(0)),
        ("orientation 9", exif_block(9)), ("no byte order", b"XX" + exif_block(6)[2:]),
        ("far directory", b"II*\0\xff\xff\xff\x7f"), ("wrong kind", exif_block(6, kind=2)),
    ):  # fmt: skip
        data = _with_app1(plain, b"Exif\0\0" + block)
        yield Case(f"jpeg exif {name}", data, picture=RGB, tolerance=4)
    data = _with_app1(encode(stored_for(RGB, 6), "JPEG", quality=97), b"Exif\0\0" + exif_block(6, ">", 4))  # fmt: skip
    yield Case("jpeg exif big-endian long", data, picture=RGB, tolerance=4)


def _ycck() -> bytes:
    """A CMYK JPEG as Adobe writes it: inverted, and its colours as luma and chroma."""
    luma_chroma = Image.fromarray(255 - RGB).convert("YCbCr").split()
    inverted = [channel.point(lambda value: 255 - value) for channel in luma_chroma]
    data = bytearray(encode(Image.merge("CMYK", [*inverted, Image.new("L", (WIDTH, HEIGHT))]), "JPEG", quality=97, subsampling=0))  # fmt: skip
    marker = data.index(b"Adobe")
    data[marker + 11] = 2
    return bytes(data)


def _with_app1(jpeg: bytes, body: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def _webps() -> Iterator[Case]:
    lossless = {"lossless": True, "exact": True}
    yield Case("webp lossy", encode(RGB, "WEBP", quality=97), picture=RGB, tolerance=6)
    yield Case("webp lossless", encode(RGB, "WEBP", **lossless), picture=RGB)
    seen = over_chessboard(RGBA)
    yield Case("webp lossless alpha", encode(RGBA, "WEBP", **lossless), picture=seen)
    yield Case("webp lossy alpha", encode(RGBA, "WEBP", quality=97), picture=seen, tolerance=6)
    frames = [Image.fromarray(RGB), Image.fromarray(RGB[::-1].copy())]
    data = encode(frames[0], "WEBP", save_all=True, append_images=frames[1:], **lossless)
    yield Case("webp animated", data, picture=RGB)


def _gifs() -> Iterator[Case]:
    seen = _grey3(GREY)
    clear = b"\x21\xf9\x04\x01\0\0" + bytes([GREY[3, 5]]) + b"\0"
    yield Case("gif", raw_gif(WIDTH, HEIGHT, gif_image(GREY)), picture=seen)
    yield Case("gif 87a", raw_gif(WIDTH, HEIGHT, gif_image(GREY), b"GIF87a"), picture=seen)
    yield Case("gif of 600 frames", raw_gif(WIDTH, HEIGHT, gif_image(GREY) * 600), picture=seen)
    alpha = np.where(GREY[3, 5] == GREY, 0, 255)
    data = raw_gif(WIDTH, HEIGHT, clear + gif_image(GREY))
    yield Case("gif transparent", data, picture=over_chessboard(np.dstack([GREY, GREY, GREY, alpha])))  # fmt: skip
    yield Case("gif frame larger than its screen", raw_gif(5, 4, gif_image(GREY)), picture=seen)
    canvas = np.zeros((HEIGHT + 6, WIDTH + 4, 4), dtype=np.uint8)
    canvas[5:-1, 3:-1, :3] = seen
    canvas[5:-1, 3:-1, 3] = alpha
    data = raw_gif(WIDTH + 4, HEIGHT + 6, clear + gif_image(GREY, 3, 5))
    yield Case("gif frame within its canvas", data, picture=over_chessboard(canvas))
    yield Case("gif interlaced", encode(Image.fromarray(GREY), "GIF", interlace=1), picture=seen)
    yield Case("gif without a frame", raw_gif(WIDTH, HEIGHT, b""), code=PARSE)


def _profiles() -> Iterator[Case]:
    """A profile that swaps red and green for whoever obeys it; the release does not."""
    plain = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = plain.replace(b"rXYZ", b"----").replace(b"gXYZ", b"rXYZ").replace(b"----", b"gXYZ")
    assert swapped != plain
    yield Case("png with a profile", encode(RGB, "PNG", icc_profile=swapped), picture=RGB)
    data = encode(RGB, "JPEG", quality=97, icc_profile=swapped)
    yield Case("jpeg with a profile", data, picture=RGB, tolerance=4)


def _optional_formats() -> Iterator[Case]:
    colour = Image.fromarray(RGB)
    yield Case("bmp 24", encode(RGB, "BMP"), picture=RGB)
    yield Case("bmp grey", encode(GREY, "BMP"), picture=_grey3(GREY))
    black_white = Image.fromarray(GREY).point(lambda value: 255 * (value > 127), "1")
    seen = _grey3(np.where(GREY > 127, 255, 0))
    yield Case("bmp 1", encode(black_white, "BMP"), picture=seen)
    bottom_up = encode(RGB, "BMP")
    top_down = bottom_up[:22] + struct.pack("<i", -HEIGHT) + bottom_up[26:]
    yield Case("bmp top down", top_down, picture=RGB[::-1])
    yield Case("avif", encode(RGB, "AVIF", quality=98), picture=RGB, tolerance=8)
    yield Case("avif alpha", encode(RGBA, "AVIF", quality=98), picture=over_chessboard(RGBA), tolerance=8)  # fmt: skip
    wide = GREY.astype(np.uint16) * 257
    floats = Image.fromarray(GREY.astype(np.float32) / np.float32(255))
    for name, picture, seen, tolerance in (
        ("rgb", colour, RGB, 0.0), ("rgba", Image.fromarray(RGBA), over_chessboard(RGBA), 0.0),
        ("grey", Image.fromarray(GREY), _grey3(GREY), 0.0),
        ("1", black_white, _grey3(np.where(GREY > 127, 255, 0)), 0.0),
        ("grey 16", Image.fromarray(wide), _grey3(GREY), 0.0),
        ("integers", Image.fromarray(wide.astype(np.int32)), _grey3(GREY), 0.0),
        ("floats to 1", floats, _grey3(GREY), 0.0),
        ("floats to 255", Image.fromarray(GREY.astype(np.float32)), _grey3(GREY), 0.0),
        ("cmyk", colour.convert("CMYK"), RGB, 1.0),
        ("grey alpha", Image.fromarray(np.dstack([GREY, ALPHA])), over_chessboard(np.dstack([GREY, GREY, GREY, ALPHA])), 0.0),
        ("ycbcr", colour.convert("YCbCr"), RGB, 2.0),
        ("lab", _lab_of_grey(), None, 0.0),
    ):  # fmt: skip
        size = None if seen is not None else (WIDTH, HEIGHT)
        yield Case(f"tiff {name}", encode(picture, "TIFF"), picture=seen, tolerance=tolerance, size=size)  # fmt: skip
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits"):
        yield Case(f"tiff {compression}", encode(RGB, "TIFF", compression=compression), picture=RGB)
    pages = [colour, Image.fromarray(RGB[::-1].copy())]
    data = encode(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    yield Case("tiff of two pages", data, picture=RGB)


def _lab_of_grey() -> Image.Image:
    neutral = np.full_like(GREY, 128)
    return Image.merge("LAB", [Image.fromarray(GREY), *[Image.fromarray(neutral)] * 2])


def _orientations() -> Iterator[Case]:
    for orientation in range(1, 9):
        stored = np.ascontiguousarray(stored_for(RGB, orientation))
        block = b"Exif\0\0" + exif_block(orientation)
        data = _with_app1(encode(stored, "JPEG", quality=97), block)
        yield Case(f"jpeg orientation {orientation}", data, picture=RGB, tolerance=4)
        data = raw_png(stored, 8, 2, before=chunk(b"eXIf", exif_block(orientation)))
        yield Case(f"png orientation {orientation}", data, picture=RGB)
        data = encode(stored, "WEBP", lossless=True, exif=block)
        yield Case(f"webp orientation {orientation}", data, picture=RGB)
        tags = Image.Exif()
        tags[0x0112] = orientation
        yield Case(f"tiff orientation {orientation}", encode(stored, "TIFF", exif=tags), picture=RGB)  # fmt: skip
        data = encode(stored, "AVIF", quality=98, exif=tags)
        yield Case(f"avif orientation {orientation}", data, picture=RGB, tolerance=8)


def _extremes() -> Iterator[Case]:
    for width, height in ((1, 1), (2, 1), (28, 28), (29, 29), (1, 10_000), (10_000, 1), (20_000, 20), (65_535, 1), (1, 65_535)):  # fmt: skip
        data = encode(Image.new("L", (width, height), 90), "PNG")
        yield Case(f"png {width} x {height}", data, size=(width, height))
    for form in ("JPEG", "WEBP", "GIF"):
        data = encode(Image.new("RGB", (1, 1), (10, 20, 30)), form)
        yield Case(f"{form.lower()} 1 x 1", data, size=(1, 1))
    yield Case("png side of 65536", raw_png(np.zeros((1, 65_536, 1), int), 1, 0), code=LARGE)


def _no_images() -> Iterator[Case]:
    yield Case("nothing", b"", code="empty_image_file")
    for name, data in {
        "one byte": b"\x89", "spaces": b"   \n", "zeros": bytes(4096), "text": b"hello, world",
        "html": b"<!doctype html><html><body>404</body></html>",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "svg with a prologue": b'<?xml version="1.0"?><svg/>', "pdf": b"%PDF-1.7\n%\xe2\xe3",
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n", "ico": b"\0\0\1\0\1\0\x10\x10\0\0",
        "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "mp4": b"\0\0\0\x18ftypisom\0\0\2\0isomiso2",
        "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n", "psd": b"8BPS\0\1" + bytes(30),
        "zip": b"PK\3\4" + bytes(30), "gzip": b"\x1f\x8b\x08" + bytes(30), "wav": b"RIFF\x24\0\0\0WAVEfmt ",
        "ppm": b"P6 2 2 255\n" + bytes(12), "tga": bytes([0, 0, 2]) + bytes(40),
        "json": b'{"error": "not found"}', "python pickle": b"\x80\4K\1.", "elf": b"\x7fELF" + bytes(60),
    }.items():  # fmt: skip
        yield Case(name, data, code=TYPE)


def _cut_off() -> Iterator[Case]:
    whole = {
        "png": encode(gradient(120, 90), "PNG"),
        "jpeg": encode(gradient(120, 90), "JPEG", quality=97),
        "progressive jpeg": encode(gradient(120, 90), "JPEG", quality=97, progressive=True),
        "webp": encode(gradient(120, 90), "WEBP", quality=97),
        "lossless webp": encode(gradient(120, 90), "WEBP", lossless=True),
        "gif": encode(gradient(120, 90), "GIF"),
        "bmp": encode(gradient(120, 90), "BMP"),
        "tiff": encode(gradient(120, 90), "TIFF", compression="tiff_lzw"),
        "avif": encode(gradient(120, 90), "AVIF"),
    }
    for name, data in whole.items():
        yield Case(f"{name} cut in half", data[: len(data) // 2], code=PARSE)
        yield Case(f"{name} cut after 20 bytes", data[:20], code=PARSE)
        yield Case(f"{name} without its last tenth", data[: -len(data) // 10], code=PARSE)
    yield Case("jpeg without its last two bytes", whole["jpeg"][:-2], code=PARSE)
    for name, data in (("png", SIGNATURE), ("jpeg", b"\xff\xd8\xff"), ("gif", b"GIF89a"), ("webp", b"RIFF\0\0\0\0WEBP"), ("tiff", b"II*\0"), ("bmp", b"BM"), ("avif", b"\0\0\0\x10ftypavif\0\0\0\0")):  # fmt: skip
        yield Case(f"{name} signature alone", data, code=PARSE)


def _lying() -> Iterator[Case]:
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 10_000))
    end = chunk(b"IEND", b"")
    good = raw_png(RGB, 8, 2)
    yield Case("png of no width", SIGNATURE + header(0, 5, 8, 2) + pixels + end, code=PARSE)
    yield Case("png of no height", SIGNATURE + header(5, 0, 8, 2) + pixels + end, code=PARSE)
    yield Case("png taller than its pixels", SIGNATURE + header(100, 5000, 8, 2) + pixels + end, code=PARSE)  # fmt: skip
    yield Case("png of colour type 5", SIGNATURE + header(9, 9, 8, 5) + pixels + end, code=PARSE)
    yield Case("png of depth 3", SIGNATURE + header(9, 9, 3, 0) + pixels + end, code=PARSE)
    yield Case("png without pixels", SIGNATURE + header(9, 9, 8, 2) + end, code=PARSE)
    yield Case("png without a header", SIGNATURE + pixels + end, code=PARSE)
    yield Case("png with a wrong checksum", good[:29] + b"\0\0\0\0" + good[33:], code=PARSE)
    yield Case("png with garbage for pixels", SIGNATURE + header(9, 9, 8, 2) + chunk(b"IDAT", b"garbage") + end, code=PARSE)  # fmt: skip
    yield Case("png with an unknown filter", SIGNATURE + header(9, 9, 8, 0) + chunk(b"IDAT", zlib.compress((b"\x09" + bytes(9)) * 9)) + end, code=PARSE)  # fmt: skip
    jpeg = encode(RGB, "JPEG", quality=97)
    frame = jpeg.index(b"\xff\xc0")
    yield Case("jpeg of no height", jpeg[: frame + 5] + b"\0\0" + jpeg[frame + 7 :], code=PARSE)
    yield Case("jpeg of 12 bits", jpeg[: frame + 4] + b"\x0c" + jpeg[frame + 5 :], code=PARSE)
    yield Case("jpeg without tables", b"\xff\xd8" + jpeg[frame:], code=PARSE)
    yield Case("jpeg of markers alone", b"\xff\xd8" + b"\xff\xd9" * 10, code=PARSE)
    bad_webp = bytearray(encode(RGB, "WEBP", lossless=True))
    bad_webp[20] = 0x00
    yield Case("webp with a wrong start byte", bytes(bad_webp), code=PARSE)
    lzw = raw_gif(WIDTH, HEIGHT, gif_image(GREY)).replace(b"\x2c", b"\x2c", 1)
    broken = lzw[: 800 + 5] + b"\xff" * 40 + lzw[800 + 45 :]
    yield Case("gif with broken codes", broken, code=PARSE)


def _bombs() -> Iterator[Case]:
    empty = chunk(b"IDAT", zlib.compress(bytes(1 << 20), 9))
    end = chunk(b"IEND", b"")
    for side in (13_000, 14_000, 60_000):
        yield Case(f"png bomb of {side} squared", SIGNATURE + header(side, side, 1, 0) + empty + end, code=LARGE)  # fmt: skip
    yield Case("png of 2 ** 31", SIGNATURE + header(2**31 - 1, 2**31 - 1, 8, 2) + empty + end, code=LARGE)  # fmt: skip
    text = zlib.compress(bytes(100 << 20), 9)
    for kind, lead in ((b"zTXt", b"k\0\0"), (b"iCCP", b"p\0\0"), (b"iTXt", b"k\0\1\0\0\0")):
        data = raw_png(RGB, 8, 2, before=chunk(kind, lead + text))
        yield Case(f"png {kind.decode()} that inflates to 100 MB", data, code=PARSE)
    yield Case("png of 70000 chunks", raw_png(RGB, 8, 2, before=chunk(b"teST", b"") * 70_000), code=PARSE)  # fmt: skip
    yield Case("jpeg of 65535 squared", _resized_jpeg(65_535, 65_535), code=LARGE)
    yield Case("gif of 65535 squared", raw_gif(65_535, 65_535, gif_image(GREY)), code=LARGE)
    canvas = struct.pack("<I", 0) + (16_382).to_bytes(3, "little") * 2
    body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas
    yield Case("webp canvas of 16383 squared", b"RIFF" + struct.pack("<I", len(body)) + body, code=LARGE)  # fmt: skip


def _resized_jpeg(width: int, height: int) -> bytes:
    jpeg = encode(RGB, "JPEG")
    frame = jpeg.index(b"\xff\xc0")
    return jpeg[: frame + 5] + struct.pack(">HH", height, width) + jpeg[frame + 9 :]


GROUPS = {
    "PRE-02": (_bombs,), "PRE-03": (_orientations,), "PRE-04": (_gifs,),
    "PRE-05": (_png_depths, _png_extras, _jpegs, _webps), "PRE-07": (_profiles,),
    "PRE-08": (_cut_off, _lying), "PRE-09": (_optional_formats,), "PRE-10": (_no_images,),
    "PRE-11": (_extremes,),
}  # fmt: skip
"""What shows which requirement."""
