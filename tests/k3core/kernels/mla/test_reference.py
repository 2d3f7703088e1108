"""Both forms of latent attention against softmax attention written out head by head."""

from collections.abc import Callable

import pytest
import torch

from k3core.kernels.interface import MlaPlan, MlaWeights
from k3core.kernels.mla import reference

UNIT_TOKENS, PAGE_UNITS, NUM_PAGES = 4, 3, 8
NUM_HEADS, KEY, SHARED, VALUE, LATENT = 3, 5, 2, 7, 6
DTYPE = torch.float64
Attend = Callable[[torch.Tensor, torch.Tensor, MlaWeights, MlaPlan], torch.Tensor]


def by_hand(query: torch.Tensor, rows: torch.Tensor, weights: MlaWeights) -> torch.Tensor:
    """One query row over the rows it sees."""
    out = torch.zeros(NUM_HEADS, VALUE, dtype=DTYPE)
    for head in range(NUM_HEADS):
        block = weights.kv_b[head * (KEY + VALUE) : (head + 1) * (KEY + VALUE)]
        scores = []
        for row in rows:
            key = torch.cat((block[:KEY] @ row[:LATENT], row[LATENT:]))
            scores.append(query[head] @ key * weights.scale)
        for share, row in zip(torch.softmax(torch.stack(scores), 0), rows, strict=True):
            out[head] += share * (block[KEY:] @ row[:LATENT])
    return out


@pytest.fixture
def weights() -> MlaWeights:
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_HEADS * (KEY + VALUE), LATENT)
    kv_b = torch.randn(shape, generator=generator, dtype=DTYPE)
    return MlaWeights(kv_b, KEY, VALUE, (KEY + SHARED) ** -0.5)


@pytest.mark.parametrize("attend", [reference.prefill, reference.decode])
def test_paged_attention_sees_exactly_the_tokens_before(
    attend: Attend, weights: MlaWeights
) -> None:
    generator = torch.Generator().manual_seed(1)
    width = LATENT + SHARED
    # Rows beyond the last token are NaN: reading one would show.
    latent = torch.full((NUM_PAGES, PAGE_UNITS, UNIT_TOKENS, width), float("nan"), dtype=DTYPE)
    units = torch.randperm(NUM_PAGES * PAGE_UNITS, generator=generator)
    contexts, lengths = (0, 9, 4), (6, 1, 8)
    tables = units[: 3 * 4].reshape(3, 4)
    sequences = [
        torch.randn(c + n, width, generator=generator, dtype=DTYPE)
        for c, n in zip(contexts, lengths, strict=True)
    ]
    for table, rows in zip(tables, sequences, strict=True):
        positions = torch.arange(len(rows))
        reference.write(latent, rows, table[positions // UNIT_TOKENS], positions % UNIT_TOKENS)
    q = torch.randn(sum(lengths), NUM_HEADS, KEY + SHARED, generator=generator, dtype=DTYPE)
    plan = MlaPlan(starts=(0, 6, 7, 15), contexts=contexts, unit_tables=tables)
    found = attend(q, latent, weights, plan)
    row = 0
    for context, length, rows in zip(contexts, lengths, sequences, strict=True):
        for position in range(context, context + length):
            wanted = by_hand(q[row], rows[: position + 1], weights)
            assert torch.allclose(found[row], wanted, atol=1e-12)
            row += 1


def test_dense_attention_is_the_paged_one_without_pages(weights: MlaWeights) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(2, 9, LATENT + SHARED, generator=generator, dtype=DTYPE)
    q = torch.randn(2, 9, NUM_HEADS, KEY + SHARED, generator=generator, dtype=DTYPE)
    found = reference.dense(q, rows, weights)
    for sequence in range(2):
        for position in range(9):
            wanted = by_hand(q[sequence, position], rows[sequence, : position + 1], weights)
            assert torch.allclose(found[sequence, position], wanted, atol=1e-12)


@pytest.mark.parametrize("attend", [reference.prefill, reference.decode])
def test_a_prompt_of_several_tiles_is_attended_whole(attend: Attend, weights: MlaWeights) -> None:
    length = 2 * reference.QUERY_TILE + 5
    num_units = -(-length // UNIT_TOKENS)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(length, LATENT + SHARED, generator=generator, dtype=DTYPE)
    q = torch.randn(length, NUM_HEADS, KEY + SHARED, generator=generator, dtype=DTYPE)
    latent = torch.zeros(num_units, 1, UNIT_TOKENS, LATENT + SHARED, dtype=DTYPE)
    table = torch.randperm(num_units, generator=generator)
    positions = torch.arange(length)
    reference.write(latent, rows, table[positions // UNIT_TOKENS], positions % UNIT_TOKENS)
    found = attend(q, latent, weights, MlaPlan((0, length), (0,), table.unsqueeze(0)))
    wanted = reference.dense(q.unsqueeze(0), rows.unsqueeze(0), weights)[0]
    assert torch.allclose(found, wanted, atol=1e-11)
