"""A model that can be checked exactly: it folds tokens into a hash and remembers its rows.

State after p tokens := a hash of the first p, taken one after the other; MLA row := (position,
content). The device holds both where the plan says, as memory does: it overwrites, it copies
whole pages, and it has no idea who owns what. A row whose state or history is not what its
tokens require yields a wrong token, as a real model would, and the fault is written down.
"""

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from k3core.scheduler.plan import HostCopy, PageCopy, RowPlan, RowResult, StepPlan
from k3core.simulate.streams import image_content

# hashlib names no public type for its objects.
Fold = Any
WRONG_TOKEN = -1
_POISON = array("q", [-1])


def start_fold() -> Fold:
    """The zero state."""
    return blake2b(digest_size=16)


def fold_of(content: "array[int]") -> bytes:
    """State after all of `content`, by value."""
    fold = start_fold()
    fold.update(content.tobytes())
    return fold.digest()


@dataclass(slots=True)
class Script:
    """What a request should do.

    Attributes:
        content: of prompt and output together, packed int64.
        output: tokens in order, packed int32.
        prompt_length: n.
        accepted: accepted drafts at each decode step, then none.
    """

    content: "array[int]"
    output: "array[int]"
    prompt_length: int
    accepted: tuple[int, ...] = ()
    num_decode_steps: int = 0


@dataclass(slots=True)
class _Rows:
    """Rows of one unit: where it starts and what each row holds."""

    first: int
    content: "array[int]"


