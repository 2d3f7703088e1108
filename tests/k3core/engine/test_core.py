from array import array
from dataclasses import dataclass, field

import pytest

from k3core.cache.coordinator import PrefixCache
from k3core.cache.spec import CacheConfig
from k3core.engine.core import EngineCore
from k3core.engine.host_memory import HostMemory
from k3core.engine.script import Script, ScriptLine
from k3core.engine.scripted_runner import ScriptedRunner, scripted_layout
from k3core.engine.words import EngineEvent, EngineRequest
from k3core.scheduler.request import ImageSpan, Request
from k3core.scheduler.scheduler import Role, Scheduler, SchedulerConfig
from k3wire.errors import ContextLengthExceeded, InternalError, InvalidRequest
from k3wire.messages.sampling import SamplingParams

UNIT = 8
NUM_PAGES = 40
END = 99


@dataclass
class Bench:
    """An engine from a script, on a clock that the test moves."""

    role: Role = "combined"
    lines: tuple[ScriptLine, ...] = (ScriptLine("", (11, 12, 13), 0.0, 0.0, 1),)
    chunk_tokens: int = 64
    waits_for_embeddings: bool = False
    now_s: float = 100.0
    core: EngineCore = field(init=False)
    cache: PrefixCache = field(init=False)
    memory: HostMemory = field(init=False)

    def __post_init__(self) -> None:
        self.layout = scripted_layout(UNIT)
        config = CacheConfig(
            unit_tokens=UNIT,
            page_units=self.layout.page_units,
            num_pages=NUM_PAGES,
            export_alignment=1,
        )
        self.cache = PrefixCache(config, b"test")
        self.memory = HostMemory(NUM_PAGES * self.layout.page_bytes)
        # The last prompt token says which line answers.
        runner = ScriptedRunner(
            Script(self.lines), self.layout, self.memory, lambda ids: ids[-1], lambda: self.now_s
        )
        scheduler = Scheduler(
            SchedulerConfig(
                role=self.role,
                chunk_tokens=(self.chunk_tokens,),
                waits_for_embeddings=self.waits_for_embeddings,
            ),
            self.cache,
        )
        self.core = EngineCore(scheduler, runner, lambda: self.now_s)
        self.core.open()

    def run(self) -> list[EngineEvent]:
        """Steps until the engine wants to sleep."""
        events: list[EngineEvent] = []
        for _ in range(1000):
            if self.core.step(events.extend) != 0.0:
                return events
        raise AssertionError("the engine never rests")

    def state_page(self, page: int) -> bytes:
        size = self.layout.page_bytes
        return bytes(self.memory.view(page * size, size))


def request(
    key: str = "r",
    prompt: list[int] | None = None,
    images: tuple[ImageSpan, ...] = (),
    num_emitted_tokens: int = 0,
    **sampling: object,
) -> EngineRequest:
    fields = {"max_tokens": 16, "stop_token_ids": (END,)} | sampling
    params = SamplingParams(**fields)  # type: ignore[arg-type]  # fields by name, per test
    tokens = array("i", prompt if prompt is not None else [5] * 20 + [0])
    left = params.max_tokens - num_emitted_tokens
    return EngineRequest(Request(key, tokens, left, images), params, num_emitted_tokens)


def tokens_of(events: list[EngineEvent], key: str = "r") -> list[int]:
    return [token for event in events if event.key == key for token in event.token_ids]


def test_a_request_is_answered_token_by_token_and_ends_on_its_end_token() -> None:
    bench = Bench()
    bench.core.add(request())
    events = bench.run()
    assert events[0].kind == "admitted"
    assert [event.token_ids for event in events[1:]] == [(11,), (12,), (13,), (END,)]
    assert [event.position for event in events[1:]] == [0, 1, 2, 3]
    assert [event.finish_reason for event in events[1:]] == [None, None, None, "stop"]
    assert bench.core.is_quiescent


