"""How tokens are chosen and when a request ends; the one place where these words are defined."""

from typing import Literal

from k3wire.messages.base import Message

FinishReason = Literal["stop", "length", "abort", "error"]
"""`abort` and `error` stay inside the fleet; the gateway never shows them as finish reasons."""


class SamplingParams(Message, frozen=True, kw_only=True, tag="sampling"):
    """Sampling of one request.

    The draw at output position p depends on (seed, p) alone, so another worker continues the
    same stream and batch neighbours change nothing.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass, (0, 1].
        top_k: 0 is off.
        min_p: 0 is off.
        seed: 64-bit; the gateway draws one when the client gives none.
        max_tokens: output tokens at most, ≥ 1.
        min_tokens: end tokens are not drawn before so many output tokens.
        stop_token_ids: ids that end the answer; they are emitted as the last token.
        ignores_end: true keeps generating past `stop_token_ids` (benchmarks).
        presence_penalty: subtracted once for each token already in the output.
        frequency_penalty: subtracted for each time a token is in the output.
        repetition_penalty: 1 is off.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignores_end: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
