"""A rendered prompt: token ids and image slots, inline or by reference when long."""

import msgspec

from k3wire.messages.base import BlobRef, Message
from k3wire.messages.media import ImageSlot

MAX_INLINE_PROMPT_BYTES = 48 * 1024
"""Longest encoded `PromptPayload` inside another message; a longer one goes by `BlobRef`."""


class PromptPayload(Message, frozen=True, kw_only=True, tag="prompt"):
    """What the model is to read.

    Attributes:
        token_ids: little-endian int32, four bytes a token, pads of images included.
        image_slots: in order of their offsets.
        mark_offsets: token offsets of message boundaries (end of system, tools, turn), where a
            marker-driven cache may keep a checkpoint.
    """

    token_ids: bytes
    image_slots: tuple[ImageSlot, ...] = ()
    mark_offsets: tuple[int, ...] = ()


class PromptSource(Message, frozen=True, kw_only=True, tag="prompt-source"):
    """Exactly one of the two: the payload, or the reference of its msgpack encoding."""

    inline: PromptPayload | None = None
    blob: BlobRef | None = None


def encode_prompt(prompt: PromptPayload) -> bytes:
    """Encodes a prompt for a blob or for measuring whether it fits inline."""
    return msgspec.msgpack.encode(prompt)


def decode_prompt(data: bytes) -> PromptPayload:
    """Decodes what `encode_prompt` made.

    Raises:
        msgspec.DecodeError: the bytes are no prompt.
    """
    return msgspec.msgpack.decode(data, type=PromptPayload)
