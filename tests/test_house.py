"""The rules of the house, read from the source: floors, readers, forbidden calls, requirements."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomllib

from megatron.options.config import options, sections
from tests.conftest import LONG_FIRST
from tests.house import House, SourceFile, source_file

ROOT = Path(__file__).resolve().parent.parent

# A file imports lower floors, or its own folder (for a file of megatron/ itself: the others of its floor).
FLOORS = {
    "options": 1,
    "runtime": 1,
    "hub": 2,
    "parallel": 2,
    "models": 3,
    "data": 3,
    "checkpoint": 3,
    "tasks": 4,
    "resilience": 4,
    "weights": 5,
    "plan": 5,
    "settings": 6,
    "observability": 6,
    "generation": 6,
    "evaluation": 7,
    "training": 8,
    "train": 9,
    "generate": 9,
    "evaluate": 9,
    "measuring": 9,
    "launch": 10,
    "api": 11,
    "cli": 11,
    "gaudi_spawn": 11,
    "pretrain_gpt": 11,
}
MOST_FLOORS = 11

# Limits of what `python -m tests.house` prints. Each is the figure of the day, rounded up: lower it where you can.
LIMITS = {
    "files below 60 code lines with one importer": 8,
    "ternaries in 1,000 code lines": 22,
    "branches in 1,000 code lines": 236,
    "functions of more than 12 branches": 0,
    "lines of imports, % of the code lines": 10.1,
}
MOST_FILES = 18
CROWDED: dict[str, int] = {}
"""Rooms with more files than MOST_FILES: split or join."""
LEAST_COMMENTS = 5.0
"""Own-line comments, % of the code lines, which are reasons: 5 to 10 are wanted."""

# Where a module of the package is imported by a string: commands by their names, the program that a rank runs.
BY_STRING = {"megatron/cli/entry.py", "megatron/launch/preload.py"}

# The files that answer before anything heavy is loaded.
LIGHT = (
    "generation.options",
    "launch.child_processes",
    "launch.dialects.hl_requests",
    "launch.preflight",
    "models.registry",
    "models.rules",
    "options.config",
    "options.progress",
    "options.schedule",
    "options.stored",
    "plan.describe",
    "runtime.accelerator",
    "runtime.commands",
    "runtime.devices",
    "runtime.files",
    "settings.command_line",
    "settings.validation",
    "tasks.packed",
    "tasks.registry",
    "weights.huggingface_config",
    "weights.model_folder",
)


@cache
def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return source(path).tree


def room(path: Path) -> str:
    """megatron/parallel/layers.py -> parallel; megatron/train.py -> train."""
    return path.relative_to(ROOT / "megatron").parts[0].removesuffix(".py")


def source(path: Path) -> SourceFile:
    return source_file(ROOT, path)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted module, line) of every import of a file."""
    return source(path).imported_modules()


def at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def floor_faults(path: Path) -> Iterator[str]:
    here = room(path)
    by_string = [(name, line) for name, line in source(path).named_modules() if name.split(".")[1] in FLOORS]
    for module, line in [*imports(path), *by_string]:
        first, _, rest = module.partition(".")
        if first == "tools":
            yield f"{at(path, line)} imports {module}; nobody imports tools"
        if first != "megatron" or not rest:
            continue
        there = rest.split(".")[0]
        if there not in FLOORS:
            yield f"{at(path, line)} imports megatron.{there}, which stands on no floor"
        elif FLOORS[there] > FLOORS[here]:
            yield f"{at(path, line)}: {here} [{FLOORS[here]}] imports {there} [{FLOORS[there]}], a higher floor"
        elif FLOORS[there] == FLOORS[here] and there != here and FLOORS[here] > 1 and path.parent != ROOT / "megatron":
            yield f"{at(path, line)}: {here} imports {there}, another folder of floor {FLOORS[here]}"


def test_floors_are_few() -> None:
    assert set(FLOORS.values()) == set(range(1, max(FLOORS.values()) + 1))
    assert max(FLOORS.values()) <= MOST_FLOORS


def test_every_room_has_files() -> None:
    folders = {path.parent for path in sources("megatron")}
    empty = [folder for folder in folders if not any(path.name != "__init__.py" for path in folder.rglob("*.py"))]
    assert empty == []


