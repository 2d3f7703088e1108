"""Replies to calls under way, on one wildcard subject of a connection.

The client's own mux pays a task and a time-out for each reply and lets a call hang until its
deadline when the connection breaks; here a reply is a dictionary look-up, and a break fails every
call under way at once, since its reply may have been lost.
"""

import asyncio
import itertools
import secrets

from nats.aio.client import Client
from nats.aio.msg import Msg

from k3wire.errors import NoResponders

STATUS_HEADER = "Status"
NO_RESPONDERS_STATUS = "503"
"""What the server answers by itself where nobody is subscribed."""


class ReplyMux:
    """The calls of one connection that wait for a reply."""

    def __init__(self) -> None:
        self._prefix = f"_INBOX.{secrets.token_hex(12)}."
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[Msg]] = {}

    @property
    def num_waiting(self) -> int:
        """Calls under way."""
        return len(self._waiting)

    async def open(self, client: Client) -> None:
        """Subscribes; the client keeps the subscription over reconnects."""
        await client.subscribe(f"{self._prefix}*", cb=self._take)

    def expect(self) -> tuple[str, "asyncio.Future[Msg]"]:
        """Gives a fresh reply subject and the future of what comes there; `forget` it always."""
        subject = f"{self._prefix}{next(self._numbers)}"
        reply: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[subject] = reply
        return subject, reply

    def forget(self, subject: str) -> None:
        """Ends the wait for a reply; one that comes later is dropped."""
        self._waiting.pop(subject, None)

    def fail_all(self) -> None:
        """Fails every call under way: the connection broke."""
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(NoResponders("The bus went away before the answer came"))

    async def _take(self, message: Msg) -> None:
        reply = self._waiting.get(message.subject)
        if reply is None or reply.done():
            return
        headers = message.headers
        if headers and headers.get(STATUS_HEADER) == NO_RESPONDERS_STATUS:
            reply.set_exception(NoResponders("No worker serves this right now"))
        else:
            reply.set_result(message)