def test_max_tokens_ends_an_answer_with_length_and_counts_earlier_attempts() -> None:
    bench = Bench()
    bench.core.add(request("a", max_tokens=2))
    bench.core.add(request("b", num_emitted_tokens=1, prompt=[5] * 20 + [11, 0], max_tokens=3))
    events = bench.run()
    assert tokens_of(events, "a") == [11, 12]
    assert tokens_of(events, "b") == [12, 13]
    reasons = {event.key: event.finish_reason for event in events if event.finish_reason}
    assert reasons == {"a": "length", "b": "length"}


def test_ignoring_the_end_goes_on_to_the_limit() -> None:
    bench = Bench()
    bench.core.add(request(max_tokens=5, ignores_end=True))
    assert tokens_of(bench.run()) == [11, 12, 13, 11, 12]


def test_a_line_without_an_end_token_stops_by_itself() -> None:
    bench = Bench()
    bench.core.add(request(stop_token_ids=()))
    events = bench.run()
    assert tokens_of(events) == [11, 12, 13]
    assert events[-1].finish_reason == "stop"


def test_frames_of_several_tokens_hold_all_of_them_and_the_rest_at_the_end() -> None:
    bench = Bench(lines=(ScriptLine("", (1, 2, 3, 4, 5), 0.0, 0.0, 2),))
    bench.core.add(request())
    events = [event for event in bench.run() if event.kind == "tokens"]
    assert [event.token_ids for event in events] == [(1, 2), (3, 4), (5, END)]
    assert [event.position for event in events] == [0, 2, 4]


def test_one_slow_request_never_holds_another() -> None:
    bench = Bench(lines=(ScriptLine("", (1, 2), 5.0, 2.0, 1), ScriptLine("", (7, 8), 0.0, 0.0, 1)))
    bench.core.add(request("slow"))
    bench.core.add(request("fast", prompt=[6] * 20 + [1]))
    events = bench.run()
    assert tokens_of(events, "fast") == [7, 8, END]
    assert tokens_of(events, "slow") == []
    bench.now_s += 5.0
    assert tokens_of(bench.run(), "slow") == [1]
    bench.now_s += 1.9
    assert tokens_of(bench.run(), "slow") == []
    bench.now_s += 0.2
    assert tokens_of(bench.run(), "slow") == [2]
    bench.now_s += 2.0
    assert bench.run()[-1].finish_reason == "stop"


def test_an_engine_that_holds_a_request_says_when_to_wake_it() -> None:
    bench = Bench(lines=(ScriptLine("", (1,), 5.0, 0.0, 1),))
    bench.core.add(request())
    assert bench.core.step(lambda events: None) == pytest.approx(105.0)


def test_the_second_equal_prompt_is_served_from_the_cache_with_the_same_answer() -> None:
    bench = Bench()
    first_tokens = []
    for key in ("one", "two"):
        bench.core.add(request(key, prompt=[*range(50, 90), 0]))
        events = bench.run()
        first_tokens.append(tokens_of(events, key))
        usage = events[0].usage
        assert usage is not None
        assert usage.cached_local == (0 if key == "one" else 40)
    assert first_tokens[0] == first_tokens[1]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_abort_in_any_state_frees_every_page_and_says_nothing_more(num_steps: int) -> None:
    bench = Bench(chunk_tokens=16)
    free = bench.core.load.num_free_pages
    bench.core.add(request(prompt=[5] * 40 + [0]))
    for _ in range(num_steps):
        bench.core.step(lambda events: None)
    assert bench.core.abort("r")
    assert not bench.core.abort("r")
    assert bench.run() == []
    assert bench.core.is_quiescent
    assert bench.core.load.num_free_pages == free


def test_a_prompt_larger_than_the_cache_is_refused_and_leaves_nothing() -> None:
    bench = Bench()
    too_long = [5] * (UNIT * bench.layout.page_units * NUM_PAGES) + [0]
    with pytest.raises(ContextLengthExceeded):
        bench.core.add(request(prompt=too_long))
    assert bench.core.is_quiescent


