"""Where attention should look: an auxiliary loss that starts the look-up by name.

Left to themselves the MLA layers of a model this small stay idle: their keys hold a token and not
what stood before it, so no head earns anything by looking, and recurrent layers do all the
remembering, which confuses a handful of facts. One head of each MLA layer is therefore told where
the token that comes next stood before, after the same words; the rest follows from the loss of
the words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from k3core.kernels.interface import Kernels, MlaWeights

TAUGHT_HEAD = 0
LONGEST_CONTEXT = 12
SHORTEST_CONTEXT = 2
"""Tokens before the source that must equal those before the token, at most and at least."""


@dataclass(slots=True)
class Looks:
    """Keeps what the MLA layers of one pass compare.

    Attributes:
        seen: (queries [B, T, N, K + R], rows [B, T, C + R], weights) of each layer in turn.
    """

    seen: list[tuple[torch.Tensor, torch.Tensor, MlaWeights]] = field(default_factory=list)

    def recording(self, base: Kernels) -> Kernels:
        """The same operators; while gradients are wanted, what attention is given is kept."""

        def mla_dense(query: torch.Tensor, rows: torch.Tensor, weights: MlaWeights) -> torch.Tensor:
            if torch.is_grad_enabled():
                self.seen.append((query, rows, weights))
            return base.mla_dense(query, rows, weights)

        return replace(base, mla_dense=mla_dense)

    def forget(self) -> None:
        """Lets go of the last pass."""
        self.seen.clear()

    def loss(self, ids: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Mean -log of the attention that falls on the sources, over layers and tokens.

        Args:
            ids: [B, T] of the pass that was seen; forgotten thereafter.
            places: (row, position) of the tokens to be looked for.

        Returns:
            A scalar; 0 if no token has a source.
        """
        seen, self.seen = self.seen, []
        listed = ids.tolist()
        found = [(b, at, sources(listed[b], at)) for b, at in places]
        found = [(b, at, where) for b, at, where in found if where]
        if not found:
            return torch.zeros(())
        is_source = torch.zeros(len(found), ids.shape[1], dtype=torch.bool)
        for index, (_, _, where) in enumerate(found):
            is_source[index, where] = True
        row = torch.tensor([b for b, _, _ in found])
        asking = torch.tensor([at - 1 for _, at, _ in found])
        is_later = torch.arange(ids.shape[1]) > asking[:, None]
        losses: list[torch.Tensor] = []
        for query, rows, weights in seen:
            scores = _scores(query, rows, weights, row, asking).masked_fill(is_later, -torch.inf)
            mass = scores.masked_fill(~is_source, -torch.inf).logsumexp(-1)
            losses.append((scores.logsumexp(-1) - mass).mean())
        return torch.stack(losses).mean()


def sources(ids: Sequence[int], at: int) -> list[int]:
    """Where the token at a position stood earlier, after the longest run of the same tokens.

    Args:
        ids: of a row.
        at: position of the token.

    Returns:
        All positions whose run is the longest, the latest first; none if no run reaches
        SHORTEST_CONTEXT.
    """
    best: list[int] = []
    longest = SHORTEST_CONTEXT
    for place in range(at - 1, 0, -1):
        if ids[place] != ids[at] or ids[place - 1] != ids[at - 1]:
            continue
        limit = min(place, LONGEST_CONTEXT)
        length = 1
        while length < limit and ids[place - 1 - length] == ids[at - 1 - length]:
            length += 1
        if length > longest:
            best, longest = [place], length
        elif length == longest:
            best.append(place)
    return best


def _scores(
    query: torch.Tensor,
    rows: torch.Tensor,
    weights: MlaWeights,
    row: torch.Tensor,
    asking: torch.Tensor,
) -> torch.Tensor:
    """Scores [n, T] of the taught head's queries at (row, asking) against all keys of their row.

    Askers of one row stand together.
    """
    heads = query.shape[-2]
    shared_dim = query.shape[-1] - weights.key_dim
    latent, shared = rows.split((rows.shape[-1] - shared_dim, shared_dim), dim=-1)
    kv_b = weights.kv_b.unflatten(0, (heads, -1))[TAUGHT_HEAD, : weights.key_dim]
    keys = torch.cat((latent @ kv_b.T, shared), dim=-1)
    asked = query[row, asking, TAUGHT_HEAD]
    numbers, counts = row.unique_consecutive(return_counts=True)
    pieces = zip(numbers.tolist(), asked.split(counts.tolist()), strict=True)
    return torch.cat([piece @ keys[number].T for number, piece in pieces]) * weights.scale
