"""Encoder to preprocessor: pixels of one image, into the encoder's registered buffer."""

from k3wire.messages.base import BufferSpan, Message, StageReport
from k3wire.messages.media import ImageSlot


class PreprocessRequest(Message, frozen=True, kw_only=True, tag="preprocess"):
    """Asks for the patches of one image.

    Attributes:
        request_id: whose image it is.
        slot: which image, with the grid that its size implies.
        processor_version: the encoder's own; a preprocessor of another version refuses.
        destination: where the float32 patches [N, 3, 14, 14] go, row-major over the padded grid.
        deadline_unix_ns: give up after this.
    """

    request_id: str
    slot: ImageSlot
    processor_version: str
    destination: BufferSpan
    deadline_unix_ns: int


class PreprocessReply(Message, frozen=True, kw_only=True, tag="preprocess-reply"):
    """The patches lie in the destination.

    Attributes:
        grid_thw: as decoded; equals the request's or the request is refused.
        size_bytes: bytes written.
        checksum: `zlib.crc32` of them; the reader checks it.
        reports: the preprocessor's own, and the fetcher's if it had to be asked.
    """

    grid_thw: tuple[int, int, int]
    size_bytes: int
    checksum: int
    reports: tuple[StageReport, ...]
