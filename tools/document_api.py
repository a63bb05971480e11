"""Print docs/reference/python.md from the signatures and docstrings of megatron.api.

python tools/document_api.py > docs/reference/python.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import api
from megatron.runtime.accelerator import choose_device

HEADER = """# Python

<!-- Written by tools/document_api.py from the docstrings of megatron.api: change those, not this page. -->

`megatron.api` has the calls for notebooks, services and programs. [Three
notebooks](../../examples/notebooks/README.md) use them.

**What is promised.** The names on this page, `megatron.api.__all__`, and their signatures, which
`tests/test_api_promise.py` freezes. By [semantic versioning](https://semver.org/spec/v2.0.0.html) a major version alone
removes or changes one of them, a minor version may add names, arguments with a default, and options; before 1.0 a minor
version may also change them, with an entry in the [changelog](../../CHANGELOG.md). Options go by the names of the
commands' flags, with underscores, and are promised as these are. Everything else under `megatron` may change in any
version, and so may texts for people: plans, logs, messages. Types are checked where they are installed (`py.typed`).

`plan`, `train` and `load` validate before anything starts, and report all faults in one `ConfigError`. `train`,
`prepare`, `convert` and `train_tokenizer` run in processes of their own: their output is shown as it comes, Ctrl-C (the
interrupt of a notebook) stops them as it stops the command, and this process keeps its memory and its device.
"""
CALLS = ("plan", "train_tokenizer", "prepare", "train", "load", "convert")
CLASSES = (api.TrainedRun, api.RunPlan)
PATHS = "str | Path | Sequence[str | Path]"
ERRORS = (api.ConfigError, api.DataError, api.CheckpointError, api.CommandError)


def argument(parameter: inspect.Parameter) -> str:
    """Return `name: type = default`, with the type as in the source."""
    hint = str(parameter.annotation).replace("Paths", PATHS)
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}: {hint}{default}"


def signature(name: str, function: Callable[..., Any]) -> str:
    """Return `name(...)`, an argument a line if it is long; annotations are written as in the source."""
    given = inspect.signature(function)
    words: list[str] = []
    for parameter in given.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        if parameter.name != "self":
            words.append(argument(parameter))
    returns = str(given.return_annotation).strip("'")
    line = f"{name}({', '.join(words)}) -> {returns}"
    if len(line) <= 98:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f") -> {returns}"


def text_of(thing: Any) -> str:
    """Return a docstring as Markdown: its `Args` are a list."""
    text = inspect.getdoc(thing) or ""
    before, args, after = text.partition("Args:\n")
    if not args:
        return text
    listed, _, rest = after.partition("\n\n")
    items = re.sub(r"^    (\w+): ", r"- `\1`: ", listed, flags=re.MULTILINE)
    return f"{before}{re.sub(r'^        ', '  ', items, flags=re.MULTILINE)}\n\n{rest}".rstrip()


def call_lines(name: str, function: Callable[..., Any]) -> Iterator[str]:
    yield from ("```python", signature(name, function), "```", "", text_of(function), "")


def doc_of_fields(cls: type) -> dict[str, str]:
    """Return the strings below the fields of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = str(text.value.value)
    return found


def class_lines(cls: type) -> Iterator[str]:
    """Yield the description of a class: its fields, properties and methods."""
    yield from (f"### {cls.__name__}", "", text_of(cls), "")
    docs = doc_of_fields(cls)
    rows = []
    for field in dataclasses.fields(cls):
        rows.append((field.name, str(field.type), docs.get(field.name, "")))
    for name, member in vars(cls).items():
        if isinstance(member, property):
            assert member.fget is not None
            rows.append((name, str(inspect.signature(member.fget).return_annotation).strip("'"), text_of(member)))
    yield from ("| attribute | type | |", "|---|---|---|")
    for name, hint, text in rows:
        cell = " ".join(text.split())
        yield f"| `{name}` | `{hint}` | {cell} |".replace(" | None`", " \\| None`")
    yield ""
    for name, member in vars(cls).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            yield from call_lines(f"{cls.__name__}.{name}", member)


def lines() -> Iterator[str]:
    choose_device("cpu")  # before anything imports deepspeed, which prints what it finds
    from megatron.generation.text_model import TextModel

    yield HEADER
    yield "## Calls\n"
    for name in CALLS:
        yield f"### {name}\n"
        yield from call_lines(name, getattr(api, name))
    yield "## Results\n"
    for cls in CLASSES:
        yield from class_lines(cls)
    yield "### TextModel\n"
    yield f"{text_of(TextModel)} `load` returns it.\n"
    yield from call_lines("TextModel.generate", TextModel.generate)
    yield "## Errors\n"
    for error in ERRORS:
        base = next(each for each in error.__mro__ if each.__module__ == "builtins")
        yield f"- `{error.__name__}`, a {base.__name__}: {' '.join(text_of(error).split())}"
    others = sorted(set(api.__all__) - {*CALLS, *(each.__name__ for each in (*CLASSES, *ERRORS))})
    yield "\n## InstructLab's interface\n"
    yield f"[InstructLab's arguments](instructlab.md) has the rest: {', '.join(f'`{name}`' for name in others)}."


def main() -> None:
    text = "\n".join(lines())
    print(re.sub(r"\n{3,}", "\n\n", text))


if __name__ == "__main__":
    main()
