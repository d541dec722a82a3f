"""`python -m interop.browser`: the cases of the browser against a relay, as TAP version 14.

The relay's certificate has to be one that browsers take by its hash: ECDSA P-256, valid for at
most 14 days. Exit status as of `interop.client`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from interop import client
from interop.browser import chromium
from interop.browser.cases import Browser, cases, names
from interop.browser.page import open_page
from interop.peers import Unavailable
from interop.processes import ProgramFailed
from moqt.quic.certificates import fingerprint
from moqt.uri import parse_uri

NO_BROWSER = 2


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="interop.browser", description="MOQT in a page, against a relay"
    )
    parser.add_argument("-r", "--relay", metavar="URL", default=client.DEFAULT_RELAY)
    parser.add_argument("-t", "--test", metavar="NAME", help="run this case only")
    parser.add_argument("-l", "--list", action="store_true", help="list the cases")
    parser.add_argument("-v", "--verbose", action="store_true", help="logs on standard error")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="the relay's certificate, PEM")
    parser.add_argument(
        "--relay-log", type=Path, metavar="FILE", help="where the relay logs: who was refused"
    )
    return parser.parse_args(arguments)


async def run(options: argparse.Namespace, browser: Path) -> int:
    """The page goes by WebTransport, our own side of a case by native QUIC."""
    uri = parse_uri(options.relay)
    ours = client.Options(
        relay=f"moqt://{uri.authority}{uri.path or ''}",
        test=options.test,
        list=False,
        verbose=options.verbose,
        verify=False,
    )
    url = f"https://{uri.authority}{uri.path or '/'}"
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        async with open_page(browser, Path(folder)) as page:
            every = cases(Browser(page, url, fingerprint(options.cert), options.relay_log))
            chosen = [each for each in every if options.test in (None, each.name)]
            return await client.run(chosen, ours)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    if options.list:
        print("\n".join(names()))
        return client.PASSED
    if options.test is not None and options.test not in names():
        print(f"no case {options.test!r} here; --list names them", file=sys.stderr)
        return client.UNSUPPORTED
    if options.cert is None:
        print("--cert names the relay's certificate: browsers take it by its hash", file=sys.stderr)
        return NO_BROWSER
    level = logging.DEBUG if options.verbose else logging.CRITICAL
    logging.basicConfig(level=level, stream=sys.stderr)
    # As an exception, so that the browser is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return asyncio.run(run(options, chromium.find_browser()))
    except (Unavailable, ProgramFailed) as why:
        print(why, file=sys.stderr)
        return NO_BROWSER


def entry() -> None:
    sys.exit(main())
