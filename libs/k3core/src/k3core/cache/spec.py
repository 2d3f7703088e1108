"""What a prefix cache is told once, at start-up: sizes, positions to keep, order of eviction.

Letters: U tokens of a match unit, B tokens of the checkpoint grid, A alignment at which a
kernel can export a state inside a pass, G pages of one KDA state (one a group).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

ExportMode: TypeAlias = Literal["in_pass", "align", "partial"]
Promotion: TypeAlias = Literal["second_hit", "always", "never", "markers"]
Draft: TypeAlias = Literal["off", "drop", "no_drop", "successor", "replay"]
Codec: TypeAlias = Literal["raw", "int8"]
Eviction: TypeAlias = Literal["lru", "marconi"]
Memory: TypeAlias = Literal["flat", "two_pools", "two_ended_lazy", "two_ended_eager"]


class CacheError(ValueError):
    """A cache that was asked for something impossible; the message names the values."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Which positions of a prompt keep a checkpoint; a union of every rule that is on.

    Attributes:
        prompt_end: the last grid position and the last unit position of the prompt.
        unit_end: the last unit position only.
        dense: every grid position, in the prompt and while decoding.
        opportunistic: unit positions, thinned, while slots are free; evicted first.
        intervals: every multiple of these many tokens; each a multiple of the grid.
        decode_grid: while decoding, every multiple of so many tokens; 0 for none.
    """

    prompt_end: bool = True
    unit_end: bool = False
    dense: bool = False
    opportunistic: bool = False
    intervals: tuple[int, ...] = ()
    decode_grid: int = 0


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """One worker's cache. Validated by `check`.

    Attributes:
        unit_tokens: U.
        page_units: units in a page of MLA rows.
        num_pages: pages of the arena; in `two_pools`, those for MLA rows.
        num_slots: states that fit; read in `two_pools` only, where they have their own pool.
        state_groups: G, pages of one raw state.
        int8_groups: pages of one INT8 state.
        checkpoint_grid: B; 0 means a page's tokens.
        export_alignment: A.
        export_mode: how a state inside a chunk is obtained: exported inside the pass, or by
            ending a chunk on the grid (`align`), or on the grid and on the unit (`partial`).
        partial_hits: False lets only grid positions be stored and hit.
        draft: what a drafter costs a hit: nothing, or under `drop` the last matched unit, or under
            `replay` as much as leaves `replay_tokens` of the prompt to compute.
        replay_tokens: read under `replay` only; at least 1, what any prompt computes.
        is_drop_strict: under `drop`, a checkpoint is restored only if the unit after it is the
            one a writer of it went on with, not merely any that is known: the drafter's last
            slot was computed from that one.
        draft_tokens: most drafts that a decode step verifies; a window of them and the token before
            must not span more than the grid. 0 where that is not known.
        path_cap: checkpoints kept on a path, tails, forks and locks aside; -1 for no cap.
        page_bytes: size of a page, for byte counters and the host tier; 0 if not known.
        host_bytes: bound of the host-memory tier; 0 for none. Needs `page_bytes`, and a plan
            whose pages do not move.
    """

    unit_tokens: int = 128
    page_units: int = 12
    num_pages: int = 1024
    num_slots: int = 0
    state_groups: int = 1
    int8_groups: int = 1
    checkpoint_grid: int = 0
    export_alignment: int = 16
    export_mode: ExportMode = "in_pass"
    partial_hits: bool = True
    retention: Retention = Retention()
    promotion: Promotion = "second_hit"
    draft: Draft = "off"
    replay_tokens: int = 1
    is_drop_strict: bool = False
    draft_tokens: int = 0
    path_cap: int = -1
    codec: Codec = "raw"
    eviction: Eviction = "lru"
    memory: Memory = "flat"
    page_bytes: int = 0
    host_bytes: int = 0

    @property
    def page_tokens(self) -> int:
        """Tokens of one page of MLA rows."""
        return self.unit_tokens * self.page_units

    @property
    def grid(self) -> int:
        """B in tokens."""
        return self.checkpoint_grid or self.page_tokens

    def check(self) -> None:
        """Refuse sizes that do not fit together.

        Raises:
            CacheError: naming both values that disagree.
        """
        for name in ("unit_tokens", "page_units", "num_pages", "state_groups", "export_alignment"):
            if getattr(self, name) < 1:
                raise CacheError(f"{name} must be at least 1, not {getattr(self, name)}")
        unit, grid = self.unit_tokens, self.grid
        if grid % unit:
            raise CacheError(f"checkpoint_grid {grid} is not a multiple of unit {unit}")
        for interval in self.retention.intervals:
            if interval < 1 or interval % grid:
                raise CacheError(
                    f"retention interval {interval} is not a multiple of checkpoint_grid {grid}"
                )
        step = self.retention.decode_grid
        if step < 0 or step % unit:
            raise CacheError(f"decode_grid {step} is not a multiple of unit {unit}")
        if self.path_cap == 0 or self.path_cap < -1:
            raise CacheError(f"path_cap must be -1 or at least 1, not {self.path_cap}")
        if self.replay_tokens < 1:
            raise CacheError(f"replay_tokens must be at least 1, not {self.replay_tokens}")
        if self.draft_tokens and grid < self.draft_tokens + 1:
            raise CacheError(
                f"checkpoint_grid {grid} is less than the {self.draft_tokens + 1} tokens of a "
                f"window of {self.draft_tokens} drafts"
            )
        if self.host_bytes and (not self.page_bytes or self.memory.startswith("two_ended")):
            raise CacheError(
                f"host_bytes {self.host_bytes} needs page_bytes (is {self.page_bytes}) and "
                f"pages that stay in place (memory is {self.memory})"
            )
        if self.memory == "two_pools" and self.num_slots < 1:
            raise CacheError("two_pools needs num_slots of at least 1")
