"""Runs one scenario: the real scheduler and cache, a toy model, exact checks at every step.

A case enters, its results leave. What must always hold, and is reported as a failure where it
does not: every restored state and every row read is that of the request's own tokens; sealed
bytes never change; every count of the cache can be recomputed. `results` tells what came of it.
"""

from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from k3core.cache.audit import audit
from k3core.cache.coordinator import PrefixCache
from k3core.cache.host_tier import HostTier
from k3core.cache.path_pin import PathPin
from k3core.cache.sequence import Sequence
from k3core.scheduler.plan import Event, StepPlan
from k3core.scheduler.request import Request
from k3core.scheduler.scheduler import Scheduler, SchedulerConfig
from k3core.simulate.lookup_result import match_result
from k3core.simulate.scenario_file import (
    Case,
    Json,
    ScenarioError,
    segments,
    whole,
    whole_numbers,
)
from k3core.simulate.streams import Streams, Text
from k3core.simulate.toy_device import Script, ToyDevice, fold_of

# A request that makes no progress for this many steps never will.
_MAX_STEPS = 1_000_000
# Units that an audit may walk for every check.
_AUDIT_UNITS = 50_000


@dataclass(slots=True, eq=False)
class Track:
    """What was seen of one request.

    Attributes:
        sequence: the cache's view, for its path.
        forwards: token counts of the passes that computed its prompt, in order; decode passes
            are not listed.
        exported: positions it sealed.
        output: tokens it was given.
        encoder_runs: pictures encoded for it.
        is_cut: it was ended before all its output was due.
    """

    request: Request
    text: Text
    output_wanted: "array[int]"
    sequence: Sequence
    status: str = "waiting"
    is_cut: bool = False
    reason: str = ""
    forwards: list[int] = field(default_factory=list[int])
    exported: list[int] = field(default_factory=list[int])
    output: list[int] = field(default_factory=list[int])
    encoder_runs: list[str | int] = field(default_factory=list[str | int])


