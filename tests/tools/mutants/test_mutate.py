"""`tools.mutate` on a small tree: each row of its table is one thing that the tool must tell."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools import mutate
from tools.mutants.breaks import Edit, ListError, Stale, read_lists
from tools.mutants.proposals import propose
from tools.mutants.rows import TableError, read_rows

CODE = '''\
"""What the small tree is about."""


def double(number: int) -> int:
    """Twice `number`."""
    if number < 0:
        raise ValueError("negative")
    return number + number


def count(end: int) -> int:
    """How many steps it takes from 0 to `end`."""
    steps = 0
    while steps < end:
        steps += 1
    return steps
'''
TESTS = """\
import pytest

from small.code import count, double


def test_double():
    assert double(2) == 4


def test_negative():
    try:
        double(-1)
    except ValueError:
        pass


def test_count():
    assert count(3) == 3


def test_wrong():
    assert double(1) == 3


@pytest.mark.skip
def test_skipped():
    assert double(1) == 2


class TestMany:
    @pytest.mark.parametrize("number", [0, 5])
    def test_each(self, number):
        assert double(number) - number == number
"""
ROWS = """\
# Part of the small tree
## Doubling

| Rule | Where | Tests | State |
|---|---|---|---|
| Twice | `small/code.py::double` | `tests/t.py::test_double` | implemented |
| Twice in a class | `small/code.py::double` | `tests/t.py::TestMany.test_each` | implemented |
| Negative is refused | `small/code.py::double` | `tests/t.py::test_negative` | implemented |
| Moved since | `small/code.py::double` | `tests/t.py::test_double` | implemented |
| Not thought of | `small/code.py::double` | `tests/t.py::test_double` | implemented |
| Fails anyway | `small/code.py::double` | `tests/t.py::test_wrong` | implemented |
| Is skipped | `small/code.py::double` | `tests/t.py::test_skipped` | implemented |
| Other tests | `small/code.py::double` | `tests/t.py::test_gone` | implemented |
| Cannot be imported | `small/code.py` | `tests/t.py::test_double` | implemented |
| Not ours | - | - | not applicable: for others |
| Cannot be broken | `small/code.py` | `tests/t.py::test_double` | implemented |

## Counting

| | obligation | where | test | state |
|---|---|---|---|---|
| MUST | Counts to the end | `small.code.count` | `tests/t.py::test_count` | implemented |
"""
LIST = """\
table = "docs/small.md"

[[Doubling]]
row = "Twice"
old = "return number + number"
new = "return number * 3"

[[Doubling]]
row = "Twice in a"
old = "return number + number"
new = "return number * number"

[[Doubling]]
row = "Negative"
old = 'raise ValueError("negative")'
new = "pass"

[[Doubling]]
row = "Moved"
old = "return 2 * number"
new = "return number"

[[Doubling]]
row = "Fails"
old = "number < 0"
new = "number > 0"

[[Doubling]]
row = "Is skipped"
old = "number < 0"
new = "number > 0"

[[Doubling]]
row = "Other"
old = "number < 0"
new = "number > 0"

[[Doubling]]
row = "Cannot be im"
old = "def double"
new = "def triple"

[[Doubling]]
row = "Cannot be br"
none = "it is a name"

[[Doubling]]
row = "Never written"
old = "number < 0"
new = "number > 0"

