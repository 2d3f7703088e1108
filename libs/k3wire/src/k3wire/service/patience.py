"""Calls to a stateless stage that may be restarting: nobody there is worth a short wait."""

import asyncio
import time
from typing import TypeVar

from k3wire.bus.base import Bus
from k3wire.errors import DeadlineExceeded, NoResponders, ShuttingDown, SlowDown
from k3wire.messages.base import Message
from k3wire.subjects import Call

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

PATIENCE_S = 10.0
"""How long an absent stage is waited for; a restart takes less."""

FIRST_ATTEMPT_S = 15.0
"""How long the first call is waited for; each later one twice as long as the one before, so that
work of any length ends within one of them."""

FIRST_PAUSE_S = 0.02
LAST_PAUSE_S = 0.5


async def call_patiently(
    bus: Bus, subject: str, call: Call[Q, R], request: Q, deadline_unix_ns: int
) -> R:
    """Calls, and tries again with growing pauses while nobody listens or all are full.

    The handler must be idempotent by request id: a worker that died may have begun.

    Raises:
        NoResponders: nobody came within `PATIENCE_S` or the deadline.
        K3Error: as `Bus.call`.
    """
    give_up_ns = min(deadline_unix_ns, time.time_ns() + int(PATIENCE_S * 1e9))
    pause_s = FIRST_PAUSE_S
    attempt_s = FIRST_ATTEMPT_S
    while True:
        attempt_ns = min(deadline_unix_ns, time.time_ns() + int(attempt_s * 1e9))
        try:
            return await bus.call(subject, call, request, attempt_ns)
        except DeadlineExceeded:
            # A worker that was killed while the call was on its way never answers.
            if attempt_ns >= deadline_unix_ns:
                raise
            attempt_s *= 2
        except (NoResponders, ShuttingDown, SlowDown):
            if time.time_ns() + int(pause_s * 1e9) >= give_up_ns:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
