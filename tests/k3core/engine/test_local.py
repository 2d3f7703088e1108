import random
from functools import cache

import pytest
import torch
from support.golden_model import MICRO_A, golden

from k3core.engine.local import LocalEngine, LocalImage, LocalRequest
from k3core.engine.parts import EngineSizes
from k3wire.errors import ContextLengthExceeded
from k3wire.messages.sampling import SamplingParams


@cache
def engine() -> LocalEngine:
    return LocalEngine(MICRO_A, EngineSizes(arena_bytes=8 << 20, unit_tokens=16, chunk_tokens=64))


@cache
def images() -> tuple[LocalImage, ...]:
    recorded = golden().recorded
    found: list[LocalImage] = []
    while f"image{len(found)}.pixel_values" in recorded:
        stem = f"image{len(found)}"
        t, h, w = recorded[f"{stem}.grid_thw"].flatten().tolist()
        found.append(LocalImage(recorded[f"{stem}.pixel_values"], (t, h, w)))
    return tuple(found)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def test_the_golden_prompt_with_its_pictures_goes_on_as_the_reference_does() -> None:
    answer = engine().generate(golden().token_ids.tolist(), images(), greedy(1))
    assert answer.token_ids == (int(golden().logits[-1].argmax()),)
    assert answer.finish_reason == "length"


def test_a_warm_cache_answers_alike_with_and_without_pictures() -> None:
    prompt = golden().token_ids.tolist()
    text = [token for token in prompt if token != golden().config.media_placeholder_token_id]
    for tokens, pictures in ((prompt, images()), (text, ())):
        answers = [engine().generate(tokens, pictures, greedy(5)) for _ in range(2)]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[1].usage.cached_local == (len(tokens) - 1) // 16 * 16


def test_another_picture_of_equal_size_shares_nothing_behind_it() -> None:
    prompt = golden().token_ids.tolist()
    first = prompt.index(golden().config.media_placeholder_token_id)
    other = tuple(
        LocalImage(-image.pixels, image.grid_thw) if index == 0 else image
        for index, image in enumerate(images())
    )
    engine().generate(prompt, images(), greedy(1))
    answer = engine().generate(prompt, other, greedy(1))
    assert answer.usage.cached_local <= first // 16 * 16


def test_a_salt_of_its_own_turns_the_cache_off() -> None:
    prompt = [random.Random(4).randrange(200) for _ in range(80)]
    requests = [LocalRequest(prompt, greedy(3), salt=salt) for salt in ("a", "b", "a")]
    answers = [engine().generate_all([request])[0] for request in requests]
    assert [answer.usage.cached_local for answer in answers] == [0, 0, 64]
    assert len({answer.token_ids for answer in answers}) == 1


def test_a_batch_answers_each_prompt_as_alone_in_order() -> None:
    draw = random.Random(2)
    prompts = [[draw.randrange(200) for _ in range(draw.randrange(1, 70))] for _ in range(8)]
    alone = [engine().generate(prompt, (), greedy(4)).token_ids for prompt in prompts]
    together = engine().generate_all(
        [LocalRequest(p, greedy(4), salt=f"s{i}") for i, p in enumerate(prompts)]
    )
    assert [answer.token_ids for answer in together] == alone


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded):
        engine().generate([1] * 200_000)


def test_pictures_are_embedded_as_recorded() -> None:
    recorded = golden().recorded
    for index, image in enumerate(images()):
        torch.testing.assert_close(
            engine().embed(image), recorded[f"image{index}.embeds"], atol=2e-4, rtol=1e-3
        )
