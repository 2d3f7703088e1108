"""One short name for a checkpoint's content, the same in every process that loads it.

Prefill, decode and encoder compare it before they exchange anything, and cache keys carry it. A
checkpoint may be a terabyte, so files are sampled: the first and last bytes (a safetensors file
begins with its table of tensors) and pieces in between. Two trainings of one shape differ in all
of them. Runs without torch.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from k3core.weights.errors import CheckpointError

PIECE_BYTES = 64 * 1024
NUM_PIECES = 16
DIGITS = 16


def checkpoint_fingerprint(directory: Path) -> str:
    """Names a checkpoint directory's content: its config and its weights.

    Returns:
        16 hexadecimal digits.

    Raises:
        CheckpointError: the directory has no config or no weights, or cannot be read.
    """
    digest = hashlib.sha256()
    files = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    if len(files) < 2:
        raise CheckpointError(f"{directory}: no safetensors files")
    for path in files:
        try:
            for piece in _pieces(path):
                digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
    return digest.hexdigest()[:DIGITS]


def _pieces(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield f"{len(path.name)}:{path.name}:{size}:".encode()
    last = max(0, size - PIECE_BYTES)
    with path.open("rb") as file:
        for offset in sorted({last * index // (NUM_PIECES - 1) for index in range(NUM_PIECES)}):
            file.seek(offset)
            yield file.read(PIECE_BYTES)
