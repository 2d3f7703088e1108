"""Names of images in the caches: what the bytes are, and what the processor makes of them.

Both are whole SHA-256 digests. Fields are framed by type and length, so that no two different
lists of fields give the same bytes to hash.
"""

import hashlib
import struct
from collections.abc import Iterable

from k3text.images.config import ProcessorConfig
from k3text.images.versions import PROCESSOR_NAME

KEY_BYTES = 32

_DOMAIN = "k3 image feature key v1"
_CONFIG_DOMAIN = "k3 image processor config v1"

Field = str | bytes | int | float | bool | None


def content_key(data: bytes) -> bytes:
    """Names encoded bytes: their SHA-256, 32 bytes."""
    return hashlib.sha256(data).digest()


def feature_key(content: bytes, config: ProcessorConfig) -> bytes:
    """Names the patches of an image: content, code, codecs and rules, 32 bytes.

    Args:
        content: the image's content key.
        config: the checkpoint's rules, with the version of the code.
    """
    assert len(content) == KEY_BYTES, "a content key is a whole SHA-256"
    return _digest([_DOMAIN, PROCESSOR_NAME, config.version, config_digest(config), content])


def config_digest(config: ProcessorConfig) -> bytes:
    """Names a set of rules, 32 bytes; the version is not among them."""
    background = config.background
    behind: list[Field] = (
        [None]
        if background is None
        else [
            background.pattern,
            background.square_size,
            background.is_white_top_left,
            background.white_value,
            background.gray_value,
        ]
    )
    return _digest(
        [
            _CONFIG_DOMAIN,
            config.patch_size,
            config.merge_size,
            config.max_patches,
            config.max_patches_a_side,
            *config.mean,
            *config.std,
            config.fill_stage,
            *behind,
        ]
    )


def _digest(fields: Iterable[Field]) -> bytes:
    hasher = hashlib.sha256()
    for field in fields:
        tag, body = _frame(field)
        hasher.update(struct.pack(">cQ", tag, len(body)))
        hasher.update(body)
    return hasher.digest()


def _frame(field: Field) -> tuple[bytes, bytes]:
    match field:
        case None:
            return b"n", b""
        case bool():
            return b"?", bytes([field])
        case int():
            return b"i", str(field).encode()
        case float():
            return b"f", struct.pack(">d", field)
        case str():
            return b"s", field.encode()
        case bytes():
            return b"b", field
