"""Everything of a chat request but its messages and tools: sampling, stop, streaming, switches.

Follows the permissive reading: what is harmless and unknown is ignored, what would change the
answer or reach inside the fleet is refused by name.
"""

import secrets

from k3_gateway.chat_request.fields import (
    JsonObject,
    as_list,
    as_object,
    as_string,
    read_bool,
    read_int,
    read_number,
    refuse,
)
from k3wire.errors import UnsupportedParameter
from k3wire.messages.base import Message
from k3wire.messages.sampling import SamplingParams

MAX_STOPS = 5
MAX_STOP_BYTES = 256
MAX_TOP_K = 1 << 20
SEED_BOUNDS = (-(1 << 63), (1 << 63) - 1)
MAX_TOKENS_BOUND = 1 << 31

REFUSED = (
    "audio",
    "chat_template",
    "ec_transfer_params",
    "function_call",
    "functions",
    "guided_choice",
    "guided_json",
    "guided_regex",
    "kv_transfer_params",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "priority",
    "prompt_embeds",
    "request_id",
    "structured_outputs",
    "web_search_options",
)
"""Fields that would change the answer or reach an internal channel, and are not served."""

REFUSED_VALUES: dict[str, tuple[object, ...]] = {
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "stop_token_ids": ([],),
    "top_logprobs": (0,),
    "n": (1,),
}
"""Fields of which only the named values are served; any other is refused, not ignored."""


class ChatOptions(Message, frozen=True, kw_only=True, tag="chat-options"):
    """Options of one chat request, validated.

    Attributes:
        model: as asked for.
        max_tokens: output tokens asked for, or None for what fits.
        is_stream: answer as server-sent events.
        has_usage_chunk: stream_options.include_usage.
        stops: stop strings, on visible text only.
        has_parallel_calls: more than one call in an answer is fine.
        sampling: all but `max_tokens` and `stop_token_ids`, which depend on prompt and model.
        cache_salt: isolates prefix reuse, "" shares.
    """

    model: str
    max_tokens: int | None
    is_stream: bool
    has_usage_chunk: bool
    stops: tuple[str, ...]
    has_parallel_calls: bool
    sampling: SamplingParams
    cache_salt: str


def parse_options(body: JsonObject) -> ChatOptions:
    """Reads and checks the options of a chat request.

    Raises:
        InvalidRequest: a value of the wrong type or out of range.
        UnsupportedParameter: a field that is refused.
    """
    _refuse_unsupported(body)
    if body.get("model") is None:
        refuse("model", "is required")
    is_stream = read_bool(body, "stream", False)
    return ChatOptions(
        model=as_string(body["model"], "model"),
        max_tokens=_read_max_tokens(body),
        is_stream=is_stream,
        has_usage_chunk=_read_stream_options(body, is_stream),
        stops=_read_stops(body),
        has_parallel_calls=read_bool(body, "parallel_tool_calls", True),
        sampling=_read_sampling(body),
        cache_salt=_read_salt(body),
    )


def _refuse_unsupported(body: JsonObject) -> None:
    for name in REFUSED:
        if body.get(name) is not None:
            raise UnsupportedParameter(f"'{name}' is not supported here; remove it", param=name)
    for name, served in REFUSED_VALUES.items():
        value = body.get(name)
        if value is not None and not any(value is one or value == one for one in served):
            raise UnsupportedParameter(f"'{name}' must be {served[0]!r} here", param=name)
    modalities = body.get("modalities")
    if modalities is not None and "text" not in as_list(modalities, "modalities"):
        raise UnsupportedParameter("'modalities' must contain \"text\"", param="modalities")


def _read_max_tokens(body: JsonObject) -> int | None:
    both = [
        read_int(body, name, None, 1, MAX_TOKENS_BOUND)
        for name in ("max_completion_tokens", "max_tokens")
    ]
    return both[0] if both[0] is not None else both[1]


def _read_stream_options(body: JsonObject, is_stream: bool) -> bool:
    value = body.get("stream_options")
    if value is None:
        return False
    if not is_stream:
        refuse("stream_options", "is only allowed with 'stream': true")
    options = as_object(value, "stream_options")
    return read_bool(options, "include_usage", False, path="stream_options.")


def _read_stops(body: JsonObject) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else as_list(value, "stop")
    stops = tuple(as_string(item, "stop") for item in items)
    if len(stops) > MAX_STOPS:
        refuse("stop", f"takes at most {MAX_STOPS} strings, not {len(stops)}")
    for stop in stops:
        if not stop or len(stop.encode()) > MAX_STOP_BYTES:
            refuse("stop", f"strings must have 1 to {MAX_STOP_BYTES} bytes")
    return stops


def _read_sampling(body: JsonObject) -> SamplingParams:
    top_k = read_int(body, "top_k", 0, -1, MAX_TOP_K) or 0
    seed = read_int(body, "seed", None, *SEED_BOUNDS)
    return SamplingParams(
        temperature=read_number(body, "temperature", 1.0, (0.0, 2.0)),
        top_p=read_number(body, "top_p", 0.95, (0.0, 1.0), excludes_low=True),
        top_k=max(top_k, 0),
        min_p=read_number(body, "min_p", 0.0, (0.0, 1.0)),
        seed=secrets.randbits(63) if seed is None else seed,
        max_tokens=1,
        min_tokens=read_int(body, "min_tokens", 0, 0, MAX_TOKENS_BOUND) or 0,
        ignores_end=read_bool(body, "ignore_eos", False),
        presence_penalty=read_number(body, "presence_penalty", 0.0, (-2.0, 2.0)),
        frequency_penalty=read_number(body, "frequency_penalty", 0.0, (-2.0, 2.0)),
        repetition_penalty=read_number(
            body, "repetition_penalty", 1.0, (0.0, 10.0), excludes_low=True
        ),
    )


def _read_salt(body: JsonObject) -> str:
    value = body.get("cache_salt")
    if value is None:
        return ""
    salt = as_string(value, "cache_salt")
    if not 0 < len(salt.encode()) <= 256:
        refuse("cache_salt", "must have 1 to 256 bytes")
    return salt
