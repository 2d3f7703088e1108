"""The prefill worker's settings."""

from typing import Annotated, Literal

from k3wire.service.settings import CommonSettings, Setting


class PrefillSettings(CommonSettings, frozen=True, kw_only=True):
    """Everything the prefill worker reads from its environment."""

    checkpoint: Annotated[
        str,
        Setting("K3_CHECKPOINT", "Directory of the served checkpoint, its tokenizer included."),
    ] = ""
    engine: Annotated[
        Literal["model", "scripted"],
        Setting("K3_ENGINE", "`model` computes; `scripted` answers from a file, without a model."),
    ] = "model"
    script: Annotated[
        str, Setting("K3_SCRIPT", "JSONL file of answers, for the scripted engine.")
    ] = ""
    device: Annotated[str, Setting("K3_PREFILL_DEVICE", "Where the model runs: cpu or cuda.")] = (
        "cpu"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Setting(
            "K3_PREFILL_DTYPE",
            "Of weights, rows and embeddings; auto: float32 on a processor, else the checkpoint's.",
        ),
    ] = "auto"
    kernels: Annotated[
        str, Setting("K3_PREFILL_KERNELS", "Operator backend by name; auto takes the fastest here.")
    ] = "auto"
    num_threads: Annotated[
        int, Setting("K3_PREFILL_THREADS", "Processor threads of the engine; 0: one a core.")
    ] = 0
    arena_bytes: Annotated[
        int, Setting("K3_PREFILL_ARENA", "Memory for pages of rows and states.", "bytes")
    ] = 128 * 1024 * 1024
    host_bytes: Annotated[
        int,
        Setting(
            "K3_PREFILL_HOST",
            "Memory for rows and states that had to leave the arena; 0 keeps none.",
            "bytes",
        ),
    ] = 0
    checkpoint_codec: Annotated[
        Literal["raw", "int8"],
        Setting(
            "K3_PREFILL_CHECKPOINT_CODEC",
            "How states are kept for reuse: as they are, or rounded to 8 bits, a third as large.",
        ),
    ] = "raw"
    embedding_bytes: Annotated[
        int, Setting("K3_PREFILL_EMBEDDINGS", "Memory for image embeddings in use.", "bytes")
    ] = 32 * 1024 * 1024
    unit_tokens: Annotated[
        int,
        Setting(
            "K3_PREFILL_UNIT", "Prefixes match in units of so many tokens; as decode's.", "tokens"
        ),
    ] = 128
    chunk_tokens: Annotated[
        int, Setting("K3_PREFILL_CHUNK", "Prompt tokens computed in one step.", "tokens")
    ] = 2048
    max_requests: Annotated[
        int, Setting("K3_PREFILL_MAX_REQUESTS", "Requests at once; more are told to slow down.")
    ] = 512
    transfer_host: Annotated[
        str, Setting("K3_PREFILL_TRANSFER_HOST", "Address that peers move tensors to and from.")
    ] = "127.0.0.1"
    transfer_protocol: Annotated[
        Literal["tcp", "rdma"],
        Setting("K3_PREFILL_TRANSFER_PROTOCOL", "How tensors move between workers."),
    ] = "tcp"
