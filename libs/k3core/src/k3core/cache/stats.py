"""Counters that make silent loss visible. All ascend; nothing in here decides anything."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheStats:
    """Totals of one cache since it was made.

    Attributes:
        queries: requests admitted for the first time; retries and resumptions are not counted.
        resumed_queries: lookups of preempted requests that were admitted again.
        prompt_tokens: of first admissions; always hit plus computed.
        matched_tokens: MLA coverage found.
        hit_tokens: tokens served.
        gap_tokens: matched minus hit, by reason.
        restores: checkpoints copied into live pages.
        host_restores: admissions that used rows or a state from host memory.
        takeovers: checkpoints that became live states because no slot was left for a copy.
        exports: checkpoints sealed, by class.
        donations: live states that became checkpoints without a copy.
        duplicates: units dropped because their digest was known.
        refused_states: checkpoints dropped because their digest was known.
        skipped_exports: exports given up for want of a slot.
        unwritten_exports: slots reserved that no kernel wrote.
        evicted_units: units evicted.
        evicted_states: checkpoints evicted, by class.
        rows_evicted_for_states: units evicted because a state needed their page.
        moved_pages: pages moved by compactions.
    """

    queries: int = 0
    resumed_queries: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    hit_tokens: int = 0
    gap_tokens: dict[str, int] = field(default_factory=dict[str, int])
    restores: int = 0
    host_restores: int = 0
    takeovers: int = 0
    exports: dict[str, int] = field(default_factory=dict[str, int])
    donations: int = 0
    duplicates: int = 0
    refused_states: int = 0
    skipped_exports: int = 0
    unwritten_exports: int = 0
    evicted_units: int = 0
    evicted_states: dict[str, int] = field(default_factory=dict[str, int])
    rows_evicted_for_states: int = 0
    moved_pages: int = 0


def count(counter: dict[str, int], key: str, amount: int = 1) -> None:
    """Add to one entry of a counter by name."""
    counter[key] = counter.get(key, 0) + amount
