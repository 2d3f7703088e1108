"""What goes into a drafting round and what comes out of it, for both drafts; one sequence.

A sequence of L committed tokens, for all of which the target gave taps, is followed by the
anchor: the token sampled last, at position L, which the target has not read yet. A round drafts
the tokens at L + 1, L + 2, ... The target then reads anchor and drafts; what it accepts is
committed before the next round.

Letters: T newly committed tokens, N drafted tokens, L layers, S rows, X row width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

Pick: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Chooses a token: logits [V] float32 -> id, int64 scalar."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that the target has read since the last round; at least one in the first round.

    Attributes:
        taps: [T, taps width], the target's concatenated taps at these tokens.
        next_ids: [T], int64, the token after each of them; the last one is the anchor.
    """

    taps: torch.Tensor
    next_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens.

    Attributes:
        token_ids: [N], int64.
        logits: [N, V], float32, from which each was picked: the draft's distribution, as
            rejection sampling needs it.
        confidence: [N], float32, how likely each is accepted if those before it are; None if
            the draft does not say.
    """

    token_ids: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor | None


class RowCache:
    """Attention rows of one sequence, a fixed number of layers, one tensor."""

    def __init__(
        self,
        num_layers: int,
        max_tokens: int,
        row_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rows_LSX = torch.zeros(num_layers, max_tokens, row_dim, dtype=dtype, device=device)
        self._length = 0

    @property
    def length(self) -> int:
        """Rows held in each layer."""
        return self._length

    def append(self, rows_LTX: torch.Tensor) -> None:
        """Copy rows of the next T tokens into every layer."""
        end = self._length + rows_LTX.shape[1]
        assert end <= self._rows_LSX.shape[1], "the draft's cache is full"
        self._rows_LSX[:, self._length : end] = rows_LTX
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget all rows from `length` on."""
        assert length <= self._length, "a cache only shrinks here"
        self._length = length

    def rows(self, layer: int) -> torch.Tensor:
        """Rows of a layer, [S, X]; a view."""
        return self._rows_LSX[layer, : self._length]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token; the first of equals."""
    return logits.argmax()
