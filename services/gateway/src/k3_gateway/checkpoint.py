"""The little that the gateway reads of a checkpoint's config.json."""

from pathlib import Path

import msgspec

DEFAULT_CONTEXT_TOKENS = 1048576
"""Of the released model; for a config that does not say."""


class _TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_position_embeddings: int = DEFAULT_CONTEXT_TOKENS


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    text_config: _TextConfig | None = None
    max_position_embeddings: int = DEFAULT_CONTEXT_TOKENS


def read_context_tokens(folder: Path) -> int:
    """Gives the model's longest context.

    Raises:
        OSError: there is no config.json.
        msgspec.DecodeError: it is not a configuration.
    """
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
    inner = config.text_config
    return inner.max_position_embeddings if inner else config.max_position_embeddings
