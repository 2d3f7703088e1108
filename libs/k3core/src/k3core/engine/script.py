"""The script of the engine without a model: which answer to give, and how fast.

A script is a JSONL file. Each line is an object:

    {"match": "substring of the last user text", "text": "…"}
    {"match": "…", "token_ids": [1, 2], "first_token_ms": 40, "per_token_ms": 8, "split_every": 4}

A request gets the first line whose `match` occurs in the last thing its user said; an empty
`match` occurs in everything. `text` goes through the tokenizer that the caller brings, so this
room stays free of text.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from k3wire.errors import InvalidRequest

_MAX_MS = 3_600_000.0

_MARKERS = re.compile(r"(<\|open\|>|<\|close\|>|<\|sep\|>|<\|end_of_msg\|>)")
"""The four markers of the chat format, as a script's author writes them."""


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line as written; exactly one of `text` and `token_ids`."""

    match: str
    text: str | None = None
    token_ids: list[int] | None = None
    first_token_ms: float = 0.0
    per_token_ms: float = 0.0
    split_every: int = 1


class ScriptError(ValueError):
    """A script that cannot be used; the message names the line."""


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """One answer.

    Attributes:
        match: what the last user text has to contain.
        token_ids: the answer, without the token that ends it.
        first_token_s: seconds from a request's admission to its first token.
        per_token_s: seconds from each token to the next.
        split_every: tokens that reach the stream together.
    """

    match: str
    token_ids: tuple[int, ...]
    first_token_s: float
    per_token_s: float
    split_every: int


@dataclass(frozen=True, slots=True)
class Script:
    """All answers, in the order of the file."""

    lines: tuple[ScriptLine, ...]

    def fingerprint(self) -> str:
        """Names the script's content, 16 hexadecimal digits; equal scripts give equal names."""
        return hashlib.sha256(msgspec.json.encode(self.lines)).hexdigest()[:16]

    def find(self, last_user_text: str) -> int:
        """Gives the index of the line that answers.

        Raises:
            InvalidRequest: no line matches.
        """
        for index, line in enumerate(self.lines):
            if line.match in last_user_text:
                return index
        raise InvalidRequest(
            'No line of the script matches the last user message; a line with "match": "" '
            "answers everything."
        )


def split_markers(text: str) -> list[tuple[str, bool]]:
    """Cuts a line's text at the literal markers of the chat format.

    Returns:
        (piece, whether it is a marker), in order and without empty pieces; a tokenizer encodes
        each piece on its own, as it does when it renders a conversation.
    """
    pieces = _MARKERS.split(text)
    return [(piece, bool(_MARKERS.fullmatch(piece))) for piece in pieces if piece]


def load_script(path: Path, encode: Callable[[str], list[int]]) -> Script:
    """Reads a script from a file.

    Args:
        path: the JSONL file; blank lines are skipped.
        encode: text to token ids; the markers of the chat format, written literally, must come
            out as their special tokens.

    Raises:
        ScriptError: unreadable, empty, or a line is malformed; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScriptError(f"script {path.name}: not readable as UTF-8 text") from error
    return parse_script(text, encode)


def parse_script(text: str, encode: Callable[[str], list[int]]) -> Script:
    """Reads a script from its text; see `load_script`."""
    decoder = msgspec.json.Decoder(_Line)
    lines: list[ScriptLine] = []
    for number, written in enumerate(text.splitlines(), start=1):
        if not written.strip():
            continue
        try:
            lines.append(_line(decoder.decode(written), encode))
        except (msgspec.MsgspecError, ValueError) as error:
            raise ScriptError(f"script line {number}: {error}") from error
    if not lines:
        raise ScriptError("script: no lines")
    return Script(lines=tuple(lines))


def _line(line: _Line, encode: Callable[[str], list[int]]) -> ScriptLine:
    if (line.text is None) == (line.token_ids is None):
        raise ValueError("exactly one of `text` and `token_ids` must be given")
    token_ids = encode(line.text) if line.text is not None else line.token_ids or []
    if any(token < 0 for token in token_ids):
        raise ValueError("`token_ids` must not be negative")
    for name, value in (
        ("first_token_ms", line.first_token_ms),
        ("per_token_ms", line.per_token_ms),
    ):
        if not 0.0 <= value <= _MAX_MS:
            raise ValueError(f"`{name}` must lie between 0 and {_MAX_MS:.0f}")
    if line.split_every < 1:
        raise ValueError("`split_every` must be at least 1")
    return ScriptLine(
        match=line.match,
        token_ids=tuple(token_ids),
        first_token_s=line.first_token_ms / 1000.0,
        per_token_s=line.per_token_ms / 1000.0,
        split_every=line.split_every,
    )
