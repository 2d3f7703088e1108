"""One request over HTTP, stamped as its client sees it; knows nothing but the public API."""

import json
import time

import aiohttp

from loadtest.record import Record


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, object],
    record: Record,
    *,
    leaves_after_first: bool = False,
) -> None:
    """Sends a body and fills the record; a failure is recorded, not raised."""
    record.sent_ns = time.monotonic_ns()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            record.status = response.status
            if response.status != 200:
                record.error = (await response.text())[:200]
            elif body.get("stream"):
                await _read_stream(response, record, leaves_after_first)
            else:
                _note_usage(record, await response.json())
                record.chunk_ns.append(time.monotonic_ns())
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        record.error = type(error).__name__
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # What a server sends need not have the shape that it should.
        record.error = f"malformed answer: {type(error).__name__}"
    record.end_ns = time.monotonic_ns()


async def _read_stream(response: aiohttp.ClientResponse, record: Record, leaves: bool) -> None:
    is_finished = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        payload = line[6:].strip()
        if payload == b"[DONE]":
            break
        event = json.loads(payload)
        if "error" in event:
            record.error = str(event["error"].get("code"))
            return
        _note_usage(record, event)
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            if delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
                record.chunk_ns.append(time.monotonic_ns())
            is_finished = is_finished or choice.get("finish_reason") is not None
        if leaves and record.chunk_ns:
            record.is_cancelled = True
            response.close()
            return
    if not is_finished:
        record.error = "stream ended without a finish reason"


def _note_usage(record: Record, event: dict[str, object]) -> None:
    usage = event.get("usage")
    if isinstance(usage, dict):
        details = usage.get("prompt_tokens_details") or {}
        record.num_prompt_tokens = int(usage["prompt_tokens"])
        record.num_output_tokens = int(usage["completion_tokens"])
        record.num_cached_tokens = int(details.get("cached_tokens") or 0)
