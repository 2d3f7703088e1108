"""Prefill to decode: reserve pages, then hand the request over once they are filled."""

from k3wire.messages.base import Message, StageReport
from k3wire.messages.pages import PageGrant, PageLayoutInfo
from k3wire.messages.prompt import PromptSource
from k3wire.messages.sampling import SamplingParams


class ReserveRequest(Message, frozen=True, kw_only=True, tag="reserve"):
    """Asks a decode worker for room: the prompt's pages now, the output's by admission.

    Attributes:
        request_id: which.
        attempt: fences off an earlier attempt's late messages.
        prefill_worker_id: whose death frees the reservation.
        num_prompt_tokens: length of the prompt, pads included.
        prompt: the prompt, for the decode worker's own prefix index.
        sampling: how to go on.
        num_emitted_tokens: output position at which decode starts, less the first token.
        cache_salt: enters the digests.
        adapter: enters the digests.
        layout: the sender's layout.
        stream_subject: where tokens go.
        deadline_unix_ns: the reservation is dropped after this.
    """

    request_id: str
    attempt: int = 0
    prefill_worker_id: str
    num_prompt_tokens: int
    prompt: PromptSource
    sampling: SamplingParams
    num_emitted_tokens: int = 0
    cache_salt: str = ""
    adapter: str = ""
    layout: PageLayoutInfo
    stream_subject: str
    deadline_unix_ns: int


class ReserveReply(Message, frozen=True, kw_only=True, tag="reserve-reply"):
    """Where to push the pages."""

    grant: PageGrant


class CommitRequest(Message, frozen=True, kw_only=True, tag="commit"):
    """Every page is in place; decode may run the request from here.

    Attributes:
        request_id: which.
        attempt: as reserved.
        num_tokens: prompt tokens that the pages and the state cover.
        first_token_id: sampled by prefill and already sent to the gateway.
        checksum: `zlib.crc32` over the state pages, checked before the request runs.
        report: prefill's own report of the transfer.
        deadline_unix_ns: of the request.
    """

    request_id: str
    attempt: int = 0
    num_tokens: int
    first_token_id: int
    checksum: int
    report: StageReport | None = None
    deadline_unix_ns: int
