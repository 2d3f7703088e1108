"""Logging: a constant phrase and fields, as text for people or JSON for collectors.

Never a prompt, an image, a key or a whole client URL; whoever logs gives fields that say less.
"""

import logging
import sys
import time
from typing import Any

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FieldFormatter(logging.Formatter):
    """Formats a record with the fields that were given as `extra`."""

    def __init__(self, service: str, worker_id: str, *, is_json: bool) -> None:
        """Makes a formatter.

        Args:
            service: name of the process's role.
            worker_id: which process.
            is_json: one JSON object a line instead of text.
        """
        super().__init__()
        self._service = service
        self._worker_id = worker_id
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        """Gives the line."""
        fields = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._is_json:
            line: dict[str, Any] = {
                "time": record.created,
                "level": record.levelname,
                "service": self._service,
                "worker": self._worker_id,
                "logger": record.name,
                "event": record.getMessage(),
                **fields,
            }
            if trace:
                line["exception"] = trace
            return msgspec.json.encode(line, enc_hook=str).decode()
        head = f"{stamp}.{int(record.msecs):03d} {record.levelname:7} {self._service:12}"
        tail = "".join(f" {key}={value}" for key, value in fields.items())
        return f"{head} {record.getMessage()}{tail}" + (f"\n{trace}" if trace else "")


def start_logging(service: str, worker_id: str, level: str, style: str) -> None:
    """Sets up the root logger of this process, on standard error.

    Args:
        service: name of the role.
        worker_id: which process.
        level: least level shown.
        style: `text` or `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldFormatter(service, worker_id, is_json=style == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("nats").setLevel(logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
