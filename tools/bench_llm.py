"""`make bench-llm`: what sharing costs and brings two engines, as ratios inside one run.

The engines, relay and prompts are those of `make demo-llm`; each figure is the median of some
rounds, and stands beside its goal. `--fake` runs engines without a model, to see that the bench
works: its figures say nothing. All rows must have the tokens that the engine computes by itself.

A look-up that misses is measured at a `kvcs.Client`, since the engine of the demo takes no prompt
of 32,000 tokens. The live row is of two engines and a relay that run at once: with fewer than three
cores they slow each other down.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcs import Client, load_descriptor
from tools import llm_fake
from tools.demo import COMPAT, DemoFailed, Stage, perform
from tools.demo_llm import TracedEngine, prompt, wait_until

RESULTS = Path("bench/results")
STALL = 0.5
LOOKUP_TIMEOUT = 0.3
"""Defaults of the connector, by which its goals are stated, in seconds."""
MISSING_TOKENS = 32_000


@dataclass
class Row:
    """One figure, and what it should be."""

    name: str
    goal: float
    unit: str
    at_least: bool = False
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of all rounds."""
        return median(self.values)

    @property
    def reached(self) -> bool:
        """Whether the goal is."""
        return self.median >= self.goal if self.at_least else self.median <= self.goal

    def told(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "name": self.name,
            "median": self.median,
            "goal": self.goal,
            "sense": "at least" if self.at_least else "at most",
            "unit": self.unit,
            "reached": self.reached,
            "values": self.values,
        }


def rows() -> dict[str, Row]:
    """All figures, without values."""
    return {
        "live": Row("live: decode's first token, by prefill's own", 1.05, "x"),
        "cached": Row("from the relay's cache, sooner than own prefill", 5.0, "x", at_least=True),
        "publishing": Row("the producer's first token, by that without publishing", 1.05, "x"),
        "miss": Row(f"a look-up of {MISSING_TOKENS:,} tokens that misses", 0.030, "s"),
        "frozen": Row("a frozen producer, beyond own prefill", 2 * STALL, "s"),
        "killed": Row("a killed producer, beyond own prefill", 2 * STALL, "s"),
        "again": Row("the request after a frozen producer's, by own prefill", 1.05, "x"),
        "dead": Row("a dead relay, beyond own prefill, once", LOOKUP_TIMEOUT, "s"),
        "after": Row("the requests after that, by own prefill", 1.05, "x"),
    }


class FakeEngine(TracedEngine):
    """One without a model."""

    program = "tools.llm_fake"


def fake_prompt(number: int, length: int) -> list[int]:
    """A prompt of its own, of so many tokens."""
    return [(number * 7919 + place * 31) % 49_152 for place in range(length)]


