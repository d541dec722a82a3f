"""The fuzzer finds what is planted, writes it down, and finds nothing in a short real run."""

from __future__ import annotations

import mmap
import random
import time
from pathlib import Path

import pytest

from moqt.receiving.early import EarlyStreams
from moqt.session import Session
from moqt.track.knowledge import Knowledge
from relay.core import Relay
from tests.moqt.loose import Everything
from tests.relay.star import Star
from tools import fuzz, fuzz_floods
from tools.fuzz_floods import MANY, FloodTarget
from tools.fuzz_sessions import EARLY, recorded
from tools.fuzz_targets import TARGETS, Case, Target


class Fragile(Target):
    """Refuses nothing and breaks at a step that holds 0xff 0xff."""

    name = "fragile"

    def corpus(self) -> list[Case]:
        return [[("", b"harmless"), ("", b"octets"), ("", b"in"), ("", b"parts")]]

    def run(self, case: Case) -> None:
        for _, octets in case:
            if b"\xff\xff" in octets:
                raise ZeroDivisionError("planted")


class Slow(Fragile):
    def run(self, case: Case) -> None:
        until = time.monotonic() + 5
        while time.monotonic() < until:  # busy, as a loop that never ends
            pass


class Greedy(Fragile):
    def __init__(self) -> None:
        self.kept: list[mmap.mmap] = []

    def run(self, case: Case) -> None:
        # new pages: what an earlier test let go would serve an ordinary allocation
        self.kept.append(mmap.mmap(-1, 50_000))
        self.kept[-1].write(b"x" * 50_000)


class Thorough(Fragile):
    """Looks at all it has whenever something comes, as an insertion into a list would."""

    def corpus(self) -> list[Case]:
        return [[("", b"x")] * size for size in (10, 100, 3000)]

    def run(self, case: Case) -> None:
        seen: list[bytes] = []
        for _, octets in case:
            seen.append(octets)
            for each in seen:
                self.look(each)

    def look(self, octets: bytes) -> None: ...


class Hoarder(Fragile):
    """Makes much of each octet; what it made is gone when the input is over."""

    def corpus(self) -> list[Case]:
        return [[("", bytes(size))] for size in (10, 1000, 20_000)]

    def run(self, case: Case) -> None:
        kept = [bytes(1000) for _, octets in case for _ in octets]
        assert kept is not None


def plan(output: Path, *targets: str, **changes) -> fuzz.Plan:
    settings = {"seconds": 60.0, "seed": 1, "runs": 400, "input_seconds": 5.0, "growth": 1 << 30}
    return fuzz.Plan(targets=targets, output=output, **(settings | changes))


_PLANTED: tuple[tuple[str, type[Target]], ...] = (
    ("fragile", Fragile),
    ("slow", Slow),
    ("greedy", Greedy),
    ("thorough", Thorough),
    ("hoarder", Hoarder),
)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, target in _PLANTED:
        monkeypatch.setitem(TARGETS, name, target)


def test_a_short_run_of_every_target_finds_nothing(tmp_path: Path):
    runs = {"transport": 12, "relay": 60, "session": 300, "webtransport": 40, "flood": 30}
    for name in TARGETS:
        tally = fuzz.fuzz(plan(tmp_path, name, runs=runs.get(name, 1000)))[name]
        assert tally.findings == []
        assert tally.runs >= runs.get(name, 1000)


def test_a_planted_fault_is_found_shortened_written_and_replayed(tmp_path, planted, capsys):
    tallies = fuzz.fuzz(plan(tmp_path, "fragile"))
    assert 1 <= len(tallies["fragile"].findings) <= 10
    assert fuzz.report(tallies) == len(tallies["fragile"].findings)
    path = tmp_path / "fragile-1-1.case"
    assert "ZeroDivisionError: planted" in path.read_text()
    assert f"python -m tools.fuzz --replay {path}" in path.read_text()
    name, case = fuzz.read_case(path)
    assert name == "fragile" and len(case) == 1
    assert fuzz.main(["--replay", str(path)]) == 1
    assert "planted" in capsys.readouterr().out


def test_a_run_with_a_finding_exits_with_1_and_one_without_with_0(tmp_path, planted):
    common = ["--runs", "400", "--seed", "1", "--output", str(tmp_path)]
    assert fuzz.main(["--target", "fragile", *common]) == 1
    assert fuzz.main(["--target", "datagram", *common]) == 0


