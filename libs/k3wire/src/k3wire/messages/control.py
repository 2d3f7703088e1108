"""Cancel and life signs: who is there, with what, how busy, and who should stop what."""

import msgspec

from k3wire.messages.base import Message, Stage


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """Drop everything of a request; coming twice, late or for an unknown request is fine."""

    request_id: str
    attempt: int | None = None


class WorkerLoad(Message, frozen=True, kw_only=True, tag="load"):
    """How busy a worker is; a missing or zero capacity never means idle.

    Attributes:
        num_running: requests being worked on.
        num_waiting: requests queued.
        num_queued_tokens: uncomputed prompt tokens of running and waiting requests.
        num_free_pages: pages free or reclaimable.
        num_pages: pages in all.
        tokens_per_s: measured rate of the stage's own work.
        active_by_gateway: requests of each gateway id, for the routers' corrections.
        rss_bytes: resident memory.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    tokens_per_s: float = 0.0
    active_by_gateway: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    rss_bytes: int = 0


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """A worker's life sign, every `HEARTBEAT_INTERVAL_S`.

    Attributes:
        role: which service.
        worker_id: which process.
        epoch: wall-clock nanoseconds of its start; a greater one replaces a smaller.
        seq: rises by one with each beat.
        sent_unix_ns: wall clock at sending.
        pid: process id on its host.
        host: its host name.
        is_ready: it can serve now.
        is_draining: it takes no more.
        reason: why it is not ready, for people.
        model_fingerprint: what it serves, "" if it serves any.
        endpoint: HTTP address, for gateways.
        load: how busy it is.
    """

    role: Stage
    worker_id: str
    epoch: int
    seq: int
    sent_unix_ns: int
    pid: int
    host: str = ""
    is_ready: bool
    is_draining: bool = False
    reason: str = ""
    model_fingerprint: str = ""
    endpoint: str = ""
    load: WorkerLoad = msgspec.field(default_factory=WorkerLoad)


HEARTBEAT_INTERVAL_S = 0.1
"""Seconds between two beats."""

HEARTBEAT_STALE_S = 1.0
"""A worker not heard of for so long is not routed to."""
