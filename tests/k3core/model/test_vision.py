import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.golden_model import MICRO_A, golden

from k3core.config import VisionConfig
from k3core.model.vision import Grid, VisionModel
from k3core.weights.loading import LoadOptions
from k3core.weights.vision_loading import load_vision_model

# Largest difference to the recorded run, relative to its largest value.
GOLDEN_TOLERANCE = 1e-5

# Float32 against float64, relative to the largest value, over a few layers of random weights.
EQUATION_TOLERANCE = 2e-5

SMALL = VisionConfig(
    num_layers=2,
    hidden_size=24,
    intermediate_size=40,
    num_heads=2,
    qkv_hidden_size=32,
    patch_size=14,
    pos_emb_height=5,
    pos_emb_width=7,
    pos_emb_time=4,
    merge_kernel=(2, 2),
    mm_hidden_size=24,
    text_hidden_size=36,
    projector_ln_eps=1e-5,
)

SHAPES = {
    "small": SMALL,
    "attention as wide as the tower": replace(SMALL, num_heads=3, qkv_hidden_size=24),
    "one head, one layer": replace(SMALL, num_heads=1, num_layers=1, qkv_hidden_size=8),
    "five heads": replace(
        SMALL, num_heads=5, qkv_hidden_size=60, hidden_size=16, mm_hidden_size=16
    ),
    "a tall table": replace(SMALL, pos_emb_height=9, pos_emb_width=4),
    "small patches": replace(SMALL, patch_size=6),
    "a wide merge": replace(SMALL, merge_kernel=(1, 2)),
    "another epsilon": replace(SMALL, projector_ln_eps=0.1),
}

GRIDS: tuple[Grid, ...] = ((1, 2, 2), (1, 4, 6), (1, 8, 2), (2, 4, 4), (3, 2, 6))


def random_model(config: VisionConfig, seed: int = 0) -> VisionModel:
    generator = torch.Generator().manual_seed(seed)
    model = VisionModel(config)
    for parameter in model.parameters():
        scale = 1.0 if parameter.dim() == 1 else 1 / math.sqrt(parameter[0].numel())
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        if parameter.dim() == 1:
            parameter.data += 1.0
    return model.eval()


