"""Where workers' token frames arrive, handed to the requests that wait for them.

Enters: `TokenFrame`s from the bus. Leaves: `TokenDelta`s, in order, one queue a request. Always
true: a delta of a stale attempt or of a request that ended is dropped; a position that was already
delivered is not delivered twice; a position that stays missing ends the request as a lost worker.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from k3wire.errors import DeadlineExceeded, K3Error, WorkerLost, from_info
from k3wire.messages.stream import TokenDelta, TokenFrame

MAX_QUEUED_DELTAS = 8192
"""Deltas a stalled reader may leave unread; past that its request is ended."""

MAX_HELD_DELTAS = 256
"""Deltas that may wait for one that is late."""

MAX_GAP_S = 2.0
"""How long a missing frame may be late before it counts as lost."""

LOST_TEXT = "Tokens of this answer were lost on the way; ask again"


@dataclass(slots=True)
class TokenStream:
    """The deltas of one attempt of one request, put back in order.

    Prefill and decode publish from two connections, so a delta may overtake its predecessor; it is
    held until the gap closes. A gap that stays open is a lost frame.

    Attributes:
        request_id: whose.
        attempt: which; others are dropped.
        next_position: output position expected next.
    """

    request_id: str
    attempt: int
    next_position: int = 0
    _queue: deque[TokenDelta] = field(default_factory=deque[TokenDelta])
    _reader: asyncio.Future[None] | None = None
    _held: dict[int, TokenDelta] = field(default_factory=dict[int, TokenDelta])
    _is_ended: bool = False

    def put(self, delta: TokenDelta) -> None:
        """Takes a delta; never blocks."""
        if delta.attempt != self.attempt or self._is_ended:
            return
        if delta.error is not None:
            self._end(delta)
            return
        if delta.position > self.next_position:
            self._held[delta.position] = delta
            loop = asyncio.get_running_loop()
            loop.call_later(MAX_GAP_S, self._end_gap, self.next_position)
            if len(self._held) > MAX_HELD_DELTAS:
                self.fail(WorkerLost(LOST_TEXT))
            return
        self._take(delta)
        while not self._is_ended and self.next_position in self._held:
            self._take(self._held.pop(self.next_position))

    def _take(self, delta: TokenDelta) -> None:
        already = self.next_position - delta.position
        if already > 0:
            fresh = delta.token_ids[already:]
            if not fresh and delta.finish_reason is None:
                return
            delta = msgspec.structs.replace(delta, position=self.next_position, token_ids=fresh)
        if len(self._queue) >= MAX_QUEUED_DELTAS:
            self.fail(WorkerLost(LOST_TEXT))
            return
        self.next_position += len(delta.token_ids)
        self._is_ended = delta.finish_reason is not None
        self._queue.append(delta)
        self._wake()

    def _end_gap(self, position: int) -> None:
        if self._held and self.next_position == position:
            self.fail(WorkerLost(LOST_TEXT))

    def _end(self, last: TokenDelta) -> None:
        while self._queue and len(self._queue) >= MAX_QUEUED_DELTAS:
            self._queue.popleft()
        self._is_ended = True
        self._queue.append(last)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def fail(self, error: K3Error) -> None:
        """Ends the stream from this side, as when its worker is found dead."""
        if not self._is_ended:
            self._end(
                TokenDelta(
                    request_id=self.request_id,
                    attempt=self.attempt,
                    finish_reason="error",
                    error=error.to_info(),
                )
            )

    async def deltas(self, deadline_s: float) -> AsyncIterator[TokenDelta]:
        """Yields deltas until the one that finishes, which is yielded too.

        Args:
            deadline_s: event-loop time after which to give up waiting for the next one.

        Raises:
            DeadlineExceeded: the deadline passed.
            K3Error: what the worker reported, or `WorkerLost` for a lost frame.
        """
        while True:
            delta = await self.next(deadline_s)
            assert delta is not None, "without a bound on silence there is always a delta"
            yield delta
            if delta.finish_reason is not None:
                return

    async def next(self, deadline_s: float, silence_s: float | None = None) -> TokenDelta | None:
        """Gives the next delta; not to be called after the one that finishes.

        Args:
            deadline_s: event-loop time after which to give up.
            silence_s: how long to wait at most; None: till the deadline.

        Returns:
            None if nothing came within `silence_s`.

        Raises:
            DeadlineExceeded: the deadline passed.
            K3Error: what the worker reported, or `WorkerLost` for a lost frame.
        """
        if not self._queue:
            await self._wait(deadline_s, silence_s)
        if not self._queue:
            if silence_s is not None and asyncio.get_running_loop().time() < deadline_s:
                return None
            raise DeadlineExceeded("The answer took longer than the request allows")
        delta = self._queue.popleft()
        if delta.error is not None:
            raise from_info(delta.error)
        return delta

    async def _wait(self, deadline_s: float, silence_s: float | None) -> None:
        # A future and a timer: a time-out block around a queue costs a token three times as much.
        loop = asyncio.get_running_loop()
        until_s = deadline_s if silence_s is None else min(deadline_s, loop.time() + silence_s)
        self._reader = loop.create_future()
        timer = loop.call_at(until_s, self._wake)
        try:
            await self._reader
        finally:
            timer.cancel()
            self._reader = None


class TokenInbox:
    """All streams of this gateway."""

    def __init__(self) -> None:
        self._streams: dict[str, TokenStream] = {}

    def open(self, request_id: str, attempt: int) -> TokenStream:
        """Opens a stream before the request is sent, so that no token can come too early."""
        stream = TokenStream(request_id=request_id, attempt=attempt)
        self._streams[request_id] = stream
        return stream

    def close(self, request_id: str) -> None:
        """Forgets a stream; safe twice."""
        self._streams.pop(request_id, None)

    def on_frame(self, frame: TokenFrame) -> None:
        """Hands each delta of a frame to its stream."""
        for delta in frame.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)

    @property
    def num_open(self) -> int:
        """Requests waiting for tokens."""
        return len(self._streams)
