"""The decode worker's settings."""

from typing import Annotated, Literal

from k3wire.service.settings import CommonSettings, Setting


class DecodeSettings(CommonSettings, frozen=True, kw_only=True):
    """Everything the decode worker reads from its environment."""

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
    device: Annotated[str, Setting("K3_DECODE_DEVICE", "Where the model runs: cpu or cuda.")] = (
        "cpu"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Setting(
            "K3_DECODE_DTYPE",
            "Of weights and rows; auto: float32 on a processor, else the checkpoint's.",
        ),
    ] = "auto"
    kernels: Annotated[
        str, Setting("K3_DECODE_KERNELS", "Operator backend by name; auto takes the fastest here.")
    ] = "auto"
    num_threads: Annotated[
        int, Setting("K3_DECODE_THREADS", "Processor threads of the engine; 0: one a core.")
    ] = 0
    arena_bytes: Annotated[
        int, Setting("K3_DECODE_ARENA", "Memory for pages of rows and states.", "bytes")
    ] = 128 * 1024 * 1024
    unit_tokens: Annotated[
        int,
        Setting(
            "K3_DECODE_UNIT", "Prefixes match in units of so many tokens; as prefill's.", "tokens"
        ),
    ] = 128
    max_batch: Annotated[
        int, Setting("K3_DECODE_MAX_BATCH", "Requests in one step of the engine.")
    ] = 256
    max_requests: Annotated[
        int,
        Setting("K3_DECODE_MAX_REQUESTS", "Requests reserved or running; more must slow down."),
    ] = 512
    transfer_host: Annotated[
        str, Setting("K3_DECODE_TRANSFER_HOST", "Address that prefill workers write pages to.")
    ] = "127.0.0.1"
    transfer_protocol: Annotated[
        Literal["tcp", "rdma"],
        Setting("K3_DECODE_TRANSFER_PROTOCOL", "How tensors move between workers."),
    ] = "tcp"
