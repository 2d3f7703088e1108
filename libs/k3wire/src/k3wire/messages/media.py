"""An image as the services speak of it: by key, size and place in the prompt; never its bytes."""

from k3wire.messages.base import Message


class ImageRef(Message, frozen=True, kw_only=True, tag="image"):
    """One encoded image and every way to get at its bytes.

    Attributes:
        content_key: SHA-256 of the encoded bytes, 32 bytes.
        media_type: sniffed, e.g. `image/png`.
        width: pixels, after the EXIF orientation is applied.
        height: pixels, likewise.
        size_bytes: length of the encoded bytes.
        url: normalised address to fetch them from again, or "" for a data URL.
        holder: subject that serves `PieceRequest` for the content key while the request lives
            (the gateway, for a data URL), or "".
        tenant: cache isolation scope of the URL; "" when tenants share.
    """

    content_key: bytes
    media_type: str
    width: int
    height: int
    size_bytes: int
    url: str = ""
    holder: str = ""
    tenant: str = ""


class ImageSlot(Message, frozen=True, kw_only=True, tag="slot"):
    """An image in its place in the prompt.

    Attributes:
        image: which image.
        feature_key: H(content key, processor version and configuration), 32 bytes.
        offset: index of its first pad token in the prompt.
        num_tokens: pad tokens, equal to the merged patches.
        grid_thw: patches in time, height and width after resize and padding.
        param: the part's path in the client's request, for error messages:
            `messages[0].content[1].image_url`.
    """

    image: ImageRef
    feature_key: bytes
    offset: int
    num_tokens: int
    grid_thw: tuple[int, int, int]
    param: str = ""
