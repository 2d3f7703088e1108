import math
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.golden_model import MICRO_A, golden

from k3core.engine.local import LocalAnswer, LocalEngine, LocalImage, LocalRequest
from k3core.engine.parts import EngineSizes
from k3wire.errors import ContextLengthExceeded, InvalidRequest
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


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_without_an_embedding_is_refused_before_it_ends_a_step(token: int) -> None:
    with pytest.raises(InvalidRequest):
        engine().generate([1, token, 2])
    assert engine().generate([1, 2], (), greedy(1)).token_ids


def test_pictures_are_embedded_as_recorded() -> None:
    recorded = golden().recorded
    for index, image in enumerate(images()):
        torch.testing.assert_close(
            engine().embed(image), recorded[f"image{index}.embeds"], atol=2e-4, rtol=1e-3
        )


def random_requests(count: int, seed: int) -> list[LocalRequest]:
    """Prompts that share beginnings and pictures, half of them with pictures."""
    draw = random.Random(seed)
    placeholder = golden().config.media_placeholder_token_id
    words = [token for token in range(200) if token != placeholder]
    stem = [draw.choice(words) for _ in range(96)]
    merge = 2 * 2
    pool = [picture for picture in images() if math.prod(picture.grid_thw) <= 64 * merge]
    found: list[LocalRequest] = []
    for _ in range(count):
        prompt = stem[: draw.randrange(96)]
        pictures: list[LocalImage] = []
        for _ in range(draw.choice((0, 0, 1, 2))):
            picture = draw.choice(pool)
            pictures.append(picture)
            prompt = [*prompt, *[placeholder] * (math.prod(picture.grid_thw) // merge)]
            prompt += [draw.choice(words) for _ in range(draw.randrange(6))]
        prompt += [draw.choice(words) for _ in range(draw.randrange(1, 40))]
        found.append(LocalRequest(prompt, greedy(3), tuple(pictures)))
    return found


@pytest.mark.slow
def test_two_hundred_prompts_get_warm_and_together_what_they_get_cold_and_alone() -> None:
    requests = random_requests(200, seed=21)
    cold = [
        engine().generate_all([replace(request, salt=f"cold-{number}")])[0].token_ids
        for number, request in enumerate(requests)
    ]
    warm: list[LocalAnswer] = []
    for start in range(0, len(requests), 8):
        group = [replace(request, salt="warm") for request in requests[start : start + 8]]
        warm += engine().generate_all(group)
    assert [answer.token_ids for answer in warm] == cold
    assert sum(answer.usage.cached_local > 0 for answer in warm) > 100


def test_answers_survive_being_preempted_for_want_of_pages() -> None:
    draw = random.Random(12)
    requests = [
        LocalRequest([draw.randrange(200) for _ in range(52 + index)], greedy(36))
        for index in range(6)
    ]
    alone = [engine().generate_all([request])[0].token_ids for request in requests]
    page_bytes = engine().page_bytes
    tight = LocalEngine(
        MICRO_A, EngineSizes(arena_bytes=14 * page_bytes, unit_tokens=16, chunk_tokens=64)
    )
    assert [answer.token_ids for answer in tight.generate_all(requests)] == alone
    assert tight.cache_stats.resumed_queries > 0


def test_what_had_to_leave_the_arena_comes_back_from_host_memory_unchanged() -> None:
    draw = random.Random(17)
    prompts = [[draw.randrange(200) for _ in range(70)] for _ in range(8)]
    cold = [
        engine().generate_all([LocalRequest(prompt, greedy(3), salt=f"h{index}")])[0].token_ids
        for index, prompt in enumerate(prompts)
    ]
    sizes = EngineSizes(
        arena_bytes=8 * engine().page_bytes, unit_tokens=16, chunk_tokens=64, host_bytes=4 << 20
    )
    small = LocalEngine(MICRO_A, sizes)
    for _ in range(2):
        answers = [small.generate(prompt, (), greedy(3)) for prompt in prompts]
        assert [answer.token_ids for answer in answers] == cold
    # The arena holds two prompts at most: all the others were brought back.
    assert [answer.usage.cached_local for answer in answers] == [64] * len(prompts)


def test_rounded_states_go_on_alike_from_the_arena_and_from_host_memory() -> None:
    draw = random.Random(18)
    prompts = [[draw.randrange(200) for _ in range(70)] for _ in range(4)]
    roomy = EngineSizes(arena_bytes=8 << 20, unit_tokens=16, chunk_tokens=64, codec="int8")
    tight = replace(roomy, arena_bytes=7 * engine().page_bytes, host_bytes=4 << 20)
    answers: list[list[tuple[int, ...]]] = []
    for sizes in (roomy, tight):
        asked = LocalEngine(MICRO_A, sizes)
        for _ in range(2):
            found = [asked.generate(prompt, (), greedy(2)) for prompt in prompts]
        assert [answer.usage.cached_local for answer in found] == [64] * len(prompts)
        answers.append([answer.token_ids for answer in found])
    assert asked.cache_stats.host_restores > 1
    assert answers[0] == answers[1]
