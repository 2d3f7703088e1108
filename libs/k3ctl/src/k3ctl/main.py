"""The operator's command line, `k3`: one module a command, imported only when it is asked for."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from k3wire.service.settings import SettingsError

COMMANDS = (
    "up",
    "demo",
    "ask",
    "status",
    "trace",
    "doctor",
    "inspect",
    "verify",
    "make-checkpoint",
    "simulate",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="k3", description="Kimi K3 serving.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Only the named command's module is loaded: some need torch, most do not.
    named = [name for name in COMMANDS if name in arguments[:1]] or COMMANDS
    for name in named:
        module = importlib.import_module(f"k3ctl.commands.{name.replace('-', '_')}")
        module.add_parser(subparsers)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except SettingsError as error:
        print(f"k3: wrong settings: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing may be flushed to it at the exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
