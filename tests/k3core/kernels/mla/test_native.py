"""Latent attention over scattered pages against float64, in both forms."""

import pytest
import torch

from k3core.kernels.cpu_native import native_library
from k3core.kernels.interface import MlaPlan, MlaWeights
from k3core.kernels.mla import reference
from k3core.kernels.mla.native import NativeMla

UNIT_TOKENS = 8
PAGE_UNITS = 3
# (N, K, R, V, C): no shared key, widths that are no vectors, one head.
SHAPES = [(4, 16, 8, 16, 32), (3, 5, 0, 7, 12), (1, 32, 16, 64, 48), (5, 8, 3, 12, 21)]
# (context, chunk): first token, long chunk, decode far out, chunk across blocks of keys.
CHUNKS = [(0, 1), (0, 90), (150, 1), (61, 7), (64, 2)]


@pytest.fixture(scope="module")
def mla() -> NativeMla:
    return NativeMla(native_library())


def _case(
    shape: tuple[int, int, int, int, int],
    chunks: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, MlaWeights, MlaPlan]:
    num_heads, key_dim, shared_dim, value_dim, latent_dim = shape
    generator = torch.Generator().manual_seed(11)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    units = [-(-(context + length) // UNIT_TOKENS) for context, length in chunks]
    num_pages = -(-sum(units) // PAGE_UNITS) + 2
    # Pages are wider than their rows, as in an arena that holds several layers.
    row_dim = latent_dim + shared_dim
    arena = draw(num_pages, PAGE_UNITS * UNIT_TOKENS * row_dim + 11)
    latent = arena[:, 5:-6].unflatten(1, (PAGE_UNITS, UNIT_TOKENS, row_dim))
    shuffled = torch.randperm(num_pages * PAGE_UNITS, generator=generator)
    tables = torch.zeros(len(chunks), max(units), dtype=torch.int64)
    starts = [0]
    for row, (count, (_, length)) in enumerate(zip(units, chunks, strict=True)):
        tables[row, :count] = shuffled[sum(units[:row]) : sum(units[: row + 1])]
        starts.append(starts[-1] + length)
    q = draw(starts[-1], num_heads, key_dim + shared_dim + 2)[..., 1:-1]
    weights = MlaWeights(
        draw(num_heads * (key_dim + value_dim), latent_dim) * 0.3,
        key_dim,
        value_dim,
        (key_dim + shared_dim) ** -0.5,
    )
    return q, latent, weights, MlaPlan(tuple(starts), tuple(c for c, _ in chunks), tables)


def _double(weights: MlaWeights) -> MlaWeights:
    return MlaWeights(weights.kv_b.double(), weights.key_dim, weights.value_dim, weights.scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_both_forms_meet_float64(
    mla: NativeMla, shape: tuple[int, int, int, int, int], form: str
) -> None:
    q, latent, weights, plan = _case(shape, CHUNKS)
    truth = reference.prefill(q.double(), latent.double(), _double(weights), plan)
    out = getattr(mla, form)(q * 2, latent, weights, plan)
    truth = reference.prefill(q.double() * 2, latent.double(), _double(weights), plan)
    assert (out - truth).abs().max() <= 5e-6 * truth.abs().max()


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_bfloat16_is_widened_and_rounded_once(mla: NativeMla, form: str) -> None:
    q, latent, weights, plan = _case(SHAPES[0], CHUNKS, torch.bfloat16)
    wide = MlaWeights(weights.kv_b.float(), weights.key_dim, weights.value_dim, weights.scale)
    run = getattr(mla, form)
    expected = run(q.float(), latent.float(), wide, plan).bfloat16()
    assert torch.equal(run(q, latent, weights, plan), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_cuts_batches_and_threads_change_no_bit(
    mla: NativeMla, shape: tuple[int, int, int, int, int], form: str
) -> None:
    q, latent, weights, plan = _case(shape, CHUNKS)
    run = getattr(mla, form)
    together = run(q, latent, weights, plan)
    library = native_library()
    before = library.get_threads()
    try:
        library.set_threads(3)
        for row, (context, length) in enumerate(CHUNKS):
            start = plan.starts[row]
            table = plan.unit_tables[row : row + 1]
            for low, high in ((0, length // 2), (length // 2, length)):
                if low == high:
                    continue
                part = MlaPlan((0, high - low), (context + low,), table)
                rows = slice(start + low, start + high)
                assert torch.equal(run(q[rows], latent, weights, part), together[rows])
    finally:
        library.set_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_to_their_places_only(mla: NativeMla, dtype: torch.dtype) -> None:
    _, latent, _, _ = _case(SHAPES[0], CHUNKS, dtype)
    rows = torch.randn(6, latent.shape[3] + 3, generator=torch.Generator().manual_seed(1))
    rows = rows.to(dtype)[:, 1:-2]
    units, places = torch.tensor([0, 0, 7, 4, 12, 3]), torch.tensor([3, 4, 0, 7, 1, 2])
    expected = latent.clone()
    reference.write(expected, rows, units, places)
    mla.write(latent, rows, units, places)
    assert torch.equal(latent, expected)
