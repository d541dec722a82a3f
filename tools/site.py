"""`make docs`: the pages as a site, in `build/site`, with MkDocs in an environment of its own.

The pages stand where a reader of the repository looks for them, and link to files of it. The site
is made of a copy that has them at the same places, and beside them the files that they link to. A
link that leads nowhere, or to an anchor that is not there, is an error.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from tools.environments import docs
from tools.environments.own import ROOT, Environment

LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
OTHERS += ("interop/results/README.md", "LICENSE")

SETTINGS = """\
site_name: kvcs
docs_dir: pages
site_dir: ../site
use_directory_urls: false
theme:
  name: mkdocs
  highlightjs: false
  locale: en
markdown_extensions: [tables, fenced_code, toc]
validation:
  nav: {omitted_files: ignore, not_found: warn, absolute_links: warn}
  links: {not_found: warn, anchors: warn, absolute_links: warn, unrecognized_links: warn}
nav:
  - Home: README.md
  - Begin:
      - Concepts: docs/concepts.md
      - Programs: docs/programs.md
      - Python API: docs/api.md
      - Troubleshooting: docs/troubleshooting.md
      - Examples: examples/README.md
  - Engines:
      - Integration: docs/integration.md
      - vLLM: docs/vllm.md
  - Operate:
      - Relays: docs/operations.md
      - Holders and index: docs/kvsp.md
      - Security: docs/security.md
      - Limits: docs/limits.md
      - kvsp-server: docs/configuration.md
      - Performance: docs/performance.md
      - Transports: docs/transports.md
  - Project:
      - Architecture: docs/architecture.md
      - Contributing: CONTRIBUTING.md
      - Changes: CHANGELOG.md
      - Interoperability: docs/interop.md
      - Results: interop/results/README.md
      - Conformance, MOQT: docs/moqt-conformance.md
      - Conformance, KVSP: docs/kvsp-conformance.md
      - Conformance, KVCS: docs/kvcs-conformance.md
"""


def gather(pages: Path) -> None:
    """Copy the pages, and the files that they link to, to the same places below `pages`."""
    sources = [ROOT / each for each in OTHERS] + sorted((ROOT / "docs").rglob("*.*"))
    for source in sources:
        copied = pages / source.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(source, copied)
            continue
        text = source.read_text("utf-8")
        copied.write_text(LINK.sub(partial(_there, source, pages), text), "utf-8")


def _there(source: Path, pages: Path, link: re.Match[str]) -> str:
    """A link, with its file copied; one to a folder leads to the file that says what is in it."""
    path, anchor = link[1], link[2] or ""
    if re.match(r"[a-z]+:", path):
        return link[0]
    target = (source.parent / path).resolve()
    if target.is_dir():
        inside = next(
            (each for each in ("README.md", "__init__.py") if (target / each).is_file()),
            next((each.name for each in sorted(target.iterdir()) if each.is_file()), ""),
        )
        target, path = target / inside, f"{path.rstrip('/')}/{inside}"
    if target.is_file() and target.is_relative_to(ROOT) and target.suffix != ".md":
        copied = pages / target.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, copied)
    return f"]({path}{anchor})"


def main() -> int:
    """Make the site; 1 when a link leads nowhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path, help="the generator's own folder")
    environment = Environment("docs", parser.parse_args().environment)
    environment.make(docs.install)
    work = ROOT / "build" / "docs"
    shutil.rmtree(work, ignore_errors=True)
    gather(work / "pages")
    (work / "mkdocs.yml").write_text(SETTINGS, "utf-8")
    built = subprocess.run(
        [environment.python, "-m", "mkdocs", "build", "--strict", "--quiet"], cwd=work
    )
    if not built.returncode:
        sys.stdout.write(f"{ROOT / 'build' / 'site' / 'index.html'}\n")
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
