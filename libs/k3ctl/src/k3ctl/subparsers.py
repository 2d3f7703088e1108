"""The one thing a command module needs of its caller's argument parser."""

import argparse
from typing import Protocol


class Subparsers(Protocol):
    """What `argparse.ArgumentParser.add_subparsers` returns, whose own class is private."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser:
        """Add a command and give its parser."""
        ...
