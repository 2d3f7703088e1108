"""From encoded bytes to patches, in this process: header, decode, resize, background, cut.

For trusted images, tests and the sandbox's workers; services call the sandbox. The order is fixed,
because it decides pixels: turn upright, resize (bicubic), blend, pad, normalise.
"""

from dataclasses import dataclass

from k3text.images.alpha import composite
from k3text.images.config import ProcessorConfig
from k3text.images.decode import decode
from k3text.images.geometry import plan
from k3text.images.header import ImageLimits, read_header
from k3text.images.keys import content_key, feature_key
from k3text.images.patchify import Bytes, Floats, normalise, resize, to_patches
from k3wire.errors import ImageTooLarge


@dataclass(frozen=True, slots=True)
class PatchedImage:
    """An image as bytes cut into patches; what travels and is cached.

    Attributes:
        pixels: [N, 3, P, P], uint8, row-major over the padded grid.
        grid_thw: patches in time, height and width.
        width: pixels of the original, as seen.
        height: likewise.
        num_tokens: merged patches.
    """

    pixels: Bytes
    grid_thw: tuple[int, int, int]
    width: int
    height: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as the vision tower takes it, with its names.

    Attributes:
        patches: [N, 3, P, P], float32, row-major over the padded grid.
        grid_thw: patches in time, height and width.
        width: pixels of the original, as seen.
        height: likewise.
        num_tokens: merged patches, pad tokens in the prompt.
        content_key: of the encoded bytes.
        feature_key: of the patches.
    """

    patches: Floats
    grid_thw: tuple[int, int, int]
    width: int
    height: int
    num_tokens: int
    content_key: bytes
    feature_key: bytes


def cut(
    data: bytes,
    config: ProcessorConfig,
    limits: ImageLimits | None = None,
    out: Bytes | None = None,
) -> PatchedImage:
    """Makes the byte patches of an image.

    Args:
        data: the whole encoded image.
        config: how images become patches.
        limits: what is refused; the defaults if None.
        out: flat memory for the patches, long enough for the largest; new memory if None.

    Raises:
        ImageError: one of its leaves; see `read_header` and `decode`.
    """
    header = read_header(data, limits)
    geometry = plan(header.width, header.height, config)
    try:
        picture = decode(data, header)
        if config.fill_stage == "before_resize":
            picture = composite(picture, config.background)
        if picture.mode == "RGBA":
            picture = resize(picture, (geometry.width, geometry.height))
            picture = composite(picture, config.background)
        pixels = to_patches(picture, geometry, config.patch_size, out)
    except MemoryError as error:
        raise ImageTooLarge("The image is too large to decode") from error
    return PatchedImage(pixels, geometry.grid_thw, header.width, header.height, geometry.num_tokens)


def process(
    data: bytes, config: ProcessorConfig, limits: ImageLimits | None = None
) -> ProcessedImage:
    """Makes the patches of an image and its keys.

    Raises:
        ImageError: one of its leaves; see `read_header` and `decode`.
    """
    patched = cut(data, config, limits)
    content = content_key(data)
    return ProcessedImage(
        patches=normalise(patched.pixels, config),
        grid_thw=patched.grid_thw,
        width=patched.width,
        height=patched.height,
        num_tokens=patched.num_tokens,
        content_key=content,
        feature_key=feature_key(content, config),
    )
