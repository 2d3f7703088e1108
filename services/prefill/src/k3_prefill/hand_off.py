"""A prompt's way to its decode worker: reserve, push pages, commit.

Pages travel while later chunks are still computed; the state follows last, and the commit only
when every write was acknowledged. Whatever goes wrong with the other worker ends as one error
that a client may retry: `worker_lost`.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from k3core.scheduler.plan import HandOff
from k3core.transfer.base import TransferEngine, Write
from k3core.transfer.page_exchange import Arena, checksum, state_writes, unit_writes
from k3wire import subjects
from k3wire.bus.base import Bus
from k3wire.errors import DeadlineExceeded, K3Error, NoResponders, TierUnavailable, WorkerLost
from k3wire.messages.base import StageReport
from k3wire.messages.control import Cancel
from k3wire.messages.decode import CommitRequest, ReserveRequest
from k3wire.messages.pages import PageGrant
from k3wire.messages.prefill import PrefillRequest

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 5.0
"""Longest wait for a decode worker's answer; a living one answers within milliseconds."""

MAX_PUSH_BYTES = 32 * 1024 * 1024
"""Bytes of one batch of writes. A cancel stops a push between two batches, and a decode worker
lets a cancelled reservation rest longer than one batch takes."""


class DecodeLink:
    """Talks to decode workers and writes into their pages."""

    def __init__(
        self,
        bus: Bus,
        transfer: TransferEngine,
        arena: Arena,
        view_page: Callable[[int], memoryview],
    ) -> None:
        """Joins the parts.

        Args:
            bus: for the calls.
            transfer: for the pages; the arena is registered with it.
            arena: of this worker.
            view_page: the bytes of one page of it.
        """
        self._bus = bus
        self._transfer = transfer
        self._arena = arena
        self._view_page = view_page

    async def reserve(self, worker_id: str, request: ReserveRequest) -> PageGrant:
        """Asks a decode worker for room.

        Raises:
            WorkerLost: it is gone or does not answer.
            K3Error: what it answered.
        """
        subject = subjects.direct(subjects.RESERVE, worker_id)
        deadline = _control_deadline(request.deadline_unix_ns)
        try:
            reply = await self._bus.call(subject, subjects.RESERVE, request, deadline)
        except (NoResponders, DeadlineExceeded) as error:
            raise _lost() from error
        return reply.grant

    async def push_units(self, grant: PageGrant, units: Sequence[int], position: int) -> int:
        """Writes some units of a prompt into their granted places; returns bytes written.

        Raises:
            WorkerLost: the other side does not take them.
        """
        return await self._write(grant, unit_writes(self._arena, grant, units, position))

    async def push_rest(
        self, grant: PageGrant, hand_off: HandOff, units: Sequence[int], position: int
    ) -> int:
        """Writes the last units of a prompt and its whole state; returns bytes written.

        Raises:
            WorkerLost: the other side does not take them.
        """
        writes = unit_writes(self._arena, grant, units, position)
        return await self._write(
            grant, writes + state_writes(self._arena, grant, hand_off.state_pages)
        )

    async def commit(
        self, worker_id: str, request: PrefillRequest, hand_off: HandOff, report: StageReport
    ) -> None:
        """Lets the decode worker run the request.

        Raises:
            WorkerLost: it is gone, does not answer, or found the pages damaged.
            K3Error: what it answered.
        """
        message = CommitRequest(
            request_id=request.request_id,
            attempt=request.attempt,
            num_tokens=hand_off.num_tokens,
            first_token_id=hand_off.first_token,
            checksum=checksum(self._view_page(page) for page in hand_off.state_pages),
            report=report,
            deadline_unix_ns=request.deadline_unix_ns,
        )
        subject = subjects.direct(subjects.COMMIT, worker_id)
        deadline = _control_deadline(request.deadline_unix_ns)
        try:
            await self._bus.call(subject, subjects.COMMIT, message, deadline)
        except (NoResponders, DeadlineExceeded) as error:
            raise _lost() from error

    async def cancel(self, request: PrefillRequest) -> None:
        """Gives a reservation back; one that is gone already is fine, and so is a bus that is away.

        The reservation's deadline frees it where nobody hears of this.
        """
        cancel = Cancel(request_id=request.request_id, attempt=request.attempt)
        try:
            await self._bus.publish(subjects.cancel("decode"), cancel)
        except K3Error as error:
            logger.warning("reservation not given back", extra={"code": error.code})

    async def _write(self, grant: PageGrant, writes: Sequence[Write]) -> int:
        try:
            for batch in _batches(writes):
                await self._transfer.write(grant.session, batch)
        except TierUnavailable as error:
            raise _lost() from error
        return sum(write.size_bytes for write in writes)


def _batches(writes: Sequence[Write]) -> Iterator[list[Write]]:
    """Groups writes in order, each group up to `MAX_PUSH_BYTES` or a single write."""
    batch: list[Write] = []
    size = 0
    for write in writes:
        if batch and size + write.size_bytes > MAX_PUSH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(write)
        size += write.size_bytes
    if batch:
        yield batch


def _control_deadline(deadline_unix_ns: int) -> int:
    return min(deadline_unix_ns, time.time_ns() + int(CONTROL_TIMEOUT_S * 1e9))


def _lost() -> WorkerLost:
    return WorkerLost("A worker was lost while the answer was being prepared; try again.")
