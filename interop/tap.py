"""TAP version 14: what a test client prints, and what the harness reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

VERSION_LINE = "TAP version 14"

Scalar = str | int
_POINT = re.compile(
    r"(?P<not>not )?ok\b\s*(?P<number>\d+)?\s*(?:- )?(?P<name>.*?)"
    r"(?:\s+#\s*(?P<directive>SKIP|TODO)\S*\s*(?P<why>.*))?$",
    re.IGNORECASE,
)
_PLAN = re.compile(r"1\.\.(\d+)")


@dataclass(frozen=True, slots=True)
class Point:
    """One test point. `skip` is the reason when it was skipped; then `ok` says nothing."""

    name: str
    ok: bool
    skip: str | None = None
    diagnostics: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Run, and ended well: a skip is never a pass."""
        return self.ok and self.skip is None

    @property
    def failed(self) -> bool:
        return not self.ok and self.skip is None


def header(count: int, comments: Iterable[str] = ()) -> str:
    """The version line, the run's comments and the plan."""
    return "\n".join([VERSION_LINE, *(f"# {line}" for line in comments), f"1..{count}"])


def one_line(text: str) -> str:
    """`text` as a description or a reason: one line, no directive in it."""
    return " ".join(text.replace("#", "No.").split())


def render(number: int, point: Point) -> str:
    """A test point with its YAML diagnostic block."""
    line = f"{'ok' if point.ok or point.skip else 'not ok'} {number} - {point.name}"
    if point.skip is not None:
        line += f" # SKIP {one_line(point.skip)}"
    if not point.diagnostics:
        return line
    block = [f"  {key}: {_yaml(value)}" for key, value in point.diagnostics.items()]
    return "\n".join([line, "  ---", *block, "  ..."])


def document(points: Iterable[Point], comments: Iterable[str] = ()) -> str:
    """A whole run."""
    listed = list(points)
    body = [render(number, point) for number, point in enumerate(listed, 1)]
    return "\n".join([header(len(listed), comments), *body]) + "\n"


def _yaml(value: Scalar) -> str:
    # A JSON string is a YAML double-quoted scalar.
    return str(value) if isinstance(value, int) else json.dumps(value)


def parse(text: str) -> list[Point]:
    """The top-level test points of a run, with the scalars of their diagnostics.

    Points the plan promised and that never came, as after `Bail out!`, are failures.
    Raises ValueError when there is no plan: such output is no test run.
    """
    points: list[Point] = []
    planned: int | None = None
    bailed = ""
    lines = iter(text.splitlines())
    for line in lines:
        if match := _PLAN.match(line):
            planned = int(match.group(1))
        elif line.startswith("Bail out!"):
            bailed = line.removeprefix("Bail out!").strip()
            break
        elif line.strip() == "---" and line.startswith(" ") and points:
            points[-1] = _with(points[-1], _block(lines))
        elif match := _POINT.match(line):
            directive = (match.group("directive") or "").upper()
            why = match.group("why") or ""
            skipped = directive == "SKIP"
            points.append(
                Point(match.group("name"), not match.group("not"), why if skipped else None)
            )
    if planned is None:
        raise ValueError("no plan (1..N) in the output")
    for number in range(len(points) + 1, planned + 1):
        message = bailed or "the plan promised it, and it never came"
        points.append(Point(f"test {number}", False, None, {"message": message}))
    return points


def _with(point: Point, diagnostics: Mapping[str, Scalar]) -> Point:
    return Point(point.name, point.ok, point.skip, diagnostics)


def _block(lines: Iterable[str]) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for line in lines:
        if line.strip() == "...":
            break
        if match := re.match(r"\s*([\w-]+):\s+(.+)$", line):
            found[match.group(1)] = _scalar(match.group(2))
    return found


def _scalar(text: str) -> Scalar:
    if text.startswith('"'):
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    return int(text) if re.fullmatch(r"-?\d+", text) else text
