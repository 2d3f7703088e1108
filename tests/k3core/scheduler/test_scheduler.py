"""Steps in flight, roles and hand-offs: who owns a page when."""

from array import array

import pytest

from k3core.cache.audit import audit
from k3core.cache.coordinator import PrefixCache
from k3core.cache.spec import CacheConfig, CacheError
from k3core.scheduler.plan import Event, RowResult, StepPlan
from k3core.scheduler.request import ImageSpan, Request
from k3core.scheduler.scheduler import Role, Scheduler, SchedulerConfig


def _scheduler(
    role: Role = "combined", pages: int = 16, chunk: int = 64, waits: bool = False
) -> Scheduler:
    cache = CacheConfig(
        unit_tokens=4, page_units=2, num_pages=pages, checkpoint_grid=8, export_alignment=4
    )
    config = SchedulerConfig(
        role=role, chunk_tokens=(chunk,), encoder_tokens=64, waits_for_embeddings=waits
    )
    return Scheduler(config, PrefixCache(cache))


def _request(name: str, n: int = 20, new: int = 4, stream: int = 0, **options: object) -> Request:
    tokens = array("i", [stream * 1000 + i for i in range(n)])
    return Request(name, tokens, new, **options)  # pyright: ignore[reportArgumentType]


def _results(plan: StepPlan, **last: bool) -> list[RowResult]:
    return [
        RowResult(
            row.request_id,
            (7,) if row.wants_logits else (),
            tuple(export.position for export in row.exports),
            last.get(row.request_id, False),
        )
        for row in plan.rows
    ]


def _step(scheduler: Scheduler) -> list[Event]:
    plan = scheduler.schedule()
    return scheduler.commit(plan, _results(plan)) if plan.rows else []


def _free(scheduler: Scheduler) -> int:
    return scheduler.cache.pool.free_rows()


def test_pages_of_an_aborted_request_come_back_with_the_step_that_writes_them() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a"))
    first = scheduler.schedule()
    taken = _free(scheduler)
    assert scheduler.abort("a")
    assert not scheduler.has_work()
    assert _free(scheduler) == taken
    assert not scheduler.abort("a")
    scheduler.add(_request("b", stream=1))
    second = scheduler.schedule()
    written = {unit for row in first.rows for unit in row.units}
    assert written.isdisjoint(unit for row in second.rows for unit in row.units)
    assert scheduler.commit(first, _results(first)) == []
    assert scheduler.cache.paged.index == {}
    scheduler.commit(second, _results(second))
    scheduler.abort("b")
    assert scheduler.cache.reset()
    assert _free(scheduler) == 16


def test_an_id_may_be_used_again_while_its_old_step_is_in_flight() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a"))
    old = scheduler.schedule()
    scheduler.abort("a")
    scheduler.add(_request("a", stream=3))
    new = scheduler.schedule()
    assert scheduler.commit(old, _results(old)) == []
    events = scheduler.commit(new, _results(new))
    assert [(event.kind, event.tokens) for event in events] == [("token", (7,))]
    assert audit(scheduler.cache) == []


def test_nothing_written_by_a_step_is_seen_before_its_commit() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a"))
    plan = scheduler.schedule()
    sequence = scheduler.cache.new_sequence("look", array("i", range(24)))
    assert scheduler.cache.lookup(sequence).matched == 0
    scheduler.commit(plan, _results(plan))
    assert scheduler.cache.lookup(sequence).hit == 20


def test_a_slot_that_no_kernel_wrote_is_never_seen() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a"))
    plan = scheduler.schedule()
    assert plan.rows[0].exports
    scheduler.commit(plan, [RowResult("a", (7,), ())])
    assert scheduler.cache.states.sealed == {}
    assert scheduler.cache.stats.unwritten_exports == len(plan.rows[0].exports)
    assert audit(scheduler.cache) == []


def test_a_failed_step_seals_nothing_and_its_rows_start_over() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a", new=2))
    scheduler.fail(scheduler.schedule())
    assert scheduler.cache.states.sealed == {}
    assert audit(scheduler.cache) == []
    kinds = [event.kind for _ in range(3) for event in _step(scheduler)]
    assert kinds == ["token", "token", "finished"]
    assert scheduler.cache.stats.queries == 1


