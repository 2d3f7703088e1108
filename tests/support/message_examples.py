"""One example of every message, with every field set to something that is not its default."""

from typing import Any

from k3wire.errors import ErrorInfo
from k3wire.messages.base import (
    Admitted,
    BlobRef,
    BufferSpan,
    Message,
    PieceReply,
    PieceRequest,
    StageReport,
)
from k3wire.messages.control import Cancel, Heartbeat, WorkerLoad
from k3wire.messages.decode import CommitRequest, ReserveReply, ReserveRequest
from k3wire.messages.encode import EncodedItem, EncodeItem, EncodeReply, EncodeRequest
from k3wire.messages.fetch import ReadReply, ReadRequest, ResolveReply, ResolveRequest
from k3wire.messages.media import ImageRef, ImageSlot
from k3wire.messages.pages import PageGrant, PageLayoutInfo
from k3wire.messages.prefill import PrefillRequest
from k3wire.messages.preprocess import PreprocessReply, PreprocessRequest
from k3wire.messages.prompt import PromptPayload, PromptSource
from k3wire.messages.sampling import SamplingParams
from k3wire.messages.stream import TokenDelta, TokenFrame

DIGEST = bytes(range(32))
UNTIL_NS = 1_790_000_000_123_456_789

REPORT = StageReport(
    stage="encoder", tier="L3", outcome="partial", worker_id="encoder-1", start_unix_ns=UNTIL_NS,
    duration_ns=1_234_567, wait_ns=89, saved_ns=7_654_321, size_bytes=4096, num_items=3,
    num_hits=2, detail="shared",
)  # fmt: skip
BLOB = BlobRef(
    digest=DIGEST, size_bytes=70_000, store_key="l1:bytes:00", holder="k3.worker.g.piece"
)
SPAN = BufferSpan(session="127.0.0.1:17000", address=0x7F00_0000_1000, size_bytes=65_536)
IMAGE = ImageRef(
    content_key=DIGEST, media_type="image/png", width=640, height=480, size_bytes=12_345,
    url="https://a.example/b.png", holder="k3.worker.g.piece", tenant="t",
)  # fmt: skip
SLOT = ImageSlot(
    image=IMAGE, feature_key=DIGEST[::-1], offset=17, num_tokens=391, grid_thw=(1, 36, 46),
    param="messages[0].content[1].image_url",
)  # fmt: skip
SAMPLING = SamplingParams(
    temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, seed=-(2**62), max_tokens=128, min_tokens=2,
    stop_token_ids=(163586, 163585), ignores_end=True, presence_penalty=0.25,
    frequency_penalty=-0.25, repetition_penalty=1.125,
)  # fmt: skip
PROMPT = PromptPayload(token_ids=b"\1\0\0\0\2\0\0\0", image_slots=(SLOT,), mark_offsets=(1, 2))
LAYOUT = PageLayoutInfo(
    model_fingerprint="sha256:abc", layout_version=1, partition="tp0of1", page_bytes=1 << 20,
    page_units=12, unit_tokens=128, num_state_groups=2,
)  # fmt: skip
GRANT = PageGrant(
    session="127.0.0.1:17001", base_address=0x7F00_0000_0000, latent_units=b"\5\0\0\0",
    state_pages=b"\6\0\0\0\7\0\0\0", num_resident_tokens=256,
)  # fmt: skip
LOAD = WorkerLoad(
    num_running=1, num_waiting=2, num_queued_tokens=3, num_free_pages=4, num_pages=5,
    tokens_per_s=6.5, active_by_gateway={"gateway-1": 7}, rss_bytes=8,
)  # fmt: skip
DELTA = TokenDelta(
    request_id="req-1", attempt=1, position=2, token_ids=(3, 163_839), finish_reason="error",
    error=ErrorInfo(code="worker_lost", message="gone", param="p", retry_after_s=1.5),
    reports=(REPORT,), num_cached_tokens=128, logprobs=(-0.5, -1.25),
)  # fmt: skip

EXAMPLES: tuple[Message, ...] = (
    REPORT,
    BLOB,
    SPAN,
    IMAGE,
    SLOT,
    SAMPLING,
    PROMPT,
    LAYOUT,
    GRANT,
    LOAD,
    DELTA,
    PieceRequest(digest=DIGEST, offset=49_152, size_bytes=49_152, deadline_unix_ns=UNTIL_NS),
    PieceReply(data=b"piece"),
    Admitted(worker_id="prefill-1", epoch=UNTIL_NS),
    Cancel(request_id="req-1", attempt=2),
    Heartbeat(
        role="decode", worker_id="decode-1", epoch=1, seq=2, sent_unix_ns=UNTIL_NS, pid=3,
        host="node", is_ready=True, is_draining=True, reason="draining",
        model_fingerprint="sha256:abc", endpoint="http://127.0.0.1:1", load=LOAD,
    ),
    ResolveRequest(
        request_id="req-1", url="https://a.example/b.png", tenant="t", param="messages[0]",
        deadline_unix_ns=UNTIL_NS,
    ),
    ResolveReply(image=IMAGE, report=REPORT),
    ReadRequest(request_id="req-1", image=IMAGE, deadline_unix_ns=UNTIL_NS),
    ReadReply(blob=BLOB, report=REPORT),
    PreprocessRequest(
        request_id="req-1", slot=SLOT, processor_version="1", destination=SPAN,
        deadline_unix_ns=UNTIL_NS,
    ),
    PreprocessReply(grid_thw=(1, 36, 46), size_bytes=9, checksum=2**32 - 1, reports=(REPORT,)),
    EncodeItem(slot=SLOT, destination=SPAN),
    EncodeRequest(
        request_id="req-1", items=(EncodeItem(slot=SLOT, destination=SPAN),), dtype="bfloat16",
        weights_fingerprint="sha256:abc", deadline_unix_ns=UNTIL_NS,
    ),
    EncodedItem(feature_key=DIGEST, size_bytes=10, checksum=11),
    EncodeReply(
        items=(EncodedItem(feature_key=DIGEST, size_bytes=10, checksum=11),), reports=(REPORT,)
    ),
    PromptSource(inline=PROMPT, blob=BLOB),
    PrefillRequest(
        request_id="req-1", attempt=1, model_fingerprint="sha256:abc",
        prompt=PromptSource(blob=BLOB), num_emitted_tokens=5, sampling=SAMPLING, cache_salt="s",
        adapter="a", stream_subject="k3.gateway.g.tokens", decode_worker_id="decode-1",
        deadline_unix_ns=UNTIL_NS,
    ),
    ReserveRequest(
        request_id="req-1", attempt=1, prefill_worker_id="prefill-1", num_prompt_tokens=300,
        prompt=PromptSource(inline=PROMPT), sampling=SAMPLING, num_emitted_tokens=5, cache_salt="s",
        adapter="a", layout=LAYOUT, stream_subject="k3.gateway.g.tokens", deadline_unix_ns=UNTIL_NS,
    ),
    ReserveReply(grant=GRANT),
    CommitRequest(
        request_id="req-1", attempt=1, num_tokens=300, first_token_id=42, checksum=7, report=REPORT,
        deadline_unix_ns=UNTIL_NS,
    ),
    TokenFrame(worker_id="decode-1", epoch=1, seq=2, deltas=(DELTA,)),
)  # fmt: skip


def all_messages() -> set[type[Message]]:
    """Every class of message that the table of subjects reaches."""
    found: list[Any] = [Message]
    for kind in found:
        found.extend(kind.__subclasses__())
    return set(found[1:])
