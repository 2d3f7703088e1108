"""Calls to a stateless stage that may be restarting: nobody there is worth a short wait."""

import asyncio
import time
from typing import TypeVar

from k3wire.bus.base import Bus
from k3wire.errors import NoResponders, ShuttingDown, SlowDown
from k3wire.messages.base import Message
from k3wire.subjects import Call

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

PATIENCE_S = 10.0
"""How long an absent stage is waited for; a restart takes less."""

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
    while True:
        try:
            return await bus.call(subject, call, request, deadline_unix_ns)
        except (NoResponders, ShuttingDown, SlowDown):
            if time.time_ns() + int(pause_s * 1e9) >= give_up_ns:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
