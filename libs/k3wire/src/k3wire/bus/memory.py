"""The bus within one process, for tests: same semantics, same bytes, no broker."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from k3wire.bus import codec
from k3wire.bus.base import Headers, Subscription
from k3wire.bus.intake import Intake, hear
from k3wire.errors import DeadlineExceeded, NoResponders
from k3wire.messages.base import Message
from k3wire.subjects import Call

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


@dataclass(eq=False, slots=True)
class _Server:
    queue: str
    intake: Intake
    run: Callable[[bytes, Headers], Awaitable[bytes]]


@dataclass(eq=False, slots=True)
class _Listener:
    pattern: str
    take: Callable[[bytes], None]


@dataclass(slots=True)
class MemoryBus:
    """A broker and its clients in one object; see `k3wire.bus.base.Bus`.

    Every message is encoded and decoded, so that a test sees what the wire would do to it.
    """

    _servers: dict[str, list[_Server]] = field(default_factory=dict[str, list[_Server]])
    _listeners: list[_Listener] = field(default_factory=list[_Listener])
    _turn: "itertools.count[int]" = field(default_factory=itertools.count)

    async def call(self, subject: str, call: Call[Q, R], request: Q, deadline_unix_ns: int) -> R:
        """Sends a request and waits for its reply; see `Bus.call`."""
        data = codec.encode(request)
        servers = self._servers.get(subject, [])
        if not servers:
            raise NoResponders(f"No worker serves {call.name} right now")
        server = servers[next(self._turn) % len(servers)]
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def answer(found: bytes) -> None:
            if not reply.done():
                reply.set_result(found)

        server.intake.start(
            lambda: server.run(data, {}), answer, codec.encode_error, deadline_unix_ns
        )
        try:
            async with asyncio.timeout((deadline_unix_ns - time.time_ns()) / 1e9):
                found = await reply
        except TimeoutError as error:
            raise DeadlineExceeded(f"{call.name} did not answer in time") from error
        return codec.decode_reply(found, call.reply)

    async def publish(self, subject: str, message: Message) -> None:
        """Sends a message that has no reply; see `Bus.publish`."""
        data = codec.encode(message)
        for listener in list(self._listeners):
            if fnmatchcase(subject, listener.pattern):
                listener.take(data)
        await asyncio.sleep(0)

    async def serve(
        self,
        subject: str,
        call: Call[Q, R],
        handler: Callable[[Q, Headers], Awaitable[R]],
        *,
        queue: str = "",
        max_concurrency: int = 256,
    ) -> Subscription:
        """Answers calls of one kind; see `Bus.serve`."""

        async def run(data: bytes, headers: Headers) -> bytes:
            return codec.encode(await handler(codec.decode(data, call.request), headers))

        server = _Server(queue, Intake(call.name, max_concurrency), run)
        servers = self._servers.setdefault(subject, [])
        servers.append(server)
        return _MemorySubscription(lambda: servers.remove(server), server.intake)

    async def listen(
        self, subject: str, message_type: type[R], handler: Callable[[R], None]
    ) -> Subscription:
        """Hands each message to a handler; see `Bus.listen`."""
        listener = _Listener(
            subject.replace(">", "*"), lambda data: hear(data, message_type, handler)
        )
        self._listeners.append(listener)
        return _MemorySubscription(lambda: self._listeners.remove(listener), None)

    async def close(self) -> None:
        """Nothing to close; safe twice."""


class _MemorySubscription:
    def __init__(self, leave: Callable[[], Any], intake: Intake | None) -> None:
        self._leave: Callable[[], Any] | None = leave
        self._intake = intake

    async def drain(self) -> None:
        if self._leave is not None:
            leave, self._leave = self._leave, None
            leave()
        if self._intake is not None:
            await self._intake.drain()
