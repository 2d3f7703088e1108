"""The encoder's settings."""

from typing import Annotated, Literal

from k3wire.service.settings import CommonSettings, Setting


class EncoderSettings(CommonSettings, frozen=True, kw_only=True):
    """Everything the encoder reads from its environment."""

    checkpoint: Annotated[
        str, Setting("K3_CHECKPOINT", "Directory of the served checkpoint: vision weights, config.")
    ] = ""
    mooncake_master: Annotated[
        str,
        Setting("K3_MOONCAKE_MASTER", "Mooncake's master, `host:port`; empty: nothing is shared."),
    ] = ""
    redis_url: Annotated[
        str,
        Setting(
            "K3_REDIS_URL",
            "Redis in which encoders agree who computes an image; empty: each computes its own.",
        ),
    ] = "redis://127.0.0.1:6379/0"
    device: Annotated[str, Setting("K3_ENCODER_DEVICE", "Where the tower runs: cpu or cuda.")] = (
        "cpu"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Setting("K3_ENCODER_DTYPE", "Of the weights; auto: float32 on a processor, else bfloat16."),
    ] = "auto"
    num_threads: Annotated[
        int, Setting("K3_ENCODER_THREADS", "Processor threads of the tower; 0: one a core.")
    ] = 0
    cache_bytes: Annotated[
        int,
        Setting(
            "K3_ENCODER_CACHE",
            "Memory for embeddings (tier L3); 0 turns the tier off, its shared level too.",
            "bytes",
        ),
    ] = 256 * 1024 * 1024
    pixel_bytes: Annotated[
        int, Setting("K3_ENCODER_PIXELS", "Memory for patches on their way in.", "bytes")
    ] = 256 * 1024 * 1024
    batch_tokens: Annotated[
        int, Setting("K3_ENCODER_BATCH", "Embeddings computed in one call.", "tokens")
    ] = 4096
    transfer_host: Annotated[
        str, Setting("K3_ENCODER_TRANSFER_HOST", "Address that peers move tensors to and from.")
    ] = "127.0.0.1"
    transfer_protocol: Annotated[
        Literal["tcp", "rdma"],
        Setting("K3_ENCODER_TRANSFER_PROTOCOL", "How tensors move between workers."),
    ] = "tcp"
