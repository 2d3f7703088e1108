"""Calls to a stateless stage that may be restarting: nobody there is worth a short wait."""

import asyncio
import time
from dataclasses import dataclass
from typing import TypeVar

from k3wire.bus.base import Bus, Subscription
from k3wire.errors import DeadlineExceeded, NoResponders, ShuttingDown, SlowDown
from k3wire.messages.base import Message, Stage
from k3wire.service.directory import Directory
from k3wire.subjects import Call

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

PATIENCE_S = 10.0
"""How long an absent stage is waited for; a restart takes less."""

FIRST_ATTEMPT_S = 15.0
"""How long the first call is waited for; each later one twice as long as the one before, so that
work of any length ends within one of them. Only for messages that were lost: a worker that is lost
is known of within a second."""

FIRST_PAUSE_S = 0.02
LAST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Peers:
    """The workers that may take a shared call.

    Attributes:
        directory: that follows them, or will.
        role: theirs.
    """

    directory: Directory
    role: Stage

    async def follow(self, bus: Bus) -> Subscription:
        """Begins to follow them, where the directory follows nobody yet."""
        return await self.directory.follow(bus, self.role)


async def call_patiently(
    bus: Bus,
    subject: str,
    call: Call[Q, R],
    request: Q,
    deadline_unix_ns: int,
    peers: Peers | None = None,
) -> R:
    """Calls, and tries again with growing pauses while nobody listens or all are full.

    The handler must be idempotent by request id: a worker that died may have begun, and one that
    works on it may be asked again because another one left.

    Args:
        bus: to call on.
        subject: of the call.
        call: which.
        request: what is asked.
        deadline_unix_ns: when it is given up.
        peers: whose loss ends a wait; who took the call is not known.

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
            if peers is None:
                return await bus.call(subject, call, request, attempt_ns)
            reply = await _call_among(peers, bus, subject, call, request, attempt_ns)
            if reply is not None:
                return reply
            # Whoever comes in its place is waited for as long as at first.
            give_up_ns = min(deadline_unix_ns, time.time_ns() + int(PATIENCE_S * 1e9))
            pause_s = FIRST_PAUSE_S
        except DeadlineExceeded:
            # The call or its answer was lost on the way.
            if attempt_ns >= deadline_unix_ns:
                raise
            attempt_s *= 2
        except (NoResponders, ShuttingDown, SlowDown):
            if time.time_ns() + int(pause_s * 1e9) >= give_up_ns:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


async def _call_among(
    peers: Peers, bus: Bus, subject: str, call: Call[Q, R], request: Q, attempt_ns: int
) -> R | None:
    """Calls; None if a worker left that may have been at it."""
    try:
        # A time-out without a time: it ends when somebody leaves.
        async with asyncio.timeout(None) as alive:

            def end() -> None:
                # Two may leave before the wait has ended.
                if not alive.expired():
                    alive.reschedule(0.0)

            with peers.directory.watch(peers.role, end):
                return await bus.call(subject, call, request, attempt_ns)
    except TimeoutError:
        return None
