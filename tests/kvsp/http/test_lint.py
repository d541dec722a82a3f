"""Nothing in the HTTP plane can run what a peer sends."""

from __future__ import annotations

import ast
from pathlib import Path

import kvsp

FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}


def test_no_code_of_kvsp_reads_pickles_or_runs_text() -> None:
    root = Path(next(iter(kvsp.__path__)))
    files = sorted(root.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert not {name.partition(".")[0] for name in names} & FORBIDDEN, path
                if path.name not in ("torch_engine.py", "tensors.py"):
                    assert "torch" not in {name.partition(".")[0] for name in names}, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                # it reads pickles
                assert (node.value.id, node.attr) != ("torch", "load"), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in CALLS, f"{path}:{node.lineno}"
