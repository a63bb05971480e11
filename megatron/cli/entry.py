"""The process of a command: tools/NAME.py of a checkout, and `megatron-NAME` where the package is installed.

`entry.preprocess_data()` imports megatron/cli/data/preprocess_data.py, or a file of that name in another folder of
COMMANDS, and runs its `main`. Nothing else is imported before, so that Ctrl-C ends the process at once, without a
traceback, while modules such as torch are imported.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron.runtime.first_steps import end_process_at_interrupt, raise_at_interrupt

COMMANDS = ("megatron.cli", "megatron.cli.calls", "megatron.cli.data", "megatron.cli.foreign", "megatron.cli.merging")
FAILED = 1


def __getattr__(name: str) -> Callable[[], int]:
    # importlib and inspect look for names such as __path__ here
    if name.startswith("_"):
        raise AttributeError(name)
    return lambda: _run(name)


def train() -> NoReturn:
    """Run the process of a rank, which handles signals itself."""
    end_process_at_interrupt()
    importlib.import_module("megatron.train").process()
    raise AssertionError("the process of a rank does not return")


def pretrain_gpt() -> NoReturn:
    """Run the process of a rank that is given Megatron's flags."""
    end_process_at_interrupt()
    translation = importlib.import_module("megatron.cli.foreign.from_megatron")
    sys.argv[1:] = translation.rank_arguments(sys.argv[1:])
    importlib.import_module("megatron.train").process()
    raise AssertionError("the process of a rank does not return")


def _run(name: str) -> int:
    """Return the exit status of a command."""
    end_process_at_interrupt()
    try:
        module = importlib.import_module(module_of(name))
    # a package that is not installed: its name says enough
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    finally:
        # from here on a command ends by an exception, so that it removes what it has begun
        raise_at_interrupt()
    status: int = module.main()
    return status


def module_of(name: str) -> str:
    """Return the module of a command."""
    for package in COMMANDS:
        # looked for, not imported: the module's imports may take seconds
        if importlib.util.find_spec(f"{package}.{name}") is not None:
            return f"{package}.{name}"
    raise AttributeError(f"no command is named {name}")


if __name__ == "__main__":
    # how megatron.api and the scripts of an installed package start a command: -m megatron.cli.entry NAME FLAGS
    sys.exit(_run(sys.argv.pop(1)))
