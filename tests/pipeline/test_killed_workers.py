"""Any one worker killed while nothing is asked: the next request works."""

import asyncio
import base64
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from support.pictures import encode, gradient
from support.stack import Stack, api, running_stack, until


@pytest.fixture(scope="module")
def mortal_stack(
    tmp_path_factory: pytest.TempPathFactory, micro_checkpoint: Path
) -> Generator[Stack, None, None]:
    with running_stack(tmp_path_factory.mktemp("mortal"), micro_checkpoint) as running:
        yield running


@pytest.mark.parametrize(
    "role",
    [
        "fetcher",
        "preprocessor",
        "encoder",
        "prefill",
        "decode",
        "redis",
        "mooncake",
        "mooncake-store",
        "nats",
    ],
)
async def test_the_request_after_a_kill_works(mortal_stack: Stack, role: str) -> None:
    stack = mortal_stack
    raw = encode(gradient(64 + len(role), 40), "PNG")
    image = {"url": "data:image/png;base64," + base64.b64encode(raw).decode()}
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": role}]
    async with api(stack) as client:
        assert (await client.post(client.body("hello")))[0] == 200
        pid = stack.pid(role)
        os.kill(pid, signal.SIGKILL)
        status, answer = await client.post(client.body(content))
        assert status == 200, answer
        await until(lambda: stack.pid(role) not in (0, pid), 30)


async def test_the_gateway_comes_back_at_its_address(mortal_stack: Stack) -> None:
    stack = mortal_stack
    pid = stack.pid("gateway")
    os.kill(pid, signal.SIGKILL)
    await until(lambda: stack.pid("gateway") not in (0, pid), 30)
    async with api(stack) as client:

        async def answers() -> bool:
            try:
                return (await client.post(client.body("hello again")))[0] == 200
            except OSError:
                return False

        end_s = time.monotonic() + 30
        while not await answers():
            assert time.monotonic() < end_s, "the gateway did not come back"
            await asyncio.sleep(0.1)
