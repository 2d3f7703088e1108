"""Who is there: the table of workers, from their heartbeats.

A worker is in the table from its first beat until it says that it stops or is not heard of for
`HEARTBEAT_STALE_S`. A beat of an older epoch or with an older number is ignored. A worker that a
caller found dead is left out until it beats again from a later moment. A reader that stood still
itself (a long garbage collection, a crowded machine) does not take its own silence for theirs; nor
does one that beats, and misses its own beats too, take the bus's.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from k3wire import subjects
from k3wire.bus.base import Bus, Subscription
from k3wire.messages.base import Stage
from k3wire.messages.control import HEARTBEAT_STALE_S, Heartbeat

MAX_DEPARTED = 1024
TICK_S = 0.1
MAX_STALL_S = 0.25
"""A tick that comes later than this was held up by us: beats wait unread for as long."""

QUIET_S = 0.5
"""Our own beats come back within this while the bus works."""

BUS_PATIENCE_S = 15.0
"""How long a bus that is away is waited for before everybody counts as lost: about as long as its
client takes to see it, and to find it again."""


@dataclass(slots=True)
class _Entry:
    beat: Heartbeat
    heard_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Watch:
    role: Stage
    tell: Callable[[], None]


@dataclass(slots=True)
class Directory:
    """The table; times are the event loop's.

    Attributes:
        on_departure: called with the worker's last beat when one leaves or falls silent; set by
            whoever cares.
        own_id: of the worker that reads the table, whose beats tell whether the bus works; "" for
            a reader that does not beat, which trusts the bus.
    """

    on_departure: Callable[[Heartbeat], None] | None = None
    own_id: str = ""
    _entries: dict[str, _Entry] = field(default_factory=dict[str, _Entry])
    _suspects: dict[str, float] = field(default_factory=dict[str, float])
    _change: asyncio.Event = field(default_factory=asyncio.Event)
    _watches: "set[_Watch]" = field(default_factory=set["_Watch"])
    _timer: asyncio.TimerHandle | None = None
    _due_s: float = float("inf")

    async def follow(self, bus: Bus, role: Stage | None = None) -> Subscription:
        """Begins to listen to one role or to all, and to sweep ten times a second."""
        subject = subjects.heartbeat(role, "*") if role else subjects.heartbeats()
        inner = await bus.listen(subject, Heartbeat, self.take)
        self._tick()
        return _Following(self, inner)

    def _tick(self) -> None:
        self.sweep()
        self._due_s = time.monotonic() + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def halt(self) -> None:
        """Ends the sweeping; draining what `follow` gave does it."""
        self._due_s = float("inf")
        if self._timer is not None:
            self._timer.cancel()

    def _forgive_stall(self) -> None:
        stall_s = time.monotonic() - self._due_s
        if stall_s > MAX_STALL_S:
            self._due_s += stall_s
            for entry in self._entries.values():
                entry.heard_s += stall_s

    def _is_bus_away(self) -> bool:
        own = self._entries.get(self.own_id)
        return own is not None and QUIET_S < time.monotonic() - own.heard_s < BUS_PATIENCE_S

    def take(self, beat: Heartbeat) -> None:
        """Takes one beat."""
        entry = self._entries.get(beat.worker_id)
        if entry is not None and (beat.epoch, beat.seq) <= (entry.beat.epoch, entry.beat.seq):
            return
        suspected_s = self._suspects.get(beat.worker_id)
        if suspected_s is not None and beat.sent_unix_ns / 1e9 > suspected_s:
            del self._suspects[beat.worker_id]
        if beat.worker_id == self.own_id and self._is_bus_away():
            # What the others sent meanwhile is still on its way.
            for each in self._entries.values():
                each.heard_s = time.monotonic()
        was_ready = entry is not None and _is_open(entry.beat)
        self._entries[beat.worker_id] = _Entry(beat, time.monotonic())
        if _is_open(beat) != was_ready or suspected_s is not None:
            self._change.set()
            self._change = asyncio.Event()

    def suspect(self, worker_id: str) -> None:
        """Leaves a worker out until it beats again; for whoever got no answer from it."""
        self._suspects[worker_id] = time.time()
        if len(self._suspects) > MAX_DEPARTED:
            self._suspects.pop(next(iter(self._suspects)))

    def sweep(self) -> None:
        """Drops workers that fell silent; cheap, and done by every question anyway."""
        self._forgive_stall()
        if self._is_bus_away():
            return
        limit_s = time.monotonic() - HEARTBEAT_STALE_S
        for worker_id, entry in list(self._entries.items()):
            if entry.heard_s < limit_s:
                del self._entries[worker_id]
                if self.on_departure is not None:
                    self.on_departure(entry.beat)
                for watch in list(self._watches):
                    if watch.role == entry.beat.role:
                        watch.tell()

    @contextlib.contextmanager
    def watch(self, role: Stage, tell: Callable[[], None]) -> Generator[None, None, None]:
        """Tells, within the block, of each worker of a role that leaves; `tell` must not block."""
        watch = _Watch(role, tell)
        self._watches.add(watch)
        try:
            yield
        finally:
            self._watches.discard(watch)

    def ready(self, role: Stage) -> list[Heartbeat]:
        """Workers of a role that can be given work now, in order of their ids."""
        self.sweep()
        return sorted(
            (
                entry.beat
                for entry in self._entries.values()
                if entry.beat.role == role
                and _is_open(entry.beat)
                and entry.beat.worker_id not in self._suspects
            ),
            key=lambda beat: beat.worker_id,
        )

    def all(self) -> list[Heartbeat]:
        """Every worker heard of lately, ready or not."""
        self.sweep()
        return [entry.beat for entry in self._entries.values()]

    def is_alive(self, worker_id: str) -> bool:
        """Whether a worker is in the table and not suspected."""
        self.sweep()
        return worker_id in self._entries and worker_id not in self._suspects

    async def wait_for(self, role: Stage, deadline_s: float) -> list[Heartbeat]:
        """Waits until a worker of the role is ready.

        Args:
            role: which.
            deadline_s: event-loop time at which to give up.

        Returns:
            the ready workers; none if the wait was in vain.
        """
        while True:
            found = self.ready(role)
            if found:
                return found
            change = self._change
            try:
                async with asyncio.timeout_at(deadline_s):
                    await change.wait()
            except TimeoutError:
                return self.ready(role)


@dataclass(slots=True)
class _Following:
    directory: Directory
    inner: Subscription

    async def drain(self) -> None:
        self.directory.halt()
        await self.inner.drain()


def _is_open(beat: Heartbeat) -> bool:
    return beat.is_ready and not beat.is_draining
