"""The language model against its golden run, however the run is cut."""

from collections.abc import Iterator

import pytest
import torch
from support.golden_model import golden, micro_model

from k3core.engine.single_sequence import Segment, SingleSequence
from k3core.model.text import TextModel

# The reference's own prefill and decode differ by 4.8e-5 at this scale of logits, 4.8.
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def run(model: TextModel, cuts: list[tuple[int, int]], taps: tuple[str, ...] = ()) -> torch.Tensor:
    """Logits of the golden tokens fed in the given chunks."""
    return run_tapped(model, cuts, taps)["logits"]


def run_tapped(
    model: TextModel, cuts: list[tuple[int, int]], taps: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    data = golden()
    sequence = SingleSequence(model, len(data.token_ids), torch.float32)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("logits", *taps)}
    for low, high in cuts:
        chosen = (data.image_rows >= low) & (data.image_rows < high)
        segment = Segment(
            data.token_ids[low:high], data.image_rows[chosen] - low, data.image_embeds[chosen]
        )
        output = sequence.feed(segment, taps)
        parts["logits"].append(output.logits)
        for name in taps:
            parts[name].append(output.taps[name])
    return {name: torch.cat(chunks) for name, chunks in parts.items()}


def chunks_of(size: int) -> list[tuple[int, int]]:
    num_tokens = len(golden().token_ids)
    return [(low, min(low + size, num_tokens)) for low in range(0, num_tokens, size)]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("form", ["auto", "expanded", "absorbed"])
def test_one_pass_meets_the_golden_logits(kernels: str, form: str) -> None:
    logits = run(micro_model(kernels, form), chunks_of(len(golden().token_ids)))
    assert (logits - golden().logits).abs().max() <= TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 9, 16, 31, 50, 95])
@pytest.mark.parametrize("form", ["auto", "expanded", "absorbed"])
def test_chunks_of_any_size_meet_the_golden_logits(size: int, form: str) -> None:
    logits = run(micro_model("auto", form), chunks_of(size))
    assert (logits - golden().logits).abs().max() <= TOLERANCE


@pytest.mark.slow
def test_chunks_of_every_size_meet_the_golden_logits() -> None:
    worst = {
        size: float((run(micro_model(), chunks_of(size)) - golden().logits).abs().max())
        for size in range(1, len(golden().token_ids) + 1)
    }
    assert {size: gap for size, gap in worst.items() if gap > TOLERANCE} == {}


@pytest.mark.parametrize("prompt", [1, 3, 40, 64])
def test_prefill_then_decode_meets_the_golden_logits(prompt: int) -> None:
    num_tokens = len(golden().token_ids)
    cuts = [(0, prompt), *((t, t + 1) for t in range(prompt, num_tokens))]
    logits = run(micro_model(), cuts)
    assert (logits - golden().logits).abs().max() <= TOLERANCE


def test_every_layers_attention_meets_its_golden_output() -> None:
    num_layers = golden().config.text.num_layers
    taps = tuple(f"layer{index}.attn_out" for index in range(num_layers))
    found = run_tapped(micro_model(), chunks_of(len(golden().token_ids)), taps)
    for name in taps:
        wanted = golden().recorded[name]
        gap = (found[name] - wanted).norm() / wanted.norm()
        assert gap <= 2e-5, name


def test_taps_change_nothing_and_join_up() -> None:
    last = golden().config.text.num_layers - 1
    taps = ("layer0.stream", f"layer{last}.stream", f"layer{last}.mixture", "layer0.mixture")
    whole = chunks_of(len(golden().token_ids))
    found = run_tapped(micro_model(), whole, taps)
    assert torch.equal(found["logits"], run(micro_model(), whole))
    # The mixture after the last layer is what the final norm and the head read.
    model = micro_model()
    mixture = found[f"layer{last}.mixture"]
    unit = mixture * torch.rsqrt(mixture.square().mean(-1, keepdim=True) + 1e-5) * model.norm
    assert torch.allclose(unit @ model.lm_head.T, found["logits"], atol=1e-5)
    assert not torch.allclose(found["layer0.stream"], found["layer0.mixture"], atol=1e-2)


def test_dense_pass_for_training_meets_the_golden_logits_and_has_gradients() -> None:
    data = golden()
    model = micro_model("reference")
    with torch.enable_grad():
        logits = model.forward_dense(
            data.token_ids.unsqueeze(0), data.image_rows, data.image_embeds
        )
        assert (logits[0] - data.logits).abs().max() <= TOLERANCE
        logits.square().mean().backward()
    without = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any())
    ]
    model.zero_grad(set_to_none=True)
    # Layer 0 mixes over nothing, so its query has no part in the result.
    assert without == ["layers.0.attention_mix.norm", "layers.0.attention_mix.proj"]


def test_only_wanted_rows_get_logits() -> None:
    data = golden()
    sequence = SingleSequence(micro_model(), len(data.token_ids), torch.float32)
    segment = Segment(data.token_ids, data.image_rows, data.image_embeds)
    output = sequence.feed(segment, all_logits=False)
    assert output.logits.shape == (1, data.config.text.vocab_size)
    assert (output.logits[0] - data.logits[-1]).abs().max() <= TOLERANCE


def test_the_dense_pass_taps_what_the_paged_one_taps() -> None:
    data, model = golden(), micro_model("reference")
    last = model.config.num_layers - 1
    taps = ("layer0.stream", "layer1.mixture", f"layer{last}.stream", f"layer{last}.mixture")
    paged = run_tapped(model, chunks_of(31), taps)
    ids = data.token_ids.unsqueeze(0)
    dense = model.forward_dense_taps(ids, taps, data.image_rows, data.image_embeds)
    assert (dense.logits - paged["logits"]).abs().max() <= TOLERANCE
    assert dense.taps.keys() == set(taps)
    for name in taps:
        assert (dense.taps[name] - paged[name]).abs().max() <= TOLERANCE
    plain = model.forward_dense(ids, data.image_rows, data.image_embeds)
    assert torch.equal(plain[0], dense.logits)
