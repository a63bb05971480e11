"""Generate text with a checkpoint, a Hugging Face model or adapters, on any layout.

    python tools/generate.py --load checkpoints/run --prompt "Once upon a time" --max-new-tokens 100
    python tools/generate.py --load models/llama --chat
    python tools/generate.py --load models/llama --input prompts.jsonl --output answers.jsonl --data-parallel-size 4

scripts/generate.sh does the same from HL_* variables. A single rank runs in this process; several are started by the
agent that starts training.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from megatron.cli.command import command
from megatron.command_names import command_name
from megatron.config.flags import dashed
from megatron.config.options import ConfigError
from megatron.exit_codes import DONE, REFUSED
from megatron.generation.command import build_generate_parser, read_command
from megatron.launch.inference import add_launch_flags, launch_request, plan_ranks, variables_text, with_terminal

MAIN = "megatron.generate"


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_generate_parser(command_name("generate"))
    add_launch_flags(parser, "generate")
    if "--help" in arguments or "-h" in arguments:
        print(parser.format_help(), end="")
        if "--variables" in arguments:
            print(f"\nvariables of scripts/generate.sh, which flags override:\n{variables_text('generate')}")
        return DONE
    own = type(parser)(allow_abbrev=False, add_help=False)
    add_launch_flags(own, "generate")
    namespace, flags = own.parse_known_args(dashed(arguments))
    request = launch_request(namespace, "generate", os.environ)
    flags = [*request.train_flags, *flags]
    faults, notes = list(request.faults), list(request.notes)
    request.faults = []
    try:
        read, found = read_command(flags)
    except ConfigError as error:
        return refused([*faults, *error.faults])
    notes += found
    plan = plan_ranks(MAIN, request, flags, read.load, is_chat=read.prompts.chat)
    if read.prompts.chat and (request.data_parallel_size or 1) > 1:
        request.faults.append("--chat uses one copy of the model; leave the data-parallel size out")
    if plan.hosts and read.prompts.input == "-":
        request.faults.append("--input - needs its ranks on this machine; write the prompts to a file")
    if faults := list(dict.fromkeys([*faults, *request.faults])):
        return refused(faults)
    if request.dry_run:
        where = ", ".join(host.name for host in plan.hosts) or "this machine"
        print(f"{plan.nodes * plan.devices_per_node} ranks of {MAIN} on {where}; nothing was started")
        print(shlex.join([sys.executable, "-m", MAIN, *plan.train_flags]))
        return DONE
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if plan.nodes * plan.devices_per_node == 1 and not plan.hosts:
        from megatron import generate
        from megatron.resilience.process import leave, status_of

        os.environ.update(plan.environment)
        status = status_of(generate.main, plan.train_flags)
        return status if argv is not None else leave(status)
    from megatron.launch.hosts import launch

    return launch(plan if plan.hosts else with_terminal(plan, "MEGATRON_TERMINAL"))


def refused(faults: Sequence[str]) -> int:
    """Print all faults; return the exit status."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    lines = [f"refused, {count}; nothing was started or written:", *(f"  - {fault}" for fault in faults)]
    print("\n".join(lines), file=sys.stderr)
    return REFUSED
