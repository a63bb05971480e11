"""Measure a checkpoint, a Hugging Face model or adapters by lm-eval's tasks and by datasets, on any layout.

    python tools/evaluate.py --load checkpoints/run --dataset data/held_out_text_document
    python tools/evaluate.py --load models/llama --tasks tasks/quiz.yaml --output results.json --data-parallel-size 4

scripts/evaluate.sh does the same from HL_* variables.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.cli.command import command
from megatron.evaluation.options import build_evaluate_parser, read_command
from megatron.launch.inference import InferenceCommand


@command
def main(argv: Sequence[str] | None = None) -> int:
    return EVALUATE.run(argv)


EVALUATE = InferenceCommand("evaluate", build_evaluate_parser, lambda flags: (read_command(flags), []))
