"""The package as a user installs it: sdist and wheel are whole, and run where there is no checkout.

Both wheels are built without the network and installed into an environment of their own. That has the dependencies of
the running environment, but neither this checkout nor another installation of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomllib

from megatron.options.stored import PRESETS_DIR
from megatron.plan.rates.files import machine_names
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
EXTENSIONS = ("megatron/data/helpers", "megatron/parallel/token_operators")
OTHERS = (".css", ".js", ".tsv")
WHEELS = ("from the sdist", "from the checkout")


def call(command: Sequence[str | Path], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed, without anything that leads to this checkout."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("HL_")
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def pip_wheel(source: Path, output: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-index"]
    call([*pip, "--no-build-isolation", "-w", output, source], output.parent)
    (wheel,) = output.glob("*.whl")
    return wheel


@dataclass(frozen=True)
class Builds:
    sdist: Path
    wheels: dict[str, Path]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """An sdist, the wheel of it, and the wheel of a copy of the checkout."""
    work = tmp_path_factory.mktemp("builds")
    checkout, unpacked = work / "checkout", work / "unpacked"
    shutil.copytree(ROOT / "megatron", checkout / "megatron", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in SOURCES:
        shutil.copy2(ROOT / name, checkout)
    build = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    call([sys.executable, "-c", build], checkout)
    (sdist,) = work.glob("*.tar.gz")
    shutil.unpack_archive(sdist, unpacked)
    wheels = {}
    for name, source in zip(WHEELS, (next(unpacked.iterdir()), checkout), strict=True):
        reuse_compiled_extensions(source)
        wheels[name] = pip_wheel(source, work / name)
    return Builds(sdist, wheels)


def reuse_compiled_extensions(source: Path) -> None:
    """Put the extensions that set-up compiled where a build looks for them, which compiles those not up to date."""
    tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for extension in EXTENSIONS:
        target = source / "build" / f"lib.{tag}" / Path(extension).parent
        target.mkdir(parents=True)
        for compiled in ROOT.glob(f"{extension}{sysconfig.get_config_var('EXT_SUFFIX')}"):
            shutil.copy2(compiled, target)


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the installed wheel; `folder` is an empty one to run in."""

    root: Path
    folder: Path

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.root)}))

    def run(self, program: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return call([self.root / "bin" / program, *arguments], self.folder, **variables)


@pytest.fixture(scope="module", params=WHEELS)
def installed(request: pytest.FixtureRequest, builds: Builds, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    work = tmp_path_factory.mktemp("installed")
    environment = Environment(work / "environment", work / "folder")
    environment.folder.mkdir()
    call([sys.executable, "-m", "venv", "--without-pip", environment.root], work)
    # .pth files of the folders named here, such as that of this checkout, are not followed
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (environment.packages / "dependencies.pth").write_text("\n".join(dependencies))
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        environment.root / "bin" / "python",
    ]
    call([*pip, "install", "-q", "--no-deps", "--no-index", builds.wheels[request.param]], work)
    return environment


def test_the_sdist_holds_what_a_build_needs_and_no_tests(builds: Builds) -> None:
    with tarfile.open(builds.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {str(path.relative_to(ROOT)) for path in ROOT.glob("megatron/*/native/*")}
    assert {*SOURCES, *native} - {"MANIFEST.in"} <= names
    assert not [name for name in names if name.startswith(("tests", "tools", "benchmarks", "examples"))]


def test_both_wheels_hold_every_module_and_preset(builds: Builds) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron").rglob("*.py")}
    presets = {f"megatron/presets/{path.name}" for path in PRESETS_DIR.glob("*.yaml")}
    assert len(presets) > 20
    presets |= {f"megatron/plan/machines/{name}.yaml" for name in machine_names()}
    others = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron").rglob("*") if path.suffix in OTHERS}
    expected = modules | presets | others | {f"{extension}.pyi" for extension in EXTENSIONS}
    for wheel in builds.wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert {name for name in names if not name.endswith(".so")} == expected
        assert {name.partition(".")[0] for name in names if name.endswith(".so")} == set(EXTENSIONS)


def test_the_installed_package_is_the_one_imported(installed: Environment) -> None:
    found = installed.run("python", "-c", "import megatron; print(*megatron.__path__)").stdout.split()
    assert found == [str(installed.packages / "megatron")]


@pytest.mark.parametrize("theirs_first", [True, False])
def test_megatron_core_is_importable_beside_an_installed_package_and_a_checkout(
    installed: Environment, theirs_first: bool, tmp_path: Path
) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("__version__ = '1.2'\n")
    code = "import megatron.core, megatron.options.config; print(megatron.core.__version__)"
    for ours in (installed.packages, ROOT):
        places = [str(tmp_path), str(ours)] if theirs_first else [str(ours), str(tmp_path)]
        assert installed.run("python", "-c", code, PYTHONPATH=os.pathsep.join(places)).stdout == "1.2\n"


@pytest.mark.parametrize("installed", WHEELS[:1], indirect=True, scope="module")
@pytest.mark.parametrize("command", sorted(PROJECT["scripts"]))
def test_help_names_the_command_and_imports_no_torch(installed: Environment, command: str) -> None:
    shown = installed.run(command, "--help", PYTHONPROFILEIMPORTTIME="1")
    assert shown.stdout.startswith(f"usage: {command} ")
    assert re.search(r"\| +argparse$", shown.stderr, re.MULTILINE)
    assert not re.search(r"\| +(torch|deepspeed|transformers)$", shown.stderr, re.MULTILINE)


def test_every_tool_of_a_checkout_is_an_installed_command() -> None:
    targets = [target.split(":") for target in PROJECT["scripts"].values()]
    modules = {f"megatron.cli.{name}" if module == "megatron.cli.entry" else module for module, name in targets}
    names = {path.stem for path in (ROOT / "tools").glob("*.py")}
    tools = {f"megatron.cli.{name}" for name in names if not name.startswith("document_")}
    assert modules == tools | {"megatron.cli.train"}, "which is megatron.train"


@pytest.mark.parametrize("installed", WHEELS[:1], indirect=True, scope="module")
def test_text_becomes_a_dataset_that_two_ranks_and_then_one_train_on(installed: Environment) -> None:
    text = "".join(f"The square of {number} is {number * number}.\n" for number in range(4000))
    (installed.folder / "corpus.txt").write_text(text)
    installed.run(
        *("megatron-train-tokenizer", "--input", "corpus.txt", "--vocab-size", "400", "--output-dir", "tokenizer")
    )
    installed.run(
        *("megatron-preprocess", "--input", "corpus.txt", "--document-separator", r"\n", "--append-eod"),
        *("--tokenizer-type", "HFTokenizer", "--tokenizer-model", "tokenizer", "--output-prefix", "corpus"),
    )
    assert "4,000" in installed.run("megatron-inspect-dataset", "corpus_text_document", "--verify").stdout
    run = "--config tiny_llama --device cpu --seq-length 32 --global-batch-size 4 --micro-batch-size 2 --eval-iters 1"
    flags = [
        *run.split(),
        "--data-path",
        "corpus_text_document",
        "--train-samples",
        "40",
        "--lr-warmup-samples",
        "4",
        "--log-interval",
        "1",
    ]
    launch = ["megatron-launch", "--devices-per-node", "2", "--device", "cpu"]

    plan = installed.run(*launch, "--dry-run", "--", *flags, "--tensor-model-parallel-size", "2")
    assert "TP 2" in plan.stdout
    two = installed.run(*launch, "--", *flags, "--tensor-model-parallel-size", "2", "--results-dir", "two")
    one = installed.run("megatron-train", *flags, "--results-dir", "one", OMP_NUM_THREADS="1")
    for done in (two, one):
        assert re.search(r"iteration +10/ +10 ", done.stdout), done.stdout
