"""The runner without a model: answers from a script, over real pages.

Only the forward pass is make-believe. Scheduling, the prefix cache, page copies, sampling limits
and the hand-off are the real ones: a request's place in its script lies in its state page, as a
model's state would, so a decode worker can go on only if the page reached it. Neither torch nor
a tokenizer is needed; which line answers a prompt is decided by a function handed in.

State page: magic, line index, output position of the next token; little-endian.
"""

import struct
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from k3core.cache.layout import LAYOUT_VERSION, ModelSizes, PageLayout, unit_offset
from k3core.engine.host_memory import HostMemory
from k3core.engine.script import Script, ScriptLine
from k3core.engine.words import Adoption, EngineRequest, RowError
from k3core.scheduler.plan import HostCopy, PageCopy, RowPlan, RowResult, StepPlan
from k3wire.errors import InternalError, InvalidRequest

_STATE = struct.Struct("<8siq")
_MAGIC = b"k3script"
_UNIT_BYTES = 64
_PAGE_UNITS = 16

Choose = Callable[["array[int]"], int]
"""Prompt ids to the index of the line that answers; raises `InvalidRequest` if none does."""


def scripted_layout(unit_tokens: int) -> PageLayout:
    """The smallest page that still has units to send: rows are never read, only moved."""
    sizes = ModelSizes(
        mla_layers=1,
        row_elements=0,
        row_bytes=0,
        kda_layers=1,
        state_heads=1,
        head_dim=1,
        conv_width=1,
        conv_itemsize=1,
    )
    return PageLayout(
        unit_tokens=unit_tokens,
        page_units=_PAGE_UNITS,
        num_groups=1,
        group_layers=1,
        page_bytes=_PAGE_UNITS * _UNIT_BYTES,
        unit_bytes=_UNIT_BYTES,
        int8_groups=1,
        sizes=sizes,
        version=LAYOUT_VERSION,
    )


@dataclass(slots=True)
class _Answer:
    """One request's way through its line.

    Attributes:
        request: as given.
        line: index of the line.
        position: output position of the next token.
        num_said: tokens given by this worker.
        due_s: monotonic time before which the next row must not run.
    """

    request: EngineRequest
    line: int
    position: int
    num_said: int
    due_s: float


