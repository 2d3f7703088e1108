"""The fetcher's settings."""

from typing import Annotated

from k3wire.service.settings import CommonSettings, Setting


class FetcherSettings(CommonSettings, frozen=True, kw_only=True):
    """Everything the fetcher reads from its environment."""

    redis_url: Annotated[
        str, Setting("K3_REDIS_URL", "Redis that holds image bytes (tier L1).")
    ] = "redis://127.0.0.1:6379/0"
    allowed_networks: Annotated[
        tuple[str, ...],
        Setting(
            "K3_FETCHER_ALLOWED_NETWORKS",
            "Networks (CIDR) that images may come from although they are private, on any port.",
        ),
    ] = ()
    denied_networks: Annotated[
        tuple[str, ...],
        Setting(
            "K3_FETCHER_DENIED_NETWORKS", "Networks (CIDR) refused on top of the built-in list."
        ),
    ] = ()
    allowed_domains: Annotated[
        tuple[str, ...],
        Setting("K3_FETCHER_ALLOWED_DOMAINS", "If set, only these hosts, `a.b` or `*.a.b`."),
    ] = ()
    denied_domains: Annotated[
        tuple[str, ...],
        Setting("K3_FETCHER_DENIED_DOMAINS", "Hosts refused, `a.b` or `*.a.b`."),
    ] = ()
    allowed_ports: Annotated[
        tuple[int, ...], Setting("K3_FETCHER_ALLOWED_PORTS", "Ports that may be asked.")
    ] = (80, 443)
    allows_http: Annotated[
        bool, Setting("K3_FETCHER_ALLOW_HTTP", "Whether plain http is fetched.")
    ] = True
    max_image_bytes: Annotated[
        int, Setting("K3_FETCHER_MAX_IMAGE_BYTES", "Longest encoded image.", "bytes")
    ] = 20 * 1024 * 1024
    max_pending_bytes: Annotated[
        int,
        Setting("K3_FETCHER_MAX_PENDING", "Bodies being read at once; more wait.", "bytes"),
    ] = 256 * 1024 * 1024
    max_pixels: Annotated[
        int, Setting("K3_FETCHER_MAX_PIXELS", "Largest width times height.", "pixels")
    ] = 90_000_000
    media_types: Annotated[
        tuple[str, ...],
        Setting(
            "K3_FETCHER_MEDIA_TYPES",
            "Formats taken; image/avif, image/bmp and image/tiff may be added.",
        ),
    ] = ("image/jpeg", "image/png", "image/gif", "image/webp")
    connect_timeout_s: Annotated[
        float, Setting("K3_FETCHER_CONNECT_TIMEOUT_S", "Longest connect.", "s")
    ] = 3.0
    idle_timeout_s: Annotated[
        float, Setting("K3_FETCHER_IDLE_TIMEOUT_S", "Longest silence of a host.", "s")
    ] = 5.0
    total_timeout_s: Annotated[
        float,
        Setting("K3_FETCHER_TOTAL_TIMEOUT_S", "One image, redirects and retries included.", "s"),
    ] = 15.0
    max_redirects: Annotated[
        int, Setting("K3_FETCHER_MAX_REDIRECTS", "Redirects followed for one image.")
    ] = 3
    max_retries: Annotated[
        int, Setting("K3_FETCHER_MAX_RETRIES", "Tries after the first, on transient failures.")
    ] = 2
    max_downloads: Annotated[
        int, Setting("K3_FETCHER_MAX_DOWNLOADS", "Downloads at once in this process.")
    ] = 64
    max_downloads_per_host: Annotated[
        int, Setting("K3_FETCHER_MAX_DOWNLOADS_PER_HOST", "Downloads at once from one host.")
    ] = 8
    keeps_images: Annotated[
        bool,
        Setting(
            "K3_FETCHER_L1",
            "Whether images are kept (tier L1); off: every request downloads its own.",
        ),
    ] = True
    front_bytes: Annotated[
        int, Setting("K3_FETCHER_FRONT", "Images kept in this process, before L1.", "bytes")
    ] = 64 * 1024 * 1024
    default_ttl_s: Annotated[
        float, Setting("K3_FETCHER_DEFAULT_TTL_S", "Freshness where a host says nothing.", "s")
    ] = 60.0
    max_ttl_s: Annotated[
        float, Setting("K3_FETCHER_MAX_TTL_S", "Longest freshness and life in L1.", "s")
    ] = 86400.0
