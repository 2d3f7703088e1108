"""Blobs in Redis: one server, Sentinel or Cluster.

Losing Redis costs a caller one short time-out, then nothing: a circuit opens and every call fails
at once until a probe finds Redis again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from k3wire.blobs.circuit import Circuit
from k3wire.errors import TierUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The cluster client raises one error that its own family does not include.
FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError)

CONNECT_TIMEOUT_S = 0.3
OPERATION_TIMEOUT_S = 0.5
BYTES_PER_S = 50e6
"""Slowest link on which a long value is still worth waiting for."""

FIRST_PROBE_S = 0.1
LAST_PROBE_S = 2.0

READ_BYTES = 256 * 1024
"""Socket read size; the client's default costs a fifth more CPU on megabyte values."""

TIMEOUT_SLICES = 5
MAX_CONNECTIONS = 32
"""Operations at once; more wait for their turn."""

MAX_VALUE_BYTES = 32 * 1024 * 1024
"""Longest value written; a longer one is not cached."""


class RedisBlobStore:
    """Blobs in Redis; see `k3wire.blobs.base.BlobStore`."""

    def __init__(self, client: Any, guides: Sequence[Any] = ()) -> None:
        """Wraps a client of redis-py's asyncio family (any of its three classes).

        Args:
            client: does the work.
            guides: clients that tell it where the server is; closed with it.
        """
        self._client = client
        self._guides = guides
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)
        self._circuit = Circuit(self._answers, FIRST_PROBE_S, LAST_PROBE_S)

    @classmethod
    def open(cls, url: str) -> Self:
        """Makes a store; connects at first use, so that a missing Redis does not stop a start.

        Args:
            url: `redis://host:port/0`, `rediss://…`, `unix://path`, `redis+cluster://host:port` or
                `redis+sentinel://host:port,host:port/0?service=name`.
        """
        options: dict[str, Any] = {
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": OPERATION_TIMEOUT_S + MAX_VALUE_BYTES / BYTES_PER_S,
            "socket_read_size": READ_BYTES,
            "max_connections": MAX_CONNECTIONS + 1,
        }
        scheme, _, rest = url.partition("://")
        if scheme == "redis+cluster":
            return cls(RedisCluster.from_url(f"redis://{rest}", **options))
        options["retry"] = Retry(NoBackoff(), 0)
        if scheme == "redis+sentinel":
            parts = urlsplit(url)
            service = parse_qs(parts.query).get("service", ["mymaster"])[0]
            hosts = [host.rsplit(":", 1) for host in parts.netloc.split(",")]
            # One that is dead must not use up the time in which the next one would answer.
            sentinel_kwargs = {
                "socket_connect_timeout": CONNECT_TIMEOUT_S,
                "socket_timeout": CONNECT_TIMEOUT_S,
                "retry": options["retry"],
            }
            sentinel = Sentinel(
                [(host, int(port)) for host, port in hosts],
                sentinel_kwargs=sentinel_kwargs,
                **options,
            )
            database = int(parts.path.strip("/") or 0)
            return cls(sentinel.master_for(service, db=database), sentinel.sentinels)
        return cls(Redis.from_url(url, **options))

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open: Redis failed and has not answered a probe since."""
        return self._circuit.is_open

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                await self._client.ping()
        except FAILURES:
            return False
        logger.info("redis available")
        return True

    async def _guard(self, operation: Callable[[], Awaitable[T]], size_bytes: int = 0) -> T:
        if not self._circuit.may_pass():
            raise TierUnavailable("Redis did not answer a moment ago")
        async with self._turns:
            # It may have failed for those who went first.
            if not self._circuit.may_pass():
                raise TierUnavailable("Redis did not answer a moment ago")
            try:
                return await _within(operation, OPERATION_TIMEOUT_S + size_bytes / BYTES_PER_S)
            except ResponseError as error:
                # Full, read-only or misused: it answers, so the next question may fare better.
                logger.warning("redis refused", extra={"error": type(error).__name__})
                raise TierUnavailable("Redis refused") from error
            except FAILURES as error:
                if self._circuit.trip():
                    logger.warning("redis unavailable", extra={"error": type(error).__name__})
                raise TierUnavailable("Redis does not answer") from error

    async def get(self, key: str) -> bytes | None:
        """Reads a value; see `BlobStore.get`."""
        found: object = await self._guard(lambda: self._client.get(key))
        if found is not None and not isinstance(found, bytes):
            # Whatever answers there is no Redis, or answers another question.
            raise TierUnavailable("Redis gave no value")
        return found

    async def put(self, key: str, data: bytes, *, ttl_s: float) -> None:
        """Writes a value; see `BlobStore.put`."""
        if len(data) > MAX_VALUE_BYTES:
            raise TierUnavailable("The value is too long to cache")
        px = max(1, int(ttl_s * 1000))
        await self._guard(lambda: self._client.set(key, data, px=px), len(data))

    async def put_if_absent(self, key: str, data: bytes, *, ttl_s: float) -> bool:
        """Writes unless the key exists; see `BlobStore.put_if_absent`."""
        if len(data) > MAX_VALUE_BYTES:
            raise TierUnavailable("The value is too long to cache")
        px = max(1, int(ttl_s * 1000))
        return bool(
            await self._guard(lambda: self._client.set(key, data, px=px, nx=True), len(data))
        )

    async def delete(self, key: str) -> None:
        """Removes a key; see `BlobStore.delete`."""
        await self._guard(lambda: self._client.delete(key))

    async def touch(self, key: str, *, ttl_s: float) -> bool:
        """Renews a key's life; see `BlobStore.touch`."""
        px = max(1, int(ttl_s * 1000))
        return bool(await self._guard(lambda: self._client.pexpire(key, px)))

    async def close(self) -> None:
        """Closes the connections; safe twice."""
        await self._circuit.close()
        try:
            async with asyncio.timeout(1):
                for client in (self._client, *self._guides):
                    await client.aclose()
        except FAILURES:
            logger.info("redis close failed")


async def _within(operation: Callable[[], Awaitable[T]], limit_s: float) -> T:
    """Waits in slices, so that time in which this loop was held up counts as one of them.

    Raises:
        TimeoutError: the loop ran and no answer came.
    """

    async def work() -> T:
        return await operation()

    task = asyncio.get_running_loop().create_task(work())
    try:
        for _ in range(TIMEOUT_SLICES):
            done, _ = await asyncio.wait([task], timeout=limit_s / TIMEOUT_SLICES)
            if done:
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
