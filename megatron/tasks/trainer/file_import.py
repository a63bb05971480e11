"""The import of a file with a user's Trainer: as a script, with optimum.habana where that is not installed."""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.options.config import ConfigError


def check_import(option: str, name: str) -> None:
    """Raise ConfigError for a file that would train while it is imported."""
    file = Path(name.rpartition(":")[0])
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return  # its import says what is wrong
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            continue
        called = node.value.func
        is_own = isinstance(called, ast.Name) and called.id in own
        if is_own or (isinstance(called, ast.Attribute) and called.attr == "train"):
            raise ConfigError(
                [
                    f"{option}={name} calls {ast.unparse(called)} when it is imported (line {node.lineno}); put that "
                    "under `if __name__ == '__main__':`"
                ]
            )


@contextlib.contextmanager
def importable(name: str) -> Iterator[None]:
    """Within it a file imports its neighbours, as a script does, and optimum.habana where that is not installed."""
    file = name.rpartition(":")[0]
    folders = [str(Path(file).resolve().parent)] if file.endswith(".py") else []
    finder, before = _HabanaFinder(), list(sys.path)
    sys.path[:0] = folders
    # last: an installed optimum.habana is found before
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path[:] = [folder for folder in sys.path if folder not in folders or folder in before]
        # nothing else is to take them for the library
        for module in finder.made:
            sys.modules.pop(module, None)


class _HabanaFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """optimum.habana, in which GaudiTrainer is transformers' Trainer, and all else a class that cannot be used."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "optimum" and not f"{name}.".startswith("optimum.habana."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self.made.append(spec.name)
        return _HabanaModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is: its attributes are made when they are looked up."""


class _HabanaModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        # scripts go on without the check of its version, where it cannot be imported
        if name.startswith(("__", "check_")):
            raise AttributeError(name)
        if name in ("GaudiTrainer", "GaudiSFTTrainer"):
            import transformers

            return type(name, (transformers.Trainer,), {"__module__": "optimum.habana"})

        def refuse(self: Any, *arguments: Any, **options: Any) -> None:
            raise ImportError(f"optimum.habana is not installed, and {name} is used; install it, or leave {name} out")

        return type(name, (), {"__init__": refuse, "__module__": "optimum.habana"})
