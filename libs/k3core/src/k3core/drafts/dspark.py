"""A DSpark draft: a block of tokens from one pass, then a cheap chain from token to token.

What the draft knows of committed tokens it reads from the target's taps alone: their rows are
projected from a context vector, not from a layer's input, so a committed token costs one
projection a layer. The block is the anchor and a mask token at every further position; inside
it everyone sees everyone. The Markov head then adds what a token says about the next, and the
confidence head says how likely each is accepted. Embedding and head are the target's.

Letters: B sequences, A rounds (anchors) in each, T tokens, N block positions and drafted tokens,
D width, M Markov rank, V vocabulary, X row width.

Source: K3 architecture sheet, section 4.3.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from k3core.drafts.config import DraftShape, DSparkConfig
from k3core.drafts.layers import RmsNorm, RotatedMla, SiluMlp
from k3core.drafts.rounds import Committed, Pick, Proposal, RowCache, greedy


@dataclass(frozen=True, slots=True)
class TargetTables:
    """The target's own tables, which the draft reads and never changes.

    Attributes:
        embed: [V, D].
        lm_head: [V, D].
    """

    embed: torch.Tensor
    lm_head: torch.Tensor


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """What training sees of rounds.

    Attributes:
        logits: [B, A, N, V], float32, Markov part included; entry n is of the token at
            anchor + 1 + n.
        confidence_logits: [B, A, N], float32, before the sigmoid.
    """

    logits: torch.Tensor
    confidence_logits: torch.Tensor


class DSparkLayer(nn.Module):
    """A dense layer around the block's stream."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.self_attn = RotatedMla(shape.attention, width, width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = SiluMlp(width, shape.intermediate_size)

    def forward(
        self,
        stream_BAND: torch.Tensor,
        positions_BAN: torch.Tensor,
        context_BTX: torch.Tensor,
        seen_BAT: torch.Tensor | None,
    ) -> torch.Tensor:
        """Advance the stream of the blocks, [B, A, N, D]."""
        x = self.input_layernorm(stream_BAND)
        queries = self.self_attn.queries(x, positions_BAN)
        own = self.self_attn.rows(x, positions_BAN)
        stream = stream_BAND + self.self_attn.attend(queries, context_BTX, seen_BAT, own)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class MarkovHead(nn.Module):
    """What a token adds to the logits of the one after it, through a narrow bottleneck."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """Likelihood of acceptance from a position's hidden row and the token before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: torch.Tensor, markov: torch.Tensor) -> torch.Tensor:
        """Logits [...] float32 of [..., D] and [..., M]; the product is in float32."""
        joined = torch.cat((hidden, markov), dim=-1).float()
        return F.linear(joined, self.proj.weight.float(), self.proj.bias.float()).squeeze(-1)


