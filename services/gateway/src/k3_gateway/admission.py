"""How much the gateway takes on at once: requests, bodies on their way, and bytes of bodies.

Past a bound a request is told to slow down before anything is spent on it. A body that is still
coming in holds no request's place; its bytes count from the moment they are here.
"""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count

from k3wire.errors import ShuttingDown, SlowDown

RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Admission:
    """Counts of this process.

    Attributes:
        max_running: requests at once, and bodies on their way at once.
        max_bytes: bytes of bodies at once, those on their way among them.
        num_running: now.
        num_bytes: now.
        is_closed: draining; everything is refused.
    """

    max_running: int
    max_bytes: int
    num_running: int = 0
    num_bytes: int = 0
    is_closed: bool = False
    _arriving: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    _numbers: "count[int]" = field(default_factory=count)

    @property
    def num_arriving(self) -> int:
        """Bodies on their way now."""
        return len(self._arriving)

    def check(self) -> None:
        """Refuses a request whose body would be read in vain.

        Raises:
            SlowDown: all places are taken.
            ShuttingDown: the gateway drains.
        """
        if self.is_closed:
            raise ShuttingDown("The server is shutting down; send the request again")
        if self.num_running >= self.max_running:
            raise SlowDown(
                "Too many requests at once; try again later", retry_after_s=RETRY_AFTER_S
            )

    @contextlib.contextmanager
    def slot(self) -> Generator[None, None, None]:
        """Holds one request's place.

        Raises:
            SlowDown: all places are taken.
            ShuttingDown: the gateway drains.
        """
        self.check()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    @contextlib.contextmanager
    def arrival(self, give_way: Callable[[], None]) -> Generator[None, None, None]:
        """Counts a body on its way; with too many of them, the one that takes longest must go.

        So many slow clients as there may be keep nobody out, as they would if the newest went.

        Args:
            give_way: ends the reading of this body; called at most once, and not after the block.
        """
        if len(self._arriving) >= self.max_running:
            self._arriving.pop(next(iter(self._arriving)))()
        number = next(self._numbers)
        self._arriving[number] = give_way
        try:
            yield
        finally:
            self._arriving.pop(number, None)

    @contextlib.contextmanager
    def budget(self) -> Generator["BodyBudget", None, None]:
        """Holds bytes of one body, none at first."""
        held = BodyBudget(self)
        try:
            yield held
        finally:
            self.num_bytes -= held.size_bytes

    def check_room(self, size_bytes: int) -> None:
        """Refuses bytes for which there is no room now.

        Raises:
            SlowDown: too much is held already.
        """
        if self.num_bytes + size_bytes > self.max_bytes:
            raise SlowDown(
                "Too many large requests at once; try again later", retry_after_s=RETRY_AFTER_S
            )


@dataclass(slots=True)
class BodyBudget:
    """Bytes that one body holds.

    Attributes:
        admission: whose.
        size_bytes: so far.
    """

    admission: Admission
    size_bytes: int = 0

    def grow(self, size_bytes: int) -> None:
        """Holds more.

        Raises:
            SlowDown: too much is held already, by all bodies together.
        """
        self.admission.check_room(size_bytes)
        self.admission.num_bytes += size_bytes
        self.size_bytes += size_bytes
