"""`make demo-llm`: two vLLM engines and a relay; the second one's first token comes when the first
one's does.

A prefill engine computes a prompt and publishes it layer by layer; a decode engine of the same
small real model goes on from it: live, from the relay's cache, when the producer is killed in the
middle, and when the relay is. Each row tells the time to the first token, whether the tokens are
those that the decode engine computes by itself, and how many octets came. The picture has two lanes
on one time line: the layers computed here, and used there. It runs in the environment of
`tools.environments.vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.demo import DemoFailed, Stage, perform

ROOT = Path(__file__).resolve().parent.parent
MODEL = Path(sys.prefix) / "smollm2"
COUNT = 8
"""Tokens that each request asks for."""
PATIENCE = 300.0
"""Seconds that anything may take."""

TEXT = (
    "In the harbour of a small town there stood a lighthouse whose keeper wrote down every ship "
    "that passed, its name, its flag and the hour, in books that filled shelves of three rooms. "
)


@dataclass
class Row:
    """One way to the first token."""

    name: str
    seconds: float
    same: bool
    octets: int
    note: str


class Engine:
    """`tools.llm_engine`, or another of its kind, in a process; there when it takes requests."""

    program = "tools.llm_engine"

    def __init__(self, folder: Path, name: str, extra: dict[str, Any], *options: str) -> None:
        self._err = folder / f"{name}.err"
        with self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.program, MODEL, json.dumps(extra), *options],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._line()

    def say(self, **wanted: Any) -> dict[str, Any]:
        """What it answers to a line. Raises DemoFailed when it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def signal(self, number: int) -> None:
        """Stop it, or let it go on."""
        self._process.send_signal(number)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise DemoFailed(f"an engine has ended: {self._err.read_text()[-2000:]}")


class TracedEngine(Engine):
    """One of the demo, and the trace of its connector."""

    def __init__(self, folder: Path, name: str, extra: dict[str, Any], role: str) -> None:
        self.trace = folder / f"{name}.trace"
        self.trace.touch()
        module = ("--module", "tools.llm_trace", "--connector", "TracingConnector")
        traced = {**extra, "trace": str(self.trace)}
        super().__init__(folder, name, traced, "--role", role, *module, "--in-process")

    def ask(self, tokens: list[int], salt: str | None = None) -> dict[str, Any]:
        """What it answers to a prompt."""
        return self.say(tokens=tokens, count=COUNT, salt=salt)

    def forget(self) -> None:
        """Let it forget the pages of earlier prompts."""
        self.say(forget=True)

    def events(self, name: str, since: float = 0.0) -> list[dict[str, Any]]:
        """Those of its trace."""
        lines = self.trace.read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == name and e["at"] >= since]

    def octets(self, since: float) -> int:
        """That its loads brought."""
        lines = map(json.loads, self.trace.read_text().splitlines())
        return sum(each.get("octets", 0) for each in lines if each["at"] >= since)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll, for a while."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise DemoFailed(f"{what} did not happen")
        time.sleep(0.002)


