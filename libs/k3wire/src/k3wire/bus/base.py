"""The bus as services see it: calls with deadlines, events, and subscriptions.

Delivery is at most once. A reply is either the declared type or an error of our tree, which
`call` raises. Handlers run concurrently, one task a message, up to the subscription's limit;
what exceeds it waits in a bounded queue and is refused with `SlowDown` past that.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from k3wire.messages.base import Message
from k3wire.subjects import Call

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

Headers = Mapping[str, str]
"""Trace context of a call, W3C names; empty where there is none."""


class Subscription(Protocol):
    """A running subscription."""

    async def drain(self) -> None:
        """Takes no more messages and returns when every handler has ended; safe twice."""
        ...


class Bus(Protocol):
    """How processes talk. Implementations: `nats_bus.NatsBus`, `memory.MemoryBus`."""

    async def call(self, subject: str, call: Call[Q, R], request: Q, deadline_unix_ns: int) -> R:
        """Sends a request and waits for its reply.

        Raises:
            NoResponders: nobody listens there; known at once.
            DeadlineExceeded: no reply in time.
            K3Error: what the other side answered.
        """
        ...

    async def publish(self, subject: str, message: Message) -> None:
        """Sends a message that has no reply; returns when it is handed to the connection."""
        ...

    async def serve(
        self,
        subject: str,
        call: Call[Q, R],
        handler: Callable[[Q, Headers], Awaitable[R]],
        *,
        queue: str = "",
        max_concurrency: int = 256,
    ) -> Subscription:
        """Answers calls of one kind on a subject, sharing them within the queue group."""
        ...

    async def listen(
        self,
        subject: str,
        message_type: type[R],
        handler: Callable[[R], None],
    ) -> Subscription:
        """Hands each message to a handler that must not block; for tokens, beats and cancels."""
        ...
