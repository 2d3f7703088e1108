"""A KDA layer: projections, the delta rule over its state, gated norm, output.

Letters: T packed tokens, B sequences, D model width, H heads, K key width, V value width,
W convolution taps, Q = 2 * H * K + H * V.

Source: K3 architecture sheet, section 2.3.
"""

import torch
from torch import nn

from k3core.config import KdaConfig
from k3core.kernels.interface import KdaInputs, KdaPlan, KdaStates, KdaWeights, Kernels
from k3core.model.plans import LastReads


class KdaAttention(nn.Module):
    """Kimi Delta Attention over paged states, or over whole sequences for training.

    `in_proj` stacks the rows q | k | v | f_a | b | g (or g_a), so that one product reads the
    input once. Convolution, decay and norm weights are float32 whatever the model's dtype.
    """

    def __init__(self, config: KdaConfig, hidden_size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self._config = config
        self._eps = eps
        self._kernels = kernels
        heads, dim = config.num_heads, config.head_dim
        width = config.width
        gate_rows = width if config.has_full_rank_gate else dim
        self._splits = (3 * width, dim, heads, gate_rows)
        self.in_proj = nn.Parameter(torch.empty(sum(self._splits), hidden_size))
        self.f_b_proj = nn.Parameter(torch.empty(width, dim))
        self.g_b_proj = None if config.has_full_rank_gate else nn.Parameter(torch.empty(width, dim))
        self.o_proj = nn.Parameter(torch.empty(hidden_size, width))
        self.conv = nn.Parameter(torch.empty(3 * width, config.conv_width, dtype=torch.float32))
        self.a_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dim, dtype=torch.float32))
        self.o_norm = nn.Parameter(torch.empty(dim, dtype=torch.float32))

    def forward(
        self,
        x_TD: torch.Tensor,
        plan: KdaPlan,
        states: KdaStates,
        is_decode: bool,
        last: LastReads | None = None,
    ) -> torch.Tensor:
        """Attend packed chunks, reading and writing their states in place.

        Args:
            x_TD: packed rows.
            plan: of this layer's group.
            states: of this layer.
            is_decode: see `PassPlans.is_kda_decode`.
            last: the only rows whose results are wanted, or None for all T.

        Returns:
            [T, D] in x's dtype, or [R, D] of the named rows.
        """
        inputs, gate = self._project(x_TD)
        kernel = self._kernels.kda_decode if is_decode else self._kernels.kda_prefill
        out = kernel(inputs, self._weights(), plan, states)
        if last is not None:
            if not len(last.rows):
                return x_TD.new_empty(0, x_TD.shape[1])
            out, gate = out[last.rows], gate[last.rows]
        return self._finish(out, gate)

    def forward_dense(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Attend whole sequences from zero states; differentiable."""
        inputs, gate = self._project(x_BTD)
        return self._finish(self._kernels.kda_dense(inputs, self._weights()), gate)

    def _project(self, x_TD: torch.Tensor) -> tuple[KdaInputs, torch.Tensor]:
        heads = self._config.num_heads
        linear = self._kernels.linear
        qkv, f_a, beta, gate = linear(x_TD, self.in_proj).split(self._splits, dim=-1)
        decay = linear(f_a, self.f_b_proj)
        if self.g_b_proj is not None:
            gate = linear(gate, self.g_b_proj)
        inputs = KdaInputs(qkv=qkv, gate=decay.unflatten(-1, (heads, -1)), beta=beta)
        return inputs, gate.unflatten(-1, (heads, -1))

    def _finish(self, o_THV: torch.Tensor, gate_THV: torch.Tensor) -> torch.Tensor:
        gated = self._kernels.gated_rms_norm(o_THV, self.o_norm, gate_THV, self._eps)
        return self._kernels.linear(gated.flatten(-2), self.o_proj)

    def _weights(self) -> KdaWeights:
        return KdaWeights(
            conv=self.conv,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            lower_bound=self._config.gate_lower_bound,
        )
