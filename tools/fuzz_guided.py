"""The targets and mutations of `tools.fuzz`, led by coverage: `python -m tools.fuzz_guided`.

libFuzzer keeps the inputs that reach new code and `tools.fuzz.Mutator` makes new ones of them.
Needs the package atheris, which is not among the project's dependencies.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("python -m tools.fuzz_guided needs the package atheris; tools.fuzz does without")

with atheris.instrument_imports(include=["moqt", "relay", "kvcs", "kvsp"]):
    from tools.fuzz import Mutator, failure_of, write_case
    from tools.fuzz_targets import TARGETS, Case

MAX_OCTETS = 20_000


def packed(case: Case) -> bytes:
    """A case as libFuzzer keeps it: lengths and octets of each place and step."""
    return b"".join(
        bytes([len(where)]) + where.encode() + len(octets).to_bytes(2, "big") + octets
        for where, octets in case
    )


def unpacked(data: bytes) -> Case:
    """The case in `data`; what is no step ends it."""
    case: Case = []
    at = 0
    while at < len(data):
        head = at + 1 + data[at]
        end = head + 2 + int.from_bytes(data[head : head + 2], "big")
        where = data[at + 1 : head]
        if end > len(data) or not where.isascii():
            break
        case.append((where.decode(), data[head + 2 : end]))
        at = end
    return case


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz_guided", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", required=True, choices=tuple(TARGETS))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input-seconds", type=float, default=5.0, help="longer is a hang")
    parser.add_argument("--output", type=Path, default=Path("fuzz-findings"))
    options = parser.parse_args()
    target = TARGETS[options.target]()
    corpus = target.corpus()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-corpus-"))
    for number, case in enumerate(corpus):
        (folder / f"{number}").write_bytes(packed(case))

    def one(data: bytes) -> None:
        case = unpacked(data)
        reason = failure_of(target, case, options.input_seconds)
        if reason is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            path = options.output / f"{options.target}-guided-{options.seed}.case"
            write_case(path, options.target, case, reason)
            raise AssertionError(f"python -m tools.fuzz --replay {path}\n{reason}")

    def mutate(data: bytes, limit: int, seed: int) -> bytes:
        source = random.Random(seed)
        mutator = Mutator(target, [unpacked(data), source.choice(corpus)], source)
        return packed(mutator.case())[:limit]

    settings = [
        f"-max_total_time={max(1, round(options.minutes * 60))}",
        f"-seed={options.seed}",
        f"-max_len={MAX_OCTETS}",
        f"-artifact_prefix={folder}/",
    ]
    atheris.Setup(["fuzz_guided", str(folder), *settings], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
