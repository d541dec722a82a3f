"""Proposes small breaks of a name in the code. Which of them breaks a rule, a reader decides."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.breaks import Edit

SWAPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Proposal:
    line: int
    what: str
    edit: Edit

    def entry(self, comment: str) -> str:
        """An entry of a list, without its row."""
        e = self.edit
        quoted = [f"{name} = {json.dumps(text)}" for name, text in (("old", e.old), ("new", e.new))]
        head = f"# line {self.line}, {self.what}; {comment}\nfile = {json.dumps(e.file)}\n"
        return head + "\n".join(quoted) + "\n"


def propose(root: Path, reference: str) -> list[Proposal]:
    """Every proposal for `file.py::Class.method` or `file.py`. Raises `LookupError`."""
    file, _, name = reference.partition("::")
    text = (root / file).read_text("utf-8")
    body: ast.AST = ast.parse(text)
    for part in filter(None, name.split(".")):
        for child in ast.iter_child_nodes(body):
            if getattr(child, "name", None) == part:
                body = child
                break
        else:
            raise LookupError(f"there is no {name} in {file}")
    lines = text.splitlines(keepends=True)
    found = []
    for node, new, what in _candidates(body, text):
        old, replaced = _in_lines(lines, node, new)
        edit = Edit(file, old, replaced)
        if text.count(old) == 1 and old != replaced:
            found.append(Proposal(node.lineno, what, edit))
    return found


def _candidates(body: ast.AST, text: str) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    def source(node: ast.AST) -> str:
        return ast.get_source_segment(text, node) or ""

    for node in ast.walk(body):
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield test, f"not ({source(test)})", "condition negated"
                yield test, "False", "condition never true"
            case ast.comprehension(ifs=[test, *_]):
                yield test, "True", "condition always true"
            case ast.Raise():
                yield node, "pass", "nothing raised"
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield node, "pass", "call left out"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
                yield node, "pass", "assignment left out"
            case ast.Return(value=ast.expr() as value) if source(value) != "None":
                yield value, "None", "nothing returned"
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield node, word.join(f"({source(each)})" for each in values), "and, or swapped"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, f"({source(operand)})", "not left out"
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPPED:
                yield (
                    node,
                    f"{source(left)} {SWAPPED[type(op)]} {source(right)}",
                    "other comparison",
                )
            case ast.Constant(value=bool() as value):
                yield node, str(not value), "other truth"
            case ast.Constant(value=int() as value):
                yield node, f"{value + 1}", "one more"
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                yield node, f"({source(left)} - {source(right)})", "minus for plus"
            case ast.BinOp(op=ast.Sub(), left=left, right=right):
                yield node, f"({source(left)} + {source(right)})", "plus for minus"


def _in_lines(lines: list[str], node: ast.expr | ast.stmt, new: str) -> tuple[str, str]:
    """The lines of `node`, and the same with `new` in its place, with as many lines before them as
    make them unique."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    old, replaced = "".join(lines[first : last + 1]), before + new + after
    whole = "".join(lines)
    while whole.count(old) > 1 and first:
        first -= 1
        old, replaced = lines[first] + old, lines[first] + replaced
    return old, replaced
