"""Request bodies of a scenario, made from its seed alone."""

import base64
import random
import struct
import zlib
from collections.abc import Iterator

from loadtest.scenario import Scenario

WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "harbor",
    "inlet",
    "jetty",
    "kettle",
    "ledger",
    "meadow",
    "north",
    "orchard",
    "prairie",
    "quarry",
    "ridge",
    "summit",
    "timber",
    "upland",
    "valley",
    "willow",
    "yonder",
    "zephyr",
]


def png(width: int, height: int, seed: int) -> bytes:
    """Draws a PNG of coloured stripes; different seeds give different bytes."""
    generator = random.Random(seed)
    colours = [bytes(generator.randrange(256) for _ in range(3)) for _ in range(8)]
    rows = b"".join(b"\0" + colours[(y // 8) % 8] * width for y in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bodies(scenario: Scenario, model: str) -> Iterator[dict[str, object]]:
    """Yields chat-completion bodies without end."""
    generator = random.Random(scenario.seed)
    prefixes = [_words(generator, scenario.prefix_words) for _ in range(scenario.num_prefixes)]
    pool = max(scenario.image_pool, 1)
    urls = [
        "data:image/png;base64," + base64.b64encode(png(112, 112, scenario.seed + i)).decode()
        for i in range(pool if scenario.num_images else 0)
    ]
    while True:
        messages: list[dict[str, object]] = []
        if prefixes:
            messages.append({"role": "system", "content": generator.choice(prefixes)})
        text = _words(generator, scenario.prompt_words)
        content: list[dict[str, object]] = [
            {"type": "image_url", "image_url": {"url": generator.choice(urls)}}
            for _ in range(scenario.num_images)
        ]
        content.append({"type": "text", "text": text})
        messages.append({"role": "user", "content": content})
        body: dict[str, object] = {
            "model": model,
            "messages": messages,
            "max_completion_tokens": scenario.output_tokens,
            "temperature": scenario.temperature,
            "stream": scenario.is_stream,
        }
        if scenario.is_stream:
            body["stream_options"] = {"include_usage": True}
        yield body


def _words(generator: random.Random, count: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(count))