def test_a_prompt_that_no_line_answers_is_refused_by_the_runner() -> None:
    bench = Bench(lines=(ScriptLine("", (), 0.0, 0.0, 1),))
    with pytest.raises(InvalidRequest):
        bench.core.add(request(stop_token_ids=()))
    assert bench.core.is_quiescent


def test_a_prefill_engine_holds_the_pages_until_they_are_released() -> None:
    bench = Bench(role="prefill", chunk_tokens=16)
    free = bench.core.load.num_free_pages
    bench.core.add(request(prompt=[5] * 40 + [0]))
    events = bench.run()
    assert [event.kind for event in events] == ["admitted", "progress", "progress", "prefilled"]
    hand_off = events[-1].hand_off
    assert hand_off is not None
    assert hand_off.num_tokens == 41
    assert events[1].units + events[2].units == hand_off.units[:4]
    assert [event.position for event in events[1:3]] == [0, 16]
    assert events[-1].token_ids == (11,)
    assert bench.core.load.num_free_pages < free
    assert bench.core.release("r")
    assert bench.core.is_quiescent
    # The state that stays in the cache takes a page and can be evicted.
    bench.core.add(request("again", prompt=[5] * 40 + [0]))
    usage = bench.run()[0].usage
    assert usage is not None
    assert usage.cached_local == 40


def hand_over(prefill: Bench, decode: Bench, asked: EngineRequest, damage: bool = False) -> None:
    """Carries a prefilled request's pages over as the two workers would."""
    prefill.core.add(asked)
    prefilled = prefill.run()[-1]
    hand_off = prefilled.hand_off
    reservation = decode.core.reserve(asked)
    assert hand_off is not None
    assert reservation is not None
    assert len(hand_off.units) == len(reservation.units)
    size = prefill.layout.page_bytes
    for source, target in zip(hand_off.state_pages, reservation.state_pages, strict=True):
        content = b"\0" * size if damage else prefill.state_page(source)
        decode.memory.view(target * size, size)[:] = content
    prefill.core.release(asked.key)
    decode.core.adopt(asked.key, prefilled.token_ids[0])


def test_a_decode_engine_goes_on_where_the_state_page_says() -> None:
    lines = (ScriptLine("", (1, 2), 0.0, 0.0, 1), ScriptLine("", (21, 22, 23), 0.0, 0.0, 1))
    prefill, decode = Bench(role="prefill", lines=lines), Bench(role="decode", lines=lines)
    hand_over(prefill, decode, request(prompt=[5] * 20 + [1]))
    events = decode.run()
    assert tokens_of(events) == [22, 23, END]
    assert [event.position for event in events] == [1, 2, 3]
    assert events[-1].finish_reason == "stop"
    assert decode.core.is_quiescent


def test_a_state_that_did_not_arrive_is_refused() -> None:
    prefill, decode = Bench(role="prefill"), Bench(role="decode")
    with pytest.raises(InternalError):
        hand_over(prefill, decode, request(), damage=True)
    assert decode.core.abort("r")
    assert decode.core.is_quiescent


def test_a_reservation_that_does_not_fit_now_is_none_and_changes_nothing() -> None:
    bench = Bench(role="decode")
    big = [5] * (UNIT * bench.layout.page_units * (NUM_PAGES - 4))
    assert bench.core.reserve(request("a", prompt=big)) is not None
    bench.core.step(lambda events: None)
    before = bench.core.load
    assert bench.core.reserve(request("b", prompt=[6] * len(big))) is None
    bench.core.step(lambda events: None)
    assert bench.core.load == before
    bench.core.abort("a")
    assert bench.core.reserve(request("b", prompt=[6] * len(big))) is not None


