"""A relay's lines on standard error: for people, or an object of JSON each."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

_CONNECTION: Final = re.compile(r"\[([0-9a-f]{2,40})\](?: (\S+:\d+):|:)? ")


class LogFormat(StrEnum):
    """How lines are written: the values of `--log-format`."""

    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """`time` (RFC 3339, UTC), `level`, `logger`, `message`; of what is about a session its
    `connection` ID and, where that is known, its `peer`; of a fault in the program its
    `exception`."""

    def __init__(self, worker: str = "") -> None:
        """`worker` is the one whose lines they are, where there are several."""
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if self._worker:
            told["worker"] = self._worker
        found = _CONNECTION.match(message)
        if found is not None:
            told["connection"] = found[1]
            if found[2]:
                told["peer"] = found[2]
            message = message[found.end() :]
        told["message"] = message
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


def begin(level: int, style: LogFormat, worker: str = "") -> None:
    """Log to standard error from now on, as the `worker` of that name where there are several."""
    name = f"%(name)s[{worker}]" if worker else "%(name)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(worker)
        if style is LogFormat.JSON
        else logging.Formatter(f"%(asctime)s %(levelname)s {name}: %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler])
