"""One request's place on a decode worker, from its reservation to its last token.

reserve ─► RESERVED ─ commit, checksum ─► RUNNING ─ last token ─► gone
│ the client left,             │ cancel, deadline, failure
│ deadline, prefill lost       ▼
▼                             gone, at once
RESTING ─ its writer says that it stopped, or REST_S ─► gone
"""

import time
from dataclasses import dataclass
from typing import Literal

from k3wire.messages.base import StageReport
from k3wire.messages.decode import ReserveRequest
from k3wire.messages.pages import PageGrant
from k3wire.messages.stream import TokenDelta

REST_S = 2.0
"""Longest rest of a reservation that was given up, before its pages are granted again. Its prefill
worker may still be writing. It says when it has stopped, within milliseconds; one that cannot is
in the middle of a batch at most, and a batch takes far less than this."""

State = Literal["reserving", "reserved", "committing", "running", "resting"]


@dataclass(slots=True)
class Seat:
    """What the handler knows of one attempt of one request.

    Attributes:
        request: as reserved.
        state: see above; `reserving` and `committing` while the engine is asked.
        grant: the pages, once there are some.
        state_pages: ids of the state's pages in this arena.
        is_cancelled: it was given up while the engine was being asked.
        hand_off_report: prefill's report of the transfer, for the first delta.
        start_unix_ns: when decoding began.
        start_ns: likewise, monotonic.
        num_tokens: output tokens sent by this worker.
    """

    request: ReserveRequest
    state: State = "reserving"
    grant: PageGrant | None = None
    state_pages: tuple[int, ...] = ()
    is_cancelled: bool = False
    hand_off_report: StageReport | None = None
    start_unix_ns: int = 0
    start_ns: int = 0
    num_tokens: int = 0

    @property
    def key(self) -> str:
        """The engine's name for it."""
        return key_of(self.request.request_id, self.request.attempt)

    @property
    def next_position(self) -> int:
        """Output position of the next token; prefill sent the first."""
        return self.request.num_emitted_tokens + 1 + self.num_tokens

    def start(self, report: StageReport | None) -> None:
        """The request runs from now on."""
        self.state = "running"
        self.hand_off_report = report
        self.start_unix_ns = time.time_ns()
        self.start_ns = time.perf_counter_ns()

    def delta(self, token_ids: tuple[int, ...]) -> TokenDelta:
        """Makes the delta of new tokens; the first one brings the hand-off's report."""
        reports = (self.hand_off_report,) if self.hand_off_report is not None else ()
        self.hand_off_report = None
        position = self.next_position
        self.num_tokens += len(token_ids)
        return TokenDelta(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            position=position,
            token_ids=token_ids,
            reports=reports,
        )

    def report(self, worker_id: str) -> StageReport:
        """What decoding took, for the last delta."""
        return StageReport(
            stage="decode",
            outcome="bypass",
            worker_id=worker_id,
            start_unix_ns=self.start_unix_ns,
            duration_ns=time.perf_counter_ns() - self.start_ns,
            num_items=self.num_tokens,
        )


def key_of(request_id: str, attempt: int) -> str:
    """The engine's name for one attempt of a request."""
    return f"{request_id}#{attempt}"
