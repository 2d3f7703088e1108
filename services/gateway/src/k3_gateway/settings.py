"""The gateway's settings."""

from typing import Annotated

from k3wire.service.settings import CommonSettings, Setting


class GatewaySettings(CommonSettings, frozen=True, kw_only=True):
    """Everything the gateway reads from its environment."""

    redis_url: Annotated[
        str, Setting("K3_REDIS_URL", "Redis that holds image bytes (tier L1).")
    ] = "redis://127.0.0.1:6379/0"
    checkpoint: Annotated[
        str,
        Setting("K3_CHECKPOINT", "Directory of the served checkpoint: tokenizer and image rules."),
    ] = ""
    host: Annotated[str, Setting("K3_GATEWAY_HOST", "Address that the API listens on.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Setting("K3_GATEWAY_PORT", "Port of the API; 0 takes a free one.")] = 8000
    model_name: Annotated[
        str, Setting("K3_GATEWAY_MODEL_NAME", "Name that clients ask for; empty: the folder's.")
    ] = ""
    api_keys: Annotated[
        tuple[str, ...],
        Setting(
            "K3_GATEWAY_API_KEYS",
            "Accepted keys, `key` or `tenant:key`, separated by commas; none: no key is needed.",
        ),
    ] = ()
    max_context_tokens: Annotated[
        int,
        Setting("K3_GATEWAY_MAX_CONTEXT", "Longest prompt and answer; 0: the model's.", "tokens"),
    ] = 0
    max_body_bytes: Annotated[
        int, Setting("K3_GATEWAY_MAX_BODY", "Longest request body.", "bytes")
    ] = 128 * 1024 * 1024
    max_images: Annotated[int, Setting("K3_GATEWAY_MAX_IMAGES", "Images in one request.")] = 150
    max_image_bytes: Annotated[
        int, Setting("K3_GATEWAY_MAX_IMAGE_BYTES", "Longest encoded image.", "bytes")
    ] = 20 * 1024 * 1024
    max_running: Annotated[
        int, Setting("K3_GATEWAY_MAX_RUNNING", "Requests at once; more are told to slow down.")
    ] = 1024
    max_queued_bytes: Annotated[
        int,
        Setting(
            "K3_GATEWAY_MAX_QUEUED_BYTES",
            "Request bodies held at once in all, those still coming in among them.",
            "bytes",
        ),
    ] = 1024 * 1024 * 1024
    request_timeout_s: Annotated[
        float, Setting("K3_GATEWAY_REQUEST_TIMEOUT_S", "Longest time of a request.", "s")
    ] = 600.0
    body_timeout_s: Annotated[
        float, Setting("K3_GATEWAY_BODY_TIMEOUT_S", "Longest time to send a body.", "s")
    ] = 300.0
    body_idle_timeout_s: Annotated[
        float,
        Setting(
            "K3_GATEWAY_BODY_IDLE_TIMEOUT_S", "Longest time to send the next 16 KiB of it.", "s"
        ),
    ] = 15.0
    keep_alive_s: Annotated[
        float,
        Setting("K3_GATEWAY_KEEP_ALIVE_S", "Silence after which a stream sends a comment.", "s"),
    ] = 15.0
    route_wait_s: Annotated[
        float,
        Setting("K3_GATEWAY_ROUTE_WAIT_S", "How long a missing worker is waited for.", "s"),
    ] = 15.0
    has_tenant_caches: Annotated[
        bool,
        Setting(
            "K3_GATEWAY_TENANT_CACHES",
            "Keep the tenants' caches apart: prefixes and image addresses are never shared.",
        ),
    ] = False
    image_ttl_s: Annotated[
        float, Setting("K3_GATEWAY_IMAGE_TTL_S", "How long L1 keeps a data URL's bytes.", "s")
    ] = 3600.0
