"""Every name of the released checkpoint has one place in the model, and every place a name."""

import gzip
import json
import math
from collections import Counter
from functools import cache

import pytest
import torch
from support.shared_data import shared_path

from k3core.config import ModelConfig
from k3core.kernels.registry import reference_kernels
from k3core.model.text import TextModel
from k3core.model.vision import VisionModel
from k3core.weights.config_file import parse_config
from k3core.weights.inspection import count_tensors
from k3core.weights.names import Slot, layer_of, text_slots

# Half a million slots take seconds to lay out.
pytestmark = pytest.mark.slow

NUM_NAMES = 497_220


@cache
def official_config() -> ModelConfig:
    return parse_config(json.loads(shared_path("golden/official-config.json").read_text()))


@cache
def official_index() -> tuple[dict[str, str], int]:
    with gzip.open(shared_path("golden/official-index.json.gz"), "rt") as file:
        index = json.load(file)
    return index["weight_map"], index["metadata"]["total_size"]


@cache
def official_slots() -> dict[str, Slot]:
    return text_slots(official_config().text)


def test_every_released_name_has_exactly_one_place() -> None:
    names, _ = official_index()
    with torch.device("meta"):
        vision = VisionModel(official_config().vision)
    ours = [*official_slots(), *dict(vision.named_parameters())]
    assert len(names) == NUM_NAMES
    assert len(ours) == len(set(ours)) == NUM_NAMES
    assert set(ours) == set(names)


def test_the_places_cover_each_parameter_once_in_its_shape() -> None:
    with torch.device("meta"):
        model = TextModel(official_config().text, reference_kernels())
    parameters = dict(model.named_parameters())
    filled: Counter[str] = Counter()
    pieces: dict[tuple[str, int | None], list[tuple[int, int]]] = {}
    for slot in official_slots().values():
        parameter = parameters[slot.parameter]
        shape = parameter.shape if slot.expert is None else parameter.shape[1:]
        rows = slot.rows or (0, shape[0])
        pieces.setdefault((slot.parameter, slot.expert), []).append(rows)
        size = (rows[1] - rows[0]) * math.prod(shape[1:])
        assert math.prod(slot.shape) == size or slot.is_padded, slot
        assert (slot.kind == "uint8") == (parameter.dtype == torch.uint8), slot
        filled[slot.parameter] += size
    for rows in pieces.values():
        ends = [0, *(high for _, high in sorted(rows))]
        assert [low for low, _ in sorted(rows)] == ends[:-1]
    assert filled == {name: parameter.numel() for name, parameter in parameters.items()}


def test_layers_lie_in_the_shards_that_the_release_puts_them_in() -> None:
    names, _ = official_index()
    for name in official_slots():
        layer = layer_of(name, official_config().text)
        shard = 94 if layer is None else layer + 1
        assert names[name] == f"model-{shard:05d}-of-000096.safetensors"


def test_counts_and_bytes_are_the_releases() -> None:
    counts = count_tensors(official_config())
    num_by_dtype: Counter[str] = Counter()
    for count in counts:
        num_by_dtype[count.dtype] += count.num_tensors
    # Source: K3 architecture sheet, section 3.1.
    assert num_by_dtype == {"uint8": 494_592, "bfloat16": 2_122, "float32": 506}
    _, total_size = official_index()
    assert sum(count.num_bytes for count in counts) == total_size
    assert sum(count.num_parameters for count in counts) == 2_779_931_837_184
