"""The bus over core NATS.

Traps of the client that this adapter takes care of: its handlers run one after the other (ours are
tasks), its drain does not wait for tasks (ours counts them), a request to a worker that died ends
only by time-out (deadlines are in every call), a request hangs while the server is away (ours fails
at once), header cost (only calls carry any), payloads that overrun the server's limit close the
connection (messages are measured first).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import Error
from opentelemetry import propagate, trace

from k3wire.bus import codec
from k3wire.bus.base import Headers, Subscription
from k3wire.bus.intake import Intake, hear
from k3wire.bus.reply_mux import ReplyMux
from k3wire.errors import DeadlineExceeded, K3Error, NoResponders, TierUnavailable
from k3wire.messages.base import Message
from k3wire.subjects import Call

logger = logging.getLogger(__name__)

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

RECONNECT_WAIT_S = 0.2
PING_INTERVAL_S = 5
CONNECT_TIMEOUT_S = 5.0
PENDING_BYTES = 8 * 1024 * 1024
"""Bytes buffered while the server is away; past that a publish fails."""

DEFAULT_DEADLINE_S = 100.0
"""For callers that give none, like a person with the `nats` command line."""

DEADLINE_HEADER = "k3-deadline"
"""Absolute nanoseconds, so that a message that waited in a broker is dropped by its reader."""


class NatsBus:
    """A connection to NATS that speaks our messages; see `k3wire.bus.base.Bus`."""

    def __init__(self, client: Client, replies: ReplyMux) -> None:
        """Wraps an open connection; use `connect`."""
        self._client = client
        self._replies = replies

    @classmethod
    async def connect(cls, url: str, name: str) -> Self:
        """Connects, and keeps reconnecting for ever.

        Args:
            url: `nats://host:port`, several separated by commas.
            name: shown by the server's monitoring.

        Raises:
            TierUnavailable: no server answers at the first try.
        """
        client, replies = Client(), ReplyMux()

        async def on_error(error: Exception) -> None:
            logger.warning("bus error", extra={"error": type(error).__name__})

        async def on_disconnect() -> None:
            replies.fail_all()
            # The client also says so when we close it ourselves.
            if not client.is_closed:
                logger.warning("bus disconnected")

        async def on_reconnect() -> None:
            logger.info("bus reconnected")

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await client.connect(
                    servers=url.split(","),
                    name=name,
                    error_cb=on_error,
                    disconnected_cb=on_disconnect,
                    reconnected_cb=on_reconnect,
                    max_reconnect_attempts=-1,
                    # The client sleeps for this; its annotation is narrower than its code.
                    reconnect_time_wait=RECONNECT_WAIT_S,  # pyright: ignore[reportArgumentType]
                    ping_interval=PING_INTERVAL_S,
                    pending_size=PENDING_BYTES,
                )
                await replies.open(client)
        except (Error, OSError, TimeoutError) as error:
            raise TierUnavailable(
                "No NATS server answers at K3_NATS_URL; is it started?"
            ) from error
        return cls(client, replies)

    async def call(self, subject: str, call: Call[Q, R], request: Q, deadline_unix_ns: int) -> R:
        """Sends a request and waits for its reply; see `Bus.call`."""
        data = codec.encode(request)
        left_s = (deadline_unix_ns - time.time_ns()) / 1e9
        if left_s <= 0:
            raise DeadlineExceeded(f"No time was left for {call.name}")
        if not self._client.is_connected:
            raise NoResponders(f"The bus is away; {call.name} was not sent")
        headers = {DEADLINE_HEADER: str(deadline_unix_ns)}
        if trace.get_current_span() is not trace.INVALID_SPAN:
            propagate.inject(headers)
        inbox, reply = self._replies.expect()
        # A timer on the future; a time-out block around the wait costs three times as much.
        late = DeadlineExceeded(f"{call.name} did not answer in time")
        timer = asyncio.get_running_loop().call_later(left_s, _fail, reply, late)
        try:
            await self._client.publish(subject, data, reply=inbox, headers=headers)
            message = await reply
        except (Error, OSError) as error:
            raise NoResponders(f"The bus is away; {call.name} was not sent") from error
        finally:
            timer.cancel()
            self._replies.forget(inbox)
        return codec.decode_reply(message.data, call.reply)

    async def publish(self, subject: str, message: Message) -> None:
        """Sends a message that has no reply; see `Bus.publish`."""
        data = codec.encode(message)
        try:
            await self._client.publish(subject, data)
        except (Error, OSError) as error:
            raise TierUnavailable("The bus is away; the message was not sent") from error

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
        intake = Intake(call.name, max_concurrency)

        async def on_message(message: Msg) -> None:
            headers = message.headers or {}
            deadline_unix_ns = _deadline(headers)
            if deadline_unix_ns <= time.time_ns():
                logger.info("late message dropped", extra={"call": call.name})
                return

            async def run() -> bytes:
                request = codec.decode(message.data, call.request)
                return codec.encode(await handler(request, headers))

            async def answer(reply: bytes) -> None:
                with contextlib.suppress(Error, OSError):
                    await self._client.publish(message.reply, reply)

            intake.start(run, answer, codec.encode_error, deadline_unix_ns)

        inner = await self._client.subscribe(subject, queue=queue, cb=on_message)
        await self._settle()
        return _NatsSubscription(inner, intake)

    async def listen(
        self, subject: str, message_type: type[R], handler: Callable[[R], None]
    ) -> Subscription:
        """Hands each message to a handler that must not block; see `Bus.listen`."""

        async def on_message(message: Msg) -> None:
            hear(message.data, message_type, handler)

        inner = await self._client.subscribe(subject, cb=on_message)
        await self._settle()
        return _NatsSubscription(inner, None)

    async def _settle(self) -> None:
        # A subscription is only a line to the server until the server has read it; a round trip
        # makes "subscribed" mean that the next call from anywhere finds it.
        with contextlib.suppress(Error, OSError, TimeoutError):
            await self._client.flush(timeout=2)

    async def close(self) -> None:
        """Sends what is buffered and closes; safe twice and while disconnected."""
        with contextlib.suppress(Error, OSError, TimeoutError):
            async with asyncio.timeout(2):
                await self._client.flush(timeout=1)
        with contextlib.suppress(Error, OSError):
            await self._client.close()


def _fail(reply: "asyncio.Future[Msg]", error: K3Error) -> None:
    if not reply.done():
        reply.set_exception(error)


def _deadline(headers: Headers) -> int:
    text = headers.get(DEADLINE_HEADER, "")
    return int(text) if text.isdecimal() else time.time_ns() + int(DEFAULT_DEADLINE_S * 1e9)


class _NatsSubscription:
    def __init__(self, inner: NatsSubscription, intake: Intake | None) -> None:
        self._inner = inner
        self._intake = intake
        self._is_drained = False

    async def drain(self) -> None:
        if not self._is_drained:
            self._is_drained = True
            with contextlib.suppress(Error, OSError, TimeoutError):
                async with asyncio.timeout(2):
                    await self._inner.drain()
        if self._intake is not None:
            await self._intake.drain()
