"""Pictures that a web server holds, asked about through a stack, and what the stages did for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from support.picture_host import PictureHost, answer
from support.pictures import encode
from support.stack import Api

WIDTH, HEIGHT = 140, 84


def photograph(number: int) -> bytes:
    """A JPEG that no other number gives."""
    coarse = np.random.default_rng(number).integers(0, 256, (6, 10, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    return encode(smooth, "JPEG", quality=90)


def path_of(number: int) -> str:
    return f"/{number}.jpg"


def hang(host: PictureHost, numbers: Sequence[int]) -> None:
    """Puts pictures on a host, fresh for an hour."""
    for number in numbers:
        host.answers[path_of(number)] = answer(photograph(number), Cache_Control="max-age=3600")


def question(host: PictureHost, numbers: Sequence[int], text: str = "what?") -> dict[str, Any]:
    """A user message with pictures."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": host.url(path_of(number))}} for number in numbers
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class Asked:
    """An answer, and what the stages did for it.

    Attributes:
        text: what a user sees.
        num_decodes: pictures decoded for this request.
        num_encodes: pictures encoded for this request.
        details: how the encoder came to what it gave.
        lines: of the ledger by tier.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        message = body["choices"][0]["message"]
        self.text = (message.get("reasoning_content") or "", message["content"] or "")
        self.lines = {line["tier"]: line for line in body["usage"]["k3_ttft_ledger"]["lines"]}
        self.num_decodes = self.num_made("L2")
        self.num_encodes = self.num_made("L3")

    def num_made(self, tier: str) -> int:
        """Items of a tier that no hit spared."""
        line = self.lines.get(tier)
        return line["num_items"] - line["num_hits"] if line else 0


async def ask(client: Api, messages: Sequence[dict[str, Any]], salt: str = "") -> Asked:
    """Asks, with a prefix of its own if it is given a salt; the answer must be whole."""
    body = client.body(None, max_completion_tokens=6, messages=list(messages))
    status, found = await client.post(body | ({"cache_salt": salt} if salt else {}))
    assert status == 200, found
    return Asked(found)