def prompt(number: int, length: int) -> list[int]:
    """A prompt of its own, of so many tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = f"Chronicle {number}. " + TEXT * (length // 30 + 2)
    ids: list[int] = tokenizer(text).input_ids[:length]
    return ids


def measure(console: Console, stage: Stage, length: int, picture: Path) -> list[Row]:
    """All rows; draws the live one."""
    url, _, cafile = stage.relay(console)
    (relay,) = stage.children
    _, scope = stage.scope()
    extra = {
        "relay": str(url),
        "cafile": str(cafile),
        "scope_key_file": str(scope),
        "min_tokens": 64,
        "load": "layerwise",
    }
    rows = []
    first, second = prompt(1, length), prompt(2, length)
    with ThreadPoolExecutor() as pool, ExitStack() as ending:
        prefill = TracedEngine(stage.folder, "prefill", extra, "kv_producer")
        ending.callback(prefill.kill)
        decode = TracedEngine(stage.folder, "decode", extra, "kv_consumer")
        ending.callback(decode.kill)
        for engine in (prefill, decode):  # what is done once for all prompts is not measured
            engine.ask(prompt(9, length), salt="warm")
        own = {1: decode.ask(first, salt="own 1"), 2: decode.ask(second, salt="own 2")}
        console.print("both engines are warm; the decode engine has computed both prompts itself")
        took = own[1]["first"] - own[1]["began"]
        rows.append(Row("own prefill", took, True, 0, "nothing is shared"))

        def together(tokens: list[int]) -> tuple[Any, float]:
            """The prefill engine begins; returns when it has computed a layer."""
            began = time.time()
            there = pool.submit(prefill.ask, tokens)
            wait_until(lambda: prefill.events("computed", began), "a layer of the prefill engine")
            return there, began

        there, began = together(first)
        live = decode.ask(first)
        computed = there.result()
        behind = live["first"] - computed["first"]
        same = live["tokens"] == own[1]["tokens"]
        note = f"{behind:+.3f} s after the prefill engine's own first token"
        rows.append(
            Row("live", live["first"] - computed["began"], same, decode.octets(began), note)
        )
        layers = prefill.events("computed", began), decode.events("used", began)
        draw(picture, began, *layers, computed["first"], live["first"])

        decode.forget()
        began = time.time()
        cached = decode.ask(first)
        took, same = cached["first"] - began, cached["tokens"] == own[1]["tokens"]
        note = f"{rows[0].seconds / took:.1f} times sooner than its own prefill"
        rows.append(Row("from the relay's cache", took, same, decode.octets(began), note))

        there, began = together(second)
        half = len({each["layer"] for each in layers[0]}) // 2
        asked = time.time()
        answer = pool.submit(decode.ask, second)
        wait_until(lambda: len(prefill.events("computed", began)) >= half, "half of the layers")
        prefill.kill()
        lost = answer.result()
        took, same = lost["first"] - asked, lost["tokens"] == own[2]["tokens"]
        note = f"after {half} layers; its tokens were computed"
        rows.append(Row("producer killed", took, same, decode.octets(began), note))

        decode.forget()
        began = time.time()
        answer = pool.submit(decode.ask, first)
        wait_until(lambda: decode.events("used", began) or answer.done(), "the first layer")
        relay.kill()
        lost = answer.result()
        took, same = lost["first"] - began, lost["tokens"] == own[1]["tokens"]
        rows.append(Row("relay killed", took, same, decode.octets(began), "after the first layer"))
    return rows


def draw(
    picture: Path,
    began: float,
    computed: list[dict[str, Any]],
    used: list[dict[str, Any]],
    first_here: float,
    first_there: float,
) -> None:
    """Two lanes on one time line, with what vLLM has brought along for pictures."""
    from PIL import Image, ImageDraw, ImageFont

    width, height, left, right = 1200, 380, 170, 40
    end = max(first_here, first_there) - began
    step = next(
        each for each in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0) if end / each < 12
    )
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(20), ImageFont.load_default(15)

    def x(at: float) -> float:
        return left + (at - began) / (end * 1.02) * (width - left - right)

    pen.text((left, 16), "Two engines: a layer is used while the next is computed", "black", font)
    lanes = (
        (90, "computed here", computed, first_here, "#1f6fb4"),
        (210, "used there", used, first_there, "#d2691e"),
    )
    for top, name, events, first, colour in lanes:
        pen.text((16, top + 22), name, colour, font)
        pen.rectangle((left, top, width - right, top + 66), outline="#bbbbbb")
        seen: set[int] = set()
        for each in events:
            if each["layer"] in seen or each["at"] > began + end:
                continue  # of the tokens that follow
            seen.add(each["layer"])
            pen.rectangle((x(each["at"]) - 2, top + 6, x(each["at"]) + 2, top + 60), fill=colour)
        pen.line((x(first), top - 6, x(first), top + 72), fill="black", width=2)
        pen.text((x(first) - 4, top - 24), "first token", "black", small, anchor="ra")
    for tick in range(int(end / step) + 1):
        at = began + tick * step
        pen.line((x(at), 300, x(at), 308), fill="#555555")
        pen.text((x(at), 314), f"{tick * step:.2f}", "#555555", small, anchor="ma")
    pen.text((left, 344), "seconds since the prefill engine was asked", "#555555", small)
    image.save(picture)


def run(console: Console, stage: Stage, length: int, picture: Path) -> None:
    """Measure and show; raises DemoFailed when a row has other tokens."""
    rows = measure(console, stage, length, picture)
    table = Table(title=f"SmolLM2-135M, {length} tokens, vLLM on this machine's CPU")
    for name in ("", "first token after", "same tokens", "octets loaded", ""):
        table.add_column(name)
    for row in rows:
        same = "yes" if row.same else "NO"
        table.add_row(row.name, f"{row.seconds:.3f} s", same, f"{row.octets:,}", row.note)
    console.print(table)
    console.print(f"the layers of the live row: {picture}")
    if not all(row.same for row in rows):
        raise DemoFailed("a row has other tokens than the decode engine computes by itself")


def main() -> int:
    """Run the demo; 1 when it fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1025, help="of the prompt")
    parser.add_argument("--picture", type=Path, default=Path("demo-llm.png"))
    options = parser.parse_args()
    return perform("demo-llm", partial(run, length=options.tokens, picture=options.picture))


if __name__ == "__main__":
    sys.exit(main())
