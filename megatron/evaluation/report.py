"""Results of an evaluation: lines and tables on stdout, and a JSON file in lm-eval's form."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron.data.indexed import DataError
from megatron.evaluation.command import EvaluateCommand
from megatron.evaluation.commands import Commands
from megatron.evaluation.perplexity import DatasetScore, described
from megatron.files import locked_output, replacing
from megatron.generation.model import InferenceModel
from megatron.resilience.errors import raise_on_all_ranks


class EvaluationReport:
    """Collection of what was measured. Only rank 0 prints and writes.

    As a context it holds the output file, so that a second start does not overwrite it: collective, raises DataError.
    """

    def __init__(self, command: EvaluateCommand, model: InferenceModel) -> None:
        self._command, self._origin, self._ctx = command, model.origin, model.ctx
        self._is_first = model.ctx.rank == 0
        self._held = contextlib.ExitStack()
        self._datasets: dict[str, dict[str, Any]] = {}
        self._tasks = "{}"

    def __enter__(self) -> EvaluationReport:
        raise_on_all_ranks(self._ctx, self._lock)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _lock(self) -> None:
        output = self._command.evaluation.output
        if output is not None and self._is_first and not self._held.enter_context(locked_output(Path(output))):
            raise DataError(
                f"another evaluation will write to --output {output}; wait until it ends, or choose another"
            )

    def add_dataset(self, prefix: str, found: DatasetScore) -> None:
        values = dataclasses.asdict(found)
        for name in ("loss", "perplexity", "bits_per_byte"):
            values[name] = getattr(found, name)
        self._datasets[prefix] = values
        self._print(described(prefix, found))

    def add_tasks(self, commands: Commands) -> None:
        """Run the tasks. On rank 0 alone."""
        from megatron.evaluation import harness  # late: it needs lm-eval

        results = harness.run_tasks(commands, self._command.evaluation)
        self._tasks = harness.as_json(results)
        self._print(harness.table(results))

    def write(self) -> None:
        output = self._command.evaluation.output
        if output is None or not self._is_first:
            return
        content = json.loads(self._tasks)
        if self._datasets:
            content["datasets"] = self._datasets
        content["model"] = dataclasses.asdict(self._command.load)
        if self._origin is not None:  # the newest checkpoint of a run changes
            content["model"]["ckpt_step"] = self._origin.ckpt_step
        with replacing(Path(output)) as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")

    def _print(self, text: str) -> None:
        if self._is_first:
            print(text, flush=True)
