"""Gateway and preprocessor to fetcher: metadata of an image, and its bytes when L1 lost them."""

from k3wire.messages.base import BlobRef, Message, StageReport
from k3wire.messages.media import ImageRef

MAX_URL_CHARS = 8192
"""Longest image URL; a longer one is refused before it is sent."""


class ResolveRequest(Message, frozen=True, kw_only=True, tag="resolve"):
    """Asks what an image URL holds; the fetcher downloads it only if L1 does not know.

    Attributes:
        request_id: whose image it is, for cancel and logs.
        url: as the client gave it; http or https.
        tenant: isolation scope of the URL cache, "" when tenants share.
        param: path of the part in the client's request, for error messages.
        deadline_unix_ns: give up after this.
    """

    request_id: str
    url: str
    tenant: str = ""
    param: str = ""
    deadline_unix_ns: int


class ResolveReply(Message, frozen=True, kw_only=True, tag="resolve-reply"):
    """Metadata of the image; its bytes are in L1 under its content key."""

    image: ImageRef
    report: StageReport


class ReadRequest(Message, frozen=True, kw_only=True, tag="read"):
    """Asks for the bytes of an image that L1 no longer holds."""

    request_id: str
    image: ImageRef
    deadline_unix_ns: int


class ReadReply(Message, frozen=True, kw_only=True, tag="read-reply"):
    """The bytes, by reference: the fetcher's own front holds them while L1 is away.

    If the address now answers with other bytes, the fetcher refuses with `blob_lost`.
    """

    blob: BlobRef
    report: StageReport