def test_an_input_that_takes_too_long_is_a_finding(tmp_path, planted):
    tally = fuzz.fuzz(plan(tmp_path, "slow", runs=1, input_seconds=0.05))["slow"]
    assert "Hang" in tally.findings[0]


def test_memory_that_grows_is_a_finding(tmp_path, planted):
    tally = fuzz.fuzz(plan(tmp_path, "greedy", runs=1100, growth=20 << 20))["greedy"]
    assert "memory grew" in tally.findings[0]


@pytest.mark.parametrize(
    ("name", "words"), [("thorough", "calls for"), ("hoarder", "octets of memory for")]
)
def test_an_input_that_costs_more_than_its_octets_are_worth_is_a_finding(
    tmp_path, planted, name, words, capsys
):
    tally = fuzz.fuzz(plan(tmp_path, name, runs=3))[name]
    # the long one alone: what is short may cost what anything costs
    assert len(tally.findings) == 1 and words in tally.findings[0]
    path = tmp_path / f"{name}-1-1.case"
    assert len(fuzz.read_case(path)[1]) in (1, 3000)
    assert fuzz.main(["--replay", str(path)]) == 1
    assert words in capsys.readouterr().out


def test_a_store_without_a_bound_on_what_it_learns_costs_too_much_for_its_octets(monkeypatch):
    target = TARGETS["flood"]()
    case = target.corpus()[0]
    assert fuzz.cost_of(target, case, 60) is None

    def learn(self, start, end):
        self.known.add(start, end)
        kept = [*self.known]  # a copy for each marker
        return bool(kept)

    monkeypatch.setattr(Knowledge, "learn", learn)
    assert "calls for" in fuzz.cost_of(target, case, 60)


def met(script) -> tuple[Relay, list[Session]]:
    """The relay, and its sessions, after a flood that was meant."""
    star, tracks = Star(FloodTarget.LIMITS), Everything()
    pairs, _ = recorded(star, tracks)
    pairs[0].client.publish_namespace((b"demo",), on_ended=lambda *_: None)
    star.run()
    script(star, tracks, pairs[0].client, pairs[1].client)
    return star.relay, [pair.server for pair in pairs]


def test_a_flood_of_malformed_tracks_has_each_given_up():
    relay, _ = met(fuzz_floods.malformed)
    assert relay.counters.malformed_tracks == MANY


def test_a_flood_of_fills_comes_to_the_limit_of_fills():
    _, sessions = met(fuzz_floods.fills)
    assert sum(session.counters.fills_over_limit for session in sessions) > 0


def test_what_a_flood_sends_before_setup_is_held_back_or_closes_the_session(monkeypatch):
    seen = []
    hold = EarlyStreams.hold
    monkeypatch.setattr(EarlyStreams, "hold", lambda *each: (seen.append(each), hold(*each)))
    target = FloodTarget()
    cases = [case for case in target.corpus() if case[0] == EARLY]
    assert len(cases) == 12
    for case in cases:
        seen.clear()
        target.run(case)
        assert len(seen) > MANY // 2 or all("datagram" in where for where, _ in case[1:-1])


def test_one_seed_makes_one_sequence_of_inputs():
    target = TARGETS["session"]()
    corpus = target.corpus()

    def inputs(seed: int) -> list[Case]:
        mutator = fuzz.Mutator(target, corpus, random.Random(seed))
        return [mutator.case() for _ in range(50)]

    assert inputs(1) == inputs(1) != inputs(2)


def test_a_case_is_read_as_it_was_written(tmp_path: Path):
    case: Case = [("", b""), ("data 4", b"\x00\xff"), ("0:tick 1", b"|")]
    fuzz.write_case(tmp_path / "one.case", "session", case, "why\nit failed")
    assert fuzz.read_case(tmp_path / "one.case") == ("session", case)


@pytest.mark.parametrize("text", ["", "target nothing\n", "target session\ndata 4 00\n", "hello"])
def test_a_file_that_is_no_case_is_refused_with_what_is_wrong(tmp_path: Path, text: str, capsys):
    path = tmp_path / "bad.case"
    path.write_text(text)
    with pytest.raises(SystemExit):
        fuzz.main(["--replay", str(path)])
    assert "cannot replay" in capsys.readouterr().err