[[Counting]]
row = "Counts"
old = "steps += 1"
new = "steps += 0"
"""


@dataclass
class Tree:
    root: Path
    before: dict[str, bytes] = field(default_factory=dict)
    code: int = 0
    verdicts: dict[str, tuple[str, str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def write_tree(root: Path) -> None:
    tool = root / "tools" / "mutants"
    shutil.copytree(
        ROOT / "tools" / "mutants", tool, ignore=shutil.ignore_patterns("*.toml", "__pycache__")
    )
    for name, text in {
        "small/__init__.py": "",
        "small/code.py": CODE,
        "tests/t.py": TESTS,
        "docs/small.md": ROWS,
        "tools/mutants/small.toml": LIST,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """The small tree after all its breaks were tried."""
    tree = Tree(tmp_path_factory.mktemp("tree"))
    write_tree(tree.root)
    tree.before = contents(tree.root)
    report = tmp_path_factory.mktemp("report") / "report.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutate, "SLACK_SECONDS", 3.0)
        tree.code = mutate.main(["--root", str(tree.root), "--workers", "1", "--json", str(report)])
    found = json.loads(report.read_text())
    tree.verdicts = {
        each["row"]["rule"]: (each["verdict"], each["detail"]) for each in found["verdicts"]
    }
    tree.wrong = found["wrong"]
    yield tree


def test_a_break_that_the_tests_of_its_row_notice_is_caught(tree: Tree) -> None:
    assert tree.verdicts["Twice"] == ("caught", "tests/t.py::test_double: assert 6 == 4")
    assert tree.verdicts["Twice in a class"][0] == "caught"


def test_a_vacuous_test_lets_the_break_survive_and_the_row_is_named(tree: Tree) -> None:
    verdict, detail = tree.verdicts["Negative is refused"]
    assert verdict == "survived" and "small/code.py" in detail and "ValueError" in detail
    assert tree.code == 1


def test_a_break_that_hangs_is_caught_and_killed(tree: Tree) -> None:
    assert tree.verdicts["Counts to the end"] == ("caught", "no end after 3 s")


def test_a_break_whose_text_is_gone_is_stale_and_says_what_it_sought(tree: Tree) -> None:
    verdict, detail = tree.verdicts["Moved since"]
    assert verdict == "stale" and "'return 2 * number' stands 0 times in small/code.py" in detail


def test_a_row_without_a_break_is_untried_unless_a_reason_is_given(tree: Tree) -> None:
    assert tree.verdicts["Not thought of"][0] == "untried"
    assert tree.verdicts["Not ours"] == ("excused", "for others")
    assert tree.verdicts["Cannot be broken"] == ("excused", "it is a name")


def test_a_test_that_fails_or_does_not_run_as_the_code_is_shows_nothing(tree: Tree) -> None:
    assert tree.verdicts["Fails anyway"][0] == "failing"
    assert tree.verdicts["Is skipped"][0] == "failing"
    assert tree.verdicts["Other tests"][0] == "failing"


def test_a_break_that_only_keeps_the_tests_from_being_collected_catches_nothing(tree: Tree) -> None:
    assert tree.verdicts["Cannot be imported"][0] == "invalid"


def test_an_entry_that_belongs_to_no_row_is_named(tree: Tree) -> None:
    assert tree.wrong == ["small.toml [Doubling] 'Never written': no rows begin so"]


def test_the_tree_is_as_it_was(tree: Tree) -> None:
    assert contents(tree.root) == tree.before


def test_all_caught_is_success_and_survivors_elsewhere_do_not_count(
    tree: Tree, tmp_path: Path
) -> None:
    root = tmp_path / "tree"
    shutil.copytree(tree.root, root)
    listed = root / "tools" / "mutants" / "small.toml"
    listed.write_text(LIST[: LIST.index('[[Doubling]]\nrow = "Negative')])
    assert mutate.main(["--root", str(root), "--workers", "1", "--row", "Twice"]) == 0


def test_a_text_that_stands_twice_needs_its_number() -> None:
    with pytest.raises(Stale, match="stands 2 times"):
        Edit("a.txt", "x", "y").applied("x x")
    assert Edit("a.txt", "x", "y", nth=2).applied("x x") == "x y"
    with pytest.raises(Stale, match="at least 3"):
        Edit("a.txt", "x", "y", nth=3).applied("x x")
    with pytest.raises(Stale, match="no Python"):
        Edit("a.py", "x", "(", nth=1).applied("x\n")
    with pytest.raises(Stale, match="by itself"):
        Edit("a.txt", "x", "x").applied("x")


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ('old = "a"', "without `row`"),
        ('row = "Twice"\nnew = "a"', "`old` and `new` are texts"),
        ('row = "Twice"\nold = "a"\nnew = "b"\nfiel = "c"', "fiel is not known"),
        ('row = "Twice"\nnone = " "', "`none` says why"),
    ],
)
def test_an_entry_with_a_mistake_is_refused(tmp_path: Path, entry: str, fault: str) -> None:
    write_tree(tmp_path)
    listed = tmp_path / "tools" / "mutants" / "small.toml"
    listed.write_text(f'table = "docs/small.md"\n[[Doubling]]\n{entry}\n')
    with pytest.raises(ListError, match=fault):
        read_lists(tmp_path)


def test_a_row_with_another_number_of_cells_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("| Rule | Tests | State |\n|---|---|---|\n| a | b |\n")
    with pytest.raises(TableError, match="2 cells"):
        read_rows(tmp_path, "table.md")


def test_proposals_are_small_changes_that_apply(tmp_path: Path) -> None:
    write_tree(tmp_path)
    found = propose(tmp_path, "small/code.py::double")
    assert {each.what for each in found} >= {"nothing raised", "condition negated"}
    for each in found:
        assert each.edit.applied(CODE) != CODE
    with pytest.raises(LookupError):
        propose(tmp_path, "small/code.py::gone")


def test_every_list_of_the_project_can_be_read_and_every_entry_has_its_row() -> None:
    lists = read_lists(ROOT)
    assert lists.rows and not lists.wrong


def test_every_break_of_the_project_applies_to_the_code_as_it_is() -> None:
    stale = []
    for each in read_lists(ROOT).breaks:
        try:
            each.files(ROOT)
        except Stale as error:
            stale.append(f"{each.row}: {error}")
    assert not stale, "\n".join(stale)
