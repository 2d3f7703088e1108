"""One stack for all tests of a file: starting one takes seconds, and keeping one takes processor
time from whatever runs after it."""

from collections.abc import Generator
from pathlib import Path

import pytest
from support.stack import Stack, make_checkpoint, running_stack


@pytest.fixture(scope="session")
def micro_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "micro")


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, micro_checkpoint: Path
) -> Generator[Stack, None, None]:
    with running_stack(tmp_path_factory.mktemp("run"), micro_checkpoint) as running:
        yield running
