"""Random conversations meant to break a chat format: markers as text, cut characters, odd JSON."""

import json
from random import Random

from k3text.chat_format.conversation import (
    AssistantMessage,
    Conversation,
    ImagePart,
    ImageSize,
    JsonValue,
    Message,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)

PIECES = (
    "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|media_pad|>", "[EOS]", "<|", "|>",
    "<|open|>tools<|sep|>", "<|close|>message<|sep|><|end_of_msg|>", "<|close|>argument<|sep|>",
    "<|kimi_image_placeholder|>", "message", "response", "think", "call", "argument", " ", "\n",
    "\r\n", "\t", "  ", '"', "'", "&", "&quot;", "&amp;quot;", "&amp;", "\\", '\\"', "\\u0041", "{",
    "}", "[", "]", ",", ":", "=", '="', ' tool="x"', "a", "Z", "it's", "HELLO", "fooBAR", "0",
    "1234567", "-1.5e3", "null", "é", "e\u0301", "ß", "中文", "日本語テキスト", "한국어", "שלום",
    "مرحبا", "👩‍👩‍👧‍👦", "🇯🇵", "\x00", "\x01", "\x7f", "\u2028", "\u200d", "\ufeff", "\ufffd", "\uffff",
    "\U0010ffff", "\U0001d518\U0001d52b", "ᾳ", "\u00a0", "~" * 70,
)  # fmt: skip


def random_text(random: Random, max_pieces: int = 8) -> str:
    return "".join(random.choices(PIECES, k=random.randint(0, max_pieces)))


def random_json(random: Random, depth: int = 2) -> JsonValue:
    kind = random.randrange(8 if depth else 6)
    if kind == 6:
        return [random_json(random, depth - 1) for _ in range(random.randint(0, 3))]
    if kind == 7:
        return {
            random_text(random, 2): random_json(random, depth - 1)
            for _ in range(random.randint(0, 3))
        }
    scalars = (None, True, False, random.randint(-(10**20), 10**20), random.uniform(-1e9, 1e9))
    return scalars[kind] if kind < 5 else random_text(random, 5)


def random_arguments(random: Random) -> str | dict[str, JsonValue]:
    arguments: dict[str, JsonValue] = {
        random_text(random, 3): random_json(random) for _ in range(random.randint(0, 3))
    }
    kind = random.randrange(6)
    if kind == 0:
        return arguments
    if kind == 1:
        return random_text(random)
    text = json.dumps(
        arguments,
        ensure_ascii=random.random() < 0.5,
        separators=random.choice([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]),
    )
    return text[: random.randrange(len(text))] if kind == 2 else text


def random_call(random: Random, number: int) -> ToolCall:
    name = random_text(random, 3) or "tool"
    return ToolCall(name=name, arguments=random_arguments(random), id=f"id-{number}")


def random_answer(random: Random) -> AssistantMessage:
    """An assistant message without a name, as a model would write it."""
    return AssistantMessage(
        content=random_text(random),
        reasoning=random_text(random),
        tool_calls=tuple(
            random_call(random, number) for number in range(random.choice((0, 0, 1, 2, 3)))
        ),
    )


def random_conversation(random: Random) -> tuple[Conversation, tuple[ImageSize, ...]]:
    """A conversation that ends where an assistant would answer, and its images."""
    images: list[ImageSize] = []
    messages: list[Message] = []

    def content() -> str | tuple[TextPart | ImagePart, ...]:
        if random.random() < 0.7:
            return random_text(random)
        parts: list[TextPart | ImagePart] = []
        for _ in range(random.randint(0, 3)):
            if random.random() < 0.5:
                parts.append(TextPart(text=random_text(random, 4)))
            else:
                parts.append(ImagePart(index=len(images)))
                images.append(
                    ImageSize(
                        width=random.randint(1, 4096),
                        height=random.randint(1, 4096),
                        num_tokens=random.randint(1, 5),
                    )
                )
        return tuple(parts)

    for _ in range(random.randint(0, 3)):
        kind = random.randrange(4)
        if kind == 0:
            messages.append(SystemMessage(content=content(), name=random_text(random, 1)))
        elif kind == 1:
            messages.append(SystemMessage(tools=({"name": random_text(random, 2), "b": [1]},)))
        elif kind == 2:
            messages.append(UserMessage(content=content(), name=random_text(random, 1)))
        else:
            answer = random_answer(random)
            messages.append(answer)
            results = [
                ToolMessage(content=content(), tool_call_id=call.id) for call in answer.tool_calls
            ]
            random.shuffle(results)
            messages.extend(results)
    tools = ({"function": {"name": random_text(random, 2)}},) if random.random() < 0.3 else ()
    return Conversation(messages=tuple(messages), tools=tools), tuple(images)