class Bench:
    """Two engines and a relay, and what was measured of them."""

    def __init__(self, console: Console, stage: Stage, length: int, fake: bool) -> None:
        url, _, cafile = stage.relay(console)
        (self.relay,) = stage.children
        _, scope = stage.scope()
        self._files = {"cafile": str(cafile), "scope_key_file": str(scope)}
        self.url = str(url)
        self._extra = {"relay": self.url, **self._files, "min_tokens": 64, "load": "layerwise"}
        self._stage, self._length = stage, length
        self._kind = FakeEngine if fake else TracedEngine
        self._prompt = fake_prompt if fake else prompt
        self._made = 0
        self.rows = rows()
        self._pool = ThreadPoolExecutor()

    def engine(self, name: str, role: str) -> TracedEngine:
        """One that is warm: what is done once for all prompts is not measured."""
        made = self._kind(self._stage.folder, name, self._extra, role)
        made.ask(self.fresh(), salt="warm")
        return made

    def fresh(self) -> list[int]:
        """A prompt that nobody has seen."""
        self._made += 1
        return self._prompt(self._made, self._length)

    def own(self, engine: TracedEngine, tokens: list[int]) -> dict[str, Any]:
        """What an engine answers by itself: salted, it is neither published nor looked up."""
        answer = engine.ask(tokens, salt=f"own {self._made}")
        answer["took"] = answer["first"] - answer["began"]
        return answer

    def same(self, answer: dict[str, Any], own: dict[str, Any], what: str) -> None:
        """Raises DemoFailed for other tokens than the engine's own."""
        if answer["tokens"] != own["tokens"]:
            raise DemoFailed(f"{what}: other tokens than the engine computes by itself")

    def together(self, prefill: TracedEngine, tokens: list[int], layers: int) -> Future[Any]:
        """The prefill engine begins; returns when it has computed so many layers."""
        began = time.time()
        there = self._pool.submit(prefill.ask, tokens)
        wait_until(lambda: len(prefill.events("computed", began)) >= layers, f"{layers} layers")
        return there

    # -- what is measured ----------------------------------------------------------------

    def sharing(self, prefill: TracedEngine, decode: TracedEngine) -> None:
        """A round of the producer's cost, of a live and of a cached prompt."""
        alone = self.own(prefill, self.fresh())["took"]
        answer = prefill.ask(self.fresh())
        self.rows["publishing"].values.append((answer["first"] - answer["began"]) / alone)
        tokens = self.fresh()
        own = self.own(decode, tokens)
        there = self.together(prefill, tokens, 1)
        live = decode.ask(tokens)
        computed = there.result()
        self.same(live, own, "live")
        first = computed["first"] - computed["began"]
        self.rows["live"].values.append((live["first"] - computed["began"]) / first)
        decode.forget()
        cached = decode.ask(tokens)
        self.same(cached, own, "cached")
        self.rows["cached"].values.append(own["took"] / (cached["first"] - cached["began"]))

    def losing(
        self,
        prefill: TracedEngine,
        decode: TracedEngine,
        lose: Callable[[], None],
        row: str,
        layers: int,
    ) -> tuple[list[int], dict[str, Any], Future[Any]]:
        """A producer that is lost in the middle, when the consumer has begun; the prompt, the
        consumer's own answer to it, and what the producer may still say."""
        tokens = self.fresh()
        own = self.own(decode, tokens)
        there = self.together(prefill, tokens, layers // 2)
        began = time.time()
        answer = self._pool.submit(decode.ask, tokens)
        wait_until(lambda: decode.events("used", began) or answer.done(), "a layer that is used")
        lose()
        lost = answer.result()
        self.same(lost, own, row)
        self.rows[row].values.append(lost["first"] - lost["began"] - own["took"])
        return tokens, own, there

    def frozen(self, prefill: TracedEngine, decode: TracedEngine, layers: int) -> None:
        """A round of a producer that stands still, and the request after it."""
        freeze = partial(prefill.signal, signal.SIGSTOP)
        try:
            tokens, own, there = self.losing(prefill, decode, freeze, "frozen", layers)
            decode.forget()
            again = decode.ask(tokens)
        finally:
            prefill.signal(signal.SIGCONT)
        there.result()
        self.same(again, own, "again")
        self.rows["again"].values.append((again["first"] - again["began"]) / own["took"])

    def missing(self, rounds: int) -> None:
        """Look-ups of prompts that nobody has published, at a relay that lists."""
        with Client(
            self.url,
            cafile=self._files["cafile"],
            scope_keys=self._files["scope_key_file"],
            descriptor=load_descriptor(COMPAT),
        ) as client:
            client.directory.longest(fake_prompt(999, MISSING_TOKENS))  # waits for the listing
            for number in range(rounds):
                tokens = fake_prompt(1000 + number, MISSING_TOKENS)
                began = time.perf_counter()
                if client.directory.longest(tokens) is not None:
                    raise DemoFailed("a prompt that nobody has published was found")
                self.rows["miss"].values.append(time.perf_counter() - began)

    def dead(self, decode: TracedEngine, rounds: int) -> None:
        """The relay is killed; the first request after that, and those after it."""
        owned = [(tokens, self.own(decode, tokens)) for tokens in map(self._one, range(rounds + 1))]
        self.relay.kill()
        for number, (tokens, own) in enumerate(owned):
            answer = decode.ask(tokens)
            self.same(answer, own, "dead")
            took = answer["first"] - answer["began"]
            if number:
                self.rows["after"].values.append(took / own["took"])
            else:
                self.rows["dead"].values.append(took - own["took"])

    def _one(self, _: int) -> list[int]:
        return self.fresh()

    def close(self) -> None:
        """Wait for nobody."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def measure(console: Console, stage: Stage, options: argparse.Namespace) -> list[Row]:
    """All rows."""
    with ExitStack() as ending:
        bench = Bench(console, stage, options.tokens, options.fake)
        ending.callback(bench.close)
        prefill = bench.engine("prefill", "kv_producer")
        ending.callback(prefill.kill)
        decode = bench.engine("decode", "kv_consumer")
        ending.callback(decode.kill)
        console.print("both engines are warm")
        bench.missing(options.rounds)
        began = time.time()
        for _ in range(options.rounds):
            bench.sharing(prefill, decode)
        layers = len({each["layer"] for each in prefill.events("computed", began)})
        console.print("shared")
        for _ in range(options.rounds):
            bench.frozen(prefill, decode, layers)
        console.print("frozen")
        bench.losing(prefill, decode, prefill.kill, "killed", layers)
        bench.dead(decode, options.rounds)
    return list(bench.rows.values())


def run(console: Console, stage: Stage, options: argparse.Namespace) -> None:
    """Measure, show, and keep if that is asked for."""
    measured = measure(console, stage, options)
    told = {
        "bench": "llm",
        "engine": "fake" if options.fake else "vLLM, SmolLM2-135M",
        "tokens": options.tokens,
        "rounds": options.rounds,
        "rows": [row.told() for row in measured],
    }
    if options.json:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        table = Table(title=f"{told['engine']}, {options.tokens} tokens, {options.rounds} rounds")
        for name in ("", "median", "goal", ""):
            table.add_column(name)
        for row in measured:
            sense = "at least" if row.at_least else "at most"
            goal, reached = f"{sense} {row.goal:g} {row.unit}", "reached" if row.reached else "NOT"
            table.add_row(row.name, f"{row.median:.3f} {row.unit}", goal, reached)
        console.print(table)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        file = options.keep / f"llm-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
        file.write_text(json.dumps(told, indent=2) + "\n")


def main() -> int:
    """Run the bench; 1 when it fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1025, help="of a prompt (1025)")
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are shown (5)")
    parser.add_argument("--fake", action="store_true", help="engines without a model")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    parser.add_argument(
        "--keep",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FOLDER",
        help="keep the results there (bench/results)",
    )
    options = parser.parse_args()
    if options.rounds < 1 or options.tokens <= 2 * llm_fake.BLOCK_TOKENS:
        parser.error("--rounds is at least 1, --tokens more than two blocks")
    return perform("bench-llm", partial(run, options=options))


if __name__ == "__main__":
    sys.exit(main())
