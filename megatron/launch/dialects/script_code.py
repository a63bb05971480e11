"""Trainers and training loops in a user's Python file, found by its text. The file is never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

OWN_LOSS = ("compute_loss", "training_step", "compute_loss_func")
"""Names by which a trainer of transformers gets another loss or step."""


@dataclass
class ScriptCode:
    """Findings in a file."""

    file: Path
    trainers: dict[str, str] = field(default_factory=dict)
    """Classes with a loss or a step of their own, each as messages name it, with its line."""
    others: list[str] = field(default_factory=list)
    """Other places where a loss or a loop is the file's own."""
    has_more: bool = True
    """There is more in it than imports, and classes that are trainers."""

    @property
    def text(self) -> str:
        """The findings, as messages name them; empty if there are none."""
        return " and ".join([*self.trainers.values(), *self.others])

    @property
    def remedy(self) -> str:
        """The flag that trains by it; empty where that is not known."""
        if len(self.trainers) != 1 or self.others:
            return ""
        return f"-- --trainer {self.file}:{next(iter(self.trainers))}"


def read_code(file: Path) -> ScriptCode:
    """Return what trains in a file; nothing in one that is not Python."""
    result = ScriptCode(file)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return result
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (trainer := _trainer(node)):
            result.trainers[node.name] = trainer
    top = set(map(id, tree.body))
    for part in ast.walk(tree):
        if isinstance(part, ast.ClassDef) and id(part) not in top and (trainer := _trainer(part)):
            result.others.append(f"{trainer}, within a function")
        result.others += _loops(part)
    result.has_more = not all(_is_import(node) or getattr(node, "name", None) in result.trainers for node in tree.body)
    return result


def _is_import(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom)


def _trainer(node: ast.ClassDef) -> str:
    """Return how messages name a class that trains in a way of its own; empty for another class."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in OWN_LOSS]
    bases = ", ".join(map(ast.unparse, node.bases))
    if methods:
        return f"class {node.name}({bases}) with its own {methods[0].name} (line {methods[0].lineno})"
    return ""


def _loops(node: ast.AST) -> Iterator[str]:
    """Yield what computes a gradient, or gives a trainer another loss, in one node."""
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr == "backward":
            yield f"a training loop (line {node.lineno}: {ast.unparse(called)})"
        for keyword in node.keywords:
            if keyword.arg == "compute_loss_func":
                yield f"a compute_loss_func (line {node.lineno})"
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and target.attr in OWN_LOSS:
                yield f"{ast.unparse(target)} set to another function (line {node.lineno})"
