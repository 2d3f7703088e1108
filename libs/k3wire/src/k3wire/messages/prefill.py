"""Gateway to prefill: one request, answered with an admission; results go to the stream."""

from k3wire.messages.base import Message
from k3wire.messages.prompt import PromptSource
from k3wire.messages.sampling import SamplingParams


class PrefillRequest(Message, frozen=True, kw_only=True, tag="prefill"):
    """One request for one prefill worker, idempotent by (request_id, attempt).

    Attributes:
        request_id: which.
        attempt: 0, then one more at each retry; stale attempts are dropped by the gateway.
        model_fingerprint: what the gateway believes the worker serves; another one refuses.
        prompt: what to read.
        num_emitted_tokens: trailing tokens of the prompt that are output of an earlier attempt;
            sampling continues at this output position.
        sampling: how to choose tokens and when to end.
        cache_salt: enters the prefix digest; equal salts share, "" is the common one.
        adapter: adapter name, enters the digest, "" for none.
        stream_subject: where `TokenFrame`s go.
        decode_worker_id: who continues after the first token.
        deadline_unix_ns: give up after this.
    """

    request_id: str
    attempt: int = 0
    model_fingerprint: str
    prompt: PromptSource
    num_emitted_tokens: int = 0
    sampling: SamplingParams
    cache_salt: str = ""
    adapter: str = ""
    stream_subject: str
    decode_worker_id: str
    deadline_unix_ns: int
