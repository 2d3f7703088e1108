"""Turns: of several processes that want the same thing made, one makes it and the others wait.

A turn is a key in the shared store that its holder renews. Whoever dies loses it within seconds,
whoever cannot reach the store goes on without (after the life of a turn that was seen taken), and
nobody waits past a bound of his own: two who make the same thing at once cost work, never truth.
"""

import asyncio
import contextlib
import time

from k3wire.blobs.base import BlobStore
from k3wire.errors import TierUnavailable

LOCK_LIFE_S = 2.0
"""A process that died holds others up for so long; whoever lives renews."""

LOCK_RENEWALS = 4
FIRST_POLL_S = 0.01
LAST_POLL_S = 0.1


def lock_key(key: str) -> str:
    """Gives the key that stands for the turn at a thing."""
    return f"{key}:lock"


class Turn:
    """The right to make a thing; held by renewing it, given back by `end`.

    Attributes:
        has_waited: another process was at it before.
        may_be_late: another process may have made the thing since one looked for it, even if the
            turn was free at once: look again before making it.
    """

    def __init__(self, store: BlobStore | None, key: str, has_waited: bool) -> None:
        """Begins to renew; without a store there is nothing to hold."""
        self.has_waited = has_waited
        self.may_be_late = has_waited or store is not None
        self._store = store
        self._key = lock_key(key)
        self._renewing = asyncio.get_running_loop().create_task(self._renew()) if store else None

    async def _renew(self) -> None:
        assert self._store is not None
        while True:
            await asyncio.sleep(LOCK_LIFE_S / LOCK_RENEWALS)
            # A store that is gone for a moment may still have the key when it is back.
            with contextlib.suppress(TierUnavailable):
                await self._store.touch(self._key, ttl_s=LOCK_LIFE_S)

    async def end(self) -> None:
        """Lets others have their turn; safe twice."""
        store, self._store = self._store, None
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        if store is not None:
            with contextlib.suppress(TierUnavailable):
                await store.delete(self._key)


async def take_turn(
    store: BlobStore, key: str, give_up_s: float, last_poll_s: float = LAST_POLL_S
) -> Turn:
    """Waits to be the one process that makes a thing; the caller ends the turn.

    Args:
        store: shared by all that may want it.
        key: of the thing.
        give_up_s: longest wait; after it the work is done beside the other one's.
        last_poll_s: longest pause between two looks; many waiters want it longer.
    """
    until_s = time.monotonic() + give_up_s
    seen_until_s = 0.0
    pause_s = FIRST_POLL_S
    has_waited = False
    while True:
        try:
            has_lock = await store.put_if_absent(lock_key(key), b"1", ttl_s=LOCK_LIFE_S)
        except TierUnavailable:
            # One slow answer must not double the work that another process was seen at: without
            # the store, his turn is taken to last as long as the key would.
            if time.monotonic() > min(seen_until_s, until_s):
                return Turn(None, key, has_waited)
        else:
            if has_lock or time.monotonic() > until_s:
                return Turn(store if has_lock else None, key, has_waited)
            has_waited = True
            seen_until_s = time.monotonic() + LOCK_LIFE_S
        # Another process tells us nothing by itself, so its lock is looked at.
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, last_poll_s)
