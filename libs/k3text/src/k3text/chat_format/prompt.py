"""A conversation turned into the token ids a model reads, with the places of its images."""

import sys
from array import array
from collections.abc import Sequence

import msgspec

from k3text.chat_format.conversation import (
    Channel,
    Conversation,
    ImageSize,
    RenderOptions,
)
from k3text.chat_format.render import render, start_channel
from k3text.chat_format.segments import Segment
from k3text.special_tokens import END_OF_MSG
from k3text.tokenizer import Tokenizer

IDS_AT_ONCE = 65536
"""Ids that are packed in one call: three milliseconds."""


class ImageSpan(msgspec.Struct, frozen=True, kw_only=True, tag="span"):
    """The pads of one image.

    Attributes:
        image_index: of the images given to the renderer.
        offset: of the first pad, in tokens from the start of the prompt.
        num_tokens: pads.
    """

    image_index: int
    offset: int
    num_tokens: int


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="rendered"):
    """Token ids and what is known of them.

    Attributes:
        token_ids: int32, little endian, four bytes a token.
        num_tokens: in all, pads included.
        image_spans: by offset.
        mark_offsets: after each `<|end_of_msg|>`, where a message ends and a prefix may be kept.
        start_channel: in which the model goes on, and a parser starts.
    """

    token_ids: bytes
    num_tokens: int
    image_spans: tuple[ImageSpan, ...]
    mark_offsets: tuple[int, ...]
    start_channel: Channel


def render_prompt_ids(
    conversation: Conversation,
    options: RenderOptions,
    images: Sequence[ImageSize],
    tokenizer: Tokenizer,
) -> RenderedPrompt:
    """Renders a conversation and encodes it.

    Blocks for about a millisecond per 4 KB of text; long prompts belong off the event loop.

    Raises:
        InvalidRequest: as `render`, or a text has a lone surrogate.
    """
    segments = render(conversation, options, images)
    return encode_prompt(segments, start_channel(conversation, options), tokenizer)


def encode_prompt(
    segments: Sequence[Segment], channel: Channel, tokenizer: Tokenizer
) -> RenderedPrompt:
    """Encodes rendered segments one by one.

    Args:
        segments: of a whole prompt.
        channel: in which the prompt leaves the model.
        tokenizer: of the model.

    Raises:
        InvalidRequest: a text has a lone surrogate.
    """
    ids = array("i")
    assert ids.itemsize == 4
    spans: list[ImageSpan] = []
    marks: list[int] = []
    for segment in segments:
        if segment.image_index is not None:
            spans.append(
                ImageSpan(
                    image_index=segment.image_index,
                    offset=len(ids),
                    num_tokens=segment.num_repeats,
                )
            )
        pieces = tokenizer.encode_segment(segment.text, segment.is_special)
        packed = array("i")
        # All at once would hold the interpreter for a second where a text is long.
        for start in range(0, len(pieces), IDS_AT_ONCE):
            packed.extend(array("i", pieces[start : start + IDS_AT_ONCE]))
        ids.extend(packed if segment.num_repeats == 1 else packed * segment.num_repeats)
        if segment.is_special and segment.text == END_OF_MSG:
            marks.append(len(ids))
    return RenderedPrompt(
        token_ids=_little_endian(ids),
        num_tokens=len(ids),
        image_spans=tuple(spans),
        mark_offsets=tuple(marks),
        start_channel=channel,
    )


def _little_endian(ids: "array[int]") -> bytes:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
