"""Workers to gateway: tokens, one frame for each step and gateway, on the gateway's subject."""

from k3wire.errors import ErrorInfo
from k3wire.messages.base import Message, StageReport
from k3wire.messages.sampling import FinishReason


class TokenDelta(Message, frozen=True, kw_only=True, tag="delta"):
    """What one request got in one step.

    Attributes:
        request_id: whose.
        attempt: of which attempt; others are dropped.
        position: output position of the first token here; a gap means a lost frame.
        token_ids: new output tokens.
        finish_reason: set in the last delta.
        error: set, with `finish_reason` "error", if the request failed.
        reports: of the stages, in the delta that knows them.
        num_cached_tokens: prompt tokens not computed; with the first token, else None.
        logprobs: log-probability of each token, if asked for.
    """

    request_id: str
    attempt: int = 0
    position: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    reports: tuple[StageReport, ...] = ()
    num_cached_tokens: int | None = None
    logprobs: tuple[float, ...] = ()


class TokenFrame(Message, frozen=True, kw_only=True, tag="frame"):
    """All deltas of one step of one worker for one gateway.

    Attributes:
        worker_id: the sender.
        epoch: its start, fences off a predecessor.
        seq: rises by one with each frame to this gateway.
        deltas: at most one for each request.
    """

    worker_id: str
    epoch: int
    seq: int
    deltas: tuple[TokenDelta, ...]
