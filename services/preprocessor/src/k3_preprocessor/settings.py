"""The preprocessor's settings."""

from typing import Annotated, Literal

from k3wire.service.settings import CommonSettings, Setting


class PreprocessorSettings(CommonSettings, frozen=True, kw_only=True):
    """Everything the preprocessor reads from its environment."""

    redis_url: Annotated[
        str, Setting("K3_REDIS_URL", "Redis that holds image bytes (tier L1); empty: none.")
    ] = "redis://127.0.0.1:6379/0"
    mooncake_master: Annotated[
        str,
        Setting("K3_MOONCAKE_MASTER", "Mooncake's master, `host:port`; empty: nothing is shared."),
    ] = ""
    checkpoint: Annotated[
        str,
        Setting(
            "K3_CHECKPOINT",
            "Directory of the served checkpoint: image rules; empty: the released K3's.",
        ),
    ] = ""
    num_workers: Annotated[
        int, Setting("K3_PREPROCESSOR_WORKERS", "Processes that decode images.")
    ] = 2
    max_waiting: Annotated[
        int,
        Setting("K3_PREPROCESSOR_MAX_WAITING", "Images that wait for them; more must slow down."),
    ] = 64
    max_concurrency: Annotated[
        int,
        Setting("K3_PREPROCESSOR_MAX_CONCURRENCY", "Requests answered at once; others wait."),
    ] = 64
    decode_memory_bytes: Annotated[
        int,
        Setting("K3_PREPROCESSOR_DECODE_MEMORY", "Address space that decoding may add.", "bytes"),
    ] = 1536 * 1024 * 1024
    decode_cpu_s: Annotated[
        int, Setting("K3_PREPROCESSOR_DECODE_CPU", "Processor time of one image.", "s")
    ] = 10
    decode_wall_s: Annotated[
        float, Setting("K3_PREPROCESSOR_DECODE_WALL", "Time of one image by the clock.", "s")
    ] = 20.0
    max_image_bytes: Annotated[
        int, Setting("K3_PREPROCESSOR_MAX_IMAGE_BYTES", "Longest encoded image.", "bytes")
    ] = 32 * 1024 * 1024
    max_pixels: Annotated[
        int, Setting("K3_PREPROCESSOR_MAX_PIXELS", "Largest width times height.", "pixels")
    ] = 90_000_000
    media_types: Annotated[
        tuple[str, ...],
        Setting(
            "K3_PREPROCESSOR_MEDIA_TYPES",
            "Formats taken; image/avif, image/bmp and image/tiff may be added.",
        ),
    ] = ("image/jpeg", "image/png", "image/gif", "image/webp")
    cache_bytes: Annotated[
        int,
        Setting(
            "K3_PREPROCESSOR_CACHE",
            "Memory for patches (tier L2); 0 turns the tier off, its shared level too.",
            "bytes",
        ),
    ] = 256 * 1024 * 1024
    window_bytes: Annotated[
        int,
        Setting("K3_PREPROCESSOR_WINDOW", "One piece of patches on its way out.", "bytes"),
    ] = 4 * 1024 * 1024
    num_windows: Annotated[
        int, Setting("K3_PREPROCESSOR_WINDOWS", "Pieces on their way at once.")
    ] = 8
    transfer_host: Annotated[
        str,
        Setting("K3_PREPROCESSOR_TRANSFER_HOST", "Address that peers move tensors to and from."),
    ] = "127.0.0.1"
    transfer_protocol: Annotated[
        Literal["tcp", "rdma"],
        Setting("K3_PREPROCESSOR_TRANSFER_PROTOCOL", "How tensors move between workers."),
    ] = "tcp"
