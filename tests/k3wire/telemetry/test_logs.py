"""Log lines: a constant phrase and fields, for people or for collectors."""

import json
import logging
import sys
from typing import Any

from k3wire.telemetry.logs import FieldFormatter


def record(message: str, *, failed: bool = False, **fields: Any) -> logging.LogRecord:
    logger = logging.Logger("k3_test.room")
    info = None
    if failed:
        try:
            raise ValueError("why")
        except ValueError:
            info = sys.exc_info()
    return logger.makeRecord(logger.name, 20, "f", 1, message, (), info, extra=fields)


def test_text_lines_hold_phrase_and_fields() -> None:
    line = FieldFormatter("fetcher", "w", is_json=False).format(
        record("image resolved", host="a.example", size_bytes=7)
    )
    assert line.endswith("INFO    fetcher      image resolved host=a.example size_bytes=7")
    assert "\n" not in line


def test_json_lines_hold_the_same_and_anything_that_was_given() -> None:
    text = FieldFormatter("fetcher", "w", is_json=True).format(
        record("image resolved", failed=True, host="a\nb", odd=object, many=(1, 2))
    )
    assert "\n" not in text
    line = json.loads(text)
    assert (line["event"], line["service"], line["worker"]) == ("image resolved", "fetcher", "w")
    assert (line["host"], line["many"]) == ("a\nb", [1, 2])
    assert "ValueError: why" in line["exception"]


def test_a_traceback_follows_a_text_line() -> None:
    line = FieldFormatter("fetcher", "w", is_json=False).format(record("failed", failed=True))
    assert line.splitlines()[-1] == "ValueError: why"
