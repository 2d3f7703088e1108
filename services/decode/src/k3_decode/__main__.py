"""Starts a decode worker: `python -m k3_decode`, or `k3-decode`."""

import os

import uvloop

from k3_decode.main import run
from k3_decode.settings import DecodeSettings
from k3wire.service.settings import settings_or_exit


def main() -> None:
    """Reads the environment and runs until SIGTERM or SIGINT, which drain."""
    uvloop.run(run(settings_or_exit(DecodeSettings, os.environ)))


if __name__ == "__main__":
    main()
