"""How many values a JSON text holds, counted while it comes in, before any of them is made.

A byte of text can become a list of sixty: a body of a hundred megabytes of brackets would take
gigabytes and seconds in which nothing else runs. Every value but the first follows a bracket, a
comma or a colon outside of strings, so these are counted, at the speed of a copy.
"""

from dataclasses import dataclass

from k3wire.errors import InvalidJson

MAX_VALUES = 300_000
"""Brackets, commas and colons outside of strings; the most messages with tools have half of it."""

_MARKS = (b",", b":", b"[", b"{")


@dataclass(slots=True)
class ValueCounter:
    """Counts over chunks of one text, wherever it is cut.

    Attributes:
        max_values: that may come.
        num_values: so far.
    """

    max_values: int = MAX_VALUES
    num_values: int = 0
    _is_in_string: bool = False
    _is_escaped: bool = False

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes of the text, which need not be JSON.

        Raises:
            InvalidJson: there are more values than may be.
        """
        if self._is_escaped and chunk:
            chunk = chunk[1:]
            self._is_escaped = False
        if b"\\" in chunk:
            # First the escaped backslashes, in pairs from the left; then none escapes another.
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._is_escaped = chunk.endswith(b"\\")
        if self._is_in_string and b'"' not in chunk:
            return
        parts = chunk.split(b'"')
        outside = b"".join(parts[1::2] if self._is_in_string else parts[::2])
        if len(parts) % 2 == 0:
            self._is_in_string = not self._is_in_string
        self.num_values += sum(map(outside.count, _MARKS))
        if self.num_values > self.max_values:
            raise InvalidJson(f"The body has more than {self.max_values} values; send fewer")