class ScenarioRunner:
    """State of one case while its steps are executed.

    Args:
        case: what to run.
        is_audited: recompute every count after every step.

    Raises:
        CacheError: if the configuration contradicts itself.
    """

    def __init__(self, case: Case, is_audited: bool = True) -> None:
        self.case = case
        tier = HostTier(1 << 62, 1, 1, is_remote=True) if case.has_remote else None
        self.cache = PrefixCache(case.cache, case.namespace, tier)
        self.scheduler = Scheduler(
            SchedulerConfig(
                chunk_tokens=case.chunk_tokens,
                max_rows=case.max_rows,
                encoder_tokens=case.encoder_tokens,
            ),
            self.cache,
        )
        self.device = ToyDevice(case.cache.unit_tokens, case.cache.page_units)
        self.streams = Streams()
        self.tracks: dict[str, Track] = {}
        self.flying: deque[StepPlan] = deque()
        self.transfers: dict[str, PathPin] = {}
        self.lookups: dict[str, dict[str, Json]] = {}
        self.failures: list[str] = []
        self.is_next_load_lost = False
        # Names of remote bytes that no load can read.
        self.unreadable: set[int] = set()
        self.is_reset_accepted: bool | None = None
        # Pictures that the worker was told to forget, in order.
        self.dropped_images: list[str | int] = []
        # Whose prompts a step in flight computes, by its number.
        self._passes: dict[int, list[Track]] = {}
        self._image_names: dict[bytes, str | int] = {}
        self._is_audited = is_audited
        self._sealed_bytes: dict[bytes, bytes] = {}
        self._known: set[bytes] = set()
        self._num_checks = 0

    # --- requests ------------------------------------------------------------------------

    def submit(self, name: str, options: Mapping[str, Json]) -> None:
        """Queue a request.

        Raises:
            ScenarioError: if the name is taken by a live request, or the options are no request.
        """
        where = f"submit {name}"
        text = self.streams.text(segments(options.get("prompt", []), where))
        output = self.streams.text(segments(options.get("output", []), where)).tokens
        max_new = whole(options.get("max_new", len(output)), f"{where}: max_new")
        if max_new > len(output):
            output = output + self.streams.slice(f"output of {name}", 0, max_new - len(output))
        accepted = whole_numbers(options.get("accepted", []), f"{where}: accepted")
        request = Request(
            request_id=name,
            tokens=text.tokens,
            max_new_tokens=max_new,
            images=tuple(text.images),
            salt=_text(options.get("salt")),
            adapter=_text(options.get("adapter")),
            markers=tuple(text.markers),
            draft_tokens=max(accepted, default=0),
        )
        track = Track(request, text, output[:max_new], self._sequence(request))
        if name == "pool":
            raise ScenarioError(f"{where}: this is what the pool's own results are called")
        if name in self.tracks and self.tracks[name].status in ("waiting", "running"):
            raise ScenarioError(f"{where}: a request of this name is live")
        self.tracks[name] = track
        self._image_names.update(text.image_names)
        self.device.scripts[name] = Script(
            text.content + array("q", output.tolist()), output, len(text.tokens), accepted
        )
        refusal = self.scheduler.add(request, bool(options.get("hold", False)))
        if refusal is not None:
            track.status, track.reason = "refused", refusal.reason
            return
        live = self.scheduler.sequence(name)
        assert live is not None
        track.sequence = live

    def step(self) -> bool:
        """Plan a step and commit the oldest in flight; False if there was nothing to do."""
        self.begin_step()
        if not self.flying:
            return False
        self.end_step()
        return True

    def begin_step(self) -> bool:
        """Plan a step, which is in flight then; False if there was nothing to run."""
        plan = self.scheduler.schedule()
        for event in plan.events:
            self._note_event(event)
        self.dropped_images += [self._image_names[key] for key in plan.dropped_images]
        if not plan.rows:
            # Admitted without a row yet, for want of room for a picture: copies still happen.
            self.device.run(plan)
            return False
        self.flying.append(plan)
        self._note_plan(plan)
        return True

    def end_step(self) -> None:
        """Execute and commit the oldest step in flight."""
        plan = self.flying.popleft()
        wanted = {load.host for load in plan.loads}
        lacking = wanted if self.is_next_load_lost else wanted & self.unreadable
        if lacking:
            self.is_next_load_lost = False
            # What leaves or moves does so all the same: the cache counts on it.
            self.device.run(replace(plan, rows=(), restores=(), loads=(), encodes=()))
            self.scheduler.fail(plan, lacking)
            for track in self._passes.pop(plan.step):
                track.forwards.pop()
            self.check()
            return
        del self._passes[plan.step]
        for event in self.scheduler.commit(plan, self.device.run(plan)):
            self._note_event(event)
        planned = [(row.request_id, export.position) for row in plan.rows for export in row.exports]
        self._note_seals([row.request_id for row in plan.rows], planned)
        self.check()

    def run(self, names: list[str]) -> None:
        """Steps until these requests ended or nothing can run."""
        for _ in range(_MAX_STEPS):
            if all(self.tracks[name].status not in ("waiting", "running") for name in names):
                return
            if not self.step():
                return
        raise ScenarioError(f"run {names}: no end after {_MAX_STEPS} steps")

    def look_up(self, options: Mapping[str, Json]) -> dict[str, Json]:
        """A pure lookup, as a result."""
        text = self.streams.text(segments(options.get("prompt", []), "lookup"))
        request = Request(
            request_id="lookup",
            tokens=text.tokens,
            images=tuple(text.images),
            salt=_text(options.get("salt")),
            adapter=_text(options.get("adapter")),
        )
        sequence = self._sequence(request)
        result = match_result(self.cache.lookup(sequence), len(text.tokens))
        return {**result, "digests": [digest.hex() for digest in sequence.digests]}

    def end(self, name: str) -> None:
        """End a request as a stop token would; what it computed stays cached."""
        if self.scheduler.finish(name):
            self.tracks[name].status = "finished"
            self.tracks[name].is_cut = True
            self._note_seals([name], [])
        self.check()

    def abort(self, name: str) -> None:
        """A client left."""
        if self.scheduler.abort(name):
            self.tracks[name].status = "aborted"
        self.check()

    def preempt(self, name: str) -> None:
        """Take a request off the batch."""
        self.scheduler.preempt(name)
        self._note_seals([name], [])
        self.check()

    def check(self) -> None:
        """Audit counts, and sealed bytes against what they were when they were sealed."""
        self.move()
        self.failures += self.device.faults
        self.device.faults.clear()
        self._num_checks += 1
        # A large arena is walked less often; what is wrong stays wrong.
        walked = len(self.cache.paged.refs)
        if self._is_audited and self._num_checks % (1 + walked // _AUDIT_UNITS) == 0:
            pinned = [unit for pin in self.transfers.values() for unit in pin.units]
            self.failures += audit(self.cache, pinned)
            # Moves of a step in flight are still to come; what planning it sealed is noted later.
            is_moving = any(plan.moves for plan in self.flying)
            for digest in () if is_moving else self._known & self.cache.states.sealed.keys():
                checkpoint = self.cache.states.sealed[digest]
                for page in map(self.cache.pool.place, checkpoint.pages):
                    if self.device.state_at(page) != self._sealed_bytes[digest]:
                        self.failures.append(f"the state at {checkpoint.position} has changed")

    def forget_gone(self) -> None:
        """What was evicted may be sealed again by anyone."""
        self._known &= self.cache.states.sealed.keys()

    def move(self) -> None:
        """Execute the page moves that a pool has decided on."""
        moves = self.cache.pool.drain_moves()
        self.device.move([(move.src, move.dst) for move in moves])

    # --- notes ---------------------------------------------------------------------------

    def _note_plan(self, plan: StepPlan) -> None:
        encoded, passes = set(plan.encode_images), self._passes.setdefault(plan.step, [])
        for row in plan.rows:
            track = self.tracks[row.request_id]
            track.status = "running"
            if not row.is_decode:
                track.forwards.append(row.length)
                passes.append(track)
            for need in row.images:
                if need.key in encoded:
                    encoded.discard(need.key)
                    track.encoder_runs.append(track.text.image_names[need.key])

    def _note_event(self, event: Event) -> None:
        track = self.tracks[event.request_id]
        track.output.extend(event.tokens)
        if event.kind == "finished":
            track.status = "finished"
            track.reason = event.reason
        elif event.kind == "refused":
            track.status, track.reason = "refused", event.reason

    def _note_seals(self, names: list[str], planned: list[tuple[str, int]]) -> None:
        """Remember the bytes of what was sealed since the last call, and who sealed it."""
        self.move()
        sealed = self.cache.states.sealed
        fresh = sealed.keys() - self._known
        self._known = set(sealed)
        for digest in fresh:
            checkpoint = sealed[digest]
            position = checkpoint.position
            place = self.cache.pool.place(checkpoint.pages[0])
            self._sealed_bytes[digest] = self.device.state_at(place)
            owners = self._on_path(names, position, digest)
            # A donation may have waited for a later step than the request's own.
            owners = owners or self._on_path(list(self.tracks), position, digest)
            owners.sort(key=lambda name: (name, position) not in planned)
            if not owners:
                self.failures.append(f"nobody sealed the state at {position}")
                continue
            self._check_seal(self.tracks[owners[0]], position, digest)
            self.tracks[owners[0]].exported.append(position)

    def _on_path(self, names: list[str], position: int, digest: bytes) -> list[str]:
        place = position // self.case.cache.unit_tokens
        return [
            name
            for name in names
            if self.tracks[name].sequence.digests[place - 1 : place] == [digest]
        ]

    def _check_seal(self, track: Track, position: int, digest: bytes) -> None:
        content = self.device.scripts[track.request.request_id].content[:position]
        if self._sealed_bytes[digest] != fold_of(content):
            self.failures.append(
                f"{track.request.request_id}: the state at {position} is another's"
            )

    def _sequence(self, request: Request) -> Sequence:
        return self.cache.new_sequence(
            request.request_id,
            request.tokens,
            ((image.offset, image.count, image.key) for image in request.images),
            request.salt,
            request.adapter,
            request.markers,
        )


def _text(value: Json) -> str:
    return "" if value is None else str(value)