def test_every_file_stands_on_a_floor() -> None:
    assert {room(path) for path in sources("megatron") if path.name != "__init__.py"} <= set(FLOORS)


def test_files_import_lower_floors_or_their_own_folder() -> None:
    files = [path for path in sources("megatron") if path.name != "__init__.py"]
    assert [fault for path in files for fault in floor_faults(path)] == []


@pytest.mark.parametrize(
    ("file", "code", "expected"),
    [
        ("models/new.py", "from megatron.data.gpt import GPTDataset", "another folder of floor 3"),
        ("data/new_1.py", "import megatron.models.families.bloom", "another folder of floor 3"),
        ("data/new_2.py", "importlib.import_module('megatron.models.family')", "another folder of floor 3"),
        ("data/new_3.py", "from ..models import bloom", "another folder of floor 3"),
        ("parallel/new.py", "def late():\n    from megatron import train", "a higher floor"),
        ("training/new_4.py", "from tools import plan", "nobody imports tools"),
        ("training/new_5.py", "from megatron.utils import ensure", "stands on no floor"),
    ],
)
def test_a_broken_floor_is_seen(file: str, code: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SourceFile, "tree", ast.parse(code))
    faults = list(floor_faults(ROOT / "megatron" / file))
    assert faults
    assert all(expected in fault for fault in faults)


def test_files_import_each_other_in_no_circle() -> None:
    house = House(ROOT, ("megatron", "tools", "benchmarks", "examples"))
    assert len(house.files) > 100
    assert house.circles() == []


@pytest.mark.parametrize(
    ("code", "is_circle"),
    [
        ("from megatron.room.a import A", True),
        ("def late():\n    import megatron.room.a", True),
        ("from . import a", True),
        ("importlib.import_module('megatron.room.a')", True),
        ("main: str = 'megatron.room.a'", True),
        ("import megatron.room.c", False),
        ("log = logging.getLogger('megatron.room.a')", False),
        ("command = [sys.executable, '-m', 'megatron.room.a']", False),
    ],
)
def test_a_circle_is_seen(code: str, is_circle: bool, tmp_path: Path) -> None:
    room = tmp_path / "megatron" / "room"
    room.mkdir(parents=True)
    (room / "a.py").write_text("import megatron.room.b\n")
    (room / "b.py").write_text(code)
    (room / "c.py").write_text("")
    assert House(tmp_path).circles() == ([["megatron.room.a", "megatron.room.b"]] if is_circle else [])


def test_only_commands_are_imported_by_string() -> None:
    """Elsewhere an import by string is that of a user's plugin, whose name is no constant."""
    importers = [
        at(path, node.lineno)
        for path in sources("megatron")
        for node in source(path).nodes
        if isinstance(node, ast.Call)
        if ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
        if "megatron." in ast.unparse(node)
    ]
    assert {importer.partition(":")[0] for importer in importers} <= BY_STRING


LONGEST_FILE, LONGEST_FUNCTION = 500, 60


def test_files_and_functions_are_short_or_say_why() -> None:
    """A longer one has a comment `# Long: <reason>` in the line above its definition, or a file in its first lines."""
    found = []
    for path in [*sources("megatron", "tools", "benchmarks", "examples"), *sorted((ROOT / "megatron").rglob("*.cpp"))]:
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > LONGEST_FILE and not any("Long: " in line for line in lines[:40]):
            found.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
        if path.suffix != ".py":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                length = node.end_lineno - node.lineno + 1
                if length > LONGEST_FUNCTION and "# Long: " not in lines[first - 2]:
                    found.append(f"{at(path, node.lineno)}: {node.name} has {length} lines")
    assert found == []


def test_rooms_are_small() -> None:
    above = {room: number for room, number in House(ROOT).rooms().items() if number > CROWDED.get(room, MOST_FILES)}
    assert above == {}


def test_the_house_is_within_its_limits() -> None:
    figures = House(ROOT).figures()
    above = {name: value for name, value in figures.items() if name in LIMITS and value > LIMITS[name]}
    assert above == {}
    assert LIMITS.keys() <= figures.keys()
    assert figures["own-line comments, % of the code lines"] >= LEAST_COMMENTS


