"""What is kept of each request: raw stamps, written before anything is computed from them."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Record:
    """One request as its client saw it. All stamps are monotonic nanoseconds of this process.

    Attributes:
        index: order of intended sending.
        intended_ns: when it was due; latencies count from here.
        sent_ns: when it left.
        chunk_ns: when each piece of visible text came.
        end_ns: when the answer was complete, or failed.
        status: HTTP status, 0 if there was none.
        error: what went wrong, "" if nothing.
        num_prompt_tokens: from usage.
        num_cached_tokens: from usage.
        num_output_tokens: from usage.
        is_cancelled: the client left on purpose.
        is_warmup: sent before the counting began.
    """

    index: int
    intended_ns: int
    sent_ns: int = 0
    chunk_ns: list[int] = field(default_factory=list[int])
    end_ns: int = 0
    status: int = 0
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    is_cancelled: bool = False
    is_warmup: bool = False


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Writes records as JSON lines."""
    path.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))


def read_records(path: Path) -> list[Record]:
    """Reads what `write_records` wrote."""
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()]
