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

from megatron import api
from megatron.options.stored import PRESETS_DIR
from megatron.plan.rates.files import machine_names
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
EXTENSIONS = ("megatron/data/helpers", "megatron/parallel/token_operators")
OTHERS = (".css", ".js", ".tsv", ".typed")
SHARED = ("scripts", "examples", "docs")
OF_A_CHECKOUT = {"check.sh", "quickstart.sh", "setup.sh", "test.sh"}
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
    for folder in ("megatron", *SHARED):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
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


def shared_files() -> set[str]:
    """Return what users start, read and change."""
    files = (path for folder in SHARED for path in (ROOT / folder).rglob("*"))
    return {
        str(path.relative_to(ROOT))
        for path in files
        if path.is_file() and "__pycache__" not in path.parts and path.name not in OF_A_CHECKOUT
    }


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
        own = self.root / "bin" / program
        return call([own if own.exists() else program, *arguments], self.folder, **variables)


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
    assert {*SOURCES, *native, *shared_files()} - {"MANIFEST.in"} <= names
    assert not [name for name in names if name.startswith(("tests", "tools", "benchmarks"))]


def test_both_wheels_hold_every_module_and_preset(builds: Builds) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron").rglob("*.py")}
    presets = {f"megatron/presets/{path.name}" for path in PRESETS_DIR.glob("*.yaml")}
    assert len(presets) > 20
    presets |= {f"megatron/plan/machines/{name}.yaml" for name in machine_names()}
    others = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron").rglob("*") if path.suffix in OTHERS}
    expected = modules | presets | others | {f"{extension}.pyi" for extension in EXTENSIONS}
    expected |= {f"megatron/share/{name}" for name in shared_files()}
    for wheel in builds.wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert {name for name in names if not name.endswith(".so")} == expected
        assert {name.partition(".")[0] for name in names if name.endswith(".so")} == set(EXTENSIONS)


def test_the_version_stands_in_one_place_and_the_changelog_begins_with_it(builds: Builds) -> None:
    version = PROJECT["version"]
    assert builds.sdist.name == f"megatron_3d-{version}.tar.gz"
    assert all(wheel.name.startswith(f"megatron_3d-{version}-") for wheel in builds.wheels.values())
    newest = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert re.fullmatch(rf"(\[Unreleased\]|\[?\d{{4}}-\d\d-\d\d\]?) - {re.escape(version)}", newest)


def test_a_wheel_needs_no_library_but_those_of_every_linux(builds: Builds) -> None:
    """auditwheel's policies: it would name a manylinux tag for no wheel that links others."""
    wheel = builds.wheels[WHEELS[0]]
    shown = " ".join(call([sys.executable, "-m", "auditwheel", "show", wheel], builds.sdist.parent).stdout.split())
    assert re.search(r'consistent with the following platform tag: "manylinux_2_\d+_', shown), shown


def test_the_installed_package_is_the_one_imported(installed: Environment) -> None:
    # of the namespace the tests' own environment may hold a part: megatron.core
    found = installed.run("python", "-c", "import megatron.options; print(*megatron.options.__path__)").stdout.split()
    assert found == [str(installed.packages / "megatron" / "options")]


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
    variables = {"HL_CONFIG": "tiny_llama", "HL_DEVICE": "cpu", "HL_TP": "2", "HL_RESULTS_DIR": "two"}
    variables |= {"HL_DATA_DIR_ROOT": ".", "HL_DATA_FILE_PREFIX": "corpus_text_document"}
    two = installed.run("megatron-run", "llama", *flags[2:], **variables)
    one = installed.run("megatron-train", *flags, "--results-dir", "one", OMP_NUM_THREADS="1")
    for done in (two, one):
        assert re.search(r"iteration +10/ +10 ", done.stdout), done.stdout


def test_scripts_examples_and_pages_are_reached_from_an_empty_folder(installed: Environment) -> None:
    variables = {"HL_CONFIG": "tiny_llama", "HL_TP": "2", "HL_DEVICE": "cpu", "HL_DRY_RUN": "1"}
    plan = installed.run("megatron-run", "llama", "--seq-length", "32", **variables).stdout
    assert "sequence 32" in plan
    assert "megatron-launch" in plan
    assert (
        str(installed.packages / "megatron" / "share" / "scripts" / "run_bloom13b.sh")
        in installed.run("megatron-run").stdout
    )
    installed.run("megatron-run", "--copy", "work")
    assert {str(path.relative_to(installed.folder / "work")) for path in (installed.folder / "work").rglob("*")} >= (
        shared_files()
    )
    # beside no tools/: the copy starts the installed package
    copied = installed.run(
        "bash", "work/scripts/run_llama.sh", PYTHON=str(installed.root / "bin" / "python"), **variables
    )
    assert "Plan of tiny_llama" in copied.stdout


def test_the_calls_of_python_plan_as_those_of_the_checkout(installed: Environment) -> None:
    code = "from megatron import api; print(api.plan(config='bloom_13b', device='gaudi2', num_devices=64), end='')"
    here = api.plan(config="bloom_13b", device="gaudi2", num_devices=64)
    assert installed.run("python", "-c", code).stdout == str(here)


@pytest.mark.slow
@pytest.mark.parametrize("installed", WHEELS[:1], indirect=True, scope="module")
def test_a_type_checker_reads_the_types_of_the_installed_calls(installed: Environment) -> None:
    code = "from megatron.api import plan, train\nreveal_type(plan(config='a').step_seconds)\ntrain(1, config='a')\n"
    (installed.folder / "service.py").write_text(code)
    own = ["--python-executable", str(installed.root / "bin" / "python"), "--follow-imports", "silent"]
    command = [sys.executable, "-m", "mypy", *own, "--cache-dir", "cache", "service.py"]
    done = subprocess.run(command, cwd=installed.folder, capture_output=True, text=True, timeout=HANG_S)
    assert re.search(r'Revealed type is "(float \| None|.*Union\[.*float.*None\])"', done.stdout), (
        done.stdout + done.stderr
    )
    assert 'Argument 1 to "train" has incompatible type "int"' in done.stdout
