"""Errors as OpenAI clients expect them: four keys, the right status, a hint when to come back."""

import math
import random

import msgspec
from fastapi.responses import Response

from k3wire.errors import K3Error, RequestTimeout, Unauthorized

DEFAULT_RETRY_AFTER_S = 1.0
RETRY_JITTER_S = 1.0
"""Spread of Retry-After, so that refused clients do not come back as one."""


def error_body(error: K3Error) -> bytes:
    """Encodes `{"error": {message, type, param, code}}`; all four keys are always there."""
    fields = {
        "message": error.message,
        "type": error.error_type,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": fields})


def error_response(error: K3Error) -> Response:
    """Makes the HTTP response of an error, with Retry-After where a retry may help."""
    headers: dict[str, str] = {}
    if error.is_retryable:
        wait_s = error.retry_after_s or DEFAULT_RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(wait_s + random.random() * RETRY_JITTER_S)))
    if error.http_status == 504:
        headers["x-should-retry"] = "false"
    if error.code == RequestTimeout.code:
        # The rest of the body may still come, and would be taken for the next request.
        headers["connection"] = "close"
    if error.code == Unauthorized.code:
        headers["www-authenticate"] = "Bearer"
    return Response(
        content=error_body(error),
        status_code=error.http_status,
        media_type="application/json",
        headers=headers,
    )
