"""Writes golden files for messages that have none: `python tests/k3wire/messages/make_golden.py`.

It never overwrites: bytes that changed are a decision. Move the file to `old/` as
`<Message>-<release>.msgpack` first, where it must stay readable, then run this again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.message_examples import EXAMPLES

from k3wire.bus import codec

GOLDEN = Path(__file__).parent / "golden"


def main() -> None:
    """Writes what is missing."""
    for example in EXAMPLES:
        path = GOLDEN / f"{type(example).__name__}.msgpack"
        if not path.exists():
            path.write_bytes(codec.encode(example))
            sys.stdout.write(f"wrote {path.name}\n")


if __name__ == "__main__":
    main()
