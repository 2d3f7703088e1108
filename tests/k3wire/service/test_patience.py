"""Patient calls: the loss of whoever may be at one ends the wait for it, over a real broker."""

import asyncio
import time
from pathlib import Path

import pytest
from support.nats_server import nats_server

from k3wire import subjects
from k3wire.bus.base import Headers
from k3wire.bus.nats_bus import NatsBus
from k3wire.messages.base import PieceReply, PieceRequest
from k3wire.messages.control import Heartbeat
from k3wire.service import directory as directory_module
from k3wire.service.directory import Directory
from k3wire.service.patience import Peers, call_patiently

SUBJECT = subjects.shared(subjects.PIECE)
REQUEST = PieceRequest(digest=b"d" * 32, offset=0, size_bytes=1, deadline_unix_ns=1 << 62)


def beat(worker_id: str) -> Heartbeat:
    return Heartbeat(
        role="fetcher", worker_id=worker_id, epoch=1, seq=1, sent_unix_ns=0, pid=1, is_ready=True
    )


async def test_a_call_whose_worker_is_killed_is_asked_again_when_that_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "HEARTBEAT_STALE_S", 0.2)
    end, num_calls = asyncio.Event(), 0
    async with nats_server(tmp_path) as url:
        caller, worker = await NatsBus.connect(url, "a"), await NatsBus.connect(url, "b")

        async def handle(request: PieceRequest, headers: Headers) -> PieceReply:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                # Its last sign of life; the call that it took is never answered. Two leave at once.
                for worker_id in ("first", "second"):
                    subject = subjects.heartbeat("fetcher", worker_id)
                    await worker.publish(subject, beat(worker_id))
                await end.wait()
            return PieceReply(data=b"here")

        serving = await worker.serve(SUBJECT, subjects.PIECE, handle, queue="q")
        peers = Peers(Directory(), "fetcher")
        following = await peers.follow(caller)
        until_ns = time.time_ns() + 600 * 10**9
        async with asyncio.timeout(5):
            reply = await call_patiently(caller, SUBJECT, subjects.PIECE, REQUEST, until_ns, peers)
        assert (reply.data, num_calls) == (b"here", 2)
        end.set()
        for one in (serving, following):
            await one.drain()
        for bus in (worker, caller):
            await bus.close()
