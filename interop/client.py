"""`python -m interop.client`: a test client under the contract of the public interop runner.

Options and environment, TAP version 14 on standard output, exit status 0 (all passed),
1 (one failed) or 127 (no such case).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import interop.cases as _filled  # noqa: F401  the table is filled by the import
from interop import tap
from interop.case import CASES, DRAFT, Case, perform

DEFAULT_RELAY = "https://localhost:4443"
PASSED, FAILED, UNSUPPORTED = 0, 1, 127


@dataclass(frozen=True, slots=True)
class Options:
    relay: str
    test: str | None
    list: bool
    verbose: bool
    verify: bool


def own_version() -> str:
    try:
        return version("kvcs")
    except PackageNotFoundError:
        return "unknown"


def parse_options(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Arguments win over the environment, and that over the defaults."""
    parser = argparse.ArgumentParser(prog="interop.client", description="MOQT test client (kvcs)")
    parser.add_argument("-r", "--relay", metavar="URL", help=f"default {DEFAULT_RELAY}")
    parser.add_argument("-t", "--test", metavar="NAME", help="run this case only")
    parser.add_argument("-l", "--list", action="store_true", help="list the cases")
    parser.add_argument("-v", "--verbose", action="store_true", help="logs on standard error")
    parser.add_argument("--tls-disable-verify", action="store_true", help="accept any certificate")
    parsed = parser.parse_args(arguments)

    def switched(name: str) -> bool:
        return environment.get(name, "").lower() in ("1", "true", "yes")

    return Options(
        relay=parsed.relay or environment.get("RELAY_URL") or DEFAULT_RELAY,
        test=parsed.test or environment.get("TESTCASE") or None,
        list=parsed.list,
        verbose=parsed.verbose or switched("VERBOSE"),
        verify=not (parsed.tls_disable_verify or switched("TLS_DISABLE_VERIFY")),
    )


async def run(cases: Sequence[Case], options: Options) -> int:
    """Run `cases` one after the other and print as they end."""
    comments = [f"kvcs-test-client {own_version()}", f"Relay: {options.relay}", f"Draft: {DRAFT}"]
    print(tap.header(len(cases), comments), flush=True)
    failed = 0
    for number, each in enumerate(cases, 1):
        point = await perform(each, options.relay, verify=options.verify)
        print(tap.render(number, point), flush=True)
        failed += point.failed
        if number == 1 and point.diagnostics.get("received") == "ConnectError":
            print(f"Bail out! {tap.one_line(str(point.diagnostics['message']))}", flush=True)
            break
    return FAILED if failed else PASSED


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(sys.argv[1:] if arguments is None else arguments, os.environ)
    if options.list:
        print("\n".join(CASES))
        return PASSED
    if options.test is not None and options.test not in CASES:
        print(f"no case {options.test!r} here; --list names them", file=sys.stderr)
        return UNSUPPORTED
    level = logging.DEBUG if options.verbose else logging.CRITICAL
    logging.basicConfig(level=level, stream=sys.stderr)
    chosen = list(CASES.values()) if options.test is None else [CASES[options.test]]
    return asyncio.run(run(chosen, options))


if __name__ == "__main__":
    sys.exit(main())
