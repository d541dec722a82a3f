"""A UDP proxy that stands for a network: slow, narrow, lossy, or whatever you say.

A relay on port 4443, met at port 4444 through a network with a round trip of 100 ms, 20 MB/s and
1 % loss; statistics come at the end, and on SIGUSR1:

    kvcs-relay --listen 127.0.0.1:4443 --self-signed tls &
    python -m tools.path --listen 127.0.0.1:4444 --to 127.0.0.1:4443 \\
        --delay 50ms --rate 20MB/s --queue 100ms --loss 1%
    kvcs-subscribe moqt://127.0.0.1:4444 --cafile tls/cert.pem ...

A network by its name, with something changed, and a second route in the same process:

    python -m tools.path --listen 127.0.0.1:4444 --to 127.0.0.1:4443 --profile lte --loss 0 \\
        --and --listen 127.0.0.1:4445 --to 127.0.0.1:4443 --profile satellite

Each option of a path is for both directions; with --up-... or --down-... (--down-loss 2%) for one.
Up is from the clients to the server. All clients of a route share its bottleneck.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tools.path.link import Path
from tools.path.profiles import PROFILES
from tools.path.proxy import Proxy

_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZES = {"": 1, "B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20}
_RATES = {f"{unit}/s": octets for unit, octets in _SIZES.items() if unit} | {
    "": 1,
    "bit/s": 1 / 8,
    "kbit/s": 1e3 / 8,
    "Mbit/s": 1e6 / 8,
    "Gbit/s": 1e9 / 8,
}


def _number(text: str, units: dict[str, float], what: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([A-Za-z/]*)", text.strip())
    if match is None or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise argparse.ArgumentTypeError(f"{text!r} is no {what} (a number with one of {known})")
    return float(match[1]) * units[match[2]]


def duration(text: str) -> float:
    """Seconds of `50ms`, `1.5s`, `2`."""
    return _number(text, _TIMES, "time")


def size(text: str) -> int:
    """Octets of `64KiB`, `3MB`, `1300`."""
    return int(_number(text, dict(_SIZES), "size"))


def rate(text: str) -> float:
    """Octets a second of `20MB/s`, `50Mbit/s`."""
    return _number(text, dict(_RATES), "rate")


def chance(text: str) -> float:
    """A probability of `1%`, `0.01`."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def queue(text: str) -> int | float:
    """Octets as an int, or seconds at the rate as a float."""
    match = re.search(r"[a-zA-Z]+$", text)
    return duration(text) if match is not None and match[0] in ("s", "ms", "us") else size(text)


def burst(text: str) -> tuple[float, float]:
    """`0.1%x20`: how probably a burst begins, and datagrams it takes in the mean."""
    begins, _, length = text.partition("x")
    return chance(begins), float(length or 10)


def police(text: str) -> tuple[float, int, bool]:
    """`5MB/s+64KiB`: rate and bucket of a policer; of each flow's with `:each` behind."""
    limits, _, each = text.partition(":")
    if each not in ("", "each"):
        raise argparse.ArgumentTypeError(f"{text!r}: after the colon stands each, or nothing")
    limit, _, bucket = limits.partition("+")
    return rate(limit), size(bucket or "64KiB"), bool(each)


def blackouts(text: str) -> tuple[tuple[float, float], ...]:
    """`10s+2s,30s+500ms`: when they begin and how long each lasts."""
    pairs = [each.partition("+") for each in text.split(",")]
    return tuple((duration(at), duration(at) + duration(span)) for at, _, span in pairs)


