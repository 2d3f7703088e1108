"""Starts a preprocessor: `python -m k3_preprocessor`, or `k3-preprocessor`."""

import os

import uvloop

from k3_preprocessor.main import run
from k3_preprocessor.settings import PreprocessorSettings
from k3wire.service.settings import settings_or_exit


def main() -> None:
    """Reads the environment and runs until SIGTERM or SIGINT, which drain."""
    uvloop.run(run(settings_or_exit(PreprocessorSettings, os.environ)))


if __name__ == "__main__":
    main()