def random_patches(config: VisionConfig, grid: Grid, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (math.prod(grid), 3, config.patch_size, config.patch_size)
    return torch.randn(shape, generator=generator)


@torch.inference_mode()
def encode(
    model: VisionModel, patches: list[torch.Tensor], grids: list[Grid]
) -> list[torch.Tensor]:
    return model(torch.cat(patches), grids)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    difference = (found.double() - expected.double()).abs().max()
    return (difference / expected.double().abs().max()).item()


class Equations:
    """The tower written out in float64, one patch and one head at a time; slow and plain."""

    def __init__(self, model: VisionModel, config: VisionConfig) -> None:
        self.config = config
        self.weights = {name: p.detach().double() for name, p in model.named_parameters()}

    def tower(self, name: str) -> torch.Tensor:
        return self.weights[f"vision_tower.{name}.weight"]

    def encode(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        hidden = self.embed(patches.double(), grid)
        for index in range(self.config.num_layers):
            block = f"encoder.blocks.{index}"
            normed = self.norm(hidden, self.tower(f"{block}.norm0"))
            hidden = hidden + self.attend(normed, grid, block)
            normed = self.norm(hidden, self.tower(f"{block}.norm1"))
            middle = normed @ self.tower(f"{block}.mlp.fc0").T
            cubic = math.sqrt(2 / math.pi) * (middle + 0.044715 * middle**3)
            middle = 0.5 * middle * (1 + torch.tanh(cubic))
            hidden = hidden + middle @ self.tower(f"{block}.mlp.fc1").T
        hidden = self.norm(hidden, self.tower("encoder.final_layernorm"))
        return self.project(self.merge(hidden, grid))

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The float32 model's own epsilon.
        eps = torch.finfo(torch.float32).eps
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def embed(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        frames, rows, columns = grid
        kernel = self.tower("patch_embed.proj").flatten(1)
        out: list[torch.Tensor] = []
        for t in range(frames):
            for y in range(rows):
                for x in range(columns):
                    patch = patches[(t * rows + y) * columns + x].flatten()
                    embedded = kernel @ patch + self.position(y, x, rows, columns)
                    out.append(embedded + (self.time(t) if frames > 1 else 0))
        return torch.stack(out)

    def position(self, y: int, x: int, rows: int, columns: int) -> torch.Tensor:
        table = self.tower("patch_embed.pos_emb")
        y_low, y_high, y_part = _between(y, rows, table.shape[0])
        x_low, x_high, x_part = _between(x, columns, table.shape[1])
        top = table[y_low, x_low] * (1 - x_part) + table[y_low, x_high] * x_part
        bottom = table[y_high, x_low] * (1 - x_part) + table[y_high, x_high] * x_part
        return top * (1 - y_part) + bottom * y_part

    def time(self, t: int) -> torch.Tensor:
        half = self.config.hidden_size // 2
        angles = [t * 10000 ** (-j / half) for j in range(half)]
        return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)

    def attend(self, x: torch.Tensor, grid: Grid, block: str) -> torch.Tensor:
        heads, width = self.config.num_heads, self.config.head_dim
        q, k, v = (x @ self.tower(f"{block}.wqkv").T).split(heads * width, dim=-1)
        outputs: list[torch.Tensor] = []
        for head in range(heads):
            lanes = slice(head * width, (head + 1) * width)
            turned_q, turned_k = self.turn(q[:, lanes], grid), self.turn(k[:, lanes], grid)
            scores = turned_q @ turned_k.T / math.sqrt(width)
            outputs.append(scores.softmax(-1) @ v[:, lanes])
        return torch.cat(outputs, dim=-1) @ self.tower(f"{block}.wo").T

    def turn(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        _, rows, columns = grid
        width = self.config.head_dim
        out = torch.empty_like(x)
        for index in range(len(x)):
            row, column = index // columns % rows, index % columns
            for pair in range(width // 2):
                frequency = 10000 ** (-4 * (pair // 2) / width)
                angle = (column if pair % 2 == 0 else row) * frequency
                a, b = x[index, 2 * pair], x[index, 2 * pair + 1]
                out[index, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
                out[index, 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def merge(self, hidden: torch.Tensor, grid: Grid) -> torch.Tensor:
        frames, rows, columns = grid
        high, wide = self.config.merge_kernel
        mean = sum(hidden[t * rows * columns : (t + 1) * rows * columns] for t in range(frames))
        assert isinstance(mean, torch.Tensor)
        mean = mean / frames
        merged = [
            torch.cat(
                [mean[(y + dy) * columns + x + dx] for dy in range(high) for dx in range(wide)]
            )
            for y in range(0, rows, high)
            for x in range(0, columns, wide)
        ]
        return torch.stack(merged)

    def project(self, merged: torch.Tensor) -> torch.Tensor:
        hidden = merged @ self.weights["mm_projector.proj.0.weight"].T
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        hidden = hidden @ self.weights["mm_projector.proj.2.weight"].T
        scale = torch.sqrt((hidden * hidden).mean(-1, keepdim=True) + self.config.projector_ln_eps)
        return hidden / scale * self.weights["mm_projector.post_norm.weight"]


def _between(index: int, size: int, table_size: int) -> tuple[int, int, float]:
    """Neighbours in the table, and how far from the lower one; pixel centres are aligned."""
    place = max(0.0, (index + 0.5) * table_size / size - 0.5)
    low = min(int(place), table_size - 1)
    return low, min(low + 1, table_size - 1), place - low


def test_the_tower_gives_the_embeddings_of_the_released_code() -> None:
    config = golden().config.vision
    assert config is not None
    recorded = load_file(MICRO_A / "golden.safetensors")
    options = LoadOptions(torch.device("cpu"), torch.float32)
    model = load_vision_model(MICRO_A, config, options)
    numbers = range(sum(name.endswith(".embeds") for name in recorded))
    patches = [recorded[f"image{i}.pixel_values"] for i in numbers]
    grids: list[Grid] = [tuple(recorded[f"image{i}.grid_thw"].flatten().tolist()) for i in numbers]
    assert len(grids) > 1
    for i, found in enumerate(encode(model, patches, grids)):
        assert relative_error(found, recorded[f"image{i}.embeds"]) <= GOLDEN_TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_any_shape_follows_the_equations(shape: str, grid: Grid) -> None:
    config = SHAPES[shape]
    model = random_model(config)
    patches = random_patches(config, grid)
    (found,) = encode(model, [patches], [grid])
    expected = Equations(model, config).encode(patches, grid)
    assert relative_error(found, expected) <= EQUATION_TOLERANCE


def test_a_grid_of_the_tables_size_takes_the_table_as_it_is() -> None:
    config = replace(SMALL, pos_emb_height=4, pos_emb_width=6)
    model, grid = random_model(config), (1, 4, 6)
    embed = model.vision_tower.patch_embed
    with torch.inference_mode():
        blank = torch.zeros(24, 3, config.patch_size, config.patch_size)
        found = embed(blank, grid)
    assert torch.equal(found, embed.pos_emb.weight.detach().flatten(0, 1))


def test_an_image_gives_the_same_bits_alone_and_among_others() -> None:
    model = random_model(SMALL)
    patches = [random_patches(SMALL, grid, seed) for seed, grid in enumerate(GRIDS)]
    together = encode(model, patches, list(GRIDS))
    for image, grid, row in zip(patches, GRIDS, together, strict=True):
        (alone,) = encode(model, [image], [grid])
        assert torch.equal(alone, row)


def test_an_image_does_not_see_its_neighbours() -> None:
    model, grids = random_model(SMALL), [(1, 4, 6), (1, 2, 2)]
    first = random_patches(SMALL, grids[0], 1)
    answers = [
        encode(model, [first, random_patches(SMALL, grids[1], seed)], grids) for seed in (2, 3)
    ]
    assert torch.equal(answers[0][0], answers[1][0])
    assert not torch.equal(answers[0][1], answers[1][1])


def test_no_images_give_no_rows() -> None:
    patches = torch.empty(0, 3, SMALL.patch_size, SMALL.patch_size)
    with torch.inference_mode():
        assert random_model(SMALL)(patches, []) == []


def test_patches_that_no_grid_owns_are_a_fault() -> None:
    with pytest.raises(AssertionError, match="disagree"):
        encode(random_model(SMALL), [random_patches(SMALL, (1, 2, 4))], [(1, 2, 2)])


def test_bfloat16_stays_near_float32() -> None:
    model, grid = random_model(SMALL), (1, 4, 6)
    patches = random_patches(SMALL, grid)
    (expected,) = encode(model, [patches], [grid])
    (found,) = encode(model.to(torch.bfloat16), [patches.bfloat16()], [grid])
    assert found.dtype == torch.bfloat16
    # Eight bits of mantissa over two layers, and the norms' epsilon of that dtype.
    assert relative_error(found.float(), expected) < 0.08


def test_parameters_carry_their_released_names() -> None:
    names = {name for name, _ in VisionModel(replace(SMALL, num_layers=1)).named_parameters()}
    block = {
        f"vision_tower.encoder.blocks.0.{name}.weight"
        for name in ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1")
    }
    assert names == block | {
        "vision_tower.patch_embed.proj.weight",
        "vision_tower.patch_embed.pos_emb.weight",
        "vision_tower.encoder.final_layernorm.weight",
        "mm_projector.proj.0.weight",
        "mm_projector.proj.2.weight",
        "mm_projector.post_norm.weight",
    }
