"""Starts a prefill worker: `python -m k3_prefill`, or `k3-prefill`."""

import os

import uvloop

from k3_prefill.main import run
from k3_prefill.settings import PrefillSettings
from k3wire.service.settings import settings_or_exit


def main() -> None:
    """Reads the environment and runs until SIGTERM or SIGINT, which drain."""
    uvloop.run(run(settings_or_exit(PrefillSettings, os.environ)))


if __name__ == "__main__":
    main()
