"""The language model: one definition for K3 and Kimi-Linear, serving and training.

Enters a `ForwardBatch` and the `CacheViews` it addresses; leaves logits of the wanted rows
and, if asked, taps. The model owns weights only: every state lies in the views. It is
mathematics and knows no cache policy, no files and no environment.

Batch invariance: a chunk's results depend on its own tokens and states only, up to the
rounding of matrix products whose row count differs with the batch; in float32 on CPU logits
move by less than 2e-5 of their scale, and the choice of expanded or absorbed attention
depends on the chunk's own length alone; in the last layer on the run of its wanted rows.

After the last layer only the wanted rows are read. That layer writes the cache for all T rows
and does the rest of its work for these R alone, unless taps are asked for: an inner chunk of a
prompt needs none of it.

Letters: B sequences, T packed tokens, D model width, R wanted rows.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from k3core.batch import CacheViews, ForwardBatch, ForwardOutput
from k3core.config import TextConfig
from k3core.kernels.interface import KdaStates, Kernels
from k3core.model.decoder_layer import DecoderLayer, DepthMix, DepthState
from k3core.model.plans import MlaForm, PassPlans, plan_pass

PREPARED = frozenset(
    [
        "in_proj",
        "f_b_proj",
        "g_b_proj",
        "q_b_proj",
        "o_proj",
        "gate_up",
        "down",
        "latent_down",
        "latent_up",
        "router",
    ]
)
"""Matrices that layers give to `Kernels.linear` as they are stored."""

_Attend = Callable[[torch.Tensor], torch.Tensor]


class TextModel(nn.Module):
    """Decoder of K3 (AttnRes, latent MoE, KDA and MLA) and of Kimi-Linear (a subset of it)."""

    def __init__(self, config: TextConfig, kernels: Kernels, mla_form: MlaForm = "auto") -> None:
        """Allocate parameters, uninitialised, in torch's default dtype and device.

        Args:
            config: sizes and kinds.
            kernels: operators, chosen once at start.
            mla_form: which form MLA layers attend in; others than `auto` serve verification.
        """
        super().__init__()
        self.config = config
        self._kernels = kernels
        self._mla_form: MlaForm = mla_form
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, kernels) for index in range(config.num_layers)
        )
        has_mix = config.attn_res_block_size is not None
        self.output_mix = DepthMix(config.hidden_size) if has_mix else None
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self.lm_head = (
            None
            if config.is_head_tied
            else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        )

    def prepare_weights(self) -> None:
        """Let the backend keep what it wants of loaded weights, which change no more.

        The head is not among them: it is the largest and meets few rows.
        """
        for name, parameter in self.named_parameters():
            if name.rpartition(".")[2] in PREPARED:
                self._kernels.prepare_weight(parameter)

    def forward(
        self, batch: ForwardBatch, views: CacheViews, taps: Sequence[str] = ()
    ) -> ForwardOutput:
        """Run one step over B chunks through the paged cache.

        Args:
            batch: the step; its tensors on the model's device unless said otherwise there.
            views: pools to read and write; mutated.
            taps: names of hidden rows to return for all T rows, of `layerN.attn_out` (what
                attention gave), `layerN.stream` (the running stream after layer N) and
                `layerN.mixture` (the mixture that the next layer's attention, or the head,
                reads after layer N; the stream itself without AttnRes).

        Returns:
            Logits [R, vocabulary] float32, and the taps, each [T, D].
        """
        plans = plan_pass(batch, views, self._mla_form, reads_all=bool(taps))
        attends = self._bind_cache(plans, views)
        state = self._embed(batch.token_ids, batch.image_rows, batch.image_embeds)
        kept = None if plans.last is None else plans.last.rows
        tapped = self._run_layers(state, attends, frozenset(taps), kept)
        if not batch.logits_rows:
            # A chunk before the prompt's last one wants no logits at all.
            empty = state.stream.new_empty(0, self.config.vocab_size, dtype=torch.float32)
            return ForwardOutput(logits=empty, taps=tapped)
        if len(batch.logits_rows) != len(state.stream):
            state.keep(torch.tensor(batch.logits_rows, device=state.stream.device))
        return ForwardOutput(logits=self._head(state), taps=tapped)

    def forward_dense(
        self,
        token_ids_BT: torch.Tensor,
        image_rows: torch.Tensor | None = None,
        image_embeds: torch.Tensor | None = None,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run whole sequences without a cache, differentiably; for training.

        Args:
            token_ids_BT: [B, T], int64; every row starts from zero states.
            image_rows: [M], int64, rows of the flattened [B * T] to replace, or None.
            image_embeds: [M, D], the replacing rows, or None.
            logits_rows: [R], int64, the only rows of the flattened [B * T] whose logits are
                wanted, or None for all.

        Returns:
            Logits [B, T, vocabulary], or [R, vocabulary] if rows are named; float32.
        """
        state, _ = self._run_dense(token_ids_BT, image_rows, image_embeds, ())
        if logits_rows is not None:
            state.keep(logits_rows)
            return self._head(state)
        return self._head(state).unflatten(0, token_ids_BT.shape)

    def forward_dense_taps(
        self,
        token_ids_BT: torch.Tensor,
        taps: Sequence[str],
        image_rows: torch.Tensor | None = None,
        image_embeds: torch.Tensor | None = None,
    ) -> ForwardOutput:
        """Run whole sequences without a cache and also return taps, as drafts are trained on.

        Args:
            token_ids_BT: [B, T], int64; every row starts from zero states.
            taps: names as in `forward`.
            image_rows: [M], int64, rows of the flattened [B * T] to replace, or None.
            image_embeds: [M, D], the replacing rows, or None.

        Returns:
            Logits [B * T, vocabulary] float32, and the taps, each [B * T, D]; differentiable.
        """
        state, tapped = self._run_dense(token_ids_BT, image_rows, image_embeds, taps)
        return ForwardOutput(logits=self._head(state), taps=tapped)

    def _run_dense(
        self,
        token_ids_BT: torch.Tensor,
        image_rows: torch.Tensor | None,
        image_embeds: torch.Tensor | None,
        taps: Sequence[str],
    ) -> tuple[DepthState, dict[str, torch.Tensor]]:
        state = self._embed(token_ids_BT.flatten(), image_rows, image_embeds)
        attends = [
            partial(_attend_dense, layer.attention.forward_dense, token_ids_BT.shape)
            for layer in self._layers()
        ]
        return state, self._run_layers(state, attends, frozenset(taps))

    def _embed(
        self,
        token_ids_T: torch.Tensor,
        image_rows: torch.Tensor | None,
        image_embeds: torch.Tensor | None,
    ) -> DepthState:
        stream = nn.functional.embedding(token_ids_T, self.embed)
        if image_rows is not None and image_embeds is not None:
            stream = stream.index_copy(0, image_rows, image_embeds.to(stream.dtype))
        return DepthState(stream)

    def _bind_cache(self, plans: PassPlans, views: CacheViews) -> list[_Attend]:
        """Each layer's attention with its part of the cache."""
        attends: list[_Attend] = []
        num_kda = num_mla = 0
        for index, layer in enumerate(self._layers()):
            last = plans.last if index + 1 == self.config.num_layers else None
            if self.config.attention[index] == "kda":
                states = KdaStates(recurrent=views.recurrent[num_kda], conv=views.conv[num_kda])
                plan = plans.kda[views.group_of_layer[num_kda]]
                bound = partial(
                    layer.attention,
                    plan=plan,
                    states=states,
                    is_decode=plans.is_kda_decode,
                    last=last,
                )
                num_kda += 1
            else:
                latent = views.latent[num_mla]
                bound = partial(layer.attention, plans=plans, latent_PGUX=latent, last=last)
                num_mla += 1
            attends.append(bound)
        return attends

    def _run_layers(
        self,
        state: DepthState,
        attends: Sequence[_Attend],
        wanted: frozenset[str],
        kept: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run all layers, the last for the kept rows only; returns the wanted taps."""
        tapped: dict[str, torch.Tensor] = {}
        for index, (layer, attend) in enumerate(zip(self._layers(), attends, strict=True)):
            attended = layer(state, attend, kept if index + 1 == len(attends) else None)
            if not wanted:
                continue
            if f"layer{index}.attn_out" in wanted:
                tapped[f"layer{index}.attn_out"] = attended
            if f"layer{index}.stream" in wanted:
                tapped[f"layer{index}.stream"] = state.stream
            if f"layer{index}.mixture" in wanted:
                tapped[f"layer{index}.mixture"] = self._mixture_after(index, state)
        missing = wanted - tapped.keys()
        assert not missing, f"unknown taps {sorted(missing)}"
        return tapped

    def _mixture_after(self, index: int, state: DepthState) -> torch.Tensor:
        is_last = index + 1 == self.config.num_layers
        mix = self.output_mix if is_last else self._layers()[index + 1].attention_mix
        if mix is None:
            return state.stream
        eps = self.config.rms_norm_eps
        return self._kernels.attn_res_mix(state.stream, state.snapshots, mix.query(), eps)

    def _head(self, state: DepthState) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        if self.output_mix is None:
            hidden = self._kernels.rms_norm(state.stream, self.norm, eps)
        else:
            hidden = self._kernels.attn_res_norm(
                state.stream, state.snapshots, self.output_mix.query(), eps, self.norm, eps
            )
        head = self.embed if self.lm_head is None else self.lm_head
        return self._kernels.linear(hidden, head).float()

    def _layers(self) -> list[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]  # ModuleList is not generic


def _attend_dense(attend: _Attend, shape: torch.Size, x_TD: torch.Tensor) -> torch.Tensor:
    """Give a dense attention its batch axis, which the rest of the layer does not need."""
    return attend(x_TD.unflatten(0, shape)).flatten(0, 1)