def test_decode_rows_come_first_and_the_rest_of_the_budget_is_prefill() -> None:
    scheduler = _scheduler(chunk=13)
    scheduler.add(_request("a", n=8, new=9))
    _step(scheduler)
    scheduler.add(_request("b", n=20, stream=1))
    plan = scheduler.schedule()
    assert [(row.request_id, row.length, row.is_decode) for row in plan.rows] == [
        ("a", 1, True),
        ("b", 12, False),
    ]


def test_a_prefill_worker_holds_pages_until_they_are_released_and_sent() -> None:
    scheduler = _scheduler("prefill")
    scheduler.add(_request("a", n=20))
    events = _step(scheduler)
    assert [(event.kind, event.tokens) for event in events] == [("prefilled", (7,))]
    hand_off = scheduler.hand_off("a", "job 1")
    assert (hand_off.num_tokens, len(hand_off.units), hand_off.first_token) == (20, 5, 7)
    before = _free(scheduler)
    assert scheduler.release("a")
    assert not scheduler.release("a")
    assert _free(scheduler) == before
    assert scheduler.close_transfer("job 1")
    assert not scheduler.close_transfer("job 1")
    # The rows stay cached, and the live state became the checkpoint at the prompt's end.
    assert 20 in {each.position for each in scheduler.cache.states.sealed.values()}
    assert audit(scheduler.cache) == []


def test_a_reservation_takes_only_what_is_not_here_and_joins_the_batch() -> None:
    decode = _scheduler("decode")
    reservation = decode.reserve(_request("a", n=20, new=3))
    assert reservation is not None
    assert (reservation.num_resident, len(reservation.units)) == (0, 5)
    assert decode.adopt("a", 7) == []
    row = decode.schedule().rows[0]
    assert (row.start, list(row.token_ids), row.is_decode) == (20, [7], True)
    again = decode.reserve(_request("b", n=20, new=3))
    assert again is not None
    assert again.num_resident == 20
    assert again.units == reservation.units
    assert again.state_pages != reservation.state_pages


def test_an_aborted_reservation_gives_its_room_back() -> None:
    decode = _scheduler("decode")
    assert decode.reserve(_request("a", n=40)) is not None
    assert decode.abort("a")
    assert _free(decode) == 16
    with pytest.raises(CacheError):
        decode.adopt("a", 7)


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    decode = _scheduler("decode", pages=8)
    assert decode.reserve(_request("a", n=40)) is not None
    free = _free(decode)
    assert decode.reserve(_request("b", n=40, stream=1)) is None
    assert _free(decode) == free


def test_a_chunk_stops_before_a_picture_that_has_not_arrived() -> None:
    scheduler = _scheduler(waits=True)
    picture = ImageSpan(10, 6, b"k" * 32)
    scheduler.add(_request("a", n=24, images=(picture,)))
    plan = scheduler.schedule()
    assert [row.length for row in plan.rows] == [8]
    scheduler.commit(plan, _results(plan))
    assert scheduler.schedule().rows == ()
    scheduler.set_embedding_ready("a", 0)
    row = scheduler.schedule().rows[0]
    assert (row.start, row.length) == (8, 16)
    assert [(need.image_offset, need.chunk_offset, need.count) for need in row.images] == [
        (0, 2, 6)
    ]


def test_a_hit_beyond_a_picture_asks_for_no_embedding() -> None:
    scheduler = _scheduler(waits=True)
    picture = ImageSpan(1, 4, b"k" * 32)
    scheduler.add(_request("a", n=17, new=1, images=(picture,)))
    scheduler.set_embedding_ready("a", 0)
    _step(scheduler)
    scheduler.add(_request("b", n=17, new=1, images=(picture,)))
    plan = scheduler.schedule()
    assert [(row.start, row.images) for row in plan.rows] == [(16, ())]
    assert plan.encode_images == ()


def test_one_key_with_two_sizes_is_refused() -> None:
    scheduler = _scheduler()
    images = (ImageSpan(0, 4, b"k" * 32), ImageSpan(8, 5, b"k" * 32))
    event = scheduler.add(_request("a", images=images))
    assert event is not None
    assert event.kind == "refused"


def test_a_live_id_is_not_taken_twice() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a"))
    with pytest.raises(CacheError):
        scheduler.add(_request("a"))
