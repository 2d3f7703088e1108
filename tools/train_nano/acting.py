"""Calls of declared tools with arguments copied from the request, and answers from what they gave."""

import json
import random
from dataclasses import dataclass

from k3text.chat_format.conversation import JsonObject, JsonValue, ToolCall
from train_nano.talk import Reply, Turn
from train_nano.words import Words

VERBS = ("get", "find", "book", "send", "open", "play", "order", "check", "read", "make", "set")
NOUNS = (
    "weather", "time", "news", "flight", "hotel", "table", "taxi", "email", "message", "song",
    "movie", "photo", "file", "note", "event", "alarm", "timer", "light", "door", "music",
    "recipe", "order", "price", "ticket", "train", "bus", "map", "route", "score", "word",
    "contact", "meeting", "task", "list", "page", "report",
)  # fmt: skip
OTHER_NOUNS = 0.15
"""Share of tools about something else."""

KEYS = ("city", "name", "date", "title", "item", "place", "person", "topic", "word", "id")
NUMBER_KEYS = ("days", "count", "amount", "year", "size", "limit")


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared tool.

    Attributes:
        verb: first word of its name.
        noun: second word.
        keys: of its arguments, each with its JSON type.
    """

    verb: str
    noun: str
    keys: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """As declared and called."""
        return f"{self.verb}_{self.noun}"

    def declaration(self) -> JsonObject:
        """As a client sends it."""
        properties: dict[str, JsonValue] = {key: {"type": kind} for key, kind in self.keys}
        required: list[JsonValue] = [key for key, _ in self.keys]
        function: dict[str, JsonValue] = {
            "name": self.name,
            "description": f"{self.verb.capitalize()} the {self.noun}.",
            "parameters": {"type": "object", "properties": properties, "required": required},
        }
        return {"type": "function", "function": function}


def random_tools(words: Words, draw: random.Random) -> list[Tool]:
    """One to four tools with different names."""
    tools: dict[str, Tool] = {}
    while len(tools) < draw.choice((1, 2, 2, 3, 3, 4)):
        keys = [(key, "string") for key in draw.sample(KEYS, draw.choice((1, 1, 2)))]
        if draw.random() < 0.3:
            keys.append((draw.choice(NUMBER_KEYS), "integer"))
        tool = Tool(draw.choice(VERBS), _noun(words, draw), tuple(keys))
        tools[tool.name] = tool
    return list(tools.values())


def call_turn(tools: list[Tool], words: Words, draw: random.Random, *, with_result: bool) -> Turn:
    """A request for one tool, its call and, if wanted, its result and an answer from it."""
    tool = draw.choice(tools)
    values: dict[str, JsonValue] = {}
    for key, kind in tool.keys:
        values[key] = int(words.digits(1, 3)) if kind == "integer" else words.argument()
    call = ToolCall(name=tool.name, arguments=json.dumps(values, ensure_ascii=False))
    results: tuple[str, ...] = ()
    replies: list[Reply] = []
    if with_result:
        result, answer = _result(tool, words, draw)
        results = (result,)
        replies.append(Reply(answer, "", ""))
    thought = f"call {tool.name} with {_joined(values)}"
    replies.insert(0, Reply("", thought, "call", (call,), results))
    return Turn("tool_call", _request(tool, values, draw), tuple(replies))


def refused_turn(tools: list[Tool], words: Words, draw: random.Random) -> Turn:
    """A request for a tool where none may be called; the talk says `tool_choice` none."""
    turn = call_turn(tools, words, draw, with_result=False)
    reply = Reply("I may not call tools now.", "no tools allowed", "no tools")
    return Turn("tool_choice_none", turn.content, (reply,))


def missing_turn(tools: list[Tool], words: Words, draw: random.Random) -> Turn:
    """A request for a tool that was not declared."""
    while True:
        other = Tool(draw.choice(VERBS), _noun(words, draw), ((draw.choice(KEYS), "string"),))
        if all(other.noun != tool.noun for tool in tools):
            break
    text = _request(other, {key: words.phrase() for key, _ in other.keys}, draw)
    reply = Reply("I have no tool for that.", f"no tool for {other.noun}", "no tool")
    return Turn("tool_missing", text, (reply,))


def _noun(words: Words, draw: random.Random) -> str:
    return words.noun() if draw.random() < OTHER_NOUNS else draw.choice(NOUNS)


def _request(tool: Tool, values: dict[str, JsonValue], draw: random.Random) -> str:
    forms = (
        "{v} the {n} for {j}.",
        "Please {v} the {n} with {j}.",
        "{v} {n}: {j}.",
        "Call {v}_{n} with {j}.",
        "Use {v}_{n} for {j}.",
    )
    text = draw.choice(forms).replace("{j}", _joined(values))
    text = text.replace("{v}", tool.verb).replace("{n}", tool.noun)
    return text[0].upper() + text[1:]


def _joined(values: dict[str, JsonValue]) -> str:
    return " and ".join(f"{key} {value}" for key, value in values.items())


def _result(tool: Tool, words: Words, draw: random.Random) -> tuple[str, str]:
    """What a tool gives, and what is said of it."""
    value = words.digits(1, 4) if draw.random() < 0.5 else words.phrase()
    kind = draw.random()
    if kind < 0.5:
        return value, f"The {tool.noun} is: {value}."
    key = draw.choice(("result", "value", "status", tool.noun))
    return json.dumps({key: value}, ensure_ascii=False), f"The {key} is: {value}."
