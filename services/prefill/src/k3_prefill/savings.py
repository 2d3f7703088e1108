"""What tier L4 saved a prompt: the predicted cost of all of it less that of what was left."""

from collections.abc import Sequence

from k3core.engine.costs import StepCosts
from k3wire.messages.media import ImageSlot


def saved_ns(
    costs: StepCosts,
    unit_tokens: int,
    num_tokens: int,
    slots: Sequence[ImageSlot],
    num_cached: int,
) -> int:
    """Nanoseconds of the engine, as if it had nothing else to do; never more than the whole costs.

    Args:
        costs: of the worker that served the prompt.
        unit_tokens: of its engine.
        num_tokens: of the prompt.
        slots: its pictures, in their order.
        num_cached: leading tokens that were not computed.
    """

    def predict_s(start: int) -> float:
        # Text before the first picture that is needed does not wait for it: a step of its own.
        needed = (slot.offset for slot in slots if slot.offset + slot.num_tokens > start)
        stop = max(start, next(needed, start) // unit_tokens * unit_tokens)
        return costs.predict_s(start, stop) + costs.predict_s(stop, num_tokens)

    # The rest can take a step more than the whole: a picture at the very start splits nothing.
    return max(0, int(1e9 * (predict_s(0) - predict_s(num_cached))))
