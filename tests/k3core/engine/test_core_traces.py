"""Random traces over one engine: whatever is added ends once, and nothing is left."""

from array import array
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.cache.coordinator import PrefixCache
from k3core.cache.spec import CacheConfig
from k3core.engine.core import EngineCore
from k3core.engine.host_memory import HostMemory
from k3core.engine.script import Script, ScriptLine
from k3core.engine.scripted_runner import ScriptedRunner, scripted_layout
from k3core.engine.words import EngineEvent, EngineRequest
from k3core.scheduler.request import Request
from k3core.scheduler.scheduler import Role, Scheduler, SchedulerConfig
from k3wire.errors import ContextLengthExceeded
from k3wire.messages.sampling import SamplingParams

UNIT = 4
NUM_PAGES = 14
END = 99
LINES = (
    ScriptLine("", (1, 2, 3), 0.0, 0.0, 1),
    ScriptLine("", tuple(range(10, 50)), 0.0, 0.0, 3),
    ScriptLine("", (7, 8), 1.0, 0.5, 1),
)


@dataclass
class Trace:
    """One engine and what was done to it."""

    role: Role
    now_s: float = 0.0
    asked: dict[str, EngineRequest] = field(default_factory=dict[str, EngineRequest])
    gone: set[str] = field(default_factory=set[str])
    ended: dict[str, EngineEvent] = field(default_factory=dict[str, EngineEvent])
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def __post_init__(self) -> None:
        layout = scripted_layout(UNIT)
        config = CacheConfig(
            unit_tokens=UNIT,
            page_units=layout.page_units,
            num_pages=NUM_PAGES,
            export_alignment=1,
        )
        memory = HostMemory(NUM_PAGES * layout.page_bytes)
        self.runner = ScriptedRunner(
            Script(LINES), layout, memory, lambda ids: ids[-1], lambda: self.now_s
        )
        scheduler = Scheduler(
            SchedulerConfig(role=self.role, chunk_tokens=(32,), max_rows=4),
            PrefixCache(config, b"trace"),
        )
        self.core = EngineCore(scheduler, self.runner, lambda: self.now_s)
        self.core.open()

    def add(self, line: int, length: int, stem: int, max_tokens: int) -> None:
        key = f"r{len(self.asked)}"
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(END,))
        tokens = array("i", [*[60 + stem] * length, line])
        left = 1 if self.role == "prefill" else max_tokens
        asked = EngineRequest(Request(key, tokens, left), sampling)
        try:
            self.core.add(asked)
        except ContextLengthExceeded:
            return
        self.asked[key] = asked
        self.tokens[key] = []

    def step(self, seconds: float) -> None:
        self.now_s += seconds
        events: list[EngineEvent] = []
        self.core.step(events.extend)
        for event in events:
            assert event.key not in self.gone, "an event of a request that was let go"
            assert event.key not in self.ended or event.kind == "admitted"
            if event.token_ids:
                assert event.position == len(self.tokens[event.key])
                self.tokens[event.key] += event.token_ids
            if event.finish_reason or event.kind in ("failed", "prefilled"):
                self.ended[event.key] = event
            if event.kind == "prefilled":
                continue

    def let_go(self, number: int, *, aborts: bool) -> None:
        if not self.asked:
            return
        key = f"r{number % len(self.asked)}"
        is_held = key in self.ended and self.ended[key].kind == "prefilled"
        if aborts or not is_held:
            is_known = self.core.abort(key)
        else:
            is_known = key not in self.gone and self.core.release(key)
        if is_known:
            assert key not in self.gone
            self.gone.add(key)

    def finish(self) -> None:
        for _ in range(2000):
            for key, event in self.ended.items():
                if event.kind == "prefilled" and key not in self.gone:
                    self.core.release(key)
                    self.gone.add(key)
            if self.core.is_quiescent:
                break
            self.step(0.3)
        assert self.core.is_quiescent
        self.step(0.0)
        assert self.core.load.num_free_pages == NUM_PAGES
        # Before time began everything that it still knows is held.
        assert not self.runner.held(-1.0)
        for key in self.asked:
            assert key in self.gone or key in self.ended
            self.check_tokens(key)

    def check_tokens(self, key: str) -> None:
        line = LINES[self.asked[key].request.tokens[-1]]
        full = [*line.token_ids, END][: self.asked[key].sampling.max_tokens]
        assert self.tokens[key] == full[: len(self.tokens[key])]
        event = self.ended.get(key)
        if self.role != "prefill" and event is not None and event.finish_reason == "stop":
            assert self.tokens[key] == full


operations = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(0, 2),
        st.integers(0, 150),
        st.integers(0, 2),
        st.integers(1, 60),
    ),
    st.tuples(st.just("step"), st.sampled_from([0.0, 0.3, 2.0])),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("release"), st.integers(0, 30)),
)


@settings(max_examples=60, deadline=None)
@given(role=st.sampled_from(["combined", "prefill"]), trace=st.lists(operations, max_size=60))
def test_every_request_ends_once_and_every_page_comes_back(
    role: Role, trace: list[tuple[object, ...]]
) -> None:
    bench = Trace(role)
    for name, *values in trace:
        if name == "add":
            bench.add(*values)  # type: ignore[arg-type]  # integers, by the strategy
        elif name == "step":
            bench.step(*values)  # type: ignore[arg-type]  # seconds, by the strategy
        else:
            bench.let_go(values[0], aborts=name == "abort")  # type: ignore[arg-type]  # a number
    bench.finish()
