"""Pictures that cannot be used, remembered for a while, so that a broken one costs its decoding once.

Only what the bytes themselves decide is remembered; a lost worker or a full queue is not.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from k3wire.errors import ImageError

KEEP_S = 300.0
"""How long a refusal is remembered; other limits come with a restart, which forgets all."""

MAX_REFUSALS = 4096
"""Remembered at once, about a megabyte; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    kind: type[ImageError]
    message: str
    until_s: float


class Refusals:
    """Errors by content key."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Starts empty; `now_s` is a clock that never goes back."""
        self._now_s = now_s
        self._found: OrderedDict[bytes, _Refusal] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def check(self, content_key: bytes) -> None:
        """Lets a picture pass that was not refused of late.

        Raises:
            ImageError: the leaf that it was refused with.
        """
        refusal = self._found.get(content_key)
        if refusal is None:
            return
        if refusal.until_s <= self._now_s():
            del self._found[content_key]
            return
        raise refusal.kind(refusal.message)

    def note(self, content_key: bytes, error: ImageError) -> None:
        """Remembers why a picture was refused."""
        self._found[content_key] = _Refusal(type(error), error.message, self._now_s() + KEEP_S)
        self._found.move_to_end(content_key)
        while len(self._found) > MAX_REFUSALS:
            self._found.popitem(last=False)
