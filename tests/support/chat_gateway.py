"""The chat endpoint in the test's process: real sockets, memory for NATS and Redis, one worker."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from k3_gateway.admission import Admission
from k3_gateway.generation import Fleet
from k3_gateway.http_server import make_server
from k3_gateway.images import ImageResolver
from k3_gateway.inbox import TokenInbox
from k3_gateway.openai.app import build_app
from k3_gateway.openai.auth import KeyRing
from k3_gateway.openai.body_intake import BodyLimits
from k3_gateway.openai.chat_completions import ChatService
from k3_gateway.pipeline import Pipeline, ServedModel
from k3_gateway.routing import Router
from k3_gateway.settings import GatewaySettings
from k3text.images.config import ProcessorConfig
from k3text.tokenizer import Tokenizer
from k3wire import subjects
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.bus.base import Headers
from k3wire.bus.memory import MemoryBus
from k3wire.messages.base import Admitted, Stage
from k3wire.messages.control import Heartbeat
from k3wire.messages.prefill import PrefillRequest
from k3wire.messages.stream import TokenDelta, TokenFrame
from k3wire.service import directory as directory_module
from k3wire.service.directory import Directory
from k3wire.service.pieces import PieceHolder
from k3wire.telemetry.tracing import Tracing

GATEWAY = "gateway-1"
MODEL = "m"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ChatGateway:
    """A running gateway.

    Attributes:
        port: of its API, on loopback.
        admission: of its requests.
        pieces: what it holds for others.
        asked: what its worker was asked.
    """

    port: int
    admission: Admission
    pieces: PieceHolder
    asked: list[PrefillRequest]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection of a client's own."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def post(self, body: bytes) -> tuple[int, Any]:
        """Sends a whole body at once; gives the status and the decoded answer."""
        reader, writer = await self.connect()
        try:
            writer.write(chat_head(len(body)))
            writer.write(body)
            return await read_answer(reader)
        finally:
            writer.close()


def chat_head(num_bytes: int | None) -> bytes:
    """A request's head; a body without a length comes in chunks."""
    length = "transfer-encoding: chunked" if num_bytes is None else f"content-length: {num_bytes}"
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{length}\r\n\r\n"
    ).encode()


def chat_body(content: Any, **fields: Any) -> bytes:
    """A request of one user message."""
    message = {"role": "user", "content": content}
    return json.dumps({"model": MODEL, "messages": [message], **fields}).encode()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Reads one answer that has a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length:")[2].partition("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


@asynccontextmanager
async def chat_gateway(**settings: Any) -> AsyncGenerator[ChatGateway, None]:
    """Runs a gateway whose worker answers every prompt with `ok`."""
    given = GatewaySettings(**settings)
    # Its workers are never silent; they only do not beat.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory_module, "HEARTBEAT_STALE_S", 600.0)
        async with _serving(given) as gateway:
            yield gateway


@asynccontextmanager
async def _serving(given: GatewaySettings) -> AsyncGenerator[ChatGateway, None]:
    bus, directory, inbox = MemoryBus(), Directory(), TokenInbox()
    pieces, asked = PieceHolder("k3.pieces"), list[PrefillRequest]()
    admission = Admission(given.max_running, given.max_queued_bytes)

    async def answer(request: PrefillRequest, headers: Headers) -> Admitted:
        asked.append(request)
        delta = TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            token_ids=tuple(b"ok"),
            finish_reason="stop",
        )
        frame = TokenFrame(worker_id="p", epoch=1, seq=1, deltas=(delta,))
        await bus.publish(request.stream_subject, frame)
        return Admitted(worker_id="p", epoch=1)

    await bus.listen(subjects.tokens(GATEWAY), TokenFrame, inbox.on_frame)
    await bus.serve(subjects.direct(subjects.PREFILL, "p"), subjects.PREFILL, answer)
    roles: tuple[tuple[Stage, str], ...] = (("prefill", "p"), ("decode", "d"))
    for role, worker_id in roles:
        directory.take(_beat(role, worker_id))
    fleet = Fleet(GATEWAY, bus, directory, Router(GATEWAY, 1), inbox, pieces, given.route_wait_s)
    chat = _chat(given, fleet, admission)
    server = make_server(build_app(chat, chat.pipeline.model, lambda: ""), "127.0.0.1", 0, 1.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event
            await asyncio.sleep(0)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield ChatGateway(port, admission, pieces, asked)
        finally:
            server.should_exit = True


def _beat(role: Stage, worker_id: str) -> Heartbeat:
    return Heartbeat(
        role=role, worker_id=worker_id, epoch=1, seq=1, sent_unix_ns=0, pid=1, is_ready=True
    )


def _chat(settings: GatewaySettings, fleet: Fleet, admission: Admission) -> ChatService:
    model = ServedModel(
        name=MODEL,
        fingerprint="k3-m",
        max_context_tokens=settings.max_context_tokens or 100_000,
        tokenizer=Tokenizer({bytes([byte]): byte for byte in range(256)}),
        created_s=0,
    )
    images = ImageResolver(
        bus=fleet.bus,
        store=MemoryBlobStore(),
        pieces=fleet.pieces,
        config=ProcessorConfig(),
        worker_id=GATEWAY,
        max_image_bytes=settings.max_image_bytes,
        ttl_s=settings.image_ttl_s,
    )
    pipeline = Pipeline(
        model=model,
        fleet=fleet,
        images=images,
        worker_id=GATEWAY,
        max_images=settings.max_images,
        request_timeout_s=settings.request_timeout_s,
        has_tenant_caches=settings.has_tenant_caches,
    )
    return ChatService(
        pipeline=pipeline,
        keys=KeyRing(settings.api_keys),
        admission=admission,
        tracing=Tracing("gateway", GATEWAY, "", 0.0),
        body_limits=BodyLimits(
            max_bytes=settings.max_body_bytes,
            timeout_s=settings.body_timeout_s,
            idle_timeout_s=settings.body_idle_timeout_s,
        ),
        keep_alive_s=settings.keep_alive_s,
    )
