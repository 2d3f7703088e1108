"""How much the gateway takes on at once: requests, and bytes of their bodies.

Past either bound a request is told to slow down before anything is spent on it.
"""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

from k3wire.errors import ShuttingDown, SlowDown

RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Admission:
    """Counts of this process.

    Attributes:
        max_running: requests at once.
        max_bytes: bytes of bodies at once.
        num_running: now.
        num_bytes: now.
        is_closed: draining; everything is refused.
    """

    max_running: int
    max_bytes: int
    num_running: int = 0
    num_bytes: int = 0
    is_closed: bool = False

    @contextlib.contextmanager
    def slot(self) -> Generator[None, None, None]:
        """Holds one request's place.

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
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    @contextlib.contextmanager
    def budget(self, size_bytes: int) -> Generator[None, None, None]:
        """Holds bytes of one body.

        Raises:
            SlowDown: too much is held already.
        """
        if self.num_bytes + size_bytes > self.max_bytes:
            raise SlowDown(
                "Too many large requests at once; try again later", retry_after_s=RETRY_AFTER_S
            )
        self.num_bytes += size_bytes
        try:
            yield
        finally:
            self.num_bytes -= size_bytes
