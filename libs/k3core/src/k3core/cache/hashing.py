"""Identity of a prefix: one chained digest a full match unit.

digest[i] = H(digest[i - 1], tokens of unit i, pictures that overlap unit i); the digest before
the first is the root, which carries everything that isolates: namespace, unit, salt, adapter.
The digest after unit i therefore names the whole prefix. A last, partial unit has no digest.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from struct import iter_unpack

from k3core.cache.spec import CacheError

DIGEST_BYTES = 16
# A picture's identity is never folded: at 16 bits one pair in a few hundred would collide.
KEY_BYTES = 32


class ImageMark:
    """Where a picture's placeholders lie, and which picture it is.

    Attributes:
        offset: first placeholder, tokens from the start.
        count: placeholders.
        key: feature key, 32 bytes.
    """

    __slots__ = ("count", "key", "offset")

    def __init__(self, offset: int, count: int, key: bytes) -> None:
        if len(key) != KEY_BYTES or count < 1 or offset < 0:
            raise CacheError(
                f"a picture needs a {KEY_BYTES}-byte key, a count and an offset, "
                f"not {len(key)}, {count}, {offset}"
            )
        self.offset = offset
        self.count = count
        self.key = key


def namespace_digest(fields: Sequence[tuple[str, str]]) -> bytes:
    """Name of a namespace: model revision, weights, dtype, layout, partition, as named fields.

    Order of the fields does not matter; every field and value is framed by its length.
    """
    parts: list[bytes] = []
    for name, value in sorted(fields):
        for text in (name.encode(), value.encode()):
            parts += [len(text).to_bytes(4, "little"), text]
    return sha256(b"".join(parts)).digest()


@lru_cache(maxsize=1024)
def root_digest(namespace: bytes, unit_tokens: int, salt: str = "", adapter: str = "") -> bytes:
    """The parent of a first unit."""
    return namespace_digest(
        (
            ("namespace", namespace.hex()),
            ("unit", str(unit_tokens)),
            ("salt", salt),
            ("adapter", adapter),
        )
    )[:DIGEST_BYTES]


def extend_digests(
    digests: list[bytes],
    root: bytes,
    tokens: "array[int]",
    unit_tokens: int,
    images: Sequence[ImageMark] = (),
) -> None:
    """Append the digests of every full unit of `tokens` that `digests` does not hold yet.

    Args:
        digests: of the leading units; extended in place.
        root: parent of the first unit.
        tokens: packed int32.
        unit_tokens: U.
        images: ascending in offset, not overlapping.
    """
    first, last = len(digests), len(tokens) // unit_tokens
    if first >= last:
        return
    parent = digests[-1] if digests else root
    size = unit_tokens * tokens.itemsize
    marked = _marks_of_units(images, unit_tokens, first, last) if images else {}
    append = digests.append
    # A view, since a copy of a long prompt costs as much as hashing a tenth of it.
    with memoryview(tokens) as whole, whole.cast("B") as raw:
        if not marked:
            # Cutting the units in C is the fastest of the ways that were tried.
            for (data,) in iter_unpack(f"{size}s", raw[first * size : last * size]):
                parent = sha256(parent + data).digest()[:DIGEST_BYTES]
                append(parent)
            return
        for unit in range(first, last):
            data = parent + raw[unit * size : (unit + 1) * size] + marked.get(unit, b"")
            parent = sha256(data).digest()[:DIGEST_BYTES]
            append(parent)


def _marks_of_units(
    images: Sequence[ImageMark], unit_tokens: int, first: int, last: int
) -> dict[int, bytes]:
    """What pictures add to each unit: key, start relative to the unit (negative if earlier), count.

    The count tells two pictures apart whose keys were made equal by a fault upstream.
    """
    extras: dict[int, bytes] = {}
    for image in images:
        start = max(first, image.offset // unit_tokens)
        end = min(last, -(-(image.offset + image.count) // unit_tokens))
        for unit in range(start, end):
            relative = image.offset - unit * unit_tokens
            mark = (
                image.key
                + relative.to_bytes(8, "little", signed=True)
                + image.count.to_bytes(8, "little")
            )
            extras[unit] = extras.get(unit, b"") + mark
    return extras