def test_a_state_overwritten_while_running_fails_its_request_alone() -> None:
    lines = (ScriptLine("", (1, 2, 3), 0.0, 1.0, 1),)
    prefill, decode = Bench(role="prefill", lines=lines), Bench(role="decode", lines=lines)
    hand_over(prefill, decode, request("bad"))
    hand_over(prefill, decode, request("good", prompt=[6] * 20 + [0]))
    size = decode.layout.page_bytes
    pages = [p for p in range(NUM_PAGES) if decode.state_page(p).startswith(b"k3script")]
    decode.memory.view(pages[0] * size, 8)[:] = b"\0" * 8
    decode.now_s += 10.0
    events = decode.run()
    decode.now_s += 10.0
    events += decode.run()
    failed = [event.key for event in events if event.kind == "failed"]
    assert len(failed) == 1
    (other,) = {"bad", "good"} - set(failed)
    assert tokens_of(events, other)[:2] == [2, 3]


def test_pictures_beyond_the_hit_are_asked_for_and_text_before_them_is_computed() -> None:
    bench = Bench(role="prefill", waits_for_embeddings=True)
    images = (ImageSpan(2, 4, b"a" * 32), ImageSpan(26, 4, b"b" * 32))
    prompt = [5] * 32 + [0]
    bench.core.add(request("one", prompt=prompt, images=images))
    events = bench.run()
    assert [event.images for event in events if event.kind == "admitted"] == [(0, 1)]
    assert bench.core.provide_image("one", 0, memoryview(b""))
    events = bench.run()
    assert [event.kind for event in events] == ["progress"]
    assert bench.core.provide_image("one", 1, memoryview(b""))
    assert bench.run()[-1].kind == "prefilled"
    bench.core.release("one")

    # An equal prefix up to token 24: the first picture lies inside the hit.
    other = (images[0], ImageSpan(26, 4, b"c" * 32))
    bench.core.add(request("two", prompt=prompt, images=other))
    admitted = bench.run()[0]
    assert admitted.usage is not None
    if admitted.usage.cached_local:
        assert admitted.images == (1,)
    bench.core.abort("two")
    assert not bench.core.provide_image("two", 0, memoryview(b""))


def test_load_counts_requests_tokens_and_pages() -> None:
    bench = Bench(lines=(ScriptLine("", (1,), 5.0, 0.0, 1), ScriptLine("", (1,), 0.0, 9.0, 1)))
    bench.core.add(request("waits", prompt=[5] * 30 + [0]))
    bench.core.add(request("runs", prompt=[6] * 30 + [1]))
    bench.run()
    load = bench.core.load
    assert (load.num_running, load.num_waiting, load.num_queued_tokens) == (1, 1, 31)
    assert load.num_pages == NUM_PAGES
    assert load.num_free_pages < NUM_PAGES


def test_a_submitted_request_that_is_refused_fails_by_event() -> None:
    bench = Bench()
    too_long = [5] * (UNIT * bench.layout.page_units * NUM_PAGES) + [0]
    bench.core.submit(request(prompt=too_long))
    (event,) = bench.run()
    assert event.kind == "failed"
    assert event.error is not None
    assert event.error.code == "context_length_exceeded"
    assert bench.core.is_quiescent


def test_an_answer_that_outgrows_the_cache_ends_with_length() -> None:
    bench = Bench(lines=(ScriptLine("", (1, 2, 3), 0.0, 0.0, 1),))
    room = UNIT * bench.layout.page_units * (NUM_PAGES - 1)
    bench.core.add(request(prompt=[5] * (room - 10) + [0], max_tokens=400, ignores_end=True))
    events = bench.run()
    assert events[-1].finish_reason == "length"
    assert 0 < len(tokens_of(events)) < 400
    assert bench.core.is_quiescent


def test_pictures_are_asked_for_before_the_pass_that_computes_the_text() -> None:
    bench = Bench(role="prefill", waits_for_embeddings=True)
    images = (ImageSpan(26, 4, b"b" * 32),)
    bench.core.add(request(prompt=[5] * 32 + [0], images=images))
    told: list[list[str]] = []
    bench.core.step(lambda events: told.append([event.kind for event in events]))
    assert told == [["admitted"], ["progress"]]
