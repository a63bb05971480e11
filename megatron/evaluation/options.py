"""Options of an evaluation, and the command line of megatron.evaluate. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from pydantic.dataclasses import dataclass

from megatron.generation.options import OF_TRAINING, LoadOptions
from megatron.options import flags
from megatron.options.config import ConfigError
from megatron.options.types import STRICT, NonNegative, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class EvaluationOptions:
    """Tasks and datasets to measure a model by, and the place of the results."""

    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval: YAML files, or names of tasks in task_path or of lm-eval's own."""
    task_path: tuple[str, ...] = ()
    """Folders with YAML files of tasks."""
    dataset: tuple[str, ...] = ()
    """Prefixes of indexed datasets (PREFIX.bin, PREFIX.idx), of which to report loss, perplexity and bits per byte."""
    num_fewshot: NonNegative | None = None
    """Examples in each prompt. Unset: as each task says."""
    limit: PositiveFloat | None = None
    """Samples of each task; below 1, a share of them. For tests: results of fewer samples are not the task's."""
    apply_chat_template: bool = False
    """Write each prompt as a chat, by the model's template."""
    chat_template: str | None = None
    """Template of chats: a preset, or a .jinja or .py file. Unset: the tokenizer's."""
    system_instruction: str | None = None
    """System message of each prompt."""
    fewshot_as_multiturn: bool = True
    """With apply_chat_template, write each example as a turn of the user and one of the model."""
    max_length: Positive | None = None
    """Most tokens of a sequence; longer ones lose their beginning, as in lm-eval. Unset: the learned positions of
    the model, or without them the sequence length of its training."""
    batch_size: Positive = 16
    """Texts that each copy of the model generates at once."""
    use_graphs: bool | None = None
    """Replay passes as graphs of the device (CUDA, HPU): of rows whose layout has come before, and of each generated
    token. Unset: of tokens, on CUDA, unless tensor-parallel ranks share layers."""
    output: str | None = None
    """JSON file for the results, in lm-eval's form. Unset: none."""
    log_samples: bool = False
    """Write each sample's answer and metrics into the output file, too."""

    def faults(self) -> Iterator[str]:
        """Describe the options that contradict each other."""
        if not self.tasks and not self.dataset:
            yield "nothing to measure is given; use --tasks TASK ... or --dataset PREFIX ..."
        if not self.tasks:
            # an option that nothing reads would leave the user with results of other settings
            for name in self._changed(OF_TASKS):
                yield f"--{name.replace('_', '-')} is for --tasks, which is not given; leave it out"
        if not self.apply_chat_template:
            # fewshot_as_multiturn is on by default, and counts only if it was turned off
            for name in self._changed(("chat_template", "fewshot_as_multiturn")):
                yield f"--{name.replace('_', '-')} is for --apply-chat-template; add that, or leave it out"
        yield from self._faults_of_output()
        yield from self._missing_files()

    def _changed(self, names: Iterable[str]) -> list[str]:
        """Return those of the options that are not the defaults."""
        return [name for name in names if getattr(self, name) != DEFAULTS[name]]

    def _faults_of_output(self) -> Iterator[str]:
        if self.output is None:
            if self.log_samples:
                yield "--log-samples writes into the output file; give one with --output"
        elif not Path(self.output).absolute().parent.is_dir():
            yield f"--output {self.output}: the folder does not exist; create it"
        elif Path(self.output).is_dir():
            yield f"--output {self.output} is a folder; give a file"

    def _missing_files(self) -> Iterator[str]:
        # found before the model is loaded; a task by name is looked for by lm-eval itself
        for prefix in self.dataset:
            if not Path(f"{prefix}.idx").is_file():
                yield f"--dataset {prefix}: there is no {prefix}.idx; give the path without .bin or .idx"
        for task in self.tasks:
            if task.endswith((".yaml", ".yml")) and not Path(task).is_file():
                yield f"--tasks {task} is not there; correct the path"
        for folder in self.task_path:
            if not Path(folder).is_dir():
                yield f"--task-path {folder} is not a folder; give the folder of the tasks' YAML files"


OF_TASKS = (
    "task_path", "num_fewshot", "limit", "apply_chat_template", "system_instruction", "batch_size", "log_samples"
)  # fmt: skip
DEFAULTS = {field.name: field.default for field in fields(EvaluationOptions)}


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
    return flags.grouped_parser(
        GROUPS,
        prog=prog,
        usage=f"{prog} --load FOLDER [--tasks TASK ...]\n    [--dataset PREFIX ...] [--flag VALUE ...]",
        description="Measure a checkpoint of a run, a Hugging Face model or adapters by lm-eval's tasks, and by the "
        "perplexity and bits per byte of datasets, on any layout.",
        epilog="A BOOL flag alone means true; `none` unsets an option. docs/guides/evaluation.md has examples.",
    )


def read_command(arguments: Sequence[str]) -> EvaluateCommand:
    """Return the command. Raises ConfigError with every fault."""
    namespace, rest = build_evaluate_parser().parse_known_args(flags.dashed(arguments))
    faults = flags.unknown_flags(rest, map(flags.flag, vars(namespace)), OF_TRAINING)
    load = flags.read_flags(LoadOptions, namespace, faults)
    if load is not None:
        load = load.with_local_folders(faults)
    evaluation = flags.read_flags(EvaluationOptions, namespace, faults)
    # of both, so that every fault is listed
    for given in (evaluation, load):
        if given is not None:
            faults += given.faults()
    if faults or load is None or evaluation is None:
        raise ConfigError(list(dict.fromkeys(faults)))
    return EvaluateCommand(load, evaluation)
