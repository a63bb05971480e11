"""Commands of InstructLab's ilab: `ilab model train` with its config.yaml and flags, run by this project.

    megatron-ilab --config ./config.yaml model train --pipeline accelerated --data-path ./data.jsonl
    megatron-ilab model train --strategy lab-multiphase --phased-phase1-data knowledge.jsonl \\
        --phased-phase2-data skills.jsonl

docs/reference/instructlab.md lists the keys and flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megatron.checkpoint.folders import CheckpointError
from megatron.cli.command import command
from megatron.data.index.indexed import DataError
from megatron.launch.inference import refused
from megatron.launch.instructlab.data_process import set_up_logging
from megatron.launch.instructlab.ilab import IlabTraining, read_ilab_config, read_training
from megatron.launch.instructlab.ilab_options import SHORT, SWITCHES, flag_of, flag_texts
from megatron.launch.instructlab.launch import RunFailedError
from megatron.launch.instructlab.phases import train_phases
from megatron.options.config import ConfigError
from megatron.options.flags import unknown_flags
from megatron.runtime.commands import DONE, for_stderr


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `ilab`; flags that are not given are not in its namespace."""
    # no abbreviations: a flag that is left out later must not change what a command means
    parser = argparse.ArgumentParser(prog="megatron-ilab", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="config.yaml of ilab; DEFAULT: its defaults")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more")
    model = parser.add_subparsers(dest="group", required=True, metavar="model").add_parser("model", allow_abbrev=False)
    actions = model.add_subparsers(dest="action", required=True, metavar="train")
    train = actions.add_parser("train", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, text in flag_texts().items():
        flags = [flag_of(name), *([SHORT[name]] if name in SHORT else [])]
        # argparse reads a % as a format
        text = text.replace("%", "%%")
        if name in SWITCHES:
            train.add_argument(*flags, dest=name, action="store_true", help=text)
        elif name == "lora_target_modules":
            train.add_argument(*flags, dest=name, action="append", metavar="NAME", help=text)
        else:
            train.add_argument(*flags, dest=name, metavar="VALUE", help=text)
    return parser


def read_command(argv: Sequence[str]) -> IlabTraining:
    """Return the training that a command line requests. Raises ConfigError with every fault."""
    namespace, rest = build_parser().parse_known_args(argv)
    given: dict[str, Any] = vars(namespace)
    if rest:
        raise ConfigError(unknown_flags(rest, map(flag_of, flag_texts()), {}))
    config = read_ilab_config(given.pop("config"))
    if given.pop("verbose"):
        config.general["log_level"] = "DEBUG"
    del given["group"], given["action"]
    return read_training(config, given)


def run(training: IlabTraining) -> None:
    """Train. Raises what run_training raises."""
    from megatron.launch.instructlab.run import count_samples, run_training  # it imports torch

    if training.phases is None:
        run_training(training.torch_args, training.train_args)
        return
    set_up_logging(training.train_args.log_level)
    result = train_phases(
        training.phases, training.torch_args, training.train_args, train=run_training, count=count_samples
    )
    print(f"The phases are trained; the resulting model is {result}")


@command
def main(argv: Sequence[str] | None = None) -> int:
    try:
        training = read_command(sys.argv[1:] if argv is None else argv)
        for note in training.notes:
            print(for_stderr(f"note: {note}"), file=sys.stderr)
        run(training)
    except ConfigError as error:
        return refused(error.faults)
    except (DataError, CheckpointError) as error:
        return refused([str(error)])
    except RunFailedError as error:
        print(for_stderr(f"error: {error}"), file=sys.stderr)
        return error.status
    return DONE