class DSparkDraft(nn.Module):
    """The draft, differentiable; `blocks` is for training, `draft` for serving, and they agree."""

    def __init__(self, config: DSparkConfig, tables: TargetTables) -> None:
        super().__init__()
        self.config = config
        # A plain struct, so that the target's tables are no parameters of the draft.
        self._tables = tables
        shape = config.shape
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.context_proj = nn.Linear(shape.taps_width, width, bias=False)
        self.context_norm = RmsNorm(width, eps)
        self.layers = nn.ModuleList(DSparkLayer(shape) for _ in range(config.num_layers))
        self.final_norm = RmsNorm(width, eps)
        self.markov_head = MarkovHead(shape.vocab_size, config.markov_rank)
        self.confidence_head = ConfidenceHead(width + config.markov_rank)

    def context_rows(self, taps: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Each layer's rows [..., T, X] of committed tokens with taps [..., T, taps width]."""
        context = self.context_norm(self.context_proj(taps))
        return [layer.self_attn.rows(context, positions) for layer in self._layers()]

    def blocks(
        self,
        taps_BTX: torch.Tensor,
        token_ids_BT: torch.Tensor,
        anchors_BA: torch.Tensor,
        num_tokens: int | None = None,
    ) -> BlockOutput:
        """Draft from many anchors at once; the Markov chain follows the true tokens.

        Args:
            taps_BTX: [B, T, taps width], the target's taps of whole sequences.
            token_ids_BT: [B, T], int64.
            anchors_BA: [B, A], int64, positions of anchors, from 1 on.
            num_tokens: N, or None for the config's. What is said of positions after the last
                token means nothing.
        """
        length = token_ids_BT.shape[1]
        count = num_tokens or self.config.shape.num_tokens
        places = torch.arange(length, device=token_ids_BT.device)
        context = self.context_rows(taps_BTX, places)
        hidden = self._run_blocks(
            F.embedding(token_ids_BT.gather(1, anchors_BA), self._tables.embed),
            anchors_BA,
            context,
            places < anchors_BA.unsqueeze(-1),
            count,
        )
        steps = torch.arange(count, device=anchors_BA.device)
        before_BAN = (anchors_BA.unsqueeze(-1) + steps).clamp(max=length - 1)
        previous = token_ids_BT.gather(1, before_BAN.flatten(1)).view_as(before_BAN)
        markov = self.markov_head.markov_w1(previous)
        logits = F.linear(hidden, self._tables.lm_head) + self.markov_head.markov_w2(markov)
        return BlockOutput(logits.float(), self.confidence_head(hidden, markov))

    def new_cache(self, max_tokens: int) -> RowCache:
        """A cache for one sequence of up to `max_tokens` committed tokens."""
        weight = self.context_proj.weight
        return RowCache(
            self.config.num_layers,
            max_tokens,
            self.config.shape.attention.row_dim,
            dtype=weight.dtype,
            device=weight.device,
        )

    @torch.no_grad()
    def draft(
        self,
        cache: RowCache,
        committed: Committed,
        num_tokens: int | None = None,
        pick: Pick = greedy,
    ) -> Proposal:
        """Run one round; committed tokens' rows join the cache, the block's never do.

        Args:
            cache: of the sequence, as left by the round before.
            committed: what the target has read since then.
            num_tokens: N, the block's length, or None for the config's.
            pick: chooses each token.
        """
        taps, start = committed.taps, cache.length
        places = torch.arange(start, start + len(taps), device=taps.device)
        cache.append(torch.stack(self.context_rows(taps, places)))
        anchor = committed.next_ids[-1]
        hidden_ND = self._run_blocks(
            F.embedding(anchor, self._tables.embed)[None, None],
            torch.full((1, 1), cache.length, device=taps.device),
            [cache.rows(layer).unsqueeze(0) for layer in range(self.config.num_layers)],
            None,
            num_tokens or self.config.shape.num_tokens,
        )[0, 0]
        base_NV = F.linear(hidden_ND, self._tables.lm_head)
        previous = anchor
        ids: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        markov: list[torch.Tensor] = []
        for base in base_NV:
            markov.append(self.markov_head.markov_w1(previous))
            logits.append((base + self.markov_head.markov_w2(markov[-1])).float())
            previous = pick(logits[-1])
            ids.append(previous)
        confidence = self.confidence_head(hidden_ND, torch.stack(markov)).sigmoid()
        return Proposal(torch.stack(ids), torch.stack(logits), confidence)

    def _run_blocks(
        self,
        anchors_BAD: torch.Tensor,
        anchors_BA: torch.Tensor,
        context: list[torch.Tensor],
        seen_BAT: torch.Tensor | None,
        num_tokens: int,
    ) -> torch.Tensor:
        """Normed hidden rows of the blocks, [B, A, N, D]."""
        mask_D = self._tables.embed[self.config.mask_token_id]
        masks = mask_D.expand(*anchors_BA.shape, num_tokens - 1, -1)
        stream = torch.cat((anchors_BAD.unsqueeze(2), masks), dim=2)
        positions = anchors_BA.unsqueeze(-1) + torch.arange(num_tokens, device=anchors_BA.device)
        for layer, rows in zip(self._layers(), context, strict=True):
            stream = layer(stream, positions, rows, seen_BAT)
        return self.final_norm(stream)

    def _layers(self) -> list[DSparkLayer]:
        return list(self.layers)  # type: ignore[arg-type]  # ModuleList is not generic
