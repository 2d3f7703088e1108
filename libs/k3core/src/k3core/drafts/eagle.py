"""An EAGLE-3.1 head: one layer that drafts token after token from its own last output.

Slot i pairs what the target knew after token i with token i + 1. In the first step of a round
that knowledge is three fused taps; in later ones it is the head's own normed output, since the
target has not read those tokens. Parameters carry their released names.

Letters: B sequences, A rounds (anchors) in each, T tokens, N drafted tokens, D width, V
vocabulary, X row width.

Source: K3 architecture sheet, section 4.2.
"""

import torch
from torch import nn

from k3core.drafts.config import NUM_EAGLE_TAPS, DraftShape, EagleConfig
from k3core.drafts.layers import RmsNorm, RotatedMla, SiluMlp
from k3core.drafts.rounds import Committed, Pick, Proposal, RowCache, greedy


class EagleLayer(nn.Module):
    """Attention over embedding and hidden side by side, and a dense MLP."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.hidden_norm = RmsNorm(width, eps)
        self.self_attn = RotatedMla(shape.attention, 2 * width, width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = SiluMlp(width, shape.intermediate_size)

    def joined(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What attention reads, [..., 2 D]: the normed embedding, then the normed hidden."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer; the residual is the hidden before its norm."""
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleDraft(nn.Module):
    """The head, differentiable; `unroll` is for training, `draft` for serving, and they agree."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.shape
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.embed_tokens = nn.Embedding(shape.vocab_size, width)
        self.fc_norm = nn.ModuleList(RmsNorm(width, eps) for _ in range(NUM_EAGLE_TAPS))
        self.fc = nn.Linear(shape.taps_width, width, bias=False)
        self.layers = nn.ModuleList([EagleLayer(shape)])
        self.norm = RmsNorm(width, eps)
        self.lm_head = nn.Linear(width, shape.vocab_size, bias=False)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """The first step's hidden [..., D] from concatenated taps [..., 3 D]."""
        parts = taps.split(self.config.shape.hidden_size, dim=-1)
        normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return self.fc(torch.cat(normed, dim=-1))

    def unroll(
        self,
        taps_BTX: torch.Tensor,
        token_ids_BT: torch.Tensor,
        anchors_BA: torch.Tensor,
        num_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft from many anchors at once, given the true tokens; differentiable.

        Every later step reads the head's own output and rows of the steps before, as in
        serving; only the tokens are the true ones rather than the drafted.

        Args:
            taps_BTX: [B, T, 3 D], the target's taps of whole sequences.
            token_ids_BT: [B, T], int64.
            anchors_BA: [B, A], int64, positions of anchors, from 1 on.
            num_tokens: N, or None for the config's. Logits after the last token mean nothing.

        Returns:
            [B, A, N, V], float32; entry n is of the token at anchor + 1 + n.
        """
        layer, attention = self._layer(), self._layer().self_attn
        length = token_ids_BT.shape[1]
        slots = torch.arange(length, device=token_ids_BT.device)
        hidden_BTD = self.fuse(taps_BTX)
        # The last slot has no next token; no anchor sees it.
        embeds_BTD = self.embed_tokens(token_ids_BT.roll(-1, dims=1))
        context_BTX = attention.rows(layer.joined(embeds_BTD, hidden_BTD), slots)
        seen_BAT = slots < anchors_BA.unsqueeze(-1)
        hidden = _gathered(hidden_BTD, anchors_BA - 1)
        own: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        for step in range(num_tokens or self.config.shape.num_tokens):
            places = (anchors_BA + step).clamp(max=length - 1)
            joined = layer.joined(self.embed_tokens(token_ids_BT.gather(1, places)), hidden)
            positions = anchors_BA - 1 + step
            if step:
                own.append(attention.rows(joined, positions))
            queries = attention.queries(joined, positions).unsqueeze(2)
            rows = torch.stack(own, dim=2) if own else None
            attended = attention.attend(queries, context_BTX, seen_BAT, rows).squeeze(2)
            hidden = self.norm(layer.finish(hidden, attended))
            outputs.append(hidden)
        return self.lm_head(torch.stack(outputs, dim=2)).float()

    def new_cache(self, max_tokens: int) -> RowCache:
        """A cache for one sequence; `max_tokens` counts drafted tokens too."""
        weight = self.fc.weight
        row_dim = self.config.shape.attention.row_dim
        return RowCache(1, max_tokens, row_dim, dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def draft(
        self,
        cache: RowCache,
        committed: Committed,
        num_tokens: int | None = None,
        pick: Pick = greedy,
    ) -> Proposal:
        """Run one round; the cache afterwards holds committed slots only.

        Args:
            cache: of the sequence, as left by the round before.
            committed: what the target has read since then.
            num_tokens: N, or None for the config's.
            pick: chooses each token.
        """
        hidden = self._extend(cache, self.fuse(committed.taps), committed.next_ids)[-1:]
        num_committed = cache.length
        count = num_tokens or self.config.shape.num_tokens
        ids: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        for step in range(count):
            logits.append(self.lm_head(hidden[0]).float())
            ids.append(pick(logits[-1]))
            if step + 1 < count:
                hidden = self._extend(cache, hidden, ids[-1].reshape(1))
        cache.truncate(num_committed)
        return Proposal(torch.stack(ids), torch.stack(logits), None)

    def _extend(
        self, cache: RowCache, hidden_TD: torch.Tensor, next_ids_T: torch.Tensor
    ) -> torch.Tensor:
        """Append T slots to the cache and run them; their outputs [T, D]."""
        layer, attention = self._layer(), self._layer().self_attn
        start = cache.length
        positions = torch.arange(start, start + len(next_ids_T), device=next_ids_T.device)
        joined = layer.joined(self.embed_tokens(next_ids_T), hidden_TD)
        cache.append(attention.rows(joined, positions).unsqueeze(0))
        # Each slot is a round of one query here, so that it sees the slots up to itself.
        queries = attention.queries(joined, positions)[None, :, None]
        seen = torch.arange(cache.length, device=positions.device) <= positions.unsqueeze(-1)
        attended = attention.attend(queries, cache.rows(0).unsqueeze(0), seen.unsqueeze(0), None)
        return self.norm(layer.finish(hidden_TD, attended[0, :, 0]))

    def _layer(self) -> EagleLayer:
        return self.layers[0]  # type: ignore[return-value]  # ModuleList is not generic


def _gathered(rows_BTD: torch.Tensor, places_BA: torch.Tensor) -> torch.Tensor:
    index = places_BA.unsqueeze(-1).expand(-1, -1, rows_BTD.shape[-1])
    return rows_BTD.gather(1, index)
