"""Putting an engine together: from a checkpoint, or from a script.

Both give the same thing, so that a worker's main differs in one line. The arena's address is what
the worker registers with the data plane; its pages are never moved or grown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from k3core.cache.coordinator import PrefixCache
from k3core.cache.layout import model_sizes, plan_layout
from k3core.cache.pools import PageArena
from k3core.cache.spec import CacheConfig
from k3core.engine.core import EngineCore
from k3core.engine.parts import EngineParts, EngineSizes, cache_namespace
from k3core.engine.torch_runner import TorchRunner
from k3core.kernels.registry import select_kernels
from k3core.scheduler.scheduler import Role, Scheduler, SchedulerConfig
from k3core.weights.config_file import load_config
from k3core.weights.fingerprint import checkpoint_fingerprint
from k3core.weights.loading import LoadOptions, load_text_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a checkpoint is run.

    Attributes:
        checkpoint: directory in the released layout.
        device: torch's name of it.
        dtype: `float32` or `bfloat16`, of weights, rows and embeddings; `auto` takes float32 on
            a processor and the checkpoint's own elsewhere.
        kernels: backend name or `auto`.
    """

    checkpoint: Path
    device: str = "cpu"
    dtype: str = "auto"
    kernels: str = "auto"


def model_engine(options: ModelOptions, role: Role, sizes: EngineSizes) -> EngineParts:
    """Loads a checkpoint and builds the engine around it; takes as long as loading does.

    Raises:
        ConfigError, CheckpointError: the checkpoint cannot be loaded.
        BackendUnavailableError: the kernels asked for do not run here.
        CacheError: the sizes contradict each other.
    """
    device = torch.device(options.device)
    config = load_config(options.checkpoint)
    dtype_name = _dtype_name(options, config.dtype)
    dtype = DTYPES[dtype_name]
    kernels = select_kernels(device, options.kernels)
    model = load_text_model(options.checkpoint, config, kernels, LoadOptions(device, dtype))
    itemsize = dtype.itemsize
    layout = plan_layout(
        model_sizes(config.text, row_itemsize=itemsize, conv_itemsize=itemsize),
        unit_tokens=sizes.unit_tokens,
    )
    num_pages = max(layout.num_groups + 2, sizes.arena_bytes // layout.page_bytes)
    arena = PageArena(layout, num_pages, dtype, dtype, device)
    weights = checkpoint_fingerprint(options.checkpoint)
    fingerprint = f"{weights}-{dtype_name}"
    cache = PrefixCache(
        CacheConfig(
            unit_tokens=layout.unit_tokens,
            page_units=layout.page_units,
            num_pages=num_pages,
            state_groups=layout.num_groups,
            int8_groups=layout.int8_groups,
            export_alignment=kernels.checkpoint_alignment,
            page_bytes=layout.page_bytes,
            host_bytes=sizes.host_bytes,
            codec=sizes.codec,
            retention=sizes.retention,
        ),
        cache_namespace(fingerprint, layout),
    )
    scheduler = Scheduler(_scheduler_config(role, sizes), cache)
    return EngineParts(
        core=EngineCore(scheduler, TorchRunner(model, arena)),
        layout=layout,
        base_address=arena.bytes.data_ptr(),
        size_bytes=arena.bytes.numel(),
        view_page=_page_viewer(arena),
        model_fingerprint=fingerprint,
        weights_fingerprint=weights,
        embedding_row_bytes=config.text.hidden_size * itemsize,
        embedding_dtype=dtype_name,
    )


def _scheduler_config(role: Role, sizes: EngineSizes) -> SchedulerConfig:
    return SchedulerConfig(
        role=role,
        chunk_tokens=(sizes.chunk_tokens,),
        max_rows=sizes.max_rows,
        waits_for_embeddings=role == "prefill",
    )


def _dtype_name(options: ModelOptions, stored: str) -> str:
    if options.dtype != "auto":
        return options.dtype
    return "float32" if options.device == "cpu" or stored not in DTYPES else stored


def _page_viewer(arena: PageArena) -> Callable[[int], memoryview]:
    """Bytes of one page for the checksum; copies only from a device."""

    def view(page: int) -> memoryview:
        return arena.page(page).cpu().numpy().data

    return view
