"""Generate text: `python -m megatron.generate --load FOLDER --prompt TEXT`.

Started once a rank by a launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or alone.
Exit status: megatron/runtime/commands.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from megatron.runtime.first_steps import end_process_at_interrupt

    end_process_at_interrupt()

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from megatron.generation.options import GenerateCommand, build_generate_parser, read_command
from megatron.generation.process import work_with_model
from megatron.resilience.process import leave, print_once, status_of

if TYPE_CHECKING:
    from megatron.generation.model import InferenceModel

NO_TIMEOUT_MINUTES = 60.0 * 24 * 365
"""Timeout of the ranks that wait for a line of a chat."""


def main(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(build_generate_parser("python -m megatron.generate").format_help(), end="")
        return
    command, notes = read_command(arguments)  # every fault at once, before torch is imported
    for note in notes:
        print_once(f"note: {note}")

    load = command.load
    if command.prompts.chat:
        load = dataclasses.replace(load, distributed_timeout_minutes=NO_TIMEOUT_MINUTES)
    work_with_model(load, partial(run, command), use_graphs=command.use_graphs)


def run(command: GenerateCommand, model: InferenceModel) -> None:
    """Do what the command says with a loaded model. Collective."""
    from megatron.generation.graphs import describe_choice

    if command.prompts.use_graphs is None and (line := describe_choice(model.ctx)):
        print_once(line)
    if command.prompts.benchmark:
        from megatron.generation.session import print_throughput

        return print_throughput(model, command)

    from megatron.generation.chat import TerminalChat
    from megatron.generation.session import Session, run_prompts
    from megatron.resilience.errors import raise_on_all_ranks

    session = raise_on_all_ranks(model.ctx, lambda: Session(model, command))
    if command.prompts.chat:
        return TerminalChat(session).run()
    return run_prompts(session)


def preload() -> None:
    """Import what the ranks of a run on a CPU need, before they are forked."""
    import megatron.generation.loading
    import megatron.generation.session  # noqa: F401


def process() -> NoReturn:
    """Run the process of a rank."""
    leave(status_of(main, sys.argv[1:]))


if __name__ == "__main__":
    process()
