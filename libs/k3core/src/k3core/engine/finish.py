"""When an answer ends: one rule for every engine and worker."""

from collections.abc import Sequence

from k3wire.messages.sampling import FinishReason, SamplingParams


def finish_reason(
    sampling: SamplingParams, num_output_tokens: int, new_tokens: Sequence[int]
) -> FinishReason | None:
    """Says whether an answer ends with the tokens it just got.

    Args:
        sampling: the request's parameters.
        num_output_tokens: output tokens with the new ones, earlier attempts' included.
        new_tokens: at least one.

    Returns:
        `stop` on an end token, which wins over `length` at the limit, or None to go on.
    """
    if not sampling.ignores_end and new_tokens[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if num_output_tokens >= sampling.max_tokens else None
