"""From logits to tokens: greedy or drawn, each row for itself.

What enters are the logits of one step and, for each row, the request's sampling parameters and
what it has read and said so far. What leaves is one token a row. What always holds: a row's
token depends on its own logits, parameters, history and (seed, position) alone. No operation
here reduces across rows, and none changes its order of summation with the number of rows: the
sums run along sorted rows by `cumsum`, in float64.

Order of the transformations: penalties, end tokens forbidden before `min_tokens`, temperature,
`min_p`, `top_k`, `top_p`. On the sorted row every filter keeps a leading run, so the kept set is
the shortest of the three runs; `top_p` counts mass within what the other two left. The draw is
by inversion: one uniform number a row finds its place in the cumulated mass.

Letters: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3core.engine.draws import uniform
from k3wire.messages.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row's token depends on, besides its logits.

    Attributes:
        sampling: the request's parameters.
        position: output position of the token to choose, 0 for the first of the answer.
        prompt_ids: the prompt, read only under a repetition penalty.
        output_ids: the answer so far, read only under a penalty.
    """

    sampling: SamplingParams
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()


def sample(logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Chooses one token for each row.

    Args:
        logits_RV: [R, V], float32, any device; not changed.
        rows: R rows.

    Returns:
        R token ids. The call waits for the device once, to read them.
    """
    if not rows:
        return []
    adjusted_RV = _adjust(logits_RV, rows)
    drawn = [index for index, row in enumerate(rows) if row.sampling.temperature > 0.0]
    if not drawn:
        return adjusted_RV.argmax(dim=-1).tolist()
    if len(drawn) == len(rows):
        return _draw(adjusted_RV, rows).tolist()
    chosen_R = adjusted_RV.argmax(dim=-1)
    index_D = torch.tensor(drawn, device=logits_RV.device)
    chosen_R[index_D] = _draw(adjusted_RV[index_D], [rows[index] for index in drawn])
    return chosen_R.tolist()


def _adjust(logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Applies penalties and forbids early ends; copies only if some row wants any of it."""
    touched = [index for index, row in enumerate(rows) if _wants_adjusting(row)]
    if not touched:
        return logits_RV
    adjusted_RV = logits_RV.clone()
    for index in touched:
        _adjust_row(adjusted_RV[index], rows[index])
    return adjusted_RV


def _wants_adjusting(row: SampleRow) -> bool:
    sampling = row.sampling
    return (
        sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.repetition_penalty != 1.0
        or _forbids_end(row)
    )


def _forbids_end(row: SampleRow) -> bool:
    return row.position < row.sampling.min_tokens and bool(row.sampling.stop_token_ids)


def _adjust_row(row_V: torch.Tensor, row: SampleRow) -> None:
    """Changes one row of logits in place."""
    sampling = row.sampling
    device = row_V.device
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), device=device)
        seen = seen[seen < row_V.numel()].long()
        values = row_V[seen]
        penalty = sampling.repetition_penalty
        row_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.output_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        said, counts = torch.tensor(list(row.output_ids), device=device).unique(return_counts=True)
        row_V[said] -= sampling.presence_penalty + sampling.frequency_penalty * counts.float()
    if _forbids_end(row):
        ends = [token for token in sampling.stop_token_ids if token < row_V.numel()]
        row_V[torch.tensor(ends, dtype=torch.int64, device=device)] = float("-inf")


def _draw(logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Draws one token for each row at its temperature; returns [R], int64."""
    device = logits_RV.device
    vocabulary = logits_RV.shape[-1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(-1)

    temperature_R1 = column([row.sampling.temperature for row in rows])
    min_p_R1 = column([row.sampling.min_p for row in rows])
    top_p_R1 = column([row.sampling.top_p for row in rows])
    top_k_R1 = column([float(row.sampling.top_k or vocabulary) for row in rows])
    uniform_R1 = column([uniform(row.sampling.seed, row.position) for row in rows])

    sorted_RV, ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    shifted_RV = sorted_RV.double() - sorted_RV[:, :1].double()
    # Relative to the greatest: weight 1 comes first, and min_p compares with it directly.
    weight_RV = (shifted_RV / temperature_R1).exp()
    mass_RV = weight_RV.cumsum(dim=-1)
    kept_R1 = torch.minimum((weight_RV >= min_p_R1).sum(-1, keepdim=True).double(), top_k_R1)
    kept_R1 = kept_R1.clamp(1, vocabulary).long()
    wanted_R1 = top_p_R1 * mass_RV.gather(-1, kept_R1 - 1)
    # The run whose mass first reaches top_p: one more than those that stay below it.
    nucleus_R1 = (mass_RV < wanted_R1).sum(-1, keepdim=True) + 1
    kept_R1 = torch.minimum(kept_R1, nucleus_R1)
    target_R1 = uniform_R1 * mass_RV.gather(-1, kept_R1 - 1)
    place_R1 = torch.minimum((mass_RV <= target_R1).sum(-1, keepdim=True), kept_R1 - 1)
    return ids_RV.gather(-1, place_R1).squeeze(-1)
