"""The command line of megatron.evaluate: its options and their faults. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.evaluation.options import EvaluationOptions
from megatron.generation.options import LoadOptions
from megatron.options.config import ConfigError
from megatron.options.flags import HelpFormatter, add_flags, dashed, read_flags, unknown_flags


@dataclass(frozen=True)
class EvaluateCommand:
    """Everything that one start of megatron.evaluate is to do."""

    load: LoadOptions
    evaluation: EvaluationOptions

    @property
    def use_graphs(self) -> bool | None:
        return self.evaluation.use_graphs


GROUPS: tuple[tuple[str, type], ...] = (("model and layout", LoadOptions), ("evaluation", EvaluationOptions))


def build_evaluate_parser(prog: str = "megatron-evaluate") -> argparse.ArgumentParser:
    """Return the parser of the flags, grouped; values stay strings."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} --load FOLDER [--tasks TASK ...]\n    [--dataset PREFIX ...] [--flag VALUE ...]",
        description="Measure a checkpoint of a run, a Hugging Face model or adapters by lm-eval's tasks, and by the "
        "perplexity and bits per byte of datasets, on any layout.",
        epilog="A BOOL flag alone means true; `none` unsets an option. docs/guides/evaluation.md has examples.",
        # an abbreviation would change its meaning with the next flag that is added
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    for title, cls in GROUPS:
        add_flags(parser.add_argument_group(title, (cls.__doc__ or "").strip()), cls)
    return parser


def read_command(arguments: Sequence[str]) -> EvaluateCommand:
    """Return the command. Raises ConfigError with every fault."""
    namespace, rest = build_evaluate_parser().parse_known_args(dashed(arguments))
    faults = unknown_flags(rest, vars(namespace))
    # of both, so that every fault is listed; the loop loses their types, which isinstance restores
    load, evaluation = (read_flags(cls, namespace, faults) for _, cls in GROUPS)
    if isinstance(evaluation, EvaluationOptions):
        faults += evaluation.faults()
    if isinstance(load, LoadOptions) and not Path(load.load).exists():
        faults.append(f"--load {load.load} does not exist; give the folder of a run's checkpoints or of a model")
    if faults or not isinstance(load, LoadOptions) or not isinstance(evaluation, EvaluationOptions):
        raise ConfigError(list(dict.fromkeys(faults)))
    return EvaluateCommand(load, evaluation)
