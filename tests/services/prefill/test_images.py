import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache

import torch
from support.fake_encoder import FakeEncoder
from support.golden_model import MICRO_A, golden
from support.worker_pair import WAIT_S, Pair, worker_pair

from k3core.engine.assembly import ModelOptions, model_engine
from k3core.engine.local import LocalEngine, LocalImage
from k3core.engine.parts import EngineSizes
from k3wire.errors import ImageParseError
from k3wire.messages.encode import EncodeItem
from k3wire.messages.media import ImageRef, ImageSlot
from k3wire.messages.sampling import SamplingParams

SIZES = EngineSizes(arena_bytes=4 << 20, unit_tokens=16, chunk_tokens=48)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
PROMPT = golden().token_ids.tolist()
PLACEHOLDER = golden().config.media_placeholder_token_id


def embeds(index: int) -> torch.Tensor:
    return golden().recorded[f"image{index}.embeds"]


@cache
def slots() -> tuple[ImageSlot, ...]:
    """The golden pictures in their places; the feature key begins with the index."""
    places = [index for index, token in enumerate(PROMPT) if token == PLACEHOLDER]
    found: list[ImageSlot] = []
    taken = 0
    while f"image{len(found)}.embeds" in golden().recorded:
        index = len(found)
        key = bytes([index]) * 32
        t, h, w = golden().recorded[f"image{index}.grid_thw"].flatten().tolist()
        image = ImageRef(
            content_key=key, media_type="image/png", width=14 * w, height=14 * h, size_bytes=1
        )
        count = embeds(index).shape[0]
        found.append(
            ImageSlot(
                image=image,
                feature_key=key,
                offset=places[taken],
                num_tokens=count,
                grid_thw=(t, h, w),
            )
        )
        taken += count
    return tuple(found)


@cache
def expected() -> tuple[int, ...]:
    """What one process answers, with pixels rather than recorded embeddings."""
    pictures = [
        LocalImage(golden().recorded[f"image{index}.pixel_values"], slot.grid_thw)
        for index, slot in enumerate(slots())
    ]
    return LocalEngine(MICRO_A, SIZES).generate(PROMPT, pictures, GREEDY).token_ids


def recorded_bytes(item: EncodeItem) -> bytes:
    return embeds(item.slot.feature_key[0]).contiguous().numpy().tobytes()


@dataclass
class Stage:
    pair: Pair
    encoder: FakeEncoder

    async def ask(self, name: str) -> None:
        gateway = self.pair.gateway
        fields = {field: getattr(GREEDY, field) for field in GREEDY.__struct_fields__}
        await gateway.send(gateway.request(name, PROMPT, slots=slots(), **fields))


def with_stage(test: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        options = ModelOptions(MICRO_A)
        prefill = model_engine(options, "prefill", SIZES)
        decode = model_engine(options, "decode", SIZES)
        async with asyncio.timeout(6 * WAIT_S), worker_pair(prefill, decode) as pair:
            encoder = FakeEncoder(pair.gateway.bus, pair.fabric.engine(), recorded_bytes)
            await encoder.start()
            await test(Stage(pair, encoder))

    asyncio.run(run())


def test_a_question_about_pictures_is_answered_as_in_one_process() -> None:
    async def test(stage: Stage) -> None:
        gateway = stage.pair.gateway
        await stage.ask("r")
        await gateway.until_ended("r")
        assert tuple(gateway.tokens("r")) == expected()
        stages = [report.stage for report in gateway.deltas("r")[0].reports]
        assert stages == ["encoder", "prefill"]
        await gateway.until_idle(stage.pair.num_pages)

    with_stage(test)


def test_cac_06_pictures_inside_the_hit_are_not_asked_for_again() -> None:
    async def test(stage: Stage) -> None:
        gateway = stage.pair.gateway
        for name in ("one", "two"):
            await stage.ask(name)
            await gateway.until_ended(name)
        assert gateway.tokens("two") == gateway.tokens("one")
        hit = gateway.deltas("two")[0].num_cached_tokens
        assert hit == (len(PROMPT) - 1) // 16 * 16
        beyond = [slot.feature_key for slot in slots() if slot.offset + slot.num_tokens > hit]
        asked = [[item.slot.feature_key for item in r.items] for r in stage.encoder.requests]
        assert asked == [[slot.feature_key for slot in slots()], *([beyond] if beyond else [])]

    with_stage(test)


def test_an_encoders_error_ends_the_request_and_frees_everything() -> None:
    async def test(stage: Stage) -> None:
        gateway = stage.pair.gateway
        stage.encoder.error = ImageParseError("Not a whole picture.", param="messages[0]")
        await stage.ask("r")
        last = await gateway.until_ended("r")
        assert last.error is not None
        assert (last.error.code, last.error.param) == ("image_parse_error", "messages[0]")
        assert last.position == 0
        await gateway.until_idle(stage.pair.num_pages)
        stage.encoder.error = None
        await stage.ask("again")
        await gateway.until_ended("again")
        assert tuple(gateway.tokens("again")) == expected()

    with_stage(test)


def test_a_client_that_leaves_while_pictures_are_encoded_frees_both_sides() -> None:
    async def test(stage: Stage) -> None:
        gateway = stage.pair.gateway
        stage.encoder.gate.clear()
        await stage.ask("r")
        await gateway.until(lambda: gateway.beats["decode"].load.num_waiting == 1)
        await gateway.until(lambda: bool(stage.encoder.requests))
        await gateway.cancel("r")
        await gateway.until_idle(stage.pair.num_pages)
        assert stage.encoder.cancels == ["r"]
        stage.encoder.gate.set()
        await stage.ask("next")
        await gateway.until_ended("next")
        assert tuple(gateway.tokens("next")) == expected()

    with_stage(test)
