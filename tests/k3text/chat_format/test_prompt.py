from array import array

import pytest

from k3text.chat_format.conversation import (
    Conversation,
    ImagePart,
    ImageSize,
    RenderOptions,
    UserMessage,
)
from k3text.chat_format.prompt import ImageSpan, render_prompt_ids
from k3text.tokenizer import Tokenizer
from k3wire.errors import InvalidRequest


def test_ids_are_packed_with_the_places_of_images_and_message_ends(tokenizer: Tokenizer) -> None:
    conversation = Conversation(
        messages=(
            UserMessage(content=(ImagePart(index=0),)),
            UserMessage(content=(ImagePart(index=1),)),
        )
    )
    images = (
        ImageSize(width=10, height=20, num_tokens=7),
        ImageSize(width=3, height=4, num_tokens=2),
    )
    prompt = render_prompt_ids(conversation, RenderOptions(), images, tokenizer)
    ids = list(array("i", prompt.token_ids))
    specials = tokenizer.specials
    assert len(ids) == prompt.num_tokens
    ends = [at + 1 for at, token in enumerate(ids) if token == specials.end_of_msg]
    assert prompt.mark_offsets == tuple(ends)
    pads = [at for at, token in enumerate(ids) if token == specials.media_pad]
    assert prompt.image_spans == (
        ImageSpan(image_index=0, offset=pads[0], num_tokens=7),
        ImageSpan(image_index=1, offset=pads[7], num_tokens=2),
    )
    before = ids[: pads[0]]
    begin = len(before) - 1 - before[::-1].index(specials.media_begin)
    assert tokenizer.decode_bytes(ids[begin : pads[6] + 2]) == (
        b"<|media_begin|>image 10x20<|media_content|>" + b"<|media_pad|>" * 7 + b"<|media_end|>"
    )
    assert prompt.start_channel == "think"


def test_a_lone_surrogate_anywhere_is_a_request_error(tokenizer: Tokenizer) -> None:
    conversation = Conversation(messages=(UserMessage(content="a\udc00"),))
    with pytest.raises(InvalidRequest, match="surrogate"):
        render_prompt_ids(conversation, RenderOptions(), (), tokenizer)
