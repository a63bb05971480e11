"""Generate text with a checkpoint, a Hugging Face model or adapters, on any layout.

    python tools/generate.py --load checkpoints/run --prompt "Once upon a time" --max-new-tokens 100
    python tools/generate.py --load models/llama --chat
    python tools/generate.py --load models/llama --input prompts.jsonl --output answers.jsonl --data-parallel-size 4

scripts/generate.sh does the same from HL_* variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.cli.command import command
from megatron.generation.options import GenerateCommand, build_generate_parser, read_command
from megatron.launch.inference import InferenceCommand
from megatron.launch.plan import LaunchPlan, LaunchRequest


@command
def main(argv: Sequence[str] | None = None) -> int:
    return GENERATE.run(argv)


def check(command: GenerateCommand, request: LaunchRequest, plan: LaunchPlan) -> Iterator[str]:
    """Describe prompts that these ranks cannot read."""
    # one person writes, and one copy answers
    if command.prompts.chat and (request.data_parallel_size or 1) > 1:
        yield "--chat uses one copy of the model; leave the data-parallel size out"
    # ssh brings no standard input to the ranks
    if plan.hosts and command.prompts.input == "-":
        yield "--input - needs its ranks on this machine; write the prompts to a file"


GENERATE = InferenceCommand(
    "generate", build_generate_parser, read_command, check, is_chat=lambda command: command.prompts.chat
)
