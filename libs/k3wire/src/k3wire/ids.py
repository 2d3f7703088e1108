"""Identifiers that cross processes, and how they are made.

An id is opaque and carries no meaning; it is safe in a NATS subject, a log line, a file name
and a header. Content and feature keys are SHA-256 digests (32 bytes) and live with their makers.
"""

import re
import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""One user call at the gateway; fresh and random, never the client's own id."""

WorkerId = NewType("WorkerId", str)
"""One process of one role; new at every start of the process."""

ID_BYTES = 12
"""Random bytes of an id: 96 bits, far beyond any fleet's birthday bound."""

_CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def new_request_id() -> RequestId:
    """Makes a fresh request id: `req-` and 24 hexadecimal digits."""
    return RequestId(f"req-{secrets.token_hex(ID_BYTES)}")


def new_worker_id(role: str) -> WorkerId:
    """Makes a fresh worker id: the role, a dash and 24 hexadecimal digits."""
    return WorkerId(f"{role}-{secrets.token_hex(ID_BYTES)}")


def is_client_request_id(text: str) -> bool:
    """Says whether a client's X-Request-Id may be echoed: 1 to 128 of `A-Za-z0-9._-`."""
    return _CLIENT_REQUEST_ID.fullmatch(text) is not None
