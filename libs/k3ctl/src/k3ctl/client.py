"""A small client of the gateway: one question, streamed or not, with its ledger."""

import base64
import json
import mimetypes
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from k3wire.telemetry.ledger import Ledger


class AskFailed(Exception):
    """The gateway refused or broke off; the message is fit to show."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        reasoning: the think channel.
        text: the visible answer.
        finish: finish reason.
        usage: as the gateway sent it.
        ledger: time to first token by stage, None if the server sends none.
        request_id: for `k3 trace`.
    """

    reasoning: str
    text: str
    finish: str
    usage: dict[str, Any]
    ledger: Ledger | None
    request_id: str


def image_url(source: str) -> str:
    """Gives a URL for an image argument: as it is, or a file's bytes as a data URL.

    Raises:
        AskFailed: the file cannot be read.
    """
    if source.startswith(("http://", "https://", "data:")):
        return source
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AskFailed(f"{source} cannot be read: {error.strerror}") from error
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def question(text: str, images: Sequence[str]) -> list[dict[str, Any]]:
    """Builds the messages of one question about some images."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": image_url(image)}} for image in images
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


class Client:
    """Talks to one gateway."""

    def __init__(self, url: str, session: aiohttp.ClientSession, api_key: str = "") -> None:
        """Takes the gateway's URL and an open session."""
        self._url = url.rstrip("/")
        self._session = session
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def model(self) -> str:
        """Asks what is served.

        Raises:
            AskFailed: nobody answers.
        """
        try:
            async with self._session.get(
                f"{self._url}/v1/models", headers=self._headers
            ) as response:
                return str((await self._body(response))["data"][0]["id"])
        except LookupError as error:
            raise AskFailed(f"{self._url} answered 200, but serves no model") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AskFailed(f"no gateway answers at {self._url}; is `k3 up` running?") from error

    async def _body(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        try:
            body: dict[str, Any] = await response.json(content_type=None)
            if response.status != 200:
                raise AskFailed(f"{response.status}: {body['error']['message']}")
        except (ValueError, KeyError, TypeError) as error:
            # A proxy, or something else that is no gateway of ours.
            raise AskFailed(f"{self._url} answered {response.status}, not as a gateway") from error
        return body

    async def ask(self, body: dict[str, Any]) -> Answer:
        """Asks and waits for the whole answer.

        Raises:
            AskFailed: refused, broken off, or nobody there.
        """
        try:
            async with self._session.post(
                f"{self._url}/v1/chat/completions", json=body, headers=self._headers
            ) as response:
                whole = await self._body(response)
                choice = whole["choices"][0]
                return Answer(
                    reasoning=choice["message"].get("reasoning_content") or "",
                    text=choice["message"].get("content") or "",
                    finish=choice["finish_reason"],
                    usage=whole["usage"],
                    ledger=read_ledger(whole["usage"]),
                    request_id=response.headers.get("x-request-id", ""),
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AskFailed(f"the connection to {self._url} broke, or took too long") from error

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[tuple[str, str] | Answer]:
        """Asks and yields pieces, (`reasoning` or `text`, piece), and the whole answer last.

        Raises:
            AskFailed: refused, broken off, or nobody there.
        """
        told = body | {"stream": True, "stream_options": {"include_usage": True}}
        pieces: dict[str, list[str]] = {"reasoning": [], "text": []}
        finish, usage = "", dict[str, Any]()
        try:
            async with self._session.post(
                f"{self._url}/v1/chat/completions", json=told, headers=self._headers
            ) as response:
                if response.status != 200:
                    await self._body(response)
                async for line in response.content:
                    event = _event(line)
                    if event is None:
                        continue
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        finish = choice.get("finish_reason") or finish
                        for kind, field in (
                            ("reasoning", "reasoning_content"),
                            ("text", "content"),
                        ):
                            piece = choice["delta"].get(field)
                            if piece:
                                pieces[kind].append(piece)
                                yield kind, piece
                request_id = response.headers.get("x-request-id", "")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AskFailed(f"the connection to {self._url} broke, or took too long") from error
        if not finish:
            raise AskFailed("the stream ended before the answer did")
        yield Answer(
            reasoning="".join(pieces["reasoning"]),
            text="".join(pieces["text"]),
            finish=finish,
            usage=usage,
            ledger=read_ledger(usage),
            request_id=request_id,
        )


def _event(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return None
    event: dict[str, Any] = json.loads(line[6:])
    if "error" in event:
        raise AskFailed(str(event["error"]["message"]))
    return event


def read_ledger(usage: dict[str, Any]) -> Ledger | None:
    """Reads the ledger that the gateway puts into usage."""
    found = usage.get("k3_ttft_ledger")
    return msgspec.convert(found, Ledger) if found else None
