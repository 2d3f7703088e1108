"""What becomes of the slots that a row reserved for its checkpoints."""

from k3core.cache.coordinator import PrefixCache
from k3core.cache.positions import StateClass
from k3core.scheduler.entry import Entry


def seal_exports(cache: PrefixCache, entry: Entry, written: set[int]) -> None:
    """Seal what was written and stands; free the other slots."""
    sequence = entry.sequence
    for export, packed in entry.exports:
        position = export.position
        if position not in written or position > sequence.num_computed:
            cache.cancel_export(export.pages)
            if packed:
                cache.cancel_export(packed)
            continue
        reason = sequence.targets.get(position, StateClass.GRID)
        cache.seal(sequence, position, packed or export.pages, reason)
        if packed:
            cache.states.free(export.pages)
    entry.exports = []


def cancel_exports(cache: PrefixCache, entry: Entry) -> None:
    """Free the slots of a row that did not run, or no longer counts."""
    for export, packed in entry.exports:
        cache.cancel_export(export.pages)
        if packed:
            cache.cancel_export(packed)
    entry.exports = []
