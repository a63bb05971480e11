"""Evaluations as their ranks run them. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from megatron import evaluate
from megatron.evaluation.commands import Commands
from megatron.evaluation.options import EvaluationOptions
from megatron.generation.generator import BatchSettings
from megatron.generation.loading import load_model
from megatron.generation.options import LoadOptions
from megatron.generation.prompts import PromptEncoder
from megatron.generation.saved_model import parallel_options
from megatron.parallel.context import ParallelContext

Request = tuple[str, Any]
"""A context, and what follows it: a text to score, or lm-eval's generation_kwargs."""


def run(arguments: list[str], device: str = "cpu") -> str:
    """Evaluate by a command line; what rank 0 prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), patch("torch.distributed.destroy_process_group"):
        evaluate.main(["--device", device, *arguments])
    return said.getvalue() if os.environ["RANK"] == "0" else ""


def answers(
    folder: str,
    num_stages: int,
    cuts: Sequence[Sequence[int]],
    scored: Sequence[Request],
    open_ended: Sequence[Request],
) -> list[tuple[list[tuple[float, bool]], list[str]]] | None:
    """Answers of the first rank to lm-eval's requests, for each of the cuts through the list of layers."""
    from lm_eval.api.instance import Instance

    from megatron.evaluation.harness import HarnessModel

    options = LoadOptions(load=folder, device="cpu", pipeline_model_parallel_size=num_stages)
    ctx = ParallelContext.build(parallel_options(options), "cpu")
    likelihoods = [Instance("loglikelihood", {}, each, place) for place, each in enumerate(scored)]
    texts = [Instance("generate_until", {}, each, place) for place, each in enumerate(open_ended)]

    def answer(commands: Commands) -> tuple[list[tuple[float, bool]], list[str]]:
        model = HarnessModel(commands, PromptEncoder(commands.model), EvaluationOptions(max_length=64))
        return model.loglikelihood(likelihoods), model.generate_until(texts)

    found = []
    for cut in cuts:
        with patch("megatron.generation.model.stage_bounds", lambda *_, cut=cut: list(cut)):
            model = load_model(options, ctx)
        found.append(Commands(model, BatchSettings(batch_size=4)).lead(answer))
    return found if ctx.rank == 0 else None  # type: ignore[return-value]