def address(text: str) -> tuple[str, int]:
    """`127.0.0.1:4443`, `[::1]:4443`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no address (such as 127.0.0.1:4443)")
    return host.strip("[]"), int(port)


_OPTIONS: dict[str, tuple[Callable[[str], Any], tuple[str, ...], str]] = {
    "delay": (duration, ("latency",), "one way, as 50ms"),
    "jitter": (duration, ("jitter",), "at most so much more, another each 20 ms; keeps the order"),
    "rate": (rate, ("bandwidth",), "of the bottleneck, as 20MB/s or 50Mbit/s"),
    "queue": (queue, ("queue",), "before the bottleneck, as 64KiB, or 300ms of its rate"),
    "police": (
        police,
        ("police", "police_burst", "police_each"),
        "drop beyond RATE[+BUCKET][:each], as 5MB/s+64KiB; for each client by itself",
    ),
    "loss": (chance, ("loss",), "of single datagrams, as 1%% or 0.01"),
    "burst": (burst, ("burst", "burst_length"), "losses in a row: CHANCE[xLENGTH], as 0.1%%x20"),
    "reorder": (chance, ("reorder",), "how many are late and overtaken, as 10%%"),
    "reorder-by": (duration, ("reorder_by",), "how late at most; twice the delay by default"),
    "duplicate": (chance, ("duplicate",), "how many come twice, as 1%%"),
    "mtu": (size, ("mtu",), "drop longer datagrams; octets of UDP payload"),
    "blackout": (blackouts, ("blackouts",), "nothing passes: BEGIN+LENGTH[,...], as 10s+2s"),
}
"""Of each option of a path: how it is read, the fields of `Path` it sets, and its help."""


def described(up: Path, down: Path) -> str:
    """A profile in words. Both ways alike but for the rate."""
    parts = [f"{1000 * (up.latency + down.latency):g} ms"]
    if up.bandwidth is not None and down.bandwidth is not None:
        parts.append(f"{down.bandwidth / 1e6:g} MB/s down, {up.bandwidth / 1e6:g} up")
        parts.append(f"queue of {1000 * down.queue / down.bandwidth:.3g} ms")
    if down.jitter:
        parts.append(f"jitter of {1000 * down.jitter:g} ms")
    if down.loss:
        parts.append(f"{100 * down.loss:g} % loss")
    return ", ".join(parts)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tools.path",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="profiles:\n" + "\n".join(f"  {n:17}{described(*p)}" for n, p in PROFILES.items()),
    )
    made.add_argument("--listen", type=address, required=True, help="where clients send to")
    made.add_argument("--to", type=address, required=True, help="where that is forwarded")
    made.add_argument("--profile", choices=PROFILES, help="a network by its name")
    made.add_argument("--rebind", type=duration, help="another source port each so often")
    made.add_argument("--seed", type=int, default=1, help="another seed, other dice")
    made.add_argument("--json", action="store_true", help="statistics as a line of JSON per route")
    for name, (kind, _, what) in _OPTIONS.items():
        metavar = name.upper()
        made.add_argument(f"--{name}", type=kind, metavar=metavar, help=what)
        for side in ("up", "down"):
            made.add_argument(f"--{side}-{name}", type=kind, help=argparse.SUPPRESS)
    return made


def paths(options: argparse.Namespace) -> tuple[Path, Path]:
    """The path up and the path down. Raises ValueError for what no path can be."""
    base = PROFILES.get(options.profile) or (Path(latency=0.0), Path(latency=0.0))
    return _path(base[0], options, "up"), _path(base[1], options, "down")


def _path(base: Path, options: argparse.Namespace, side: str) -> Path:
    changes: dict[str, Any] = {}
    for name, (_, fields, _) in _OPTIONS.items():
        key = name.replace("-", "_")
        value = getattr(options, f"{side}_{key}")
        value = getattr(options, key) if value is None else value
        if value is not None:
            changes.update(zip(fields, value if len(fields) > 1 else (value,), strict=True))
    if isinstance(waits := changes.get("queue"), float):
        bandwidth = changes.get("bandwidth", base.bandwidth)
        if bandwidth is None:
            raise ValueError(f"a queue of {waits:g} s needs a --rate")
        changes["queue"] = int(waits * bandwidth)
    return replace(base, **changes)


def routes(argv: Sequence[str]) -> list[argparse.Namespace]:
    """The options of each route; `--and` stands between two."""
    parts: list[list[str]] = [[]]
    for each in argv:
        if each == "--and":
            parts.append([])
        else:
            parts[-1].append(each)
    made = parser()
    read = [made.parse_args(part) for part in parts]
    for options in read:
        try:
            options.paths = paths(options)
        except ValueError as error:
            made.error(str(error))
    return read


def report(proxy: Proxy, as_json: bool) -> None:
    """The statistics of all routes, on the standard output."""
    for told in proxy.statistics():
        if as_json:
            print(json.dumps(told), flush=True)
            continue
        print(f"{told['listen']} to {told['to']}: {told['clients']} clients", end="")
        print(f", rebound {told['rebound']} times" if told["rebound"] else "")
        for side in ("up", "down"):
            link = told[side]
            drops = ", ".join(f"{count:,} {why}" for why, count in link["dropped"].items())
            more = "".join(f", {link[k]:,} {k}" for k in ("duplicated", "reordered") if link[k])
            print(
                f"  {side:5}{link['forwarded']:>10,} of {link['offered']:,} datagrams, "
                f"{link['octets'] / 1e6:,.1f} MB; dropped: {drops or 'none'}{more}; "
                f"queue at most {link['queue_max']:,} octets"
            )
        print(f"  at most {told['late_max_ms']:g} ms too late, as the host is busy")
        ours = {why: count for why, count in told["proxy_dropped"].items() if count}
        if ours:
            print(f"  the proxy did not keep up and lost: {ours}")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> None:
    read = routes(sys.argv[1:] if argv is None else argv)
    proxy = Proxy()
    for options in read:
        try:
            route = proxy.add(
                options.listen, options.to, *options.paths, rebind=options.rebind, seed=options.seed
            )
        except (OSError, UnicodeError) as error:
            ends = " for ".join(f"{host}:{port}" for host, port in (options.listen, options.to))
            parser().error(f"cannot listen on {ends}: {error}")
        host, port = route.address[:2]
        print(f"ready on {host}:{port}", flush=True)
    as_json = any(options.json for options in read)
    signal.signal(signal.SIGUSR1, lambda *_: report(proxy, as_json))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: proxy.stop())
    proxy.run()
    report(proxy, as_json)
    proxy.close()
