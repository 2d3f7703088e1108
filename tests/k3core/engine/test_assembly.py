import random
from array import array
from functools import cache

import torch
from support.golden_model import MICRO_A, golden, micro_model

from k3core.cache.layout import model_sizes, plan_layout
from k3core.engine.assembly import ModelOptions, model_engine
from k3core.engine.parts import EngineParts, EngineSizes, cache_namespace
from k3core.engine.words import EngineEvent, EngineRequest
from k3core.scheduler.request import ImageSpan, Request
from k3core.scheduler.scheduler import Role
from k3wire.messages.sampling import SamplingParams

UNIT = 16


def build(role: Role = "combined", arena_bytes: int = 8 << 20, chunk: int = 48) -> EngineParts:
    sizes = EngineSizes(arena_bytes=arena_bytes, unit_tokens=UNIT, chunk_tokens=chunk)
    parts = model_engine(ModelOptions(MICRO_A), role, sizes)
    parts.core.open()
    return parts


@cache
def bare_argmax(prompt: tuple[int, ...]) -> int:
    with torch.no_grad():
        return int(micro_model().forward_dense(torch.tensor([prompt]))[0, -1].argmax())


def greedy(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def run(parts: EngineParts, requests: list[EngineRequest]) -> dict[str, list[int]]:
    for request in requests:
        parts.core.add(request)
    tokens: dict[str, list[int]] = {request.key: [] for request in requests}
    for _ in range(10_000):
        if parts.core.is_quiescent:
            return tokens
        events: list[EngineEvent] = []
        parts.core.step(events.extend)
        for event in events:
            assert event.error is None
            tokens[event.key] += event.token_ids
    raise AssertionError("the engine did not end")


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts over one vocabulary, of which many share beginnings of various lengths."""
    draw = random.Random(seed)
    vocabulary = golden().config.text.vocab_size
    special = golden().config.media_placeholder_token_id
    words = [token for token in range(vocabulary) if token != special]
    stems = [[draw.choice(words) for _ in range(120)] for _ in range(3)]
    found: list[list[int]] = []
    for _ in range(count):
        stem = draw.choice(stems)[: draw.randrange(120)]
        found.append(stem + [draw.choice(words) for _ in range(draw.randrange(1, 60))])
    return found


def as_request(
    key: str, prompt: list[int], sampling: SamplingParams, salt: str = ""
) -> EngineRequest:
    request = Request(key, array("i", prompt), sampling.max_tokens, salt=salt)
    return EngineRequest(request, sampling)


def test_greedy_answers_are_the_bare_models() -> None:
    parts = build()
    (prompt,) = prompts(1, seed=3)
    answer = run(parts, [as_request("r", prompt, greedy())])["r"]
    expected: list[int] = []
    for _ in range(6):
        expected.append(bare_argmax((*prompt, *expected)))
    assert answer == expected


def test_warm_caches_and_company_change_no_greedy_answer() -> None:
    parts = build(arena_bytes=4 << 20)
    asked = prompts(40, seed=11)
    alone = [
        run(parts, [as_request(f"cold-{i}", prompt, greedy(), salt=f"only-{i}")])[f"cold-{i}"]
        for i, prompt in enumerate(asked)
    ]
    for start in range(0, len(asked), 8):
        group = [
            as_request(f"warm-{i}", asked[i], greedy()) for i in range(start, min(start + 8, 40))
        ]
        together = run(parts, group)
        assert [together[request.key] for request in group] == alone[start : start + 8]
    parts.core.step(lambda events: None)
    assert parts.core.load.num_free_pages == parts.core.load.num_pages


def test_drawn_answers_depend_on_seed_and_position_alone() -> None:
    parts = build()
    asked = prompts(6, seed=5)
    sampling = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=seed, max_tokens=8) for seed in range(6)
    ]
    alone = [
        run(parts, [as_request(f"a{i}", asked[i], sampling[i], salt=f"s{i}")])[f"a{i}"]
        for i in range(6)
    ]
    together = run(parts, [as_request(f"b{i}", asked[i], sampling[i]) for i in range(6)])
    assert [together[f"b{i}"] for i in range(6)] == alone

    # Another worker goes on after four tokens: the prompt then ends with them.
    resumed = EngineRequest(
        Request("c", array("i", asked[0] + alone[0][:4]), 4), sampling[0], num_emitted_tokens=4
    )
    assert run(parts, [resumed])["c"] == alone[0][4:]


def test_pictures_reach_the_model_through_provided_memory_in_any_chunking() -> None:
    run_ids = golden().token_ids.tolist()
    placeholder = golden().config.media_placeholder_token_id
    places = [index for index, token in enumerate(run_ids) if token == placeholder]
    names = sorted(name for name in golden().recorded if name.endswith(".embeds"))
    spans: list[ImageSpan] = []
    taken = 0
    for number, name in enumerate(names):
        count = golden().recorded[name].shape[0]
        spans.append(ImageSpan(places[taken], count, bytes([number]) * 32))
        taken += count
    expected = int(golden().logits[-1].argmax())
    for chunk in (16, 48, 512):
        parts = build("prefill", chunk=chunk)
        request = EngineRequest(Request("r", array("i", run_ids), 1, tuple(spans)), greedy(1))
        parts.core.add(request)
        for index, name in enumerate(names):
            data = golden().recorded[name].contiguous().view(torch.uint8).numpy().data
            parts.core.provide_image("r", index, data)
        events: list[EngineEvent] = []
        while not events or events[-1].kind != "prefilled":
            parts.core.step(events.extend)
        assert events[-1].token_ids == (expected,)


def test_a_decode_engine_continues_from_copied_pages() -> None:
    prefill, decode = build("prefill"), build("decode")
    (prompt,) = prompts(1, seed=8)
    expected = run(build(), [as_request("r", prompt, greedy(5))])["r"]
    prefill.core.add(EngineRequest(Request("r", array("i", prompt), 1), greedy(5)))
    events: list[EngineEvent] = []
    while not events or events[-1].kind != "prefilled":
        prefill.core.step(events.extend)
    hand_off = events[-1].hand_off
    reservation = decode.core.reserve(as_request("r", prompt, greedy(5)))
    assert hand_off is not None
    assert reservation is not None
    copy_pages(prefill, decode, hand_off.state_pages, reservation.state_pages)
    unit_bytes, page_units = prefill.layout.unit_bytes, prefill.layout.page_units
    for source, target in zip(hand_off.units, reservation.units, strict=True):
        start, to = source % page_units * unit_bytes, target % page_units * unit_bytes
        content = prefill.view_page(source // page_units)[start : start + unit_bytes]
        decode.view_page(target // page_units)[to : to + unit_bytes] = content
    prefill.core.release("r")
    assert decode.core.adopt("r", hand_off.first_token)
    tokens = [hand_off.first_token]
    events.clear()
    while not decode.core.is_quiescent:
        decode.core.step(events.extend)
    assert [*tokens, *(token for event in events for token in event.token_ids)] == expected


def copy_pages(
    source: EngineParts, target: EngineParts, pages: tuple[int, ...], to: tuple[int, ...]
) -> None:
    for here, there in zip(pages, to, strict=True):
        target.view_page(there)[:] = source.view_page(here)


def test_caches_of_other_models_or_partitions_share_no_digest() -> None:
    config = golden().config.text
    whole, half = (plan_layout(model_sizes(config, tp=ranks), UNIT) for ranks in (1, 2))
    names = {cache_namespace(model, layout) for model in ("a", "b") for layout in (whole, half)}
    assert len(names) == 4
    assert cache_namespace("a", plan_layout(model_sizes(config), UNIT)) in names
