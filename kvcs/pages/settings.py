"""What an engine's configuration may say of `kvcs`: every setting, its default and its bounds.

{"kvsp": "https://kvsp.example/kvsp/", "holder": "https://h1.example/kvsp/",
 "scope_key_file": "scope.json", "descriptor": "compat.json"}
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any


class PagesError(ValueError):
    """A setting, or the engine as it is configured, does not go together with holders of KVSP; the
    message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """`parse` makes it. Times in seconds, sizes in octets."""

    kvsp: str
    """Base URI of the index service that knows who holds which page."""
    holder: str
    """Base URI of the holder that pages are put at; they are taken from any."""
    scope_key_file: Path
    """The scope file of whoever may share these pages (`kvcs-keygen scope`)."""
    descriptor: Path
    """The model's Compatibility Descriptor (`kvcs-describe MODEL_FOLDER --out FILE`)."""
    cafile: Path | None = None
    """The authorities that sign the services' certificates, PEM; the system's by default."""
    token_file: Path | None = None
    """A file with the bearer token for both, which only its owner may read."""
    http_loopback: bool = False
    """Allow http:// to services on this machine."""
    lookup_timeout: float = 0.3
    """How long a look-up may take."""
    timeout: float = 10.0
    """How long getting or putting a batch of pages may take, the look-up not included."""
    failed_seconds: float = 30.0
    """For how long a service that did not answer, or refused, is not asked again."""
    pending_octets: int = 256 << 20
    """Pages that are being put, and those got at a time for LMCache; with more, no page is put."""
    uploads: int = 4
    """Pages of a batch that are put at a time."""

    @classmethod
    def parse(cls, settings: Any) -> PageSettings:
        """Read the settings. Raises PagesError."""
        if not isinstance(settings, Mapping):
            raise PagesError('the settings of kvcs are an object: "kvcs": {"kvsp": "https://…", …}')
        known = {each.name: each for each in fields(cls)}
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                meant = f"; {near[0]!r} may be meant" if near else ""
                raise PagesError(
                    f"{name!r} is no setting of kvcs{meant}. Known are {', '.join(known)}"
                )
        missing = [
            name for name, each in known.items() if each.default is MISSING and name not in settings
        ]
        if missing:
            raise PagesError(f"the settings of kvcs have no {' and no '.join(map(repr, missing))}")
        return cls(**{name: _read(name, value) for name, value in settings.items()})


_FILES = ("scope_key_file", "descriptor", "cafile", "token_file")
_SECONDS = ("lookup_timeout", "timeout", "failed_seconds")


def _read(name: str, value: Any) -> Any:
    if name in _FILES:
        if not isinstance(value, str | Path) or not str(value):
            raise _wrong(name, value, "the name of a file")
        return Path(value)
    if name == "http_loopback":
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value
    if name in ("kvsp", "holder"):
        if not isinstance(value, str):
            raise _wrong(name, value, "a URI, https://HOST/kvsp/")
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _SECONDS:
        if not number or not 0 < value < 1e9:
            raise _wrong(name, value, "a number of seconds above 0")
        return float(value)
    if not number or value != int(value) or value < 1:
        raise _wrong(name, value, "a whole number of at least 1")
    return int(value)


def _wrong(name: str, value: Any, meant: str) -> PagesError:
    return PagesError(f"{name} is {value!r}, but it has to be {meant}")
