"""requirements.lock is what pyproject.toml asks for, by hash, and says nothing of where from."""

from __future__ import annotations

import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import HEADER, LOCK, digest, wanted
from tools.pythons import lowest, versions

TEXT = LOCK.read_text("utf-8")
ENTRIES = [entry.replace("\\\n", " ") for entry in re.findall(r"^\w(?:.*\\\n)*.*", TEXT, re.M)]


def test_the_lock_was_made_from_these_requirements() -> None:
    """`make lock` makes it anew."""
    assert TEXT.startswith(f"{HEADER}{digest()}\n")


def test_every_package_of_the_lock_has_one_version_and_hashes() -> None:
    assert len(ENTRIES) > 50
    for entry in ENTRIES:
        assert re.match(r"[\w.-]+==[\w.]+ ", entry), entry
        assert re.search(r" --hash=sha256:[0-9a-f]{64}(\s|$)", entry), entry


def test_the_lock_has_a_version_that_is_allowed_of_everything_asked_for_on_every_python() -> None:
    pinned = [Requirement(entry.partition(" --hash")[0].strip()) for entry in ENTRIES]
    for asked in map(Requirement, wanted()):
        for version in versions():
            here = {"python_version": version, "python_full_version": f"{version}.9"}
            (found,) = (
                each
                for each in pinned
                if canonicalize_name(each.name) == canonicalize_name(asked.name)
                and (each.marker is None or each.marker.evaluate(here))
            )
            (exact,) = found.specifier
            assert asked.specifier.contains(exact.version), found


def test_the_lock_names_no_place_that_packages_come_from() -> None:
    assert not re.search(r"://|^\s*--(?!hash)|@ ", TEXT, re.M)


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    names = [Requirement(each).name for each in wanted()]
    assert [each.partition("==")[0] for each in lowest()] == names
    assert all(
        Requirement(asked).specifier.contains(each.partition("==")[2])
        for asked, each in zip(wanted(), lowest(), strict=True)
    )


def test_libraries_whose_inside_is_used_have_an_upper_bound() -> None:
    """aioquic: moqt/quic/aio and moqt/quic/packets; uvicorn: the protocol class of kvsp/http."""
    bounded = {each.name for each in map(Requirement, wanted()) if "<" in str(each.specifier)}
    assert {"aioquic", "uvicorn"} <= bounded
