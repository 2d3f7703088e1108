"""The runner with a model: a plan becomes one packed forward pass, its logits become tokens.

Per step: evicted pages copied to host memory, page moves, checkpoints restored into live pages
and rows brought back from host memory, the pass with its exports, raw exports encoded where the
cache keeps them compressed, and one sampling over all rows that want it. The host waits for the device once a step, to read the sampled tokens.

Batch invariance: sampling is exact for each row (see `k3core.engine.sampler`); what the model
promises is in `k3core.model.text`. Chunking and batch neighbours can therefore change a greedy
answer only where two logits lie closer together than that bound.

Letters: B rows, T packed tokens, G state groups, R rows with logits, M image rows, D hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from k3core.batch import ForwardBatch, StateExport
from k3core.cache.layout import unit_offset
from k3core.cache.pools import PageArena
from k3core.engine.sampler import SampleRow, sample
from k3core.engine.words import Adoption, EngineRequest, RowError
from k3core.model.text import TextModel
from k3core.scheduler.plan import HostCopy, PageCopy, RowPlan, RowResult, StepPlan
from k3wire.errors import InvalidRequest, WorkerLost


@dataclass(slots=True)
class _Told:
    """What a request was told so far.

    Attributes:
        request: as given.
        output_ids: its answer so far, earlier attempts' part included.
        images: embeddings of each image that arrived, [tokens, D], by index.
    """

    request: EngineRequest
    output_ids: list[int]
    images: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


class TorchRunner:
    """Runs plans on one model over one arena."""

    def __init__(self, model: TextModel, arena: PageArena) -> None:
        """Takes over both.

        Args:
            model: loaded, on the arena's device, in evaluation.
            arena: pages that the plans speak of.
        """
        self._model = model
        self._arena = arena
        self._device = model.embed.device
        self._told: dict[str, _Told] = {}
        self._host: dict[int, torch.Tensor] = {}

    def open(self) -> None:
        """Runs one token through page 0 so that the first request pays for no warm-up.

        Page 0 is left zeroed, as every fresh page is.
        """
        num_groups = self._arena.layout.num_groups
        batch = ForwardBatch(
            token_ids=torch.zeros(1, dtype=torch.int64, device=self._device),
            query_starts=(0, 1),
            context_lengths=(0,),
            unit_tables=torch.zeros(1, 1, dtype=torch.int32),
            # One page more for each group: rows and states must not share one.
            state_pages=torch.arange(1, num_groups + 1, dtype=torch.int32).unsqueeze(0),
            logits_rows=(0,),
        )
        with torch.inference_mode():
            self._model(batch, self._arena.views)
        self._arena.clear_pages(range(num_groups + 1))

    def close(self) -> None:
        """Forgets every request; the arena and the model go with the runner."""
        self._told.clear()
        self._host.clear()

    def begin(self, request: EngineRequest, adoption: Adoption | None) -> None:
        """Remembers the request and the output it brings along.

        Raises:
            InvalidRequest: a token has no row in the embedding; it would end the whole step.
        """
        tokens = request.request.tokens
        ids = np.frombuffer(tokens, dtype=np.int32)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._model.config.vocab_size:
            raise InvalidRequest("The prompt has a token that the model does not know.")
        output_ids = tokens[len(tokens) - request.num_emitted_tokens :].tolist()
        if adoption is not None:
            output_ids.append(adoption.first_token)
        self._told[request.key] = _Told(request, output_ids)

    def forget(self, key: str) -> None:
        """Forgets a request and its views of embeddings."""
        self._told.pop(key, None)

    def provide_image(self, key: str, index: int, data: memoryview) -> None:
        """Views the embeddings of one image in place."""
        told = self._told[key]
        rows = told.request.request.images[index].count
        flat = torch.frombuffer(data, dtype=self._model.embed.dtype)
        told.images[index] = flat.view(rows, -1)

    def held(self, now_s: float) -> Mapping[str, float]:
        """Nothing is ever held: a model is as fast as it is."""
        return {}

    def frame_tokens(self, key: str) -> int:
        """Tokens leave as they come."""
        return 1

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Sequence[RowResult]:
        """Runs one step; see the module's text."""
        # What leaves or moves does so even if a row then turns out not to run: the cache counts
        # on it.
        for copy in plan.spills:
            self._host[copy.host] = self._copied(copy).cpu().clone()
        for host in plan.freed_host:
            del self._host[host]
        for copy in plan.moves:
            self._arena.copy_pages(copy.src, copy.dst)
        # Before any page changes for good: a row that cannot run must leave its own as they are.
        batch = self._batch(plan) if plan.rows else None
        for copy in plan.restores:
            self._restore(copy)
        for copy in plan.loads:
            self._load(copy)
        if batch is None:
            return []
        output = self._model(batch, self._arena.views)
        for copy in plan.encodes:
            self._arena.encode_state(copy.src, copy.dst)
        wanting = [row for row in plan.rows if row.wants_logits]
        tokens = sample(output.logits, [self._sample_row(row) for row in wanting])
        sampled = {row.request_id: token for row, token in zip(wanting, tokens, strict=True)}
        return [self._result(row, sampled.get(row.request_id)) for row in plan.rows]

    def _restore(self, copy: PageCopy) -> None:
        if copy.codec == "int8":
            self._arena.decode_state(copy.src, copy.dst)
        else:
            self._arena.copy_pages(copy.src, copy.dst)

    def _load(self, copy: HostCopy) -> None:
        """Brings evicted rows or a state back from host memory."""
        kept = self._host[copy.host].to(self._device)
        if copy.pages and copy.codec == "int8":
            self._arena.decode_kept_state(kept, copy.pages)
        elif copy.pages:
            self._arena.bytes[list(copy.pages)] = kept
        else:
            self._copied(copy).copy_(kept)

    def _copied(self, copy: HostCopy) -> torch.Tensor:
        """The bytes that a host copy speaks of: a state's pages (copied), or a unit (a view)."""
        if copy.pages:
            return self._arena.bytes[list(copy.pages)]
        start = unit_offset(self._arena.layout, copy.unit)
        return self._arena.bytes.view(-1)[start : start + self._arena.layout.unit_bytes]

    def _result(self, row: RowPlan, token: int | None) -> RowResult:
        exported = tuple(export.position for export in row.exports)
        if token is None:
            return RowResult(row.request_id, exported=exported)
        self._told[row.request_id].output_ids.append(token)
        return RowResult(row.request_id, sampled=(token,), exported=exported)

    def _sample_row(self, row: RowPlan) -> SampleRow:
        told = self._told[row.request_id]
        tokens = told.request.request.tokens
        num_prompt = len(tokens) - told.request.num_emitted_tokens
        sampling = told.request.sampling
        # The prompt is copied only for the one penalty that reads it.
        reads_prompt = sampling.repetition_penalty != 1.0
        return SampleRow(
            sampling=sampling,
            position=len(told.output_ids),
            prompt_ids=tokens[:num_prompt].tolist() if reads_prompt else (),
            output_ids=told.output_ids,
        )

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        rows = plan.rows
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row.length)
        token_ids = [token for row in rows for token in row.token_ids]
        unit_tables = torch.zeros(len(rows), max(len(row.units) for row in rows), dtype=torch.int32)
        for index, row in enumerate(rows):
            unit_tables[index, : len(row.units)] = torch.tensor(row.units, dtype=torch.int32)
        image_rows, image_embeds = self._images(rows, starts)
        return ForwardBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=self._device),
            query_starts=tuple(starts),
            context_lengths=tuple(row.start for row in rows),
            unit_tables=unit_tables,
            state_pages=torch.tensor([row.state_pages for row in rows], dtype=torch.int32),
            logits_rows=tuple(starts[i + 1] - 1 for i, row in enumerate(rows) if row.wants_logits),
            exports=tuple(
                StateExport(index, export.offset, export.pages)
                for index, row in enumerate(rows)
                for export in row.exports
            ),
            image_rows=image_rows,
            image_embeds=image_embeds,
        )

    def _images(
        self, rows: Sequence[RowPlan], starts: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Rows to replace, [M], and what replaces them, [M, D].

        Raises:
            RowError: a request that was prefilled elsewhere has to compute a picture's tokens
                again; only a prefill worker can get at its embeddings.
        """
        places: list[torch.Tensor] = []
        embeds: list[torch.Tensor] = []
        for row, start in zip(rows, starts, strict=False):
            images = self._told[row.request_id].images
            for need in row.images:
                if need.index not in images:
                    raise RowError(
                        row.request_id, WorkerLost("The request has to be started again.")
                    )
                first = start + need.chunk_offset
                places.append(torch.arange(first, first + need.count))
                last = need.image_offset + need.count
                embeds.append(images[need.index][need.image_offset : last])
        if not places:
            return None, None
        return torch.cat(places).to(self._device), torch.cat(embeds).to(self._device)
