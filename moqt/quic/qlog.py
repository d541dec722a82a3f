"""Event logs in qlog's JSON text sequences (`.sqlog`), one file per connection.

qlog 0.3, "JSON-SEQ": a record separator, a JSON object and a line feed for each record; the
first one is the header. QUIC's events and MOQT's go into the same file. For debugging only:
a log shows who asked for which track, never a payload or a secret.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

logger = logging.getLogger("moqt.qlog")

VantagePoint = Literal["client", "server"]

BUFFER_OCTETS = 64 << 10
"""What waits in memory at most before it goes to the file."""
FLUSH_SECONDS = 1.0
"""An event this much later than the last write takes the waiting ones along."""
MAX_FILE_OCTETS = 256 << 20
"""A log ends here: a connection that is left running must not fill the disk."""


def _plain(value: object) -> object:
    """JSON for what the standard encoder does not know: octets are shown in hexadecimal."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return str(value)


class QlogWriter:
    """Writes events to one file. No method raises: what cannot be written is dropped, counted.

    `dropped` counts events lost to a full disk, the size limit, or data that is no JSON.
    Writes are small and buffered; they happen in the caller's thread.
    """

    def __init__(
        self, file: IO[bytes] | None, now: float, *, max_octets: int = MAX_FILE_OCTETS
    ) -> None:
        self.dropped = 0
        self.octets = 0
        """What the file holds."""
        self.now = now
        """The latest time an event had."""
        self._file = file
        self._start = self._latest = now
        self._flushed_at = now
        self._max_octets = max_octets
        self._records: list[bytes] = []
        self._waiting = 0
        self._warned = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        vantage_point: VantagePoint,
        *,
        now: float,
        title: str = "",
        group_id: str = "",
        max_octets: int = MAX_FILE_OCTETS,
    ) -> QlogWriter:
        """A writer for a new file that only its owner may read.

        `now` is the caller's clock, in seconds, as `event` takes it; `group_id` is the
        original destination connection id in hexadecimal. A file that cannot be made is
        reported once in the log; the writer then drops everything.
        """
        file: IO[bytes] | None = None
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            file = os.fdopen(handle, "wb", buffering=0)
        except OSError as error:
            logger.warning("no event log in %s: %s", path, error.strerror or error)
        writer = cls(file, now, max_octets=max_octets)
        common: dict[str, object] = {
            "time_format": "relative",
            "reference_time": round(time.time() * 1000, 3),
        }
        if group_id:
            common |= {"group_id": group_id, "ODCID": group_id}
        writer._add(
            {
                "qlog_format": "JSON-SEQ",
                "qlog_version": "0.3",
                "title": title,
                "trace": {
                    "vantage_point": {"name": "kvcs", "type": vantage_point},
                    "common_fields": common,
                },
            }
        )
        return writer

    def event(self, now: float, name: str, data: Mapping[str, Any]) -> None:
        """Add an event, `name` with its category as in `transport:packet_sent`.

        `now` is in seconds on the clock that `open` was given. Some of those who write take the
        time once for a batch: an event is not dated before the one it follows.
        """
        now = self._latest = max(now, self._latest)
        self.now = max(self.now, now)
        self._add({"time": round((now - self._start) * 1000, 3), "name": name, "data": data})
        if now - self._flushed_at >= FLUSH_SECONDS:
            self._flushed_at = now
            self.flush()

    def _add(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            self.dropped += 1
            return
        try:
            text = json.dumps(record, separators=(",", ":"), default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            self.dropped += 1
            self._warn(f"an event cannot be written: {error}")
            return
        encoded = b"\x1e%b\n" % text.encode()
        if self.octets + self._waiting + len(encoded) > self._max_octets:
            self.dropped += 1
            self._warn(f"the event log is full at {self._max_octets} octets")
            return
        self._records.append(encoded)
        self._waiting += len(encoded)
        if self._waiting >= BUFFER_OCTETS:
            self.flush()

    def flush(self) -> None:
        """Hand what waits to the file; after an error it is dropped, not kept."""
        if self._file is None or not self._records:
            return
        records, self._records, self._waiting = self._records, [], 0
        view = memoryview(b"".join(records))
        kept = self.octets
        try:
            while view:
                count = self._file.write(view) or 0
                self.octets += count
                view = view[count:]
        except OSError as error:
            self.dropped += len(records)
            self._warn(f"writing failed: {error.strerror or error}")
            self._cut(kept)

    def _cut(self, size: int) -> None:
        """Take back a record of which only a part was written."""
        if self._file is None or self.octets == size:
            return
        try:
            self._file.truncate(size)
            self._file.seek(size)
        except OSError:
            return  # not a plain file; a reader of text sequences skips a broken record
        self.octets = size

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("qlog: %s; reported once, further events are counted", text)

    def close(self) -> None:
        """Write what waits and close the file; later events are counted as dropped."""
        self.flush()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._warn(f"closing failed: {error.strerror or error}")


def log_path(directory: str | os.PathLike[str], group_id: str, vantage_point: VantagePoint) -> Path:
    """`<connection id>_<vantage point>.sqlog` in `directory`; a number keeps it from another's."""
    name = re.sub(r"[^0-9A-Za-z]", "_", group_id) or "connection"
    path = Path(directory) / f"{name}_{vantage_point}.sqlog"
    number = 1
    while path.exists():
        number += 1
        path = Path(directory) / f"{name}_{vantage_point}_{number}.sqlog"
    return path
