"""A call's arguments, written as JSON while the model is still writing them.

Argument blocks enter, byte for byte; pieces of one JSON object leave. The joined pieces depend on
the bytes only, never on how they were cut, so a stream and a whole answer are the same text.
"""

import codecs
import json
import re
from enum import Enum

import msgspec

_SPECIAL = re.compile(r'[\\"{}\[\]\x00-\x1f]')
_CLOSERS = {"{": "}", "[": "]"}
_SPACES = " \t\n\r"


class _Mode(Enum):
    IDLE = "between blocks"
    STRING = "a string, raw in the block"
    UNDECIDED = "a JSON value whose first character has not come"
    SCALAR = "a number, a word or a mistake: kept to the end of the block"
    CONTAINER = "an object or an array: copied through"
    RAW = "the whole object in one raw block"


class ArgumentsWriter:
    """Writes the arguments of one call.

    Attributes:
        num_malformed: values that were not JSON. A word that is none becomes a string; in an
            object or array brackets and control characters are mended, the rest stays as it is,
            because it was on its way before its end was known.
        num_duplicate_keys: keys written again; both stay in the text, and readers take the last.
    """

    def __init__(self) -> None:
        self.num_malformed = 0
        self.num_duplicate_keys = 0
        self._mode = _Mode.IDLE
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._keys: set[str] = set()
        self._buffer = ""
        self._is_raw = False
        self._has_raw_text = False
        self._container = _ContainerCopy()
        self._copied: list[str] = []

    def begin_argument(self, key: str, type_name: str) -> str:
        """Opens an argument block; ignored after a raw block.

        Args:
            key: unescaped.
            type_name: as written by the model; "" counts as string.
        """
        if self._is_raw:
            self.num_malformed += 1
            return ""
        start = "," if self._keys else "{"
        if key in self._keys:
            self.num_duplicate_keys += 1
        self._keys.add(key)
        start += json.dumps(key, ensure_ascii=False) + ":"
        if type_name in ("string", ""):
            self._mode = _Mode.STRING
            return start + '"'
        self._mode = _Mode.UNDECIDED
        return start

    def begin_raw(self) -> str:
        """Opens a raw block; ignored after an argument block or another raw block."""
        if self._keys or self._is_raw:
            self.num_malformed += 1
            return ""
        self._is_raw = True
        self._mode = _Mode.RAW
        return ""

    def feed(self, data: bytes) -> str:
        """Takes bytes of the open block's body."""
        return self._write(self._decoder.decode(data))

    def end_block(self) -> str:
        """Closes the open block, of whichever kind."""
        text = self._write(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        mode, self._mode = self._mode, _Mode.IDLE
        match mode:
            case _Mode.STRING:
                return text + '"'
            case _Mode.UNDECIDED | _Mode.SCALAR:
                return text + self._finish_scalar()
            case _Mode.CONTAINER:
                closing, is_whole = self._container.finish()
                value = "".join((*self._copied, closing))
                self._copied.clear()
                self.num_malformed += not (is_whole and _is_json(value))
                return text + closing
            case _Mode.RAW | _Mode.IDLE:
                return text

    def end_call(self) -> str:
        """Closes the object; the blocks are closed already. An empty raw block is no arguments."""
        if self._has_raw_text:
            return ""
        return "}" if self._keys else "{}"

    def _write(self, text: str) -> str:
        match self._mode:
            case _Mode.STRING:
                return json.dumps(text, ensure_ascii=False)[1:-1]
            case _Mode.RAW:
                return self._copy_raw(text)
            case _Mode.CONTAINER:
                return self._copy(text)
            case _Mode.SCALAR:
                self._buffer += text
                return ""
            case _Mode.UNDECIDED:
                self._buffer += text
                return self._decide()
            case _Mode.IDLE:
                return ""

    def _copy_raw(self, text: str) -> str:
        if self._has_raw_text:
            return text
        # White space alone is no arguments, so it waits for what may follow it.
        self._buffer += text
        if not self._buffer.strip(_SPACES):
            return ""
        self._has_raw_text = True
        text, self._buffer = self._buffer, ""
        return text

    def _decide(self) -> str:
        value = self._buffer.lstrip(_SPACES)
        if not value:
            return ""
        if value[0] not in _CLOSERS:
            self._mode = _Mode.SCALAR
            return ""
        self._mode = _Mode.CONTAINER
        self._buffer = ""
        self._container = _ContainerCopy()
        return self._copy(value)

    def _copy(self, text: str) -> str:
        written = self._container.feed(text)
        self._copied.append(written)
        return written

    def _finish_scalar(self) -> str:
        text, self._buffer = self._buffer, ""
        value = text.strip(_SPACES)
        if _is_json(value):
            return value
        self.num_malformed += 1
        return json.dumps(text, ensure_ascii=False)


class _ContainerCopy:
    # Copies one JSON object or array and watches brackets and strings only, so that it stays one
    # value whatever is in it: control characters in strings are escaped, what follows the end is
    # dropped, what is open at the end is closed.

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._in_string = False
        self._is_escaped = False
        self._has_ended = False
        self._is_whole = True

    def feed(self, text: str) -> str:
        if self._has_ended:
            self._is_whole = self._is_whole and not text.strip(_SPACES)
            return ""
        if not text:
            return ""
        pieces: list[str] = []
        begin = 0
        escaped_at = 0 if self._is_escaped else -1
        self._is_escaped = False
        for match in _SPECIAL.finditer(text):
            at, char = match.start(), match.group()
            if at == escaped_at:
                # A control character has no place behind a backslash; its own escape has.
                replacement = json.dumps(char)[2:-1] if char < " " else None
            else:
                replacement = self._step(char)
                if self._in_string and char == "\\":
                    escaped_at = at + 1
            if replacement is not None:
                pieces.append(text[begin:at] + replacement)
                begin = at + 1
            if self._has_ended:
                self._is_whole = self._is_whole and not text[at + 1 :].strip(_SPACES)
                pieces.append(text[begin : at + 1])
                return "".join(pieces)
        self._is_escaped = escaped_at == len(text)
        pieces.append(text[begin:])
        return "".join(pieces)

    def finish(self) -> tuple[str, bool]:
        """Gives what closes the value, and whether it was whole without that."""
        closing = "\\" if self._is_escaped else ""
        closing += '"' if self._in_string else ""
        closing += "".join(reversed(self._closers))
        return closing, self._is_whole and self._has_ended

    def _step(self, char: str) -> str | None:
        # Returns what to write instead of a character, None for no change.
        if self._in_string:
            if char == '"':
                self._in_string = False
            return json.dumps(char)[1:-1] if char < " " else None
        if char == '"':
            self._in_string = True
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
        elif char in "}]" and char == self._closers[-1]:
            self._closers.pop()
            self._has_ended = not self._closers
        elif char not in _SPACES:
            self._is_whole = False
            return ""
        return None


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
