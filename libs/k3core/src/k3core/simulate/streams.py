"""Named token streams and prompts cut from them: the same file gives the same tokens anywhere."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256, shake_128

import numpy as np

from k3core.scheduler.request import ImageSpan

# Ids stay well inside int32, and no stream ever yields the placeholder.
_VOCABULARY_MASK = 0x0FFFFFFF
PLACEHOLDER = 0x10000000


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens start..start + length of a stream."""

    stream: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Image:
    """Placeholders bound to a picture."""

    name: str | int
    tokens: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A message boundary between two segments."""


Segment = Slice | Image | Mark


@dataclass(slots=True)
class Text:
    """A prompt or an output, spelled out.

    Attributes:
        tokens: packed int32, placeholders for pictures.
        content: packed int64; equal to `tokens` but for placeholders, which carry what the
            picture contributes at that place. Two prefixes are the same if and only if this is.
        images: spans of pictures.
        image_names: name of each picture by key.
        markers: positions of marks.
    """

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    content: "array[int]" = field(default_factory=lambda: array("q"))
    images: list[ImageSpan] = field(default_factory=list[ImageSpan])
    image_names: dict[bytes, str | int] = field(default_factory=dict[bytes, str | int])
    markers: list[int] = field(default_factory=list[int])


class Streams:
    """Makes tokens by name; keeps the longest run of each stream that was asked for."""

    def __init__(self) -> None:
        self._runs: dict[str, array[int]] = {}

    def slice(self, stream: str, start: int, length: int) -> "array[int]":
        """Tokens of a stream, packed int32."""
        end = start + length
        run = self._runs.get(stream)
        if run is None or len(run) < end:
            size = max(64, 2 * end)
            # An extendable-output hash: a longer run begins with the shorter one.
            raw = shake_128(stream.encode()).digest(4 * size)
            words = np.frombuffer(raw, dtype="<u4") & _VOCABULARY_MASK
            run = array("i", words.astype(np.int32).tobytes())
            self._runs[stream] = run
        return run[start:end]

    def text(self, segments: Iterable[Segment]) -> Text:
        """Spell a list of segments out."""
        text = Text()
        for segment in segments:
            match segment:
                case Slice(stream, start, length):
                    tokens = self.slice(stream, start, length)
                    text.tokens.extend(tokens)
                    text.content.extend(tokens.tolist())
                case Image(name, count):
                    key = image_key(name)
                    text.images.append(ImageSpan(len(text.tokens), count, key))
                    text.image_names[key] = name
                    text.tokens.extend(array("i", [PLACEHOLDER]) * count)
                    text.content.extend(image_content(key, 0, count))
                case Mark():
                    text.markers.append(len(text.tokens))
        return text


def image_key(name: str | int) -> bytes:
    """Feature key of a picture, 32 bytes."""
    return sha256(b"picture\0" + str(name).encode()).digest()


def image_content(key: bytes, first: int, count: int) -> "array[int]":
    """What rows first..first + count of a picture contribute, packed int64, none like a token."""
    base = int.from_bytes(key[:5], "little") << 22
    return array("q", [(1 << 62) | base | (first + place) for place in range(count)])
