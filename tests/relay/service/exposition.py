"""What Prometheus reads, held to its rules: those that promtool checks, and its names."""

from __future__ import annotations

import re
from collections import Counter

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})? (\S+)")
LABELS = re.compile(r'\{(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*",?)*\}')


def kinds(text):
    """The type of each metric, by its name as it stands in `text`."""
    return dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE "))


def faults(text):
    """What is wrong with an exposition, a sentence each."""
    found = []
    lines = text.splitlines()
    for word in ("HELP", "TYPE"):
        names = Counter(line.split()[2] for line in lines if line.startswith(f"# {word} "))
        found += [f"{name} has {count} {word} lines" for name, count in names.items() if count > 1]
    types = kinds(text)
    helped = {line.split()[2] for line in lines if re.match(r"# HELP \S+ \S", line)}
    found += [f"{name} has no HELP" for name in types.keys() - helped]
    for name, kind in types.items():
        if (kind == "counter") != name.endswith("_total"):
            found.append(f"{name} is a {kind}")
        if "octets" in name:
            found.append(f"{name} is not in base units")
        if "_bytes_" in name.removesuffix("_total").removesuffix("_per_second"):
            found.append(f"{name} does not end with its unit")
    seen = Counter()
    for line in lines:
        if not line or line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        if match is None or not LABELS.fullmatch(match[2] or "{}"):
            found.append(f"{line!r} is no sample")
            continue
        float(match[3])
        if match[1] not in types:
            found.append(f"{match[1]} has no TYPE")
        seen[match[1], match[2]] += 1
    return found + [f"{series} comes twice" for series, count in seen.items() if count > 1]
