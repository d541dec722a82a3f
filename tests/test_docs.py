"""The pages lead somewhere, and quote what the programs say."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from kvcs.pages.settings import PageSettings
from kvcs.vllm.settings import Settings
from tests.paths import ROOT

PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        ROOT / "examples" / "README.md",
        ROOT / "interop" / "results" / "README.md",
    ]
)
PACKAGES = ("moqt", "kvcs", "kvsp", "relay")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
ENGINES = ROOT / "examples" / "engines"


@cache
def text(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text("utf-8"))


def links(page: Path) -> list[str]:
    """What a page links to, web pages left out."""
    prose = re.sub(r"`[^`\n]*`", "", text(page))
    found = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_something_that_is_there(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        to = (page.parent / path).resolve() if path else page
        known = anchors(to) if anchor and to.suffix == ".md" and to.is_file() else {anchor}
        if not to.is_relative_to(ROOT) or not to.exists() or anchor not in known:
            broken.append(link)
    assert not broken


def test_every_page_is_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = ((page.parent / link.partition("#")[0]).resolve() for link in links(page))
        ahead += [to for to in targets if to.suffix == ".md" and to.is_file()]
    assert set(PAGES) <= reached


# --- what is quoted ----------------------------------------------------------------------

VARIABLE = re.compile(r"%[-+.\d]*[sdgfrx]")


@cache
def sentences() -> str:
    """Every text in the code of the packages, a line each, `…` for what is put in."""
    said = []
    for path in sorted(each for name in PACKAGES for each in (ROOT / name).rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        told = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in told:
                continue  # a docstring is not printed
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                said.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(VARIABLE.sub("…", node.value))
    return "\n".join(said)


QUOTED = re.findall(r"^\| `([^`]+)`", text(ROOT / "docs" / "troubleshooting.md"), re.MULTILINE)


def test_the_page_of_symptoms_quotes_sentences() -> None:
    assert len(QUOTED) > 35
    assert len(set(QUOTED)) == len(QUOTED)
    assert all(len(each.replace("…", "").split()) >= 4 for each in QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_sentence_is_one_that_the_programs_print(quoted: str) -> None:
    printed = quoted in sentences()
    assert printed, f"no text in the code has it: {quoted}"


# --- the examples of engines -------------------------------------------------------------


def test_the_example_for_vllm_is_a_configuration_of_the_connector() -> None:
    given = json.loads((ENGINES / "vllm.json").read_text())
    Settings.parse(given["kv_connector_extra_config"])
    assert given["kv_load_failure_policy"] == "recompute"
    module, name = given["kv_connector_module_path"], given["kv_connector"]
    assert f'__all__ = ["{name}"]' in (ROOT / module.replace(".", "/") / "__init__.py").read_text()


def test_the_example_for_sglang_is_a_configuration_of_the_storage() -> None:
    given = json.loads((ENGINES / "sglang.json").read_text())
    PageSettings.parse(given["kvcs"])
    assert (given["module_path"], given["class_name"]) == ("kvcs.sglang", "KvcsStorage")


def test_the_example_for_lmcache_is_a_configuration_of_the_adapter_and_that_of_the_page() -> None:
    yaml = pytest.importorskip("yaml")
    given = yaml.safe_load((ENGINES / "lmcache.yaml").read_text())
    PageSettings.parse(given["extra_config"]["kvcs"])
    plugin = "remote_storage_plugin.kvcs."
    assert given["extra_config"][plugin + "module_path"] == "kvcs.lmcache"
    assert given["extra_config"][plugin + "class_name"] == "KvcsAdapter"
    page = (ROOT / "docs" / "integration.md").read_text()
    shown = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    assert shown.items() <= given.items()


def test_the_settings_of_pages_are_all_on_the_page_with_their_defaults() -> None:
    page = (ROOT / "docs" / "integration.md").read_text()
    for name in PageSettings.__dataclass_fields__:
        assert re.search(rf"^\| .*`{name}`.* \|", page, re.MULTILINE), name
    for name, default in (("lookup_timeout", "0.3 s"), ("timeout", "10 s"), ("uploads", "4")):
        assert f"| `{name}` | {default} |" in page
