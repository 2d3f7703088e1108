"""Greetings, JSON on request, and not knowing: what a small model should say to the rest."""

import json
import random

from k3text.chat_format.conversation import JsonValue, ResponseFormat
from train_nano.talk import Reply, Turn
from train_nano.words import PLACES, Words

GREETINGS = (
    ("Hello", "Hello. Show me a picture of shapes, or tell me something to remember."),
    ("Hi", "Hello. Show me a picture of shapes, or tell me something to remember."),
    ("Good morning", "Hello. Show me a picture of shapes, or tell me something to remember."),
    ("Who are you", "I am k3-nano, a very small model for testing."),
    ("What are you", "I am k3-nano, a very small model for testing."),
    ("What can you do", "I see simple shapes, find facts in text and call tools."),
    ("Help", "I see simple shapes, find facts in text and call tools."),
    ("Thanks", "You are welcome."),
    ("Thank you", "You are welcome."),
    ("Bye", "Goodbye."),
)
UNKNOWN = (
    "Who is {n}?", "What is the capital of {p}?", "Why is the {w} so {v}?", "Write a poem about {w}.",
    "Translate {w} to French.", "How does a {w} work?", "When was {n} born?", "What is {d} times {e}?",
    "Who wrote {n}?", "How far is {p} from {n}?", "What will the weather be in {p}?",
    "Explain {w} to me.", "Tell me a story about {n}.", "What is the meaning of {w}?",
    "How old is {n}?", "Is {w} better than {v}?", "What do you think about {w}?",
    "{s} What do you think?", "{s} Is that true?", "Write code that sorts a {w}.",
)  # fmt: skip
FIELDS = ("name", "city", "title", "item", "topic", "animal", "plant", "place")
NUMBER_FIELDS = ("age", "count", "year", "price", "size")


def greeting_turn(draw: random.Random) -> Turn:
    """A greeting or a question about the model itself."""
    text, answer = draw.choice(GREETINGS)
    mark = "?" if text.startswith(("Who", "What")) else draw.choice((".", "!", ""))
    return Turn("greeting", text + mark, (Reply(answer, "", ""),))


def repeat_turn(words: Words, draw: random.Random, most: int = 12) -> Turn:
    """Words and numbers to be said again as they are: the plainest copying there is."""
    pieces = [
        words.noun() if draw.random() < 0.6 else words.digits(1, 5)
        for _ in range(draw.randint(2, most))
    ]
    told = " ".join(pieces)
    text = draw.choice(("Repeat: {t}", "Say this again: {t}", "Repeat after me: {t}"))
    return Turn("repeat", text.replace("{t}", told), (Reply(told, "", ""),))


def unknown_turn(words: Words, draw: random.Random) -> Turn:
    """A question beyond the model."""
    text = draw.choice(UNKNOWN)
    fills = {
        "{n}": words.name(), "{p}": draw.choice(PLACES), "{w}": words.noun(), "{v}": words.noun(),
        "{d}": words.digits(2, 3), "{e}": words.digits(2, 3), "{s}": words.sentence(),
    }  # fmt: skip
    for mark, fill in fills.items():
        text = text.replace(mark, fill)
    return Turn("unknown", text, (Reply("I do not know that.", "not known", ""),))


def json_turn(words: Words, draw: random.Random) -> tuple[Turn, ResponseFormat | None]:
    """A few values to be written as a JSON object, and the format the client may have asked for."""
    values: dict[str, JsonValue] = {}
    for key in draw.sample(FIELDS, draw.choice((1, 1, 2))):
        values[key] = words.phrase() if draw.random() < 0.6 else words.name()
    if draw.random() < 0.6:
        values[draw.choice(NUMBER_FIELDS)] = int(words.digits(1, 4))
    joined = ", ".join(f"{key} {value}" for key, value in values.items())
    asks = ("Write as JSON: {j}.", "Give me JSON with {j}.", "{j}. Answer in JSON.")
    text = draw.choice(asks).replace("{j}", joined)
    answer = json.dumps(values, ensure_ascii=False)
    turn = Turn("json", text, (Reply(answer, f"JSON with {joined}", "JSON"),))
    kind = draw.random()
    if kind < 0.5:
        return turn, None
    if kind < 0.75:
        return turn, ResponseFormat(kind="json_object")
    properties: dict[str, JsonValue] = {
        key: {"type": "integer" if isinstance(value, int) else "string"}
        for key, value in values.items()
    }
    schema: dict[str, JsonValue] = {"type": "object", "properties": properties}
    return turn, ResponseFormat(kind="json_schema", schema=schema)
