"""Prefill to encoder: embeddings of images, into prefill's registered buffer."""

from k3wire.messages.base import BufferSpan, Message, StageReport
from k3wire.messages.media import ImageSlot


class EncodeItem(Message, frozen=True, kw_only=True, tag="encode-item"):
    """One image and where its embeddings go: [num_tokens, hidden], in the request's dtype."""

    slot: ImageSlot
    destination: BufferSpan


class EncodeRequest(Message, frozen=True, kw_only=True, tag="encode"):
    """Asks for the embeddings of some images of one request.

    A caller with many images sends several requests at once; each fits one message.

    Attributes:
        request_id: whose images they are.
        items: what, and where to.
        dtype: element type of the destination, `float32` or `bfloat16`.
        weights_fingerprint: the caller's checkpoint; an encoder of another one refuses.
        deadline_unix_ns: give up after this.
    """

    request_id: str
    items: tuple[EncodeItem, ...]
    dtype: str
    weights_fingerprint: str
    deadline_unix_ns: int


class EncodedItem(Message, frozen=True, kw_only=True, tag="encoded-item"):
    """One image's embeddings lie in their destination; `checksum` is `zlib.crc32` of the bytes."""

    feature_key: bytes
    size_bytes: int
    checksum: int


class EncodeReply(Message, frozen=True, kw_only=True, tag="encode-reply"):
    """All items lie in their destinations; `reports` covers every stage that was asked."""

    items: tuple[EncodedItem, ...]
    reports: tuple[StageReport, ...]
