"""Run a script of scripts/ by its name, as an installed package has them too; or copy them, to read and to change.

HL_TP=4 HL_DP=2 megatron-run bloom13b --lr 1e-4     is HL_TP=4 HL_DP=2 scripts/run_bloom13b.sh --lr 1e-4
megatron-run --copy work                            writes work/scripts, work/examples and work/docs
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.command import command, command_parser
from megatron.runtime.commands import DONE, REFUSED
from megatron.runtime.files import IMPORT_ROOT

INSTALLED = IMPORT_ROOT / "megatron" / "share"
"""Copies of FOLDERS, which setup.py adds to a wheel: one source for checkout and package."""
FOLDERS = ("scripts", "examples", "docs")
LEFT_OUT = ("check.sh", "environment.sh", "quickstart.sh", "setup.sh", "test.sh")
"""Scripts of a checkout, and what the others read."""


def root() -> Path:
    """Return the folder of scripts/, examples/ and docs/: the checkout's, or the package's copy."""
    return INSTALLED if INSTALLED.is_dir() else IMPORT_ROOT


def scripts() -> dict[str, Path]:
    """Return the scripts by the names that the command takes."""
    files = sorted((root() / "scripts").glob("*.sh"))
    return {file.stem.removeprefix("run_"): file for file in files if file.name not in LEFT_OUT}


def copy(folder: Path) -> None:
    """Copy scripts, examples and pages. Raises FileExistsError, before anything is written."""
    # all are looked at first: half a copy would stop the next attempt
    for name in FOLDERS:
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} exists; name a folder without it")
    for name in FOLDERS:
        shutil.copytree(root() / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    known = scripts()
    parser = command_parser(
        "run",
        "Run a script, with the HL_* variables that are set (docs/reference/variables.md).",
        usage="%(prog)s SCRIPT [FLAG VALUE ...]\n       %(prog)s --copy FOLDER",
        epilog="Flags after the name are the script's: `%(prog)s llama --help` shows its page.",
    )
    parser.add_argument("script", nargs="?", choices=sorted(known), metavar="SCRIPT", help=", ".join(known))
    parser.add_argument(
        "--copy", type=Path, metavar="FOLDER", help="write scripts, examples and documentation into a folder"
    )
    # all behind the name belongs to the script
    has_script = bool(arguments) and not arguments[0].startswith("-")
    options = parser.parse_args(arguments[:1] if has_script else arguments)
    if options.script is not None:
        return _run(known[options.script], arguments[1:])
    if options.copy is None:
        parser.print_usage()
        print("\n".join(["", "scripts:", *(f"  {name:<18}{file}" for name, file in known.items())]))
        return DONE
    try:
        copy(options.copy)
    except FileExistsError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    print(f"wrote {', '.join(str(options.copy / name) for name in FOLDERS)}")
    return DONE


def _run(script: Path, arguments: Sequence[str]) -> int:
    bash = shutil.which("bash")
    if bash is None:
        print("error: the scripts need bash, which is not in PATH; install it", file=sys.stderr)
        return REFUSED
    sys.stdout.flush()
    # of this environment, whichever python3 the PATH has
    os.execve(bash, [bash, str(script), *arguments], {"PYTHON": sys.executable, **os.environ})
