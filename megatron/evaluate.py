"""Measure a model: `python -m megatron.evaluate --load FOLDER --tasks TASK ... --dataset PREFIX ...`.

Started once a rank by a launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or alone.
Exit status: megatron/runtime/commands.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from megatron.runtime.first_steps import end_process_at_interrupt

    end_process_at_interrupt()

import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from megatron.evaluation.options import EvaluateCommand, build_evaluate_parser, read_command
from megatron.generation.process import work_with_model
from megatron.options.config import ConfigError
from megatron.resilience.process import leave, print_once, status_of

if TYPE_CHECKING:
    from megatron.generation.model import InferenceModel


def main(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(build_evaluate_parser("python -m megatron.evaluate").format_help(), end="")
        return
    command = read_command(arguments)  # every fault at once, before torch is imported
    if command.evaluation.tasks and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(["--tasks needs lm-eval, which is not installed; install the extra: pip install '.[eval]'"])

    work_with_model(command.load, partial(run, command), use_graphs=command.use_graphs)


def run(command: EvaluateCommand, model: InferenceModel) -> None:
    """Measure what the command names with a loaded model. Collective."""
    from megatron.evaluation.commands import Commands
    from megatron.evaluation.report import EvaluationReport
    from megatron.evaluation.scoring import RowGraphs
    from megatron.generation.generator import BatchSettings

    options, count = command.evaluation, 0
    graphs = RowGraphs(model.ctx) if options.use_graphs else None
    with EvaluationReport(command, model) as report:
        for prefix in options.dataset:
            from megatron.evaluation.report import score_dataset

            report.add_dataset(prefix, score_dataset(model, prefix, options.max_length, print_once, graphs))
        if options.tasks:
            settings = BatchSettings(batch_size=options.batch_size, use_graphs=options.use_graphs)
            commands = Commands(model, settings, graphs=graphs)
            commands.lead(report.add_tasks)
            count = commands.statistics.graphs
        if graphs is not None:
            print_once(f"{graphs.count + count:,} graphs captured on each rank, {graphs.count:,} of rows")
        report.write()


def preload() -> None:
    """Import what the ranks of a run on a CPU need, before they are forked."""
    import megatron.evaluation.commands
    import megatron.evaluation.report
    import megatron.generation.loading  # noqa: F401


def process() -> NoReturn:
    """Run the process of a rank."""
    leave(status_of(main, sys.argv[1:]))


if __name__ == "__main__":
    process()
