"""What every message shares: its form, byte references, buffer spans and stage reports.

A message is a frozen, tagged, keyword-only msgspec struct in msgpack map form. Fields are only
ever added, with a default; a field's meaning never changes and a removed name is not reused. A
message is at most `MAX_MESSAGE_BYTES` long; anything longer travels as a `BlobRef` or through
the data plane. Deadlines are absolute wall-clock nanoseconds, so that a message which waited in
a broker is recognised as late.
"""

from typing import Literal

import msgspec

MAX_MESSAGE_BYTES = 64 * 1024
"""Longest encoded message on the bus, headers excluded."""

PIECE_BYTES = 48 * 1024
"""Longest piece of a blob served over the bus; leaves room for the message around it."""

Stage = Literal["gateway", "fetcher", "preprocessor", "encoder", "prefill", "decode"]
Tier = Literal["L1", "L2", "L3", "L4", "none"]
Outcome = Literal["hit", "partial", "miss", "bypass"]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages; subclasses give a `tag`."""


class StageReport(Message, frozen=True, kw_only=True, tag="report"):
    """What one stage did for one request; the gateway adds these up to the TTFT ledger.

    Attributes:
        stage: who reports.
        tier: the cache tier it asked first, or `none`.
        outcome: `hit`: answered from the tier; `partial`: some of it; `miss`: computed;
            `bypass`: the tier was not asked (off, or unreachable).
        worker_id: who did it.
        start_unix_ns: when the stage began, wall clock.
        duration_ns: time spent in the stage itself, waiting for deeper stages excluded.
        wait_ns: time spent waiting in its queue.
        saved_ns: measured cost of the work that the hit skipped; 0 on a miss.
        size_bytes: bytes moved or read.
        num_items: images, or tokens, that the report covers.
        num_hits: how many of them came from the tier.
        detail: where a hit came from or why it was missed: `local`, `shared`, `evicted`, …
    """

    stage: Stage
    tier: Tier = "none"
    outcome: Outcome
    worker_id: str
    start_unix_ns: int
    duration_ns: int
    wait_ns: int = 0
    saved_ns: int = 0
    size_bytes: int = 0
    num_items: int = 1
    num_hits: int = 0
    detail: str = ""


class BlobRef(Message, frozen=True, kw_only=True, tag="blob"):
    """Bytes named by their digest, and where to ask for them.

    Attributes:
        digest: SHA-256 of the bytes, 32 bytes; the reader checks it.
        size_bytes: their length.
        store_key: key in the shared blob store, or "" if they were not put there.
        holder: subject that serves `PieceRequest` for them, or "" if nobody does.
    """

    digest: bytes
    size_bytes: int
    store_key: str = ""
    holder: str = ""


class PieceRequest(Message, frozen=True, kw_only=True, tag="piece"):
    """Asks a holder for one piece of a blob, at most `PIECE_BYTES` long."""

    digest: bytes
    offset: int
    size_bytes: int
    deadline_unix_ns: int


class PieceReply(Message, frozen=True, kw_only=True, tag="piece-reply"):
    """One piece; shorter than asked only at the blob's end."""

    data: bytes


class BufferSpan(Message, frozen=True, kw_only=True, tag="span"):
    """A span of registered memory in some process, a destination of the data plane.

    Attributes:
        session: transfer-engine session, `host:port`.
        address: first byte, in that process's address space.
        size_bytes: bytes that may be written from there.
    """

    session: str
    address: int
    size_bytes: int


class Admitted(Message, frozen=True, kw_only=True, tag="admitted"):
    """The worker took the request and will report on its stream; a refusal is an error."""

    worker_id: str
    epoch: int
