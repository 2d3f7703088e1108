"""Identity of a prefix: one chained digest a full match unit.

digest[i] = H(digest[anchor - 1], tokens of the units anchor to i). Anchors are every 64th unit
and each unit that a picture overlaps or follows; such a unit is hashed alone, with its pictures.
The digest before the first is the root, which carries everything that isolates: namespace, unit,
salt, adapter. The digest after unit i therefore names the whole prefix. A last, partial unit has
no digest.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from struct import iter_unpack

from k3core.cache.native.chain import native_chain
from k3core.cache.spec import CacheError

DIGEST_BYTES = 16
# A picture's identity is never folded: at 16 bits one pair in a few hundred would collide.
KEY_BYTES = 32
# One hash object serves so many units: making one costs as much as hashing 300 bytes. Whoever
# extends a chain hashes less than a group again, so the digests alone are enough to go on.
GROUP_UNITS = 64
# Ends what is hashed for a unit with pictures. No run of whole int32 units has such a length.
_PICTURES = b"\x01"


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
    size = unit_tokens * tokens.itemsize
    group = first - first % GROUP_UNITS
    marked = _marks_of_units(images, unit_tokens, group, last) if images else {}
    cuts = {*marked, *(unit + 1 for unit in marked)}
    borders = [group, *sorted(cut for cut in cuts if group < cut < last), last]
    native = native_chain()
    append_run = _append_run if native is None else native.append_run
    # A view, since a copy of a long prompt costs as much as hashing a tenth of it.
    with memoryview(tokens) as whole, whole.cast("B") as raw:
        for low, high in pairwise(borders):
            if high <= first:
                continue
            parent = digests[low - 1] if low else root
            if low in marked:
                data = parent + raw[low * size : high * size] + marked[low] + _PICTURES
                digests.append(sha256(data).digest()[:DIGEST_BYTES])
                continue
            groups = (size, GROUP_UNITS - low % GROUP_UNITS, GROUP_UNITS)
            seen = max(0, first - low)
            append_run(digests, parent, raw[low * size : high * size], seen, groups)


def _append_run(
    digests: list[bytes],
    parent: bytes,
    units: memoryview,
    num_seen: int,
    groups: tuple[int, int, int],
) -> None:
    """What `NativeChain.append_run` does, with two calls into OpenSSL a unit."""
    size, border, group_units = groups
    low, start = 0, num_seen
    while low * size < len(units):
        hasher = sha256(parent + units[low * size : start * size])
        update, digest, append = hasher.update, hasher.digest, digests.append
        # Cutting the units in C is the fastest of the ways that were tried.
        for (data,) in iter_unpack(f"{size}s", units[start * size : border * size]):
            update(data)
            append(digest()[:DIGEST_BYTES])
        parent, low, start, border = digests[-1], border, border, border + group_units


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
