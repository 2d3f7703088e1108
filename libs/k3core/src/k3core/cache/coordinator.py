"""One prefix cache over MLA units and KDA checkpoints (skeleton; being filled in)."""

from k3core.cache.spec import CacheConfig


class PrefixCache:
    """The index, the pages and the checkpoints of one worker."""

    def __init__(self, config: CacheConfig, namespace: bytes = b"") -> None:
        config.check()
        self.config = config
        self.namespace = namespace
