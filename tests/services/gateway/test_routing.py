"""Choice of workers: prediction, affinity, corrections, ramps."""

from collections import Counter

import pytest

from k3_gateway.routing import AFFINITY_STRIDE_TOKENS, Router, prefix_digests
from k3wire.errors import Overloaded
from k3wire.messages.control import Heartbeat, WorkerLoad


def beat(worker_id: str, **load: object) -> Heartbeat:
    return Heartbeat(
        role="prefill",
        worker_id=worker_id,
        epoch=1,
        seq=1,
        sent_unix_ns=0,
        pid=1,
        is_ready=True,
        load=WorkerLoad(**load),  # pyright: ignore[reportArgumentType] - keywords of the struct
    )


def prompt(num_tokens: int, first: int = 1) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in range(first, first + num_tokens))


def test_the_shorter_queue_gets_the_request() -> None:
    router = Router("g", seed=0)
    busy = beat("busy", num_queued_tokens=9000, tokens_per_s=1000.0)
    idle = beat("idle", num_queued_tokens=0, tokens_per_s=1000.0)
    chosen = Counter(router.choose_prefill([busy, idle], 100, ()).worker_id for _ in range(300))
    assert chosen["idle"] > 280


def test_a_held_prefix_draws_the_request_until_waiting_costs_more() -> None:
    router = Router("g", seed=0)
    digests = prefix_digests(prompt(4 * AFFINITY_STRIDE_TOKENS), "")
    router.note_sent("a", 0, digests)
    router.note_ended("a", 0)
    tokens = 4 * AFFINITY_STRIDE_TOKENS + 10
    a, b = (beat(name, tokens_per_s=1000.0) for name in "ab")
    chosen = Counter(router.choose_prefill([a, b], tokens, digests).worker_id for _ in range(300))
    assert chosen["a"] > 280
    a = beat("a", tokens_per_s=1000.0, num_queued_tokens=50_000)
    chosen = Counter(router.choose_prefill([a, b], tokens, digests).worker_id for _ in range(300))
    assert chosen["b"] > 280


def test_what_was_just_sent_counts_before_the_worker_reports_it() -> None:
    router = Router("g", seed=0)
    workers = [beat(name, tokens_per_s=1000.0, num_free_pages=100) for name in "abc"]
    counts: Counter[str] = Counter()
    for _ in range(30):
        worker = router.choose_decode(workers)
        router.note_sent(worker.worker_id, 10)
        counts[worker.worker_id] += 1
    assert set(counts.values()) == {10}


def test_a_reported_request_is_not_counted_twice() -> None:
    router = Router("g", seed=0)
    router.note_sent("a", 100)
    a = beat("a", num_free_pages=100, num_running=1, active_by_gateway={"g": 1})
    b = beat("b", num_free_pages=45)
    assert router.choose_decode([a, b]).worker_id == "a"


def test_no_worker_is_an_error_that_may_be_retried() -> None:
    router = Router("g", seed=0)
    with pytest.raises(Overloaded):
        router.choose_prefill([], 1, ())
    with pytest.raises(Overloaded):
        router.choose_decode([])


def test_ended_requests_leave_nothing_behind() -> None:
    router = Router("g", seed=0)
    router.note_sent("a", 10)
    router.note_sent("a", 20)
    router.note_ended("a", 10)
    assert router.num_claimed("a") == 1
    router.note_ended("a", 20)
    assert router.num_claimed("a") == 0
    router.note_ended("a", 20)
    assert router.num_claimed("a") == 0


def test_cac_09_prefixes_of_other_salts_and_other_tokens_do_not_match() -> None:
    tokens = prompt(3 * AFFINITY_STRIDE_TOKENS)
    plain = prefix_digests(tokens, "")
    assert len(plain) == 3
    assert not set(plain) & set(prefix_digests(tokens, "salt"))
    assert not set(plain) & set(prefix_digests(prompt(3 * AFFINITY_STRIDE_TOKENS, 2), ""))
    assert plain[:2] == prefix_digests(tokens[: 2 * AFFINITY_STRIDE_TOKENS * 4 + 8], "")
