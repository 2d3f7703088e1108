"""The server under load: its address as people write it, and what it serves."""

import json
from urllib.parse import urlsplit

import aiohttp

MAX_SHOWN_CHARS = 200


class TargetError(Exception):
    """The server cannot be played against; the message says why and what to change."""


def base_url(given: str) -> str:
    """Gives the address below which the API is: without a slash, or `/v1`, at its end.

    Raises:
        TargetError: no http or https address.
    """
    url = given.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    if not _is_http(url):
        raise TargetError(f"--url must be like http://127.0.0.1:8000, not {given!r}")
    return url


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and has_host and not (parts.query or parts.fragment)


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Asks the server what it serves.

    Args:
        session: to ask with.
        url: from `base_url`.

    Raises:
        TargetError: it does not answer, or not with a list of models.
    """
    address = f"{url}/v1/models"
    try:
        async with session.get(address) as response:
            status, text = response.status, await response.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise TargetError(
            f"{address} does not answer: {str(error) or type(error).__name__}"
        ) from error
    if status in (401, 403):
        raise TargetError(
            f"{address} refused the key ({status}): {_reason(text)}; give one with --api-key"
        )
    if status != 200:
        raise TargetError(f"{address} answered {status}: {_reason(text)}")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise TargetError(f"{address} answered without a model: {_shown(text)}") from error


def _reason(text: str) -> str:
    try:
        return _shown(str(json.loads(text)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return _shown(text)


def _shown(text: str) -> str:
    """One short line; what a server answers may hold anything."""
    line = " ".join(text[: 4 * MAX_SHOWN_CHARS].split())
    return "".join(char for char in line if char.isprintable())[:MAX_SHOWN_CHARS] or "(nothing)"
