"""Make a self-signed certificate: `python -m tools.certs DIR [NAME ...]`."""

from __future__ import annotations

import argparse

from moqt.quic.certificates import DEFAULT_NAMES, make_self_signed

__all__ = ["make_self_signed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="where cert.pem and key.pem go")
    parser.add_argument("names", nargs="*", default=list(DEFAULT_NAMES), help="DNS names and IPs")
    options = parser.parse_args()
    for path in make_self_signed(options.directory, options.names or DEFAULT_NAMES):
        print(path)


if __name__ == "__main__":
    main()