def test_the_files_that_start_first_exist() -> None:
    assert [name for name in LONG_FIRST if not (ROOT / "tests" / f"{name}.py").is_file()] == []


def test_one_class_one_name() -> None:
    """No two classes of the package share a name: a reader who finds one has found the right one."""
    homes: dict[str, list[str]] = {}
    for path in sources("megatron"):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_nobody_imports_tools_and_examples() -> None:
    importers = [
        at(path, line)
        for path in sources("megatron", "benchmarks", "examples", "tools")
        for module, line in imports(path)
        if module.split(".")[0] in ("tools", "examples")
    ]
    assert importers == []


def test_light_files_import_neither_torch_nor_deepspeed_at_module_level() -> None:
    modules = ", ".join(f"megatron.{name}" for name in LIGHT)
    code = f"import sys, {modules}; print({{'torch', 'deepspeed'}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_package_files_are_empty() -> None:
    assert [path for path in sources("megatron") if path.name == "__init__.py" and path.stat().st_size] == []


def test_no_file_is_a_drawer_for_everything() -> None:
    assert [
        path
        for path in sources("megatron", "tools", "tests")
        if path.stem in ("utils", "util", "helper", "misc", "common")
    ] == []


# ---------------------------------------------------------------------------------------------------------------------
# Options


def holders(module: ast.AST) -> dict[str, str]:
    """Names that hold a section in `module`, with its name: `options = config.optimizer`, `model: ModelConfig`."""
    classes = {cls.__name__: section for section, cls in sections().items()}
    found = {section: section for section in sections()}
    for node in ast.walk(module):
        if isinstance(node, ast.arg) and node.annotation is not None:
            annotation = ast.unparse(node.annotation).strip("'\"")
            found |= {node.arg: classes[annotation]} if annotation in classes else {}
        if isinstance(node, ast.Assign):
            several = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            targets = node.targets[0].elts if several else node.targets[:1]  # type: ignore[attr-defined]
            values = node.value.elts if several else [node.value]  # type: ignore[attr-defined]
            for target, value in zip(targets, values, strict=False):
                if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and value.attr in sections():
                    found[target.id] = value.attr
    return found


def option_readers() -> Iterator[tuple[str, str]]:
    """(section, option) of every `config.model.num_layers`, `model.num_layers` and the like.

    In the files that declare the sections only the dataclasses' own properties count, and validation.py does not
    count: a rule alone uses an option for nothing.
    """
    classes = {cls.__name__: section for section, cls in sections().items()} | {"Config": ""}
    for path in sources("megatron", "tools"):
        if path == ROOT / "megatron" / "settings" / "validation.py":
            continue
        tops: list[tuple[ast.AST, dict[str, str]]] = [(tree(path), holders(tree(path)))]
        nodes = [node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name in classes]
        if nodes:
            tops = [(node, holders(node) | {"self": classes[node.name]}) for node in nodes]
        for top, names in tops:
            for node in ast.walk(top):
                if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                    continue
                if isinstance(node.value, ast.Attribute) and node.value.attr in sections():
                    yield node.value.attr, node.attr
                elif isinstance(node.value, ast.Name) and node.value.id in names:
                    yield names[node.value.id], node.attr


def test_every_option_has_a_reader() -> None:
    read = set(option_readers())
    unread = [f"{home}.{name}" for name, (home, _) in options().items() if (home, name) not in read]
    assert unread == [], "options that nothing under megatron/ or tools/ reads"


# ---------------------------------------------------------------------------------------------------------------------
# Forbidden


OBJECT_COLLECTIVES = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list"),
    "send_object_list",
)


