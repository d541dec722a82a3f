"""`python -m interop.relay_entry`: our relay under the contract of the public interop runner.

Maps MOQT_ROLE, MOQT_PORT, MOQT_CERT, MOQT_KEY and MOQT_MLOG_DIR to the options of
`kvcs-relay`. What follows on the command line is passed on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from relay.service import entry

CERT, KEY = "/certs/cert.pem", "/certs/priv.key"
PORT = "4443"
UNSUPPORTED = 127


class UnsupportedRole(Exception):
    """The runner asks for a role we do not play; the message says which."""


def relay_options(environment: Mapping[str, str]) -> list[str]:
    """The `kvcs-relay` options for the runner's variables. Raises UnsupportedRole."""
    role = environment.get("MOQT_ROLE") or "relay"
    if role != "relay":
        raise UnsupportedRole(f"MOQT_ROLE {role!r}: only 'relay' is played here")
    host = environment.get("MOQT_HOST") or "0.0.0.0"
    options = ["--listen", f"{host}:{environment.get('MOQT_PORT') or PORT}"]
    options += ["--cert", environment.get("MOQT_CERT") or CERT]
    options += ["--key", environment.get("MOQT_KEY") or KEY]
    if events := environment.get("MOQT_MLOG_DIR"):
        options += ["--qlog-dir", events]
    return options


def main() -> None:
    try:
        options = relay_options(os.environ)
    except UnsupportedRole as error:
        print(error, file=sys.stderr)
        sys.exit(UNSUPPORTED)
    sys.argv = ["kvcs-relay", *options, *sys.argv[1:]]
    entry.main()


if __name__ == "__main__":
    main()
