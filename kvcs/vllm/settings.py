"""What `kv_connector_extra_config` may say: every setting, its default and its bounds.

{"relay": "moqt://relay.example:4443", "cafile": "ca.pem", "scope_key_file": "scope.json"}
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """`kv_connector_extra_config` is not what it should be; the message says what to write."""


class Way(StrEnum):
    """How a load goes together with the engine's own work (`load`)."""

    AUTO = "auto"
    """Layer by layer when layers flow or nothing else is being computed, else beside the batch."""
    LAYERWISE = "layerwise"
    """The forward pass begins at once and waits at each layer for that layer."""
    ASYNC = "async"
    """The request waits outside the batch until all of its pages are there."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`parse` makes it, from the object in vLLM's configuration."""

    relays: tuple[str, ...]
    """`relay`: the relay's URL, or a list of them, in order of preference."""
    scope_key_file: Path
    """The scope file of whoever may share these caches (`kvcs-keygen scope`)."""
    cafile: Path | None = None
    """The authorities that sign the relay's certificate, PEM; the system's by default."""
    token_file: Path | None = None
    """A file with the bearer token for the relay, which only its owner may read."""
    block_tokens: int = 64
    """Tokens of a block, the grain of what is published; equal on all that share caches."""
    load: Way = Way.AUTO
    """How loads go together with the batch: auto, layerwise or async."""
    lookup_timeout: float = 0.3
    """Seconds a look-up may take where the relay lists nothing."""
    stall: float = 0.5
    """Seconds without a single Object after which a load is given up."""
    timeout: float = 30.0
    """Seconds a load may take altogether."""
    min_tokens: int = 256
    """Fewer tokens than these are neither loaded nor published."""
    only_faster: bool = True
    """Whether a prompt is computed when loading it would take longer, by the rates measured."""
    loads: int = 16
    """Loads under way at a time; further requests are computed."""
    kvsp: str | None = None
    """Base URI of an index service of KVSP, which knows of longer publications."""
    keep: int = 4 << 30
    """Octets of own publications that are kept for consumers; the longest unused go first."""
    keep_seconds: float = 600.0
    """Seconds for which one is kept after it was last asked for."""
    descriptor: Path | None = None
    """A Compatibility Descriptor (`kvcs-describe`) instead of one made from the model's folder."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        """Read the settings. Raises SettingsError."""
        members = dict(extra)
        if "relay" in members and "relays" not in members:
            members["relays"] = members.pop("relay")
        known = {each.name: each for each in fields(cls)}
        unknown = [name for name in members if name not in known]
        if unknown:
            near = difflib.get_close_matches(unknown[0], [*known, "relay"], n=1)
            meant = f"; {near[0]!r} may be meant" if near else ""
            raise SettingsError(
                f"kv_connector_extra_config: {unknown[0]!r} is no setting of kvcs{meant}. Known "
                f"are relay, {', '.join(name for name in known if name != 'relays')}"
            )
        for name in ("relays", "scope_key_file"):
            if name not in members:
                shown = "relay" if name == "relays" else name
                raise SettingsError(
                    f"kv_connector_extra_config has no {shown!r}: give "
                    + (
                        "the relay's URL, moqt://HOST:PORT"
                        if name == "relays"
                        else "the scope file that `kvcs-keygen scope FILE` made"
                    )
                )
        return cls(**{name: _READ[name](name, value) for name, value in members.items()})


def _relays(name: str, value: Any) -> tuple[str, ...]:
    urls = [value] if isinstance(value, str) else value
    if not isinstance(urls, (list, tuple)) or not urls:
        raise _wrong("relay", value, "a URL, moqt://HOST:PORT, or a list of them")
    if not all(isinstance(url, str) and "://" in url for url in urls):
        raise _wrong("relay", value, "a URL, moqt://HOST:PORT, or a list of them")
    return tuple(urls)


def _path(name: str, value: Any) -> Path | None:
    if value is None and name != "scope_key_file":
        return None
    if not isinstance(value, str | Path) or not str(value):
        raise _wrong(name, value, "the name of a file")
    return Path(value)


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _wrong(name, value, "a URI")
    return value


def _way(name: str, value: Any) -> Way:
    try:
        return Way(value)
    except ValueError:
        raise _wrong(name, value, f"one of {', '.join(Way)}") from None


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _count(least: int) -> Any:
    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _wrong(name, value, f"a whole number of at least {least}")
        return value

    return read


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise _wrong(name, value, "a positive number of seconds")
    return float(value)


def _wrong(name: str, value: Any, wanted: str) -> SettingsError:
    return SettingsError(
        f"kv_connector_extra_config: {name!r} is {value!r}, and has to be {wanted}"
    )


_READ: Mapping[str, Any] = {
    "relays": _relays,
    "scope_key_file": _path,
    "cafile": _path,
    "token_file": _path,
    "descriptor": _path,
    "block_tokens": _count(1),
    "min_tokens": _count(0),
    "only_faster": _flag,
    "loads": _count(1),
    "keep": _count(1),
    "load": _way,
    "kvsp": _text,
    "lookup_timeout": _seconds,
    "stall": _seconds,
    "timeout": _seconds,
    "keep_seconds": _seconds,
}
