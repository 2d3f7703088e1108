"""One decoder layer: where the streams of Attention Residuals meet attention and MLP.

Letters: T tokens, D model width, S block snapshots.

Source: K3 architecture sheet, section 2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from k3core.config import TextConfig
from k3core.kernels.interface import Kernels
from k3core.model.feed_forward import DenseMlp, MoeMlp
from k3core.model.kda import KdaAttention
from k3core.model.mla import MlaAttention


@dataclass(slots=True)
class DepthState:
    """What one pass carries from layer to layer; nothing of it outlives the pass.

    Attributes:
        stream: [T, D], the running stream.
        snapshots: the streams that block starts saw, oldest first; empty without AttnRes.
    """

    stream: torch.Tensor
    snapshots: list[torch.Tensor] = field(default_factory=list)

    def keep(self, rows: torch.Tensor) -> None:
        """Drops all rows but the named ones, [R] int64."""
        self.stream = self.stream[rows]
        self.snapshots = [snapshot[rows] for snapshot in self.snapshots]


class DepthMix(nn.Module):
    """A pseudo-query over depth: the norm weight and projection row of one AttnRes mixture."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(hidden_size))
        self.proj = nn.Parameter(torch.empty(hidden_size))

    def query(self) -> torch.Tensor:
        """The query, [D], float32."""
        return self.norm.float() * self.proj.float()


class DecoderLayer(nn.Module):
    """Attention and feed-forward of one layer around the running stream.

    With AttnRes both parts read a mixture over block snapshots and stream; at a block start
    the stream becomes a snapshot and the attention's output the new stream. Without it they
    read the stream and are added to it.
    """

    def __init__(self, config: TextConfig, index: int, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        block = config.attn_res_block_size
        self._is_block_start = block is not None and index % block == 0
        hidden = config.hidden_size
        self.input_norm = nn.Parameter(torch.empty(hidden))
        self.post_attention_norm = nn.Parameter(torch.empty(hidden))
        self.attention_mix = None if block is None else DepthMix(hidden)
        self.mlp_mix = None if block is None else DepthMix(hidden)
        self.attention = build_attention(config, index, kernels)
        if config.is_moe[index]:
            assert config.moe is not None, "a mixture layer has a mixture's sizes"
            self.mlp = MoeMlp(config, config.moe, kernels)
        else:
            self.mlp = DenseMlp(config, config.intermediate_size, kernels)

    def forward(
        self,
        state: DepthState,
        attend: Callable[[torch.Tensor], torch.Tensor],
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Advance the depth state by this layer.

        Args:
            state: changed in place.
            attend: this layer's attention bound to the pass's cache.
            kept: [R] int64, the only rows that `attend` gives and that the state has
                afterwards, or None for all T.

        Returns:
            What attention gave, [T, D] or [R, D]: the tap `layerN.attn_out`.
        """
        attended = attend(self._normed(state, self.attention_mix, self.input_norm))
        if kept is not None:
            state.keep(kept)
            if not len(kept):
                return attended
        if self._is_block_start:
            state.snapshots.append(state.stream)
            state.stream = attended
        else:
            state.stream = state.stream + attended
        state.stream = state.stream + self.mlp(
            self._normed(state, self.mlp_mix, self.post_attention_norm)
        )
        return attended

    def _normed(
        self, state: DepthState, mix: DepthMix | None, weight: torch.Tensor
    ) -> torch.Tensor:
        if mix is None or not state.snapshots:
            return self._kernels.rms_norm(state.stream, weight, self._eps)
        return self._kernels.attn_res_norm(
            state.stream, state.snapshots, mix.query(), self._eps, weight, self._eps
        )


def build_attention(
    config: TextConfig, index: int, kernels: Kernels
) -> KdaAttention | MlaAttention:
    """The attention of layer `index` by its kind."""
    if config.attention[index] == "kda":
        assert config.kda is not None, "a KDA layer has KDA's sizes"
        return KdaAttention(config.kda, config.hidden_size, config.rms_norm_eps, kernels)
    assert config.mla is not None, "an MLA layer has MLA's sizes"
    return MlaAttention(config.mla, config.hidden_size, kernels)
