"""A whole engine in one process: prompts in, tokens out, no bus and no other worker.

This is the plain answer that every deployment has to match: the same scheduler, cache, model and
sampler as the workers', in the combined role, stepped by the caller.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from k3core.cache.stats import CacheStats
from k3core.engine.assembly import DTYPES, ModelOptions, model_engine
from k3core.engine.parts import EngineSizes
from k3core.engine.words import EngineEvent, EngineRequest
from k3core.model.vision import VisionModel
from k3core.scheduler.plan import Usage
from k3core.scheduler.request import ImageSpan, Request
from k3core.weights.config_file import load_config
from k3core.weights.loading import LoadOptions
from k3core.weights.vision_loading import load_vision_model
from k3wire.messages.sampling import FinishReason, SamplingParams

_ARENA_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LocalImage:
    """One picture of a prompt, as the preprocessor leaves it.

    Attributes:
        pixels: patches [N, 3, P, P], normalised, row-major over the padded grid.
        grid_thw: patches in time, height and width.
    """

    pixels: torch.Tensor
    grid_thw: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """One prompt to answer.

    Attributes:
        prompt_ids: with a run of placeholders for each image.
        sampling: how to choose tokens and when to end.
        images: in order of their runs.
        salt: a fresh one turns the prefix cache off for this request.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    images: Sequence[LocalImage] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """What came of a request.

    Attributes:
        token_ids: the answer, its end token included.
        finish_reason: why it ended.
        usage: what the prefix cache gave.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage


class LocalEngine:
    """Answers requests in this process; blocks while it does."""

    def __init__(
        self,
        checkpoint: Path,
        sizes: EngineSizes | None = None,
        options: ModelOptions | None = None,
    ) -> None:
        """Loads the checkpoint.

        Args:
            checkpoint: directory in the released layout.
            sizes: of the engine; 256 MiB of pages unless told otherwise.
            options: how to run it, if not in the default way.
        """
        self._options = options or ModelOptions(checkpoint)
        sizes = sizes or EngineSizes(arena_bytes=_ARENA_BYTES)
        self._parts = model_engine(self._options, "combined", sizes)
        self._parts.core.open()
        self._config = load_config(checkpoint)
        self._vision: VisionModel | None = None
        self._num_requests = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this checkpoint."""
        return self._parts.layout.page_bytes

    @property
    def cache_stats(self) -> CacheStats:
        """The prefix cache's counters."""
        return self._parts.core.cache_stats

    def generate(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[LocalImage] = (),
        sampling: SamplingParams | None = None,
    ) -> LocalAnswer:
        """Answers one prompt; greedy for 16 tokens unless told otherwise."""
        sampling = sampling or SamplingParams(temperature=0.0, max_tokens=16)
        return self.generate_all([LocalRequest(prompt_ids, sampling, images)])[0]

    def generate_all(self, requests: Sequence[LocalRequest]) -> list[LocalAnswer]:
        """Answers several prompts in one batch; answers come in the order of the requests.

        Raises:
            ContextLengthExceeded: a prompt does not fit.
            InvalidRequest: images and placeholders do not match.
        """
        core = self._parts.core
        order: list[str] = []
        # Embeddings are read in place, so they must outlive the loop.
        embeds: list[torch.Tensor] = []
        for request in requests:
            key = f"local-{self._num_requests}"
            self._num_requests += 1
            order.append(key)
            core.add(self._engine_request(key, request))
            for index, image in enumerate(request.images):
                embeds.append(self.embed(image))
                core.provide_image(key, index, embeds[-1].view(torch.uint8).numpy().data)
        tokens: dict[str, list[int]] = {key: [] for key in order}
        usage: dict[str, Usage] = {}
        ends: dict[str, FinishReason] = {}
        heard: list[EngineEvent] = []
        while not core.is_quiescent:
            core.step(heard.extend)
        for event in heard:
            if event.error is not None:
                raise event.error
            tokens[event.key].extend(event.token_ids)
            if event.usage is not None:
                usage[event.key] = event.usage
            if event.finish_reason is not None:
                ends[event.key] = event.finish_reason
        return [LocalAnswer(tuple(tokens[key]), ends[key], usage[key]) for key in order]

    def _engine_request(self, key: str, request: LocalRequest) -> EngineRequest:
        runs = _placeholder_runs(request.prompt_ids, self._config.media_placeholder_token_id)
        spans: list[ImageSpan] = []
        place = 0
        for image in request.images:
            count = self._num_tokens(image.grid_thw)
            spans.append(ImageSpan(runs[place], count, _content_key(image)))
            place += count
        return EngineRequest(
            Request(
                request_id=key,
                tokens=array("i", request.prompt_ids),
                max_new_tokens=request.sampling.max_tokens,
                images=tuple(spans),
                salt=request.salt,
            ),
            request.sampling,
        )

    def _num_tokens(self, grid_thw: tuple[int, int, int]) -> int:
        assert self._config.vision is not None, "the checkpoint has no vision part"
        rows, columns = self._config.vision.merge_kernel
        return (grid_thw[1] // rows) * (grid_thw[2] // columns)

    @torch.inference_mode()
    def embed(self, image: LocalImage) -> torch.Tensor:
        """Embeddings of one picture, [tokens, D], contiguous, on the processor."""
        vision = self._vision_model()
        dtype = DTYPES[self._parts.embedding_dtype]
        pixels = image.pixels.to(self._options.device, dtype)
        return vision(pixels, [image.grid_thw])[0].to(dtype).cpu().contiguous()

    def _vision_model(self) -> VisionModel:
        assert self._config.vision is not None, "the checkpoint has no vision part"
        if self._vision is None:
            dtype = DTYPES[self._parts.embedding_dtype]
            load = LoadOptions(torch.device(self._options.device), dtype)
            self._vision = load_vision_model(self._options.checkpoint, self._config.vision, load)
        return self._vision


def _placeholder_runs(prompt_ids: Sequence[int], placeholder: int | None) -> list[int]:
    """Positions of all placeholders, in order."""
    return [index for index, token in enumerate(prompt_ids) if token == placeholder]


def _content_key(image: LocalImage) -> bytes:
    digest = hashlib.sha256(repr(image.grid_thw).encode())
    digest.update(image.pixels.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