def forbidden(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"):
                    yield node.lineno, f"import {name}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options_given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called.rpartition(".")[2] in OBJECT_COLLECTIVES:
            yield node.lineno, f"{called}, which unpickles what it receives"
        if called in ("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.full_load", "yaml.unsafe_load"):
            yield node.lineno, called
        if options_given.get("shell", "False") != "False":
            yield node.lineno, f"{called}(shell=...)"
        if called == "torch.load" and options_given.get("weights_only") != "True":
            yield node.lineno, "torch.load without weights_only=True"
        if options_given.get("allow_pickle", "False") != "False":
            yield node.lineno, f"{called}(allow_pickle=...)"
        if options_given.get("trust_remote_code", "False") != "False":
            yield node.lineno, f"{called}(trust_remote_code=...)"


def test_nothing_forbidden_is_called() -> None:
    found = [
        f"{at(path, line)} {what}"
        for path in [*sources("megatron", "tools", "benchmarks", "examples", "scripts"), ROOT / "setup.py"]
        for line, what in forbidden(tree(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "exec(text)",
        "import pickle",
        "from pickle import loads",
        "yaml.load(text, Loader=yaml.Loader)",
        "subprocess.run(command, shell=True)",
        "os.system(command)",
        "torch.load(path)",
        "dist.all_gather_object(gathered, mine)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_forbidden_calls_are_seen(code: str) -> None:
    assert list(forbidden(ast.parse(code)))


@pytest.mark.parametrize("code", ["model.eval()", "torch.load(path, weights_only=True)", "run(command, shell=False)"])
def test_allowed_calls_are_left_alone(code: str) -> None:
    assert list(forbidden(ast.parse(code))) == []


def test_nothing_is_left_to_do() -> None:
    pattern = re.compile(r"#\s*(TODO|FIXME|XXX|HACK)\b|\bNotImplementedError\b|\bbreakpoint\(\)")
    found = [
        f"{at(path, number)} {line.strip()}"
        for path in sources("megatron", "tools", "benchmarks", "examples")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


# ---------------------------------------------------------------------------------------------------------------------
# Requirements

# distribution -> import name, where the two differ
IMPORT_NAMES = {"pyyaml": "yaml"}

# Not imported by name: transformers reads tokenizer files with it.
UNIMPORTED = {"regex"}


def required(*extras: str) -> set[str]:
    """Distributions that the package needs, and those of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    lines += [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {re.split(r"[<>=!~ \[]", line)[0] for line in lines} - {project["name"]}


def imported() -> set[str]:
    """Import names, dotted ones with each of their prefixes, of everything that is installed with the requirements."""
    modules = {
        module
        for path in sources("megatron", "tools", "benchmarks", "examples", "scripts")
        for module, _ in imports(path)
    }
    return {module.rsplit(".", cut)[0] for module in modules for cut in range(module.count(".") + 1)}


def test_every_requirement_is_imported() -> None:
    names, found = {package: IMPORT_NAMES.get(package, package) for package in required() - UNIMPORTED}, imported()
    assert sorted(package for package, name in names.items() if name not in found) == []


def test_every_import_is_required() -> None:
    declared = {IMPORT_NAMES.get(package, package) for package in required()}
    # transformers: an extra, imported where Hugging Face's own files are read; habana_frameworks: the extra hpu
    declared |= {"megatron", "tools", "benchmarks", "transformers", "habana_frameworks"}
    declared |= {"litgpt"}  # a peer of benchmarks/step.py, which names how to install it
    declared |= {"fsspec", "bitsandbytes", "lm_eval"}  # the extras `remote`, `qlora` and `eval`
    # triton: comes with torch's CUDA builds, imported on CUDA; liger_kernel: an optional peer of benchmarks/loss.py
    declared |= {"triton", "liger_kernel"}
    declared |= {"mkdocs"}  # the extra `docs`: tools/document_site.py, which mkdocs imports
    declared |= {"hypothesis"}  # the extra `test`: the drawn cases of benchmarks/plan_time.py
    declared |= {"pydantic_core"}  # comes with pydantic
    declared |= {"peft"}  # a peer of benchmarks/merge_adapter.py, in an environment of its own
    # in the environments of benchmarks/peers/tuning_peer.py and preference_peer.py, never in ours
    declared |= {"trl", "instructlab", "datasets"}
    top = {module for module in imported() if "." not in module and module not in sys.stdlib_module_names}
    beside = {path.stem for path in sources("tools", "benchmarks")}
    assert sorted(top - declared - beside) == []


def test_every_requirement_is_pinned_to_the_tested_version() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    assert sorted(required("convert", "test") - set(pins)) == []


def test_the_license_is_apache_2_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
