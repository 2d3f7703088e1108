"""An MLA layer: low-rank query, cached latent row, attention without positions, output gate.

Letters: T packed tokens, B sequences, D model width, N heads, K key width from the latent,
R shared key width, V value width, C latent width, X = C + R.

Source: K3 architecture sheet, section 2.4.
"""

import torch
from torch import nn

from k3core.config import MlaConfig
from k3core.kernels.interface import Kernels, MlaWeights
from k3core.model.plans import LastReads, MlaPart, PassPlans


class MlaAttention(nn.Module):
    """Multi-head latent attention over paged rows, or over whole sequences for training.

    `in_proj` stacks the rows q_a (or q where there is no bottleneck) | kv_a | g (if gated).
    """

    def __init__(self, config: MlaConfig, hidden_size: int, kernels: Kernels) -> None:
        super().__init__()
        self._config = config
        self._kernels = kernels
        heads = config.num_heads
        query_rows = heads * config.query_dim
        out_width = heads * config.value_dim
        rank = config.q_lora_rank
        gate_rows = out_width if config.has_output_gate else 0
        self._splits = (rank or query_rows, config.row_dim, gate_rows)
        self.in_proj = nn.Parameter(torch.empty(sum(self._splits), hidden_size))
        self.q_a_norm = None if rank is None else nn.Parameter(torch.empty(rank))
        self.q_b_proj = None if rank is None else nn.Parameter(torch.empty(query_rows, rank))
        self.kv_a_norm = nn.Parameter(torch.empty(config.kv_lora_rank))
        self.kv_b_proj = nn.Parameter(
            torch.empty(heads * (config.nope_dim + config.value_dim), config.kv_lora_rank)
        )
        self.o_proj = nn.Parameter(torch.empty(hidden_size, out_width))

    def forward(
        self,
        x_TD: torch.Tensor,
        plans: PassPlans,
        latent_PGUX: torch.Tensor,
        last: LastReads | None = None,
    ) -> torch.Tensor:
        """Write the chunks' rows, then attend through the cache.

        Args:
            x_TD: packed rows.
            plans: of the pass.
            latent_PGUX: this layer's rows.
            last: the only rows that are to attend, or None for all T.

        Returns:
            [T, D] in x's dtype, or [R, D] of the named rows.
        """
        query, rows_TX, gate = self._project(x_TD)
        self._kernels.mla_write(latent_PGUX, rows_TX, plans.units, plans.places)
        parts = plans.mla
        if last is not None:
            if not len(last.rows):
                return x_TD.new_empty(0, x_TD.shape[1])
            query, gate, parts = query[last.rows], gate[last.rows], last.mla
        return self._finish(self._attend(self._queries(query), latent_PGUX, parts), gate)

    def forward_dense(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Attend causally within each sequence of a batch; differentiable."""
        query, rows_BTX, gate = self._project(x_BTD)
        q_BTNX = self._queries(query)
        return self._finish(self._kernels.mla_dense(q_BTNX, rows_BTX, self._weights()), gate)

    def _project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What queries are made of, rows [..., C + R] and the raw gate [..., N * V or 0]."""
        config, kernels = self._config, self._kernels
        query, row, gate = kernels.linear(x_TD, self.in_proj).split(self._splits, dim=-1)
        latent, shared = row.split((config.kv_lora_rank, config.rope_dim), dim=-1)
        latent = kernels.rms_norm(latent, self.kv_a_norm, config.latent_norm_eps)
        return query, torch.cat((latent, shared), dim=-1), gate

    def _queries(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [..., N, K + R] of what was projected."""
        config, kernels = self._config, self._kernels
        if self.q_a_norm is not None and self.q_b_proj is not None:
            normed = kernels.rms_norm(query, self.q_a_norm, config.latent_norm_eps)
            query = kernels.linear(normed, self.q_b_proj)
        return query.unflatten(-1, (config.num_heads, -1))

    def _attend(
        self, q_TNX: torch.Tensor, latent_PGUX: torch.Tensor, parts: tuple[MlaPart, ...]
    ) -> torch.Tensor:
        weights = self._weights()
        out_TNV: torch.Tensor | None = None
        for part in parts:
            kernel = self._kernels.mla_decode if part.is_absorbed else self._kernels.mla_prefill
            if part.rows is None:
                return kernel(q_TNX, latent_PGUX, weights, part.plan)
            if out_TNV is None:
                out_TNV = q_TNX.new_empty(*q_TNX.shape[:2], self._config.value_dim)
            out_TNV[part.rows] = kernel(q_TNX[part.rows], latent_PGUX, weights, part.plan)
        assert out_TNV is not None, "a pass has at least one part"
        return out_TNV

    def _finish(self, o_TNV: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out = o_TNV.flatten(-2)
        if self._config.has_output_gate:
            out = out * torch.sigmoid(gate)
        return self._kernels.linear(out, self.o_proj)

    def _weights(self) -> MlaWeights:
        return MlaWeights(
            kv_b=self.kv_b_proj,
            key_dim=self._config.nope_dim,
            value_dim=self._config.value_dim,
            scale=self._config.query_dim**-0.5,
        )
