"""API keys: digests only, compared in constant time over all of them, decided per route."""

import hashlib
import hmac
from collections.abc import Mapping

from k3wire.errors import Unauthorized


class KeyRing:
    """The accepted API keys and the tenant behind each.

    An empty ring lets everybody in as one tenant: right for a laptop, and said at start-up.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        """Takes the keys, each `key` or `tenant:key`; keeps only digests."""
        self._tenants: dict[bytes, str] = {}
        for entry in keys:
            tenant, _, key = entry.rpartition(":")
            digest = hashlib.sha256(key.encode()).digest()
            self._tenants[digest] = tenant or digest.hex()[:16]

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return not self._tenants

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """Gives the caller's tenant, "" on an open ring.

        Raises:
            Unauthorized: no key, or an unknown one.
        """
        if self.is_open:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            key = headers.get("x-api-key", "")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found = ""
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        if not found:
            raise Unauthorized("Send a valid API key as 'Authorization: Bearer KEY'")
        return found
