"""Verification passes on the golden run in every form and fails on any other."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.golden_model import MICRO_A

from k3core.engine.verify import GoldenError, VerifyOptions, verify
from k3core.model.plans import MlaForm

Tensors = dict[str, torch.Tensor]
GOLDEN = MICRO_A / "golden.safetensors"
CPU = torch.device("cpu")
TOLERANCE = 1e-4


@pytest.mark.parametrize("form", ["auto", "expanded", "absorbed"])
@pytest.mark.parametrize(("chunk", "decode_from"), [(None, None), (17, None), (None, 60), (9, 70)])
def test_every_way_of_running_meets_the_golden_values(
    form: MlaForm, chunk: int | None, decode_from: int | None
) -> None:
    options = VerifyOptions(CPU, torch.float32, form, chunk, decode_from)
    comparisons = verify(MICRO_A, GOLDEN, options)
    assert [c.name for c in comparisons] == [
        "logits",
        *(f"layer{index}.attn_out" for index in range(9)),
        "image0.embeds",
        "image1.embeds",
    ]
    for comparison in comparisons:
        assert comparison.max_abs <= TOLERANCE, comparison
        assert comparison.mean_abs <= comparison.max_abs
        assert comparison.relative_norm <= 2e-5
    assert comparisons[0].scale == pytest.approx(4.8, abs=0.1)


def changed(directory: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(GOLDEN)
    change(tensors)
    path = directory / "golden.safetensors"
    save_file(tensors, path)
    return path


def test_a_difference_shows_in_its_tensor_only(tmp_path: Path) -> None:
    golden = changed(tmp_path, lambda tensors: tensors["layer3.attn_out"][5].add_(0.5))
    comparisons = verify(MICRO_A, golden, VerifyOptions(CPU, torch.float32))
    past = {c.name: c.max_abs for c in comparisons if c.max_abs > TOLERANCE}
    assert past == {"layer3.attn_out": pytest.approx(0.5, abs=1e-3)}


def test_a_value_that_is_not_finite_never_passes(tmp_path: Path) -> None:
    golden = changed(tmp_path, lambda tensors: tensors["logits"][3, 3].fill_(float("nan")))
    logits = verify(MICRO_A, golden, VerifyOptions(CPU, torch.float32))[0]
    assert logits.max_abs == float("inf")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("input_ids"),
        lambda tensors: tensors.pop("logits"),
        lambda tensors: tensors.pop("image1.grid_thw"),
        lambda tensors: tensors.update(logits=tensors["logits"][:-1].clone()),
        lambda tensors: tensors["input_ids"].fill_(7),
    ],
)
def test_a_golden_file_that_does_not_fit_is_an_error(
    tmp_path: Path, change: Callable[[Tensors], object]
) -> None:
    golden = changed(tmp_path, change)
    with pytest.raises(GoldenError):
        verify(MICRO_A, golden, VerifyOptions(CPU, torch.float32))


def test_a_run_without_images_or_layers_is_compared_by_its_logits(tmp_path: Path) -> None:
    def keep_text(tensors: Tensors) -> None:
        for name in [name for name in tensors if name not in ("input_ids", "logits")]:
            del tensors[name]

    golden = changed(tmp_path, keep_text)
    comparisons = verify(MICRO_A, golden, VerifyOptions(CPU, torch.float32))
    assert [c.name for c in comparisons] == ["logits"]
    # Placeholder rows keep their token's embedding, so these logits are others.
    assert comparisons[0].max_abs > TOLERANCE


def test_golden_data_may_lie_beside_the_weights(tmp_path: Path) -> None:
    for path in MICRO_A.iterdir():
        shutil.copy(path, tmp_path)
    options = VerifyOptions(CPU, torch.float32)
    assert verify(tmp_path, tmp_path / GOLDEN.name, options) == verify(MICRO_A, GOLDEN, options)
