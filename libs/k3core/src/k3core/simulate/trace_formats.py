"""Reads request traces: how long each prompt is, and which of its blocks are whose.

Each format names blocks in its own way; what leaves is one chain of digests a request, at the
match unit asked for, so that the cache runs on it as on hashed tokens.
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeAlias

from k3core.cache.hashing import DIGEST_BYTES

TraceFormat: TypeAlias = Literal["mooncake", "agent-sessions", "k3"]
# JSON as it comes from the file; a missing key is reported with the file's name.
Json = Any

# Tokens of one block id, by format: Mooncake FAST'25 release; kv-cache-tester's `block_size`.
MOONCAKE_BLOCK = 512
# Tokens between two names of the k3 format, which knows every token's origin: any unit divides.
K3_BLOCK = 1


class TraceError(ValueError):
    """A trace that cannot be read, or not at this unit; names both."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt.

    Attributes:
        session: whose it is, for naming.
        num_tokens: n.
        digests: of its full units.
        output_tokens: generated in the trace; the replay does not decode.
    """

    session: str
    num_tokens: int
    digests: tuple[bytes, ...]
    output_tokens: int


def read_trace(
    paths: Iterable[Path], kind: TraceFormat, unit_tokens: int
) -> Iterator[TraceRequest]:
    """Requests of one or more files (or folders of them), in their order.

    Raises:
        TraceError: if a file is not of the format, or its blocks do not divide the unit.
    """
    for path in paths:
        files = (
            sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        )
        for file in files:
            try:
                yield from _READERS[kind](file, unit_tokens)
            except TraceError:
                raise
            except FileNotFoundError as error:
                raise TraceError(f"{file}: no such file") from error
            except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
                raise TraceError(f"{file} is not a {kind} trace: {error!r}") from error


def block_tokens(kind: TraceFormat) -> int:
    """Tokens of the smallest block that the format tells apart; every unit is a multiple."""
    return {"mooncake": MOONCAKE_BLOCK, "agent-sessions": 64, "k3": K3_BLOCK}[kind]


def _mooncake(path: Path, unit_tokens: int) -> Iterator[TraceRequest]:
    step = _blocks_a_unit(unit_tokens, MOONCAKE_BLOCK, path)
    with _open(path) as lines:
        for line in lines:
            record: Json = json.loads(line)
            n = int(record["input_length"])
            full = n // unit_tokens
            # Ids are chained already: one names its block and everything before it.
            ids = record["hash_ids"][step - 1 : full * step : step]
            digests = tuple([each.to_bytes(DIGEST_BYTES, "little") for each in ids])
            yield TraceRequest("", n, digests, int(record["output_length"]))


def _agent_sessions(path: Path, unit_tokens: int) -> Iterator[TraceRequest]:
    with _open(path) as text:
        session: Json = json.load(text)
    block = int(session["block_size"])
    step = _blocks_a_unit(unit_tokens, block, path)
    name = str(session["id"])
    # Ids name blocks, not prefixes, and are local to the session: walked down a tree of its own.
    tree: dict[tuple[int, int], int] = {}
    # Leading bytes keep the sessions apart.
    space = sha256(name.encode()).digest()[:8]
    for request in session["requests"]:
        if "hash_ids" not in request:
            continue
        node, n = 0, int(request["in"])
        nodes: list[int] = []
        for each in request["hash_ids"][: n // unit_tokens * step]:
            node = tree.setdefault((node, each), len(tree) + 1)
            nodes.append(node)
        digests = tuple([space + each.to_bytes(8, "little") for each in nodes[step - 1 :: step]])
        yield TraceRequest(name, n, digests, int(request["out"]))


def _k3(path: Path, unit_tokens: int) -> Iterator[TraceRequest]:
    with _open(path) as lines:
        for line in lines:
            record: Json = json.loads(line)
            n = int(record["input_length"])
            salt = str(record.get("salt") or "") + "\0" + str(record.get("adapter") or "")
            parent = sha256(salt.encode()).digest()[:DIGEST_BYTES]
            digests: list[bytes] = []
            for parts in _units(record["segments"], unit_tokens, n):
                framed = json.dumps(parts).encode()
                parent = sha256(parent + framed).digest()[:DIGEST_BYTES]
                digests.append(parent)
            yield TraceRequest(
                str(record.get("session", "")), n, tuple(digests), int(record["output_length"])
            )


def _units(segments: Json, unit_tokens: int, n: int) -> Iterator[list[tuple[str, int, int]]]:
    """What each full unit consists of: (stream, first index, length) parts."""
    parts: list[tuple[str, int, int]] = []
    room, left = unit_tokens, n
    for segment in segments:
        stream = f"{segment[0]}:{segment[1]}"
        first, length = (
            (int(segment[2]), int(segment[3])) if len(segment) == 4 else (0, int(segment[2]))
        )
        length = min(length, left)
        left -= length
        while length:
            taken = min(room, length)
            parts.append((stream, first, taken))
            first, length, room = first + taken, length - taken, room - taken
            if not room:
                yield parts
                parts, room = [], unit_tokens


def _blocks_a_unit(unit_tokens: int, block: int, path: Path) -> int:
    if unit_tokens % block:
        raise TraceError(
            f"{path}: unit {unit_tokens} is not a multiple of the trace's block {block}"
        )
    return unit_tokens // block


def _open(path: Path) -> Any:
    # gzip.open and open share no public text type.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


_READERS = {"mooncake": _mooncake, "agent-sessions": _agent_sessions, "k3": _k3}
