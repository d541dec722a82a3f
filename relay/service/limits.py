"""`--limit NAME=VALUE`: every limit of a relay, of its sessions and of their QUIC connections."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from moqt.quic.config import QuicConfig
from moqt.values.config import SessionConfig
from relay.config import RelayConfig

SESSION = (
    "max_requests",
    "max_request_rate",
    "max_request_octets",
    "max_queued_requests",
    "stream_timeout",
    "max_track_aliases",
    "max_namespaces_told",
    "max_held_octets",
    "max_filter_ranges",
    "max_request_updates",
    "max_auth_token_cache_size",
    "max_tokens",
    "request_timeout",
    "setup_timeout",
    "alias_timeout",
    "done_timeout",
)
QUIC = (
    "max_connections",
    "max_connections_per_address",
    "retry_threshold",
    "max_resets",
    "max_session_tickets",
    "max_streams_bidi",
    "max_streams_uni",
    "max_open_streams_bidi",
    "max_open_streams_uni",
    "stream_window",
    "session_window",
    "window_memory",
    "max_reassembly",
    "max_pieces",
    "max_datagram_queue",
    "socket_buffer",
    "idle_timeout",
    "handshake_timeout",
    "remember_paths",
    "first_flight",
    "qlog_max_octets",
)


OPTIONS = ("cache_octets", "disk_octets")
"""Limits that have an option of their own."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit that can be set: `of` is what it belongs to."""

    name: str
    of: type
    default: float | None


def _limits() -> dict[str, Limit]:
    chosen: tuple[tuple[type, Iterable[Field[object]], Iterable[str] | None], ...] = (
        (RelayConfig, fields(RelayConfig), None),
        (SessionConfig, fields(SessionConfig), SESSION),
        (QuicConfig, fields(QuicConfig), QUIC),
    )
    found: dict[str, Limit] = {}
    for of, every, names in chosen:
        for field in every:
            if field.name in OPTIONS or (names is not None and field.name not in names):
                continue
            assert field.name not in found and field.default is not MISSING
            default = field.default
            assert default is None or isinstance(default, int | float)
            found[field.name] = Limit(field.name, of, default)
    return found


LIMITS = _limits()


def near(name: str, known: Iterable[str]) -> str:
    """What may have been meant by a name that is not known, to stand behind what is said of it."""
    found = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {found[0]}?" if found else ""


class Chosen:
    """The limits that were set, by what they belong to."""

    def __init__(self, settings: Iterable[str]) -> None:
        """Raises ValueError with a sentence for a name or a value that cannot be meant."""
        self._values: dict[type, dict[str, Any]] = {
            RelayConfig: {},
            SessionConfig: {},
            QuicConfig: {},
        }
        for setting in settings:
            name, equals, text = setting.partition("=")
            limit = LIMITS.get(name.strip())
            if limit is None:
                raise ValueError(
                    f"{name!r} is no limit of a relay (docs/limits.md lists them)"
                    f"{near(name, LIMITS)}"
                )
            if not equals:
                raise ValueError(f"{name} needs a value: write {name}={limit.default}")
            self._values[limit.of][limit.name] = _number(limit, text)

    @property
    def relay(self) -> dict[str, Any]:
        return self._values[RelayConfig]

    @property
    def session(self) -> dict[str, Any]:
        return self._values[SessionConfig]

    @property
    def quic(self) -> dict[str, Any]:
        return self._values[QuicConfig]


def _number(limit: Limit, text: str) -> float:
    kind = float if isinstance(limit.default, float) else int
    try:
        value = kind(text.strip().replace("_", ""))
    except ValueError:
        what = "a number" if kind is float else "a whole number"
        raise ValueError(f"{limit.name} must be {what}, not {text!r}") from None
    if not 0 <= value < 1 << 60:
        raise ValueError(f"{limit.name} must be between 0 and 2^60, not {text!r}")
    return value
