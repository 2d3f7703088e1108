"""The table of workers: who is there, in spite of late, lost and repeated beats and of our own naps."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from k3wire import subjects
from k3wire.bus.memory import MemoryBus
from k3wire.messages.control import HEARTBEAT_STALE_S, Heartbeat
from k3wire.service import directory as directory_module
from k3wire.service.directory import BUS_PATIENCE_S, Directory


def beat(worker_id: str = "a", epoch: int = 1, seq: int = 1, **fields: Any) -> Heartbeat:
    given = {
        "role": "decode", "is_ready": True, "pid": 1, "sent_unix_ns": time.time_ns(), **fields,
    }  # fmt: skip
    return Heartbeat(worker_id=worker_id, epoch=epoch, seq=seq, **given)


def names(directory: Directory) -> list[str]:
    return [found.worker_id for found in directory.ready("decode")]


async def test_only_ready_workers_of_the_role_are_given_work() -> None:
    directory = Directory()
    directory.take(beat("b"))
    directory.take(beat("a"))
    directory.take(beat("c", role="prefill"))
    directory.take(beat("d", is_ready=False))
    directory.take(beat("e", is_draining=True))
    assert names(directory) == ["a", "b"]
    assert len(directory.all()) == 5
    assert [directory.is_alive(w) for w in ("a", "d", "x")] == [True, True, False]


async def test_old_and_repeated_beats_change_nothing() -> None:
    directory = Directory()
    directory.take(beat(epoch=2, seq=5))
    for late in (beat(epoch=2, seq=4, is_ready=False), beat(epoch=2, seq=5, is_ready=False),
                 beat(epoch=1, seq=9, is_ready=False)):  # fmt: skip
        directory.take(late)
    assert names(directory) == ["a"]
    directory.take(beat(epoch=3, seq=1, is_ready=False))
    assert names(directory) == []


async def test_a_suspect_is_left_out_until_it_beats_again() -> None:
    directory = Directory()
    directory.take(beat(seq=1))
    waiting = beat(seq=2)
    directory.suspect("a")
    assert names(directory) == []
    assert not directory.is_alive("a")
    directory.take(waiting)
    assert names(directory) == [], "a beat sent before the suspicion proves nothing"
    directory.take(beat(seq=3))
    assert names(directory) == ["a"]


async def test_a_silent_worker_leaves_and_is_reported_once() -> None:
    left: list[str] = []
    directory = Directory(on_departure=lambda last: left.append(last.worker_id))
    bus = MemoryBus()
    following = await directory.follow(bus)
    await bus.publish(subjects.heartbeat("decode", "a"), beat("a"))
    assert names(directory) == ["a"]
    seq = 1
    async with asyncio.timeout(5):
        while not left:
            seq += 1
            await bus.publish(subjects.heartbeat("decode", "b"), beat("b", seq=seq))
            await asyncio.sleep(0.02)
    assert (left, names(directory)) == (["a"], ["b"])
    await following.drain()
    await following.drain()


async def test_our_own_stall_is_not_taken_for_their_silence() -> None:
    left: list[str] = []
    directory = Directory(on_departure=lambda last: left.append(last.worker_id))
    bus = MemoryBus()
    following = await directory.follow(bus)
    directory.take(beat("a"))
    # The loop stands still for longer than a worker may be silent; beats wait unread meanwhile.
    time.sleep(HEARTBEAT_STALE_S + 0.3)  # noqa: ASYNC251
    assert names(directory) == ["a"]
    async with asyncio.timeout(5):
        while not left:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert left == ["a"], "silence after the stall still counts"
    await following.drain()


async def test_waiting_ends_with_the_first_ready_worker_or_the_deadline() -> None:
    directory = Directory()
    loop = asyncio.get_running_loop()
    assert await directory.wait_for("decode", loop.time()) == []
    waiting = loop.create_task(directory.wait_for("decode", loop.time() + 5))
    await asyncio.sleep(0)
    directory.take(beat(seq=1, is_ready=False))
    directory.take(beat(seq=2))
    async with asyncio.timeout(5):
        assert [found.worker_id for found in await waiting] == ["a"]


async def test_whoever_watches_a_role_hears_of_its_losses_until_the_watch_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, heard = Directory(), list[str]()
    for worker_id, role in (("a", "decode"), ("b", "prefill"), ("c", "decode")):
        directory.take(beat(worker_id, role=role))
    with (
        directory.watch("decode", lambda: heard.append("decode")),
        monkeypatch.context() as later,
    ):
        with directory.watch("prefill", lambda: heard.append("ended")):
            pass
        later.setattr(directory_module, "HEARTBEAT_STALE_S", -1.0)
        directory.sweep()
    assert heard == ["decode", "decode"]
    directory.take(beat("d"))
    monkeypatch.setattr(directory_module, "HEARTBEAT_STALE_S", -1.0)
    directory.sweep()
    assert heard == ["decode", "decode"]


def test_the_buss_silence_is_not_taken_for_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0, time=time.time, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(directory_module, "time", clock)
    left: list[str] = []
    directory = Directory(on_departure=lambda last: left.append(last.worker_id), own_id="own")

    def pass_s(seconds: float, *beating: str) -> None:
        for _ in range(round(10 * seconds)):
            clock.now_s += 0.1
            for worker_id in beating:
                directory.take(beat(worker_id, seq=round(10 * clock.now_s)))
            directory.sweep()

    pass_s(0.3, "own", "a", "b")
    pass_s(5.0)
    assert (left, names(directory)) == ([], ["a", "b", "own"])
    pass_s(0.2, "own")
    assert left == [], "their beats may still be on their way"
    pass_s(1.3, "own", "a")
    assert left == ["b"]
    # A bus that stays away is given up, and everybody with it.
    pass_s(BUS_PATIENCE_S + 0.5)
    assert sorted(left) == ["a", "b", "own"]
