"""The status page: one file, which asks for nothing but what the admin listener answers."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("page.html")


class Page(NamedTuple):
    text: str
    headers: dict[str, str]
    """They let it run its own script and style and ask this listener, and nothing else."""


@cache
def page() -> Page:
    """The page as it is served. Raises OSError when it is not installed."""
    text = FILE.read_text("utf-8")
    script, style = (_digest(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; "
        "img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(
        text,
        {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        },
    )


def _digest(text: str, tag: str) -> str:
    (found,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
