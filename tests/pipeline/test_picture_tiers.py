"""Pictures that come again: each is downloaded, decoded and encoded once, whoever asks and how often.

Two fetchers, two preprocessors and two encoders, so that "once" holds across processes.
"""

import asyncio
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest
from support.album import ask, hang, path_of, photograph, question
from support.picture_host import Held, PictureHost, answer, picture_host
from support.stack import Stack, api, only, running_stack, until, watch

pytestmark = pytest.mark.slow

PAIRS = ("--workers", "fetcher=2", "--workers", "preprocessor=2", "--workers", "encoder=2")
OFF = {"K3_FETCHER_L1": "false", "K3_PREPROCESSOR_CACHE": "0", "K3_ENCODER_CACHE": "0"}
FIRST, ADDED, NUM_TURNS = 10, 2, 3


@pytest.fixture(scope="module")
def paired_stack(
    tmp_path_factory: pytest.TempPathFactory, micro_checkpoint: Path
) -> Generator[Stack, None, None]:
    with running_stack(tmp_path_factory.mktemp("pairs"), micro_checkpoint, *PAIRS) as running:
        yield running


@pytest.fixture
async def host() -> AsyncIterator[PictureHost]:
    async with picture_host() as found:
        yield found


async def play(stack: Stack, host: PictureHost, first: int, *, salted: bool) -> list[Any]:
    """Many pictures, the same again, then turns that add two; gives what was done and said."""
    hang(host, range(first, first + FIRST + ADDED * NUM_TURNS))
    found: list[tuple[int, int, int]] = []
    texts: list[tuple[str, str]] = []
    async with api(stack) as client:
        messages = [question(host, range(first, first + FIRST))]
        for turn in range(-2, NUM_TURNS):
            if turn >= 0:
                start = first + FIRST + ADDED * turn
                messages.append({"role": "assistant", "content": texts[-1][1]})
                messages.append(question(host, range(start, start + ADDED)))
            before = len(host.asked)
            asked = await ask(client, messages, f"{first} {turn}" if salted else "")
            found.append((len(host.asked) - before, asked.num_decodes, asked.num_encodes))
            texts.append(asked.text)
    return [found, texts]


@pytest.mark.parametrize("salted", [False, True], ids=["all tiers", "L1 to L3"])
async def test_later_requests_download_decode_and_encode_only_new_pictures(
    paired_stack: Stack, host: PictureHost, salted: bool
) -> None:
    found, texts = await play(paired_stack, host, 100 if salted else 0, salted=salted)
    assert found == [(FIRST,) * 3, (0,) * 3, *[(ADDED,) * 3] * NUM_TURNS]
    assert texts[0] == texts[1]


async def test_a_prefix_hit_asks_no_deeper_tier_for_its_pictures(
    paired_stack: Stack, host: PictureHost
) -> None:
    hang(host, range(200, 240))
    async with api(paired_stack) as client:
        message = question(host, range(200, 240))
        await ask(client, [message])
        again = await ask(client, [message])
        # All but the last unit of the prompt is a hit, and a picture here has 15 tokens.
        assert again.lines["L3"]["num_items"] <= 128 // 15 + 1
        assert again.lines["L3"]["num_hits"] == again.lines["L3"]["num_items"]
        assert "L2" not in again.lines


async def test_two_requests_at_once_for_the_same_new_pictures_do_the_work_once(
    paired_stack: Stack, host: PictureHost
) -> None:
    numbers = range(300, 320)
    hang(host, numbers)
    held = host.answers[path_of(300)] = Held(answer(photograph(300), Cache_Control="max-age=3600"))
    async with watch(paired_stack) as directory, api(paired_stack) as client:
        async with asyncio.TaskGroup() as group:
            jobs = [
                group.create_task(ask(client, [question(host, numbers)], f"twice {index}"))
                for index in range(2)
            ]
            await held.asked.wait()

            def both_are_in() -> bool:
                beat = only(directory, "gateway")
                return beat is not None and beat.load.num_running == len(jobs)

            await until(both_are_in, 20)
            held.go.set()
        one, two = (job.result() for job in jobs)
    assert one.text == two.text
    assert sorted(request.path for request in host.asked) == sorted(map(path_of, numbers))
    assert one.num_decodes + two.num_decodes == len(numbers)
    assert one.num_encodes + two.num_encodes == len(numbers)


async def test_each_tier_can_be_switched_off_and_the_answers_are_the_same(
    paired_stack: Stack,
    host: PictureHost,
    tmp_path_factory: pytest.TempPathFactory,
    micro_checkpoint: Path,
) -> None:
    _, texts = await play(paired_stack, host, 400, salted=True)
    folder = tmp_path_factory.mktemp("off")
    with running_stack(folder, micro_checkpoint, **OFF) as bare:
        found, same = await play(bare, host, 400, salted=True)
    assert same == texts
    counts = [FIRST, FIRST, *(FIRST + ADDED * (turn + 1) for turn in range(NUM_TURNS))]
    assert found == [(count,) * 3 for count in counts]
