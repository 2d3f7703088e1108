"""Which code makes the pixels: part of every feature key, told to peers, refused if different.

Two hosts with equal versions give equal patches for equal bytes. Lossy decoders and the resampler
may change pixels between releases, so their versions are in; lossless ones cannot.
"""

import PIL
from PIL import features

PROCESSOR_NAME = "k3-image"

RULES = "1"
"""Our own rules: EXIF orientation applied, XMP's not, ICC ignored, first frame, 16-bit scaled,
palettes expanded before the resize. Raise it with any change that can change a patch."""


def processor_version() -> str:
    """Gives the version, e.g. `k3-image/1 pillow/13.0.0 jpeg-turbo/3.2.0 webp/1.6.0 avif/1.4.2`."""
    parts = [
        f"{PROCESSOR_NAME}/{RULES}",
        f"pillow/{PIL.__version__}",
        f"jpeg-turbo/{features.version_feature('libjpeg_turbo') or 'none'}",
        f"webp/{_module_version('webp')}",
        f"avif/{_module_version('avif')}",
    ]
    return " ".join(parts)


def _module_version(name: str) -> str:
    return (features.version_module(name) or "none") if features.check_module(name) else "none"
