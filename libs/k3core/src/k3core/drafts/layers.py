"""Parts that both drafts are made of, under their released names: norm, MLP, rotated MLA.

Attention runs in its absorbed form everywhere: all heads share one row a token, so the same
code serves cached rows, rows of a block, and whole sequences in training.

Letters: B sequences, A rounds in each, Q queries of a round, S rows of a sequence, M rows of a
round, N heads, K key width from the latent, R rotary width, V value width, C latent width,
X = C + R, D width.
"""

import torch
from torch import nn
from torch.nn import functional as F

from k3core.drafts.config import DraftAttention
from k3core.drafts.rotary import frequencies, logits_scale, rotate
from k3core.kernels.norm.reference import rms_norm


class RmsNorm(nn.Module):
    """An RMS norm with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., width] to the same."""
        return rms_norm(x, self.weight, self._eps)


class SiluMlp(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., D] to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RotatedMla(nn.Module):
    """Latent attention whose shared key part is rotated by position.

    Rows and queries are made apart from attending, because a draft decides for itself which
    rows a query sees.
    """

    def __init__(
        self, config: DraftAttention, input_size: int, hidden_size: int, eps: float
    ) -> None:
        """Draw parameters.

        Args:
            config: sizes.
            input_size: width of what queries and rows are made from.
            hidden_size: D, of the result.
            eps: of the two latent norms.
        """
        super().__init__()
        self._config = config
        self._frequencies = frequencies(config)
        heads = config.num_heads
        self.q_a_proj = nn.Linear(input_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RmsNorm(config.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, config.row_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, eps)
        kv_rows = heads * (config.nope_dim + config.value_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, kv_rows, bias=False)
        self.o_proj = nn.Linear(heads * config.value_dim, hidden_size, bias=False)

    def rows(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What attention reads of each token: the normed latent, then the rotated shared key.

        Args:
            x: [..., input_size].
            positions: integers that broadcast against x without its last axis.

        Returns:
            [..., X].
        """
        config = self._config
        row = self.kv_a_proj_with_mqa(x)
        latent, shared = row.split((config.kv_lora_rank, config.rope_dim), dim=-1)
        shared = rotate(shared, positions, self._frequencies)
        return torch.cat((self.kv_a_layernorm(latent), shared), dim=-1)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Absorbed, scaled queries [..., N, X] of inputs [..., input_size]."""
        config = self._config
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.unflatten(-1, (config.num_heads, config.query_dim))
        plain, turned = query.split((config.nope_dim, config.rope_dim), dim=-1)
        turned = rotate(turned, positions.unsqueeze(-1), self._frequencies)
        absorbed = torch.einsum("...nk,nkc->...nc", plain, self._key_weights())
        return torch.cat((absorbed, turned), dim=-1) * logits_scale(config)

    def attend(
        self,
        queries_BAQNX: torch.Tensor,
        context_BSX: torch.Tensor,
        seen_BAS: torch.Tensor | None,
        own_BAMX: torch.Tensor | None,
    ) -> torch.Tensor:
        """One softmax over a sequence's rows and over rows that only one round has.

        Args:
            queries_BAQNX: Q queries of each of A rounds in each of B sequences.
            context_BSX: rows of the sequences.
            seen_BAS: bool, which of them a round sees, or None for all.
            own_BAMX: rows of each round, which all its queries see, or None.

        Returns:
            [B, A, Q, D].
        """
        logits = torch.einsum("baqnx,bsx->baqns", queries_BAQNX, context_BSX)
        if seen_BAS is not None:
            logits = logits.masked_fill(~seen_BAS[:, :, None, None], float("-inf"))
        if own_BAMX is not None:
            own_logits = torch.einsum("baqnx,bamx->baqnm", queries_BAQNX, own_BAMX)
            logits = torch.cat((logits, own_logits), dim=-1)
        kind = torch.promote_types(logits.dtype, torch.float32)
        weights = logits.to(kind).softmax(-1).to(logits.dtype)
        rank, num_context = self._config.kv_lora_rank, context_BSX.shape[1]
        mixed = torch.einsum(
            "baqns,bsc->baqnc", weights[..., :num_context], context_BSX[..., :rank]
        )
        if own_BAMX is not None:
            mixed = mixed + torch.einsum(
                "baqnm,bamc->baqnc", weights[..., num_context:], own_BAMX[..., :rank]
            )
        values = torch.einsum("baqnc,nvc->baqnv", mixed, self._value_weights())
        return self.o_proj(values.flatten(-2))

    def _key_weights(self) -> torch.Tensor:
        return self._per_head()[:, : self._config.nope_dim]

    def _value_weights(self) -> torch.Tensor:
        return self._per_head()[:, self._config.nope_dim :]

    def _per_head(self) -> torch.Tensor:
        """[N, K + V, C]."""
        return self.kv_b_proj.weight.unflatten(0, (self._config.num_heads, -1))
