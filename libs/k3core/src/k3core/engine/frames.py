"""From deltas to frames: one frame for each step and gateway, numbered without a gap.

Both workers that send tokens use this, so that a gateway reads one order whoever sends. The bus
is a function handed in; everything here runs on the worker's event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from k3wire.errors import K3Error
from k3wire.messages.stream import TokenDelta, TokenFrame

logger = logging.getLogger(__name__)

MAX_BACKLOG = 8192
"""Frames that may wait for the bus. Past that the oldest is dropped: its gateway sees the gap and
ends the stream, which is better than a worker that grows until it is killed."""


class FrameAssembler:
    """Groups the deltas of a step by stream subject and numbers the frames of each subject."""

    def __init__(self, worker_id: str, epoch: int) -> None:
        """Starts every subject's count at zero.

        Args:
            worker_id: the sender.
            epoch: its start, which fences off a predecessor.
        """
        self._worker_id = worker_id
        self._epoch = epoch
        # Kept for a silent subject too: a gateway that sees a number fall takes the worker for
        # a new one.
        self._next_seq: dict[str, int] = {}

    def assemble(self, deltas: Iterable[tuple[str, TokenDelta]]) -> list[tuple[str, TokenFrame]]:
        """Makes the frames of one step.

        Args:
            deltas: (stream subject, delta), in order.

        Returns:
            (stream subject, frame), one for each subject; one more where a request has several
            deltas, since a frame has at most one of each request.
        """
        open_groups: dict[str, dict[str, TokenDelta]] = {}
        frames: list[tuple[str, TokenFrame]] = []
        for subject, delta in deltas:
            group = open_groups.setdefault(subject, {})
            if delta.request_id in group:
                frames.append((subject, self._frame(subject, group)))
                group = open_groups[subject] = {}
            group[delta.request_id] = delta
        frames += [(subject, self._frame(subject, group)) for subject, group in open_groups.items()]
        return frames

    def _frame(self, subject: str, deltas: dict[str, TokenDelta]) -> TokenFrame:
        seq = self._next_seq.get(subject, 0)
        self._next_seq[subject] = seq + 1
        return TokenFrame(
            worker_id=self._worker_id, epoch=self._epoch, seq=seq, deltas=tuple(deltas.values())
        )


class FrameSender:
    """Collects a step's deltas and publishes their frames in order, from one task."""

    def __init__(
        self, assembler: FrameAssembler, publish: Callable[[str, TokenFrame], Awaitable[None]]
    ) -> None:
        """Joins the parts; nothing is published before `run`."""
        self._assembler = assembler
        self._publish = publish
        self._deltas: list[tuple[str, TokenDelta]] = []
        self._backlog: deque[tuple[str, TokenFrame]] = deque()
        self._wake = asyncio.Event()
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self.num_dropped = 0

    def add(self, subject: str, delta: TokenDelta) -> None:
        """Adds a delta to the step that is being told."""
        self._deltas.append((subject, delta))

    def flush(self) -> None:
        """Ends the step: its frames are on their way."""
        if not self._deltas:
            return
        self._backlog.extend(self._assembler.assemble(self._deltas))
        self._deltas.clear()
        while len(self._backlog) > MAX_BACKLOG:
            self._backlog.popleft()
            self.num_dropped += 1
            logger.warning("token frame dropped", extra={"num_dropped": self.num_dropped})
        self._is_sent.clear()
        self._wake.set()

    async def run(self) -> None:
        """Publishes until it is cancelled; cancel it after `wait_sent`.

        A frame that the bus refuses is lost like one that it loses: the gateway sees the gap.
        """
        while True:
            while self._backlog:
                subject, frame = self._backlog.popleft()
                try:
                    await self._publish(subject, frame)
                except K3Error:
                    self.num_dropped += 1
                    logger.warning("token frame not sent", extra={"subject": subject})
            self._is_sent.set()
            self._wake.clear()
            await self._wake.wait()

    async def wait_sent(self) -> None:
        """Returns when everything flushed so far was handed to the bus."""
        await self._is_sent.wait()


def gateway_of(stream_subject: str) -> str:
    """The gateway id in a stream's subject, as `subjects.tokens` puts it there."""
    parts = stream_subject.split(".")
    return parts[2] if len(parts) == 4 else stream_subject
