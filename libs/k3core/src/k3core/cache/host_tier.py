"""The tier behind the arena: what was evicted stays in host memory while that has room.

Bookkeeping only. An evicted unit or checkpoint is offered; if it is taken, a copy out of the
arena is owed (`drain_spills`) before the next step writes anything. A match may run on into
this tier; what it uses is pinned and copied back by the step that restores it. What must always
hold: used bytes stay within the bound; what is pinned is not dropped.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, TypeAlias

from k3core.cache.spec import CacheConfig

Kind: TypeAlias = Literal["unit", "state"]


@dataclass(slots=True, eq=False)
class HostEntry:
    """One unit's rows, or one checkpoint, in host memory.

    Attributes:
        host: names its bytes; never used twice.
        position: tokens of the prefix it ends.
        pins: steps that are copying it back.
    """

    kind: Kind
    digest: bytes
    host: int
    position: int
    size_bytes: int
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Spill:
    """A copy that is owed: from where an evicted thing lay to host memory.

    Attributes:
        host: destination.
        unit: unit id as the tensors know it, -1 for a state.
        pages: pages of a state, as the tensors know them; () for a unit.
    """

    host: int
    unit: int = -1
    pages: tuple[int, ...] = ()


class HostTier:
    """Least recently used units and checkpoints are dropped first.

    Args:
        capacity_bytes: bound.
        unit_bytes: of a unit's rows.
        state_bytes: of a stored checkpoint.
        is_remote: filled by others, not by what this arena evicts; what comes from it counts
            as remote.
    """

    def __init__(
        self, capacity_bytes: int, unit_bytes: int, state_bytes: int, is_remote: bool = False
    ) -> None:
        self.is_remote = is_remote
        self._capacity = capacity_bytes
        self._size = {"unit": unit_bytes, "state": state_bytes}
        self._order: OrderedDict[tuple[Kind, bytes], HostEntry] = OrderedDict()
        self._next = 0
        self._spills: list[Spill] = []
        self._drops: list[int] = []
        self.used_bytes = 0
        self.units: dict[bytes, HostEntry] = {}
        self.states: dict[bytes, HostEntry] = {}

    def offer_unit(self, digest: bytes, position: int, unit: int) -> bool:
        """An indexed unit is being evicted; False if it is not kept."""
        if self.is_remote:
            return False
        entry = self.admit("unit", digest, position)
        if entry is not None:
            self._spills.append(Spill(entry.host, unit=unit))
        return digest in self.units

    def offer_state(self, digest: bytes, position: int, pages: tuple[int, ...]) -> bool:
        """A sealed checkpoint is being evicted; False if it is not kept."""
        if self.is_remote:
            return False
        entry = self.admit("state", digest, position)
        if entry is not None:
            self._spills.append(Spill(entry.host, pages=pages))
        return digest in self.states

    def pin(self, entries: list[HostEntry]) -> None:
        """Keep entries while a step copies them back."""
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: list[HostEntry]) -> None:
        """The copies were executed; the entries were used just now."""
        for entry in entries:
            entry.pins -= 1
            key = (entry.kind, entry.digest)
            if key in self._order:
                self._order.move_to_end(key)

    def drain_spills(self) -> list[Spill]:
        """Copies owed since the last call, to be executed before anything is written."""
        spills, self._spills = self._spills, []
        return spills

    def drain_drops(self) -> list[int]:
        """Host bytes that may be freed after those copies, since the last call."""
        drops, self._drops = self._drops, []
        return drops

    def lose(self, entries: list[HostEntry]) -> None:
        """Entries turned out to be unreadable: they are not offered again."""
        for entry in entries:
            # Another may have been put in its place meanwhile.
            if self._order.get((entry.kind, entry.digest)) is entry:
                self._drop(entry)

    def clear(self) -> None:
        """Forget everything that is not pinned."""
        for entry in list(self._order.values()):
            if not entry.pins:
                self._drop(entry)

    def admit(self, kind: Kind, digest: bytes, position: int) -> HostEntry | None:
        """Make room for an entry and name it; None if it is known or there is no room."""
        table = self.units if kind == "unit" else self.states
        if digest in table:
            self._order.move_to_end((kind, digest))
            return None
        size = self._size[kind]
        while self.used_bytes + size > self._capacity:
            victim = next((each for each in self._order.values() if not each.pins), None)
            if victim is None:
                return None
            self._drop(victim)
        self._next += 1
        entry = HostEntry(kind, digest, self._next, position, size)
        self._order[kind, digest] = table[digest] = entry
        self.used_bytes += size
        return entry

    def _drop(self, entry: HostEntry) -> None:
        del self._order[entry.kind, entry.digest]
        del (self.units if entry.kind == "unit" else self.states)[entry.digest]
        self.used_bytes -= entry.size_bytes
        # One that was offered and dropped within a step owes no copy any more.
        owed = [spill for spill in self._spills if spill.host != entry.host]
        if len(owed) == len(self._spills):
            self._drops.append(entry.host)
        self._spills = owed


def make_tier(config: CacheConfig) -> HostTier:
    """The tier that a configuration asks for, in its own page sizes."""
    pages = config.int8_groups if config.codec == "int8" else config.state_groups
    unit_bytes = max(1, config.page_bytes // config.page_units)
    return HostTier(config.host_bytes, unit_bytes, pages * config.page_bytes)