class ScriptedRunner:
    """Answers every request from one line of a script, at the line's pace."""

    def __init__(
        self,
        script: Script,
        layout: PageLayout,
        memory: HostMemory,
        choose: Choose | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the runner.

        Args:
            script: the answers.
            layout: of the pages, from `scripted_layout`.
            memory: all pages, back to back.
            choose: finds the line for a prompt; None on a decode worker, which is told.
            clock: monotonic seconds.
        """
        self._script = script
        self._layout = layout
        self._memory = memory
        self._choose = choose
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._host: dict[int, list[bytes]] = {}

    def open(self) -> None:
        """Nothing to warm up."""

    def close(self) -> None:
        """Forgets every request."""
        self._answers.clear()
        self._host.clear()

    def begin(self, request: EngineRequest, adoption: Adoption | None) -> None:
        """Finds the request's line: by its prompt, or in the state page it came with.

        Raises:
            InvalidRequest: no line answers the prompt.
            InternalError: the state page holds no place in this script.
        """
        if adoption is None:
            assert self._choose is not None, "a decode worker only adopts"
            index, position = self._choose(request.request.tokens), request.num_emitted_tokens
            delay_s = self._script.lines[index].first_token_s
        else:
            index, position = self._read_state(adoption.state_pages[0])
            if position != request.num_emitted_tokens + 1:
                raise InternalError("The handed-over state is of another position.")
            line = self._script.lines[index]
            delay_s = line.per_token_s * line.split_every
        line = self._script.lines[index]
        if not line.token_ids and not request.sampling.stop_token_ids:
            raise InvalidRequest("The script's line is empty and the request has no end token.")
        due_s = self._clock() + delay_s if delay_s else 0.0
        self._answers[request.key] = _Answer(request, index, position, 0, due_s)

    def forget(self, key: str) -> None:
        """Forgets a request."""
        self._answers.pop(key, None)

    def provide_image(self, key: str, index: int, data: memoryview) -> None:
        """Pictures change nothing here."""

    def held(self, now_s: float) -> Mapping[str, float]:
        """Requests whose next token is not due yet."""
        return {key: answer.due_s for key, answer in self._answers.items() if answer.due_s > now_s}

    def frame_tokens(self, key: str) -> int:
        """The line's `split_every`."""
        return self._script.lines[self._answers[key].line].split_every

    def execute(self, plan: StepPlan) -> Sequence[RowResult]:
        """Moves pages as a model's engine would and reads the next tokens from the script."""
        for spill in plan.spills:
            self._host[spill.host] = [bytes(view) for view in self._copied(spill)]
        for host in plan.freed_host:
            del self._host[host]
        for copy in (*plan.moves, *plan.restores):
            self._copy(copy)
        for load in plan.loads:
            for view, content in zip(self._copied(load), self._host[load.host], strict=True):
                view[:] = content
        results = [self._run_row(row) for row in plan.rows]
        for copy in plan.encodes:
            self._copy(copy)
        return results

    def _run_row(self, row: RowPlan) -> RowResult:
        answer = self._answers[row.request_id]
        if row.is_decode and self._read_place(row) != (answer.line, answer.position):
            raise RowError(row.request_id, InternalError("The request's state was overwritten."))
        exported: list[int] = []
        for export in row.exports:
            self._write_state(export.pages, answer.line, export.position)
            exported.append(export.position)
        sampled: tuple[int, ...] = ()
        is_last = False
        if row.wants_logits:
            token, is_last = self._next_token(answer)
            sampled = (token,)
            self._pace(answer)
        self._write_state(row.state_pages, answer.line, answer.position)
        return RowResult(row.request_id, sampled, tuple(exported), is_last)

    def _next_token(self, answer: _Answer) -> tuple[int, bool]:
        """The token at the answer's position, and whether the script ends with it."""
        tokens = self._script.lines[answer.line].token_ids
        sampling = answer.request.sampling
        position = answer.position
        if sampling.ignores_end and tokens:
            return tokens[position % len(tokens)], False
        if position < len(tokens):
            is_last = position + 1 == len(tokens) and not sampling.stop_token_ids
            return tokens[position], is_last
        if sampling.stop_token_ids:
            return sampling.stop_token_ids[0], True
        return tokens[-1], True

    def _pace(self, answer: _Answer) -> None:
        """Moves on by one token and sets when the next may come."""
        line: ScriptLine = self._script.lines[answer.line]
        answer.position += 1
        answer.num_said += 1
        if line.per_token_s and answer.num_said % line.split_every == 0:
            # From when it was due, not from when it ran: a late step does not slow the stream.
            answer.due_s = (answer.due_s or self._clock()) + line.per_token_s * line.split_every

    def _copy(self, copy: PageCopy) -> None:
        size = self._layout.page_bytes
        # All sources first: a destination may be another copy's source.
        contents = [bytes(self._memory.view(page * size, size)) for page in copy.src]
        for page, content in zip(copy.dst, contents, strict=True):
            self._memory.view(page * size, size)[:] = content

    def _copied(self, copy: HostCopy) -> list[memoryview]:
        """The bytes that a host copy speaks of: a state's pages, or one unit."""
        size = self._layout.page_bytes
        if copy.pages:
            return [self._memory.view(page * size, size) for page in copy.pages]
        start = unit_offset(self._layout, copy.unit)
        return [self._memory.view(start, self._layout.unit_bytes)]

    def _write_state(self, pages: Sequence[int], line: int, position: int) -> None:
        offset = pages[0] * self._layout.page_bytes
        _STATE.pack_into(self._memory.view(offset, _STATE.size), 0, _MAGIC, line, position)

    def _read_place(self, row: RowPlan) -> tuple[int, int]:
        try:
            return self._read_state(row.state_pages[0])
        except InternalError as error:
            raise RowError(row.request_id, error) from error

    def _read_state(self, page: int) -> tuple[int, int]:
        """The line and position in a state page.

        Raises:
            InternalError: it holds none.
        """
        view = self._memory.view(page * self._layout.page_bytes, _STATE.size)
        magic, line, position = _STATE.unpack_from(view)
        if magic != _MAGIC or not 0 <= line < len(self._script.lines):
            raise InternalError("The handed-over state is not one of this script.")
        return line, position
