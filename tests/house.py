"""Figures of the house: how much code there is, how dense it is, and how files import each other.

    python -m tests.house [--repo CHECKOUT] [--busy]

prints them for `megatron/` of this checkout or another one; `--busy` lists the functions with the most branches.
tests/test_house.py holds their limits. A code line is neither blank, nor a comment, nor part of a docstring.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.BoolOp)
MOST_BRANCHES = 12
SMALL = 60
MODULE_NAME = re.compile(r"megatron(?:\.\w+)+")


@dataclass
class SourceFile:
    """A Python file of `megatron/`: its tree, and what its lines are."""

    path: Path
    module: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def code_lines(self) -> int:
        docstrings: set[int] = set()
        for node in self.nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = enumerate(self.text.split("\n"), 1)
        return sum(
            bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
            for number, line in lines
        )

    @cached_property
    def comment_lines(self) -> int:
        return sum(line.strip().startswith("#") for line in self.text.split("\n"))

    @cached_property
    def import_lines(self) -> int:
        nodes = [node for node in self.nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)

    def count(self, *kinds: type[ast.AST]) -> int:
        return sum(isinstance(node, kinds) for node in self.nodes)

    def busy_functions(self) -> Iterator[tuple[int, str, int]]:
        """(branches, name, line) of each function with more than MOST_BRANCHES."""
        for node in self.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                branches = sum(isinstance(child, BRANCHES) for child in ast.walk(node))
                if branches > MOST_BRANCHES:
                    yield branches, node.name, node.lineno

    def imported_modules(self) -> Iterator[tuple[str, int]]:
        """(module, line) of each import, also within functions; relative ones are resolved."""
        package = self.module if self.path.stem == "__init__" else self.module.rpartition(".")[0]
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, node.module] if node.module else above)
                yield base, node.lineno
                yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)

    def named_modules(self) -> Iterator[tuple[str, int]]:
        """(module, line) of each string that is a module's name, as importlib takes it.

        The names that loggers have, and modules that a child process is to run (`-m`), are no imports.
        """
        others = set(_strings_of_no_import(self.nodes))
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
                yield from ((name, node.lineno) for name in MODULE_NAME.findall(node.value) if name == node.value)


def _strings_of_no_import(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the id of each constant that names a logger, or follows "-m" in a command."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger":
            yield from map(id, node.args)
        elif isinstance(node, (ast.List, ast.Tuple)):
            for word, following in itertools.pairwise(node.elts):
                if isinstance(word, ast.Constant) and word.value == "-m":
                    yield id(following)


@cache
def source_file(root: Path, path: Path) -> SourceFile:
    return SourceFile(path, ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"))


@dataclass
class House:
    """The Python files of `megatron/`, or of other folders, in a checkout."""

    root: Path
    folders: Sequence[str] = ("megatron",)

    @cached_property
    def files(self) -> list[SourceFile]:
        paths = [path for folder in self.folders for path in sorted((self.root / folder).rglob("*.py"))]
        return [source_file(self.root, path) for path in paths]

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Modules of these folders that each module imports."""
        names = {file.module for file in self.files}
        found = {}
        for file in self.files:
            mentioned = {name for name, _ in [*file.imported_modules(), *file.named_modules()]}
            found[file.module] = mentioned & names - {file.module}
        return found

    def circles(self) -> list[list[str]]:
        """Groups of modules each of which reaches every other by imports."""
        reached = {module: self._reach(module) for module in self.imports}
        groups = set()
        for module, reachable in reached.items():
            if module in reachable:
                groups.add(tuple(sorted(other for other in reachable if module in reached[other])))
        return [list(group) for group in sorted(groups)]

    def _reach(self, start: str) -> set[str]:
        reached: set[str] = set()
        waiting = list(self.imports[start])
        while waiting:
            module = waiting.pop()
            if module not in reached:
                reached.add(module)
                waiting += self.imports[module]
        return reached

    def small_files(self) -> list[str]:
        """Files below SMALL code lines that one other file imports; families are short by intent.

        An empty `__init__.py` is not counted: a folder needs it, whoever imports it.
        """
        importers = Counter(imported for modules in self.imports.values() for imported in modules)
        return [
            file.module
            for file in self.files
            if 0 < file.code_lines < SMALL and importers[file.module] == 1 and ".families." not in file.module
        ]

    def rooms(self) -> Counter[str]:
        """Number of files in each folder."""
        return Counter(str(file.path.parent.relative_to(self.root)) for file in self.files)

    def figures(self) -> dict[str, float]:
        code = sum(file.code_lines for file in self.files)
        lines = sum(file.text.count("\n") for file in self.files)
        return {
            "code lines": code,
            "files": len(self.files),
            "files of the fullest room": max(self.rooms().values()),
            f"files below {SMALL} code lines with one importer": len(self.small_files()),
            "files in circles, imports by string included": sum(map(len, self.circles())),
            "ternaries in 1,000 code lines": 1000 * sum(file.count(ast.IfExp) for file in self.files) / code,
            "branches in 1,000 code lines": 1000 * sum(file.count(*BRANCHES) for file in self.files) / code,
            f"functions of more than {MOST_BRANCHES} branches": sum(
                len([*file.busy_functions()]) for file in self.files
            ),
            "own-line comments, % of the code lines": 100 * sum(file.comment_lines for file in self.files) / code,
            "lines of imports, % of the code lines": 100 * sum(file.import_lines for file in self.files) / code,
            "lines in all": lines,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print the figures of megatron/ of a checkout.")
    parser.add_argument("--repo", type=Path, default=ROOT, metavar="CHECKOUT", help="default: this one")
    parser.add_argument("--busy", action="store_true", help="list the functions with the most branches")
    options = parser.parse_args(arguments)
    house = House(options.repo)
    for name, value in house.figures().items():
        print(f"{name:55}{value:>10,.1f}" if value % 1 else f"{name:55}{value:>10,.0f}")
    if options.busy:
        found = [
            (branches, file.module, name, line)
            for file in house.files
            for branches, name, line in file.busy_functions()
        ]
        for branches, module, name, line in sorted(found, reverse=True):
            print(f"{branches:4} {module}:{line} {name}")


if __name__ == "__main__":
    main()
