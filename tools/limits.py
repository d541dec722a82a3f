"""Writes docs/limits.md from the settings themselves, so that it cannot go stale.

Example: python -m tools.limits
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from kvcs.names.limits import LIMITS as CACHE_LIMITS
from moqt.quic.config import QuicConfig
from moqt.values.config import SessionConfig
from relay.config import RelayConfig
from relay.service.limits import LIMITS
from tools.remembered import table

PAGE = Path(__file__).parent.parent / "docs" / "limits.md"

HEAD = """# Limits

Every limit of `kvcs-relay`, and at the end those of publishers and consumers of caches. Of a relay,
set one with `--limit NAME=VALUE`, as often as needed, for example
`--limit max_requests=50000 --limit idle_timeout=60`. Sizes are octets, times seconds. In Python
they are fields of the class that each table names. This page is written by `make docs`.

When a session comes to a limit on requests, or the relay to one of its own, the log says so once
(WARNING), the request is refused with EXCESSIVE_LOAD in words that name the limit, and a counter
grows (`Session.counters`, `kvcs_relay_session_…_total`; `kvcs_relay_requests_over_limit_total`).
"""
TITLES = {
    RelayConfig: "Of a relay, for each scope (`relay.config.RelayConfig`)",
    SessionConfig: "Of each session (`moqt.session.SessionConfig`)",
    QuicConfig: "Of each QUIC connection, or of the port (`moqt.quic.QuicConfig`)",
}


def sentences(of: type) -> dict[str, str]:
    """What is written under each field of a dataclass, on one line."""
    body = ast.parse(inspect.getsource(of).strip()).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = " ".join(text.value.value.split())
    return found


def page() -> str:
    """The whole page. Raises KeyError for a limit that says nothing of itself."""
    parts = [HEAD]
    for of, title in TITLES.items():
        said = sentences(of)
        parts.append(f"\n## {title}\n\n| `--limit` | default | what it is |\n|---|---|---|\n")
        for limit in LIMITS.values():
            if limit.of is of:
                name = limit.name
                default = "none" if limit.default is None else f"{limit.default:_}"
                parts.append(f"| `{name}` | {default} | {said[limit.name]} |\n")
    return "".join([*parts, table(), of_caches()])


OF_CACHES = """
## Of publishers and consumers of caches (`kvcs`)

The log says so when one is come to for the first time (WARNING), who asked is told, and
`limits_reached` of `--json`, in Python `kvcs.names.limits.REACHED`, counts how often.

| in Python | option | default | what it is | at it |
|---|---|---|---|---|
"""


def of_caches() -> str:
    """The table of the limits of `kvcs`."""
    return OF_CACHES + "".join(
        f"| `{each.name}` | {each.option} | {each.default:_} | {each.what} | {each.full} |\n"
        for each in CACHE_LIMITS
    )


if __name__ == "__main__":
    PAGE.write_text(page())
