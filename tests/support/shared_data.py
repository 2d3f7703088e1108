"""Data too large for the repository, found beside it or where K3_SHARED_DIR says."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shared_path(relative: str) -> Path:
    """A file or folder of the shared data; skips the test where it is absent."""
    base = Path(os.environ.get("K3_SHARED_DIR", ROOT.parent / "shared"))
    path = base / relative
    if not path.exists():
        pytest.skip(f"{relative} is not in the shared data")
    return path
