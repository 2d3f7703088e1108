"""The name under which tier L1 keeps an image's bytes: who writes and who reads them agree here."""


def image_bytes_key(content_key: bytes) -> str:
    """Gives L1's key of an image's encoded bytes.

    Args:
        content_key: SHA-256 of the bytes, whole.
    """
    return f"l1:bytes:{content_key.hex()}"
