"""Writes docs/kvcs-relay.schema.json, the JSON Schema of the file of `kvcs-relay --config`.

Example: python -m tools.relay_schema
"""

from __future__ import annotations

import json

from relay.service.cli import settings
from relay.service.limits import LIMITS
from relay.service.settings import schema
from tools.limits import PAGE, TITLES, sentences

FILE = PAGE.with_name("kvcs-relay.schema.json")


def text() -> str:
    """The whole file."""
    said = {name: words for of in TITLES for name, words in sentences(of).items()}
    limits = {name: said[name] for name in LIMITS}
    return json.dumps(schema(settings(), "kvcs-relay --config", limits), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
