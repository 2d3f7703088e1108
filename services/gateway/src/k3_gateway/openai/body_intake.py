"""A request's body on its way in: counted as it comes, in time or not at all.

Enters: what the server receives. Leaves: the whole body. Always true: no byte is held that does
not count against the gateway's budget; a client that stalls, or sends so little at a time that it
might as well, is told so and let go of; what was read of a body that failed is freed at once.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from k3_gateway.admission import Admission, BodyBudget
from k3_gateway.chat_request import bodies
from k3_gateway.chat_request.value_count import ValueCounter
from k3_gateway.openai.presence import Receive
from k3wire.errors import Cancelled, RequestTimeout

MIN_PROGRESS_BYTES = 16 * 1024
"""Less than this, and not the end, within the idle time-out is a stall: a byte now and then would
keep memory for as long as a body may take."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body must keep to.

    Attributes:
        max_bytes: longest.
        timeout_s: longest time for all of it.
        idle_timeout_s: longest time for the next `MIN_PROGRESS_BYTES` of it.
    """

    max_bytes: int
    timeout_s: float
    idle_timeout_s: float


async def read_body(
    receive: Receive, limits: BodyLimits, admission: Admission, budget: BodyBudget
) -> bytearray:
    """Reads a body; its bytes count against the budget as they come.

    Raises:
        RequestTimeout: it came too slowly, or gave way to others.
        RequestTooLarge: past the limit.
        InvalidJson: it has more values than a request may have.
        SlowDown: all bodies together are too many bytes.
        Cancelled: the client left.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits.idle_timeout_s) as timeout:
            pace = Pace(timeout, limits)
            with admission.arrival(pace.end):
                return await _collect(receive, limits.max_bytes, budget, pace)
    raise RequestTimeout("The body took too long to arrive; send it again, or a smaller one")


async def _collect(receive: Receive, max_bytes: int, budget: BodyBudget, pace: "Pace") -> bytearray:
    body, values = bytearray(), ValueCounter()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("The client left")
        chunk: bytes = message.get("body", b"")
        if len(body) + len(chunk) > max_bytes:
            raise bodies.too_large(max_bytes)
        budget.grow(len(chunk))
        values.feed(chunk)
        # Grown in place: to join the parts of a hundred megabytes would stop the loop for long.
        body += chunk
        if not message.get("more_body", False):
            return body
        pace.note(len(chunk))


class Pace:
    """How long a body may still take; all times are the event loop's."""

    def __init__(self, timeout: asyncio.Timeout, limits: BodyLimits) -> None:
        """Begins now.

        Args:
            timeout: entered; moved as bytes come.
            limits: that the body must keep to.
        """
        self._timeout = timeout
        self._idle_timeout_s = limits.idle_timeout_s
        self._end_s = asyncio.get_running_loop().time() + limits.timeout_s
        self._num_bytes = 0
        self._reschedule()

    def _reschedule(self) -> None:
        idle_end_s = asyncio.get_running_loop().time() + self._idle_timeout_s
        self._timeout.reschedule(min(self._end_s, idle_end_s))

    def note(self, num_bytes: int) -> None:
        """Counts what came; gives more time for enough of it."""
        self._num_bytes += num_bytes
        if self._num_bytes >= MIN_PROGRESS_BYTES:
            self._num_bytes = 0
            self._reschedule()

    def end(self) -> None:
        """Gives no more time."""
        self._end_s = 0.0
        # It may have ended by itself in the same turn of the loop.
        if not self._timeout.expired():
            self._timeout.reschedule(0.0)
