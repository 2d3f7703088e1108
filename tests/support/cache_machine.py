"""Random lives of a cache, checked against a model that knows nothing of digests or pages.

The machine drives the scenario runner, whose toy device already compares every state and row
that is read with the request's own tokens. Added here: the law of a hit, computed from contents
alone; purity of lookups and of refused admissions; true counters; eviction order; isolation.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.cache_draws import NAMES, UNIT, configs, prompts, segments_of

from k3core.cache.coordinator import PrefixCache
from k3core.cache.path_pin import pin_path, unpin_path
from k3core.cache.spec import CacheConfig
from k3core.simulate.results import universal_failures
from k3core.simulate.scenario import ScenarioRunner, Track
from k3core.simulate.scenario_file import Case, segments


@dataclass
class Seen:
    """What the model knows: every indexed prefix by its content, by namespace.

    Attributes:
        name_of: digest -> (namespace, content) as its writer had it.
        totals: prompt tokens of first admissions.
        counted: requests already in `totals`.
    """

    name_of: dict[bytes, tuple[str, bytes]] = field(default_factory=dict)
    totals: int = 0
    hits: int = 0
    counted: list[Track] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Submits, steps, breaks off and evicts at random."""

    # Fields of every drawn configuration that a test wants to be what it says.
    forced: ClassVar[dict[str, object]] = {}

    @initialize(
        config=configs,
        chunks=st.sampled_from([(64,), (9,), (4, 17), (12,)]),
        rows=st.sampled_from([2, 8]),
    )
    def start(self, config: CacheConfig, chunks: tuple[int, ...], rows: int) -> None:
        if config.memory.startswith("two_ended"):
            config = replace(config, host_bytes=0)
        config = replace(config, **type(self).forced)
        case = Case("machine", config, chunks, 12, rows, ())
        self.runner = ScenarioRunner(case)
        self.config = config
        self.seen = Seen()
        self.namespaces: dict[str, str] = {}
        self.places: dict[str, dict[int, int]] = {}

    # --- rules ---------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES),
        prompt=prompts,
        output=st.integers(0, 12),
        salt=st.sampled_from(["", "", "", "x"]),
        accepted=st.lists(st.integers(0, 3), max_size=4),
        steps=st.integers(0, 4),
        is_sent=st.booleans(),
    )
    def submit(
        self,
        name: str,
        prompt: tuple[str, int, str, int, str | None, int],
        output: int,
        salt: str,
        accepted: list[int],
        steps: int,
        is_sent: bool,
    ) -> None:
        track = self.runner.tracks.get(name)
        is_busy = track is not None and track.status in ("waiting", "running")
        if is_busy or name in self.runner.transfers or self._is_flying(name):
            return
        options = {"prompt": segments_of(prompt), "output": [[f"say {salt}", 0, output]]}
        if self.config.draft != "off":
            options["accepted"] = accepted
        self.namespaces[name] = salt
        self.runner.submit(name, {**options, "salt": salt})
        self._run(steps)
        if is_sent:
            self.open_transfer(name)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        self._run(count)

    @rule(name=st.sampled_from(NAMES), is_preempted=st.booleans(), second=st.booleans())
    def interrupted_step(self, name: str, is_preempted: bool, second: bool) -> None:
        """A request is taken away while its step is in flight; another step may start meanwhile."""
        if not self._begin():
            return
        if name in self.runner.tracks:
            if is_preempted:
                self.runner.scheduler.preempt(name)
            else:
                self._abort(name)
        self._check_flight()
        if second:
            self._begin()
        while self.runner.flying:
            self._end()

    @rule(name=st.sampled_from(NAMES))
    def abort(self, name: str) -> None:
        if name in self.runner.tracks:
            self._abort(name)
            assert not self.runner.scheduler.abort(name), "the second abort changes nothing"

    @rule(name=st.sampled_from(NAMES))
    def preempt(self, name: str) -> None:
        if name in self.runner.tracks:
            self.runner.preempt(name)
            self._learn()

    @rule(name=st.sampled_from(NAMES))
    def finish(self, name: str) -> None:
        if name in self.runner.tracks:
            self.runner.end(name)
            self._learn()

    @rule(count=st.integers(1, 3))
    def evict_states(self, count: int) -> None:
        for _ in range(count):
            before = dict(self.runner.cache.states.sealed)
            if self.runner.cache.evictor.evict_oldest_state():
                self._check_victim(before)
        self._settle()

    @rule(count=st.integers(1, 4))
    def evict_units(self, count: int) -> None:
        for _ in range(count):
            self.runner.cache.evictor.evict_oldest_leaf()
        self._settle()

    @rule()
    def compact(self) -> None:
        self.runner.cache.compact()
        self._settle()

    @rule()
    def reset(self) -> None:
        is_held = any(pin.units for pin in self.runner.transfers.values())
        is_idle = not self.runner.cache.sequences() and not is_held
        assert self.runner.cache.reset() == is_idle
        self._settle()

    def open_transfer(self, name: str) -> None:
        """Pin what is cached of a request that holds nothing itself."""
        track = self.runner.tracks.get(name)
        if track is None or name in self.runner.transfers or track.sequence.units:
            return
        pin = pin_path(self.runner.cache, track.sequence)
        self.runner.transfers[name] = pin
        place = self.runner.cache.pool.place
        self.places[name] = {page: place(page) for page in pin.pages}

    @rule(name=st.sampled_from(NAMES))
    def close_transfer(self, name: str) -> None:
        """The transfer was acknowledged."""
        pin = self.runner.transfers.pop(name, None)
        if pin is not None:
            del self.places[name]
            unpin_path(self.runner.cache, pin, list(self.runner.transfers.values()))
            self.runner.check()

    @rule(prompt=prompts, salt=st.sampled_from(["", "x"]))
    def look_up(self, prompt: tuple[str, int, str, int, str | None, int], salt: str) -> None:
        """Lookups agree with the law and with each other; a rolled back admission leaves no trace."""
        text = self.runner.streams.text(segments(segments_of(prompt), "machine"))
        cache = self.runner.cache
        sequence = cache.new_sequence(
            "lookup",
            text.tokens,
            ((image.offset, image.count, image.key) for image in text.images),
            salt,
        )
        before = _observable(cache)
        match = cache.lookup(sequence)
        assert cache.lookup(sequence) == match
        assert _observable(cache) == before
        self._check_law(salt, text.content, match.hit, match.matched, match.junction)
        needed = len(sequence.digests) + 1
        if cache.fence.is_idle and cache.pool.fits(needed, self.config.state_groups):
            admission = cache.begin(sequence, match)
            assert admission is not None
            cache.rollback(admission)
            self.runner.move()
            assert _observable(cache) == before
        self.runner.check()

    # --- invariants ----------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not hasattr(self, "runner"):
            return
        assert self.runner.failures == [], self.runner.failures[:3]
        # What is in transfer stays where it is.
        for pages in self.places.values():
            for page, place in pages.items():
                assert self.runner.cache.pool.place(page) == place
        stats = self.runner.cache.stats
        assert stats.prompt_tokens == self.seen.totals
        assert stats.hit_tokens == self.seen.hits
        embeddings = self.runner.scheduler.embeddings
        assert embeddings is not None
        assert 0 <= embeddings.used <= embeddings.capacity

    def teardown(self) -> None:
        """Everything ends, and every page comes back."""
        if not hasattr(self, "runner"):
            return
        runner = self.runner
        for name in list(runner.transfers):
            self.close_transfer(name)
        for _ in range(400):
            if not self._begin():
                break
            self._end()
        assert not runner.scheduler.has_work(), "something can never run"
        found = universal_failures(runner)
        assert found == [], found
        assert runner.cache.reset()
        pool = runner.cache.pool
        assert all(pool.is_free(page) for page in range(pool.num_pages))
        assert runner.failures == [], runner.failures[:3]

    def _check_flight(self) -> None:
        """No page that a step in flight writes may be taken by anyone else."""
        cache = self.runner.cache
        handle_at = {cache.pool.place(page): page for page in range(cache.pool.num_pages)}
        for plan in self.runner.flying:
            for row in plan.rows:
                written = row.units[row.start // UNIT :]
                places = {unit // self.config.page_units for unit in written}
                places |= set(row.state_pages) | {p for e in row.exports for p in e.pages}
                for place in places:
                    assert not cache.pool.is_free(handle_at[place]), "freed while it is written"

    # --- the model -----------------------------------------------------------------------

    def _run(self, count: int) -> None:
        for _ in range(count):
            if not self._begin():
                return
            self._end()

    def _begin(self) -> bool:
        waiting = [
            name
            for name, track in self.runner.tracks.items()
            if track.status == "waiting" and self.runner.scheduler.usage(name) is None
        ]
        sealed: dict[bytes, object] = dict(self.runner.cache.states.sealed)
        index = set(self.runner.cache.paged.index)
        tier = self.runner.cache.tier
        if tier is not None:
            sealed |= dict(tier.states)
            index |= set(tier.units)
        has_rows = self.runner.begin_step()
        for name in waiting:
            usage = self.runner.scheduler.usage(name)
            if usage is None:
                continue
            track = self.runner.tracks[name]
            if any(track is each for each in self.seen.counted):
                continue
            self.seen.counted.append(track)
            self.seen.totals += usage.prompt_tokens
            self.seen.hits += usage.cached_local
            assert usage.cached_local + usage.computed == len(track.request.tokens)
            content = track.text.content
            least = self._law(self.namespaces[name], content, sealed.keys(), index)[0]
            # Room for a newcomer may have been made from what it could have used.
            assert usage.cached_local in (0, least) or usage.cached_local < least
            assert usage.cached_local <= len(content) - 1
        return has_rows

    def _end(self) -> None:
        self.runner.end_step()
        self._learn()

    def _abort(self, name: str) -> None:
        self.runner.abort(name)
        self._learn()

    def _settle(self) -> None:
        self.runner.forget_gone()
        self.runner.check()

    def _is_flying(self, name: str) -> bool:
        return any(row.request_id == name for plan in self.runner.flying for row in plan.rows)

    def _learn(self) -> None:
        """Every digest in the index stands for one content, and each content for one digest."""
        for name, track in self.runner.tracks.items():
            script = self.runner.device.scripts[name]
            for place, digest in enumerate(track.sequence.digests):
                end = (place + 1) * UNIT
                meaning = (self.namespaces[name], script.content[:end].tobytes())
                known = self.seen.name_of.setdefault(digest, meaning)
                assert known == meaning, "one digest, two prefixes"

    def _law(
        self, salt: str, content: array, sealed: Iterable[bytes], index: Iterable[bytes]
    ) -> tuple[int, int]:
        """(hit, matched) by contents: the law, spelled out."""
        rows = {self.seen.name_of[d] for d in index if d in self.seen.name_of}
        states = {self.seen.name_of[d] for d in sealed if d in self.seen.name_of}
        n, matched = len(content), 0
        while matched + UNIT <= n and (salt, content[: matched + UNIT].tobytes()) in rows:
            matched += UNIT
        dropped = UNIT if self.config.draft == "drop" else 0
        computed = self.config.replay_tokens if self.config.draft == "replay" else 1
        limit = min(matched - dropped, n - computed)
        step = UNIT if self.config.partial_hits else self.config.grid
        positions = [
            p for p in range(step, limit + 1, step) if (salt, content[:p].tobytes()) in states
        ]
        return max(positions, default=0), matched

    def _check_law(self, salt: str, content: array, hit: int, matched: int, junction: int) -> None:
        cache = self.runner.cache
        sealed, index = set(cache.states.sealed), set(cache.paged.index)
        if cache.tier is not None:
            sealed |= set(cache.tier.states)
            index |= set(cache.tier.units)
        wanted = self._law(salt, content, sealed, index)
        assert (hit, matched) == wanted
        assert junction <= matched

    def _check_victim(self, before: dict[bytes, object]) -> None:
        """Within one class the oldest goes first."""
        cache = self.runner.cache
        gone = [before[d] for d in before if d not in cache.states.sealed]
        assert len(gone) == 1
        if self.config.eviction == "lru":
            victim = gone[0]
            for other in cache.states.sealed.values():
                if not other.pins and other.reason == victim.reason and not victim.hits:
                    assert victim.epoch <= other.epoch or bool(other.hits) is not bool(victim.hits)


def _observable(cache: PrefixCache) -> tuple[object, ...]:
    """Everything that a refused admission must leave as it was."""
    return (
        cache.pool.free_rows(),
        cache.pool.free_state_pages(),
        list(cache.paged.refs),
        list(cache.paged.epoch),
        dict(cache.paged.index),
        {d: (c.pages, c.epoch, c.hits, c.pins) for d, c in cache.states.sealed.items()},
        dict(cache.states.slots),
        cache.paged.num_idle_pages,
        cache.states.num_idle_pages,
        cache.stats.queries,
        cache.stats.hit_tokens,
        cache.paged.oldest_leaf(),
    )