@dataclass(slots=True)
class ToyDevice:
    """Memory of units and states by place, and the fold that runs over it.

    Attributes:
        unit_tokens: U.
        page_units: units a page.
        faults: everything that was not as it must be.
        num_copies: page copies made for restores.
    """

    unit_tokens: int
    page_units: int
    scripts: dict[str, Script] = field(default_factory=dict[str, Script])
    embeddings: dict[bytes, int] = field(default_factory=dict[bytes, int])
    faults: list[str] = field(default_factory=list[str])
    num_copies: int = 0
    _rows: dict[int, _Rows] = field(default_factory=dict[int, _Rows])
    _states: dict[int, Fold] = field(default_factory=dict[int, Fold])
    _host: dict[int, object] = field(default_factory=dict[int, object])

    def run(self, plan: StepPlan) -> list[RowResult]:
        """Execute one step and report it."""
        for copy in plan.spills:
            self._spill(copy)
        for host in plan.freed_host:
            del self._host[host]
        for copy in plan.moves:
            self.move(list(zip(copy.src, copy.dst, strict=True)))
        for copy in plan.restores:
            self.num_copies += 1
            self._copy_state(copy)
        for copy in plan.loads:
            self._load(copy)
        for key in plan.dropped_images:
            self.embeddings.pop(key, None)
        for key in plan.encode_images:
            self.embeddings[key] = 1
        results = [self._run_row(row) for row in plan.rows]
        for copy in plan.encodes:
            self._copy_state(copy)
        return results

    def keep(self, host: int, unit: int, page: int) -> None:
        """Copy a unit (page -1) or a state (unit -1) to host memory, outside of any step."""
        self._spill(HostCopy(host, unit, () if unit >= 0 else (page,)))

    def state_at(self, page: int) -> bytes:
        """State held by a page, by value; b"" if nothing was ever written there."""
        fold = self._states.get(page)
        return fold.digest() if fold is not None else b""

    def rows_at(self, unit: int) -> tuple[int, "array[int]"]:
        """First position and content of a unit's rows."""
        rows = self._rows.get(unit)
        return (rows.first, rows.content) if rows is not None else (-1, _POISON)

    def move(self, pages: list[tuple[int, int]]) -> None:
        """Move whole pages, (from, to), one after the other."""
        size = self.page_units
        for src, dst in pages:
            self._copy_state(PageCopy((src,), (dst,)))
            for place in range(size):
                rows = self._rows.get(src * size + place)
                if rows is None:
                    self._rows.pop(dst * size + place, None)
                else:
                    self._rows[dst * size + place] = _Rows(rows.first, rows.content[:])

    def _run_row(self, row: RowPlan) -> RowResult:
        script = self.scripts[row.request_id]
        is_sound = self._check_history(row, script)
        fold = self._states[row.state_pages[0]].copy() if row.start else start_fold()
        sampled, committed = self._sample(row, script)
        chunk = self._chunk_content(row, script, committed)
        self._write_rows(row, chunk)
        exported = self._fold_chunk(row, fold, chunk, committed)
        for page in row.state_pages:
            self._states[page] = fold
        if sampled and not is_sound:
            sampled = tuple(WRONG_TOKEN for _ in sampled)
        return RowResult(row.request_id, sampled, exported)

    def _check_history(self, row: RowPlan, script: Script) -> bool:
        """Whether live state and rows before the chunk are those of the sequence."""
        truth, unit = script.content, self.unit_tokens
        is_sound = True
        if row.start:
            wanted = fold_of(truth[: row.start])
            for page in row.state_pages:
                if self.state_at(page) != wanted:
                    self._fault(row, f"state of page {page} is not that after {row.start} tokens")
                    is_sound = False
        for place in range(-(-row.start // unit)):
            end = min(row.start, (place + 1) * unit)
            first, content = self.rows_at(row.units[place])
            if first != place * unit or content[: end - first] != truth[first:end]:
                self._fault(row, f"rows of unit {row.units[place]} are not those at {place * unit}")
                is_sound = False
        return is_sound

    def _sample(self, row: RowPlan, script: Script) -> tuple[tuple[int, ...], int]:
        """Tokens the target emits, and tokens of the chunk that stand."""
        done = row.start + len(row.token_ids) - script.prompt_length
        if not row.is_decode:
            if not row.wants_logits:
                return (), row.length
            return (self._output(script, done),), row.length
        step = script.num_decode_steps
        script.num_decode_steps += 1
        accepted = script.accepted[step] if step < len(script.accepted) else 0
        accepted = min(accepted, row.num_drafts)
        sampled = tuple(self._output(script, done + k) for k in range(accepted + 1))
        return sampled, accepted + 1

    def _output(self, script: Script, index: int) -> int:
        return script.output[index] if index < len(script.output) else WRONG_TOKEN

    def _chunk_content(self, row: RowPlan, script: Script, committed: int) -> "array[int]":
        """Content of the chunk as the plan gives it: token ids, embeddings, drafts."""
        chunk = array("q", row.token_ids.tolist())
        for need in row.images:
            if need.key not in self.embeddings:
                self._fault(row, f"the embeddings at {row.start + need.chunk_offset} are not held")
                continue
            chunk[need.chunk_offset : need.chunk_offset + need.count] = image_content(
                need.key, need.image_offset, need.count
            )
        known = len(chunk)
        for draft in range(row.num_drafts):
            place = row.start + known + draft
            is_accepted = draft < committed - known
            # A rejected draft leaves rows of its own, which nothing may ever read.
            chunk.append(script.content[place] if is_accepted else -2 - draft)
        return chunk

    def _write_rows(self, row: RowPlan, chunk: "array[int]") -> None:
        unit = self.unit_tokens
        position, end = row.start, row.start + len(chunk)
        while position < end:
            place = position // unit
            stop = min(end, (place + 1) * unit)
            name = row.units[place]
            rows = self._rows.get(name)
            if rows is None or rows.first != place * unit or position == rows.first:
                rows = self._rows[name] = _Rows(place * unit, _POISON * unit)
            offset = position - rows.first
            rows.content[offset : offset + stop - position] = chunk[
                position - row.start : stop - row.start
            ]
            position = stop

    def _fold_chunk(
        self, row: RowPlan, fold: Fold, chunk: "array[int]", committed: int
    ) -> tuple[int, ...]:
        done, exported = 0, list[int]()
        for export in row.exports:
            if export.offset > committed:
                continue
            fold.update(chunk[done : export.offset].tobytes())
            done = export.offset
            for page in export.pages:
                self._states[page] = fold.copy()
            exported.append(export.position)
        fold.update(chunk[done:committed].tobytes())
        return tuple(exported)

    def _copy_state(self, copy: PageCopy) -> None:
        folds = [self._states.get(page) for page in copy.src]
        for place, page in enumerate(copy.dst):
            # The toy's compressed form has fewer pages; each holds the whole fold.
            fold = folds[min(place, len(folds) - 1)]
            if fold is None:
                self._states.pop(page, None)
            else:
                self._states[page] = fold.copy()

    def _spill(self, copy: HostCopy) -> None:
        if copy.unit >= 0:
            rows = self._rows[copy.unit]
            self._host[copy.host] = _Rows(rows.first, rows.content[:])
        else:
            self._host[copy.host] = self._states[copy.pages[0]].copy()

    def _load(self, copy: HostCopy) -> None:
        held: Any = self._host[copy.host]
        if copy.unit >= 0:
            self._rows[copy.unit] = _Rows(held.first, held.content[:])
            return
        self.num_copies += 1
        for page in copy.pages:
            self._states[page] = held.copy()

    def _fault(self, row: RowPlan, what: str) -> None:
        self.faults.append(f"{row.request_id}: {what}")
