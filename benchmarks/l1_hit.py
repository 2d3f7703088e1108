"""Tier L1's hit of one picture against a bare Redis GET of the same bytes, one core.

Starts a real Redis. Several ways to the same bytes, rounds alternating: `get` is redis-py's asyncio
client with its defaults, `socket` a hand-written GET on a blocking socket into memory that is there
already, the least that Redis can cost; `fetcher` is the fetcher's read out of the store, without its
front; `front` is its hit in this process; `preprocessor` is what the preprocessor does before it
decodes. The last but `front` check the bytes' SHA-256 (`hash` alone), which a GET does not. Refuses
to report if any of them gives other bytes.

    python benchmarks/l1_hit.py [--bytes 1000000] [--rounds 300]
"""

import argparse
import json
import platform
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop
from redis.asyncio import Redis

from k3_fetcher.records import ImageRecords
from k3_preprocessor.sources import ByteSource
from k3text.images.keys import content_key
from k3wire.blobs.image_keys import image_bytes_key
from k3wire.blobs.redis_store import RedisBlobStore
from k3wire.bus.memory import MemoryBus
from k3wire.messages.media import ImageRef

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.redis_server import redis_server

GOAL = 3.0
"""How many times as long as the bare GET a hit may take."""

FRONT_BYTES = 64 * 1024 * 1024
TTL_S = 3600.0

Way = Callable[[], Awaitable[bytes | None]]
Medians = dict[str, tuple[float, float]]


class SocketGet:
    """GET without any client."""

    def __init__(self, url: str, key: str, size_bytes: int) -> None:
        host, _, port = url.removeprefix("redis://").removesuffix("/0").partition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._head = f"${size_bytes}\r\n".encode()
        self._reply = bytearray(len(self._head) + size_bytes + 2)
        self._request = f"*2\r\n$3\r\nGET\r\n${len(key)}\r\n{key}\r\n".encode()

    async def __call__(self) -> bytes | None:
        self._socket.sendall(self._request)
        filled, view = 0, memoryview(self._reply)
        while filled < len(view):
            filled += self._socket.recv_into(view[filled:])
        return bytes(view[len(self._head) : -2])

    def close(self) -> None:
        self._socket.close()


async def measure(ways: dict[str, Way], data: bytes, rounds: int) -> Medians:
    """Median microseconds by the clock and of processor time, a way.

    Raises:
        ValueError: a way gives other bytes.
    """
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start_ns, cpu_start_ns = time.perf_counter_ns(), time.process_time_ns()
            found = await way()
            took = time.perf_counter_ns() - start_ns, time.process_time_ns() - cpu_start_ns
            if found != data:
                raise ValueError(f"{name} gives other bytes")
            times[name].append(took)
    return {
        name: (
            round(statistics.median(wall for wall, _ in found) / 1000, 1),
            round(statistics.median(cpu for _, cpu in found) / 1000, 1),
        )
        for name, found in times.items()
    }


async def run(size_bytes: int, rounds: int) -> int:
    """Measures one size and prints a line a way."""
    data = secrets.token_bytes(size_bytes)
    key = content_key(data)
    name = image_bytes_key(key)
    async with redis_server() as url:
        client, store = Redis.from_url(url), RedisBlobStore.open(url)
        await client.set(name, data)
        without_front = ImageRecords(store, 0, TTL_S)
        with_front = ImageRecords(store, FRONT_BYTES, TTL_S)
        source = ByteSource(MemoryBus(), store)
        image = ImageRef(
            content_key=key, media_type="image/jpeg", width=1, height=1, size_bytes=size_bytes
        )

        async def get() -> bytes | None:
            return await client.get(name)

        async def fetcher() -> bytes | None:
            assert without_front.read_front(key) is None
            return await without_front.read_store(key)

        async def front() -> bytes | None:
            return with_front.read_front(key)

        async def preprocessor() -> bytes | None:
            return (await source.read("measured", image, 0)).data

        async def hash_only() -> bytes | None:
            return data if content_key(data) == key else None

        bare = SocketGet(url, name, size_bytes)
        ways: dict[str, Way] = {
            "get": get,
            "socket": bare,
            "hash": hash_only,
            "fetcher": fetcher,
            "front": front,
            "preprocessor": preprocessor,
        }
        try:
            # Connections, the front and caches before anything is timed.
            await with_front.read_store(key)
            await measure(ways, data, 5)
            medians = await measure(ways, data, rounds)
        except ValueError as error:
            print(f"nothing is measured: {error}", file=sys.stderr)
            return 1
        finally:
            bare.close()
            await client.aclose()
            await store.close()
    report(size_bytes, medians)
    return 0


def report(size_bytes: int, medians: Medians) -> None:
    """Prints a line a way, with its ratio to both bare ways."""
    print(json.dumps({"machine": platform.machine(), "bytes": size_bytes, "goal": GOAL}))
    for name, (wall_us, cpu_us) in medians.items():
        line = {"way": name, "wall_us": wall_us, "cpu_us": cpu_us}
        for bare in ("get", "socket"):
            line[f"wall_against_{bare}"] = round(wall_us / medians[bare][0], 2)
            line[f"cpu_against_{bare}"] = round(cpu_us / medians[bare][1], 2)
        print(json.dumps(line))


def main() -> int:
    """Runs; fails where a way gives other bytes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    return uvloop.run(run(arguments.bytes, arguments.rounds))


if __name__ == "__main__":
    raise SystemExit(main())
