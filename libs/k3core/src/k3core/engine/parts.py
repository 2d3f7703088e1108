"""What a worker needs of an engine, whichever kind it is; no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field

from k3core.cache.coordinator import PrefixCache
from k3core.cache.hashing import namespace_digest
from k3core.cache.layout import PageLayout
from k3core.cache.spec import CacheConfig, Codec, Retention
from k3core.engine.core import EngineCore
from k3core.engine.host_memory import HostMemory
from k3core.engine.script import Script
from k3core.engine.scripted_runner import Choose, ScriptedRunner, scripted_layout
from k3core.scheduler.scheduler import Role, Scheduler, SchedulerConfig

MAX_SCRIPTED_BYTES = 16 * 1024 * 1024
"""Arena of the scripted engine at most: 16,384 pages, room for thousands of requests."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """How large an engine is made.

    Attributes:
        arena_bytes: memory for pages; rounded down to whole ones.
        unit_tokens: tokens of a match unit.
        chunk_tokens: token budget of a step.
        max_rows: sequences in a step.
        host_bytes: memory for rows and states that had to leave the arena; 0 for none.
        codec: how checkpoints are stored; live states never are in any other form than raw.
        retention: which positions of a prompt keep a checkpoint.
    """

    arena_bytes: int
    unit_tokens: int = 128
    chunk_tokens: int = 2048
    max_rows: int = 64
    host_bytes: int = 0
    codec: Codec = "raw"
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is not running yet, and what its worker must know of it.

    Attributes:
        core: to be run by an `EngineThread`.
        layout: of its pages.
        base_address: first byte of the arena in this process.
        size_bytes: length of the arena.
        view_page: bytes of one page, for checksums.
        model_fingerprint: what is served; workers that differ do not work together.
        weights_fingerprint: of the checkpoint, which the encoder must share; "" without one.
        embedding_row_bytes: bytes of one image token's embedding; 0 where none are needed.
        embedding_dtype: element type of embeddings, as the encoder names it.
    """

    core: EngineCore
    layout: PageLayout
    base_address: int
    size_bytes: int
    view_page: Callable[[int], memoryview]
    model_fingerprint: str
    weights_fingerprint: str = ""
    embedding_row_bytes: int = 0
    embedding_dtype: str = "float32"


def cache_namespace(model_fingerprint: str, layout: PageLayout) -> bytes:
    """What the bytes behind a digest mean: two caches share digests only where this is equal.

    Args:
        model_fingerprint: of weights and dtype.
        layout: of the pages; the heads and layers of this rank are the partition.
    """
    sizes = layout.sizes
    partition = (
        f"{sizes.state_heads} heads, {sizes.kda_layers} KDA layers, {sizes.mla_layers} MLA layers"
    )
    return namespace_digest(
        (
            ("model", model_fingerprint),
            ("layout", str(layout.version)),
            ("partition", partition),
        )
    )


def scripted_engine(
    script: Script, role: Role, sizes: EngineSizes, choose: Choose | None
) -> EngineParts:
    """Builds the engine without a model; light, and torch is never imported.

    Args:
        script: the answers.
        role: of the worker.
        sizes: of the engine; pages are tiny, so no more than `MAX_SCRIPTED_BYTES` are taken.
        choose: finds the line for a prompt; None on a decode worker.
    """
    layout = scripted_layout(sizes.unit_tokens)
    arena_bytes = min(sizes.arena_bytes, MAX_SCRIPTED_BYTES)
    num_pages = max(layout.num_groups + 2, arena_bytes // layout.page_bytes)
    memory = HostMemory(num_pages * layout.page_bytes)
    fingerprint = f"script-{script.fingerprint()}"
    cache = PrefixCache(
        CacheConfig(
            unit_tokens=layout.unit_tokens,
            page_units=layout.page_units,
            num_pages=num_pages,
            state_groups=layout.num_groups,
            export_alignment=1,
            page_bytes=layout.page_bytes,
            host_bytes=sizes.host_bytes,
            codec=sizes.codec,
            retention=sizes.retention,
        ),
        cache_namespace(fingerprint, layout),
    )
    scheduler = Scheduler(
        SchedulerConfig(role=role, chunk_tokens=(sizes.chunk_tokens,), max_rows=sizes.max_rows),
        cache,
    )

    def view_page(page: int) -> memoryview:
        return memory.view(page * layout.page_bytes, layout.page_bytes)

    return EngineParts(
        core=EngineCore(scheduler, ScriptedRunner(script, layout, memory, choose)),
        layout=layout,
        base_address=memory.address,
        size_bytes=memory.size_bytes,
        view_page=view_page,
        model_fingerprint=fingerprint,
    )
