"""Which checkpoint a command serves: a named one, the shipped one, or a random one made here."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

MADE_FOLDER = Path(".k3") / "checkpoints" / "micro"
SHIPPED_FOLDER = Path(__file__).resolve().parents[4] / "checkpoints" / "k3-nano"
"""Where a clone keeps the demo checkpoint, if it has one."""


class NoCheckpoint(Exception):
    """No usable checkpoint; the message says what to do."""


def find_checkpoint(named: str, say: Callable[[str], None]) -> Path:
    """Gives the directory to serve, making a small random model if there is no other.

    Args:
        named: by an option or setting, "" for none.
        say: shows one line of progress.

    Raises:
        NoCheckpoint: the named directory holds none, or making one failed.
    """
    if named:
        folder = Path(named)
        if not (folder / "config.json").is_file():
            raise NoCheckpoint(f"{folder} holds no config.json; name a checkpoint's directory")
        return folder
    if (SHIPPED_FOLDER / "config.json").is_file():
        return SHIPPED_FOLDER
    if not (MADE_FOLDER / "config.json").is_file():
        say(f"making a small random checkpoint in {MADE_FOLDER}")
        # A process of its own: this one must not load torch.
        command = [sys.executable, "-m", "k3ctl.main", "make-checkpoint", "--size", "micro"]
        done = subprocess.run(
            [*command, "--seed", "0", "--out", str(MADE_FOLDER)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise NoCheckpoint(f"no checkpoint could be made: {done.stderr.strip()[-400:]}")
    return MADE_FOLDER
