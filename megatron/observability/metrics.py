"""Log of a run: one record a step, validation, memory report and timer report, with the same values everywhere.

The records go to stdout and train.log (console.py), metrics.jsonl, TensorBoard and trackers. One rank writes
(`writes=True`); on the others every method returns at once. Nothing here communicates: callers pass reduced values.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from megatron.observability import step_metrics
from megatron.observability.console import Console
from megatron.observability.load_report import LoadReport, load_picture
from megatron.observability.metric_writers import RowFile, TensorBoardLog
from megatron.observability.rank_times import RankStats
from megatron.observability.trackers.prometheus import SAVED
from megatron.observability.trackers.tracker_log import start_trackers
from megatron.options.config import Config
from megatron.plan.flops import FlopsOfSamples
from megatron.runtime.files import WriteErrors
from megatron.runtime.result_files import ANSWERS_FILE, METRICS_FILE

MAX_LOG_PERPLEXITY = 20.0
"""Cap of the perplexity's exponent, as in Megatron, so that an untrained model's can be printed."""
SHOWN_PROMPT = 60
"""Last characters of a prompt that a line of the log shows."""


PICTURE_STEPS = 100
"""Least number of steps between two pictures of the loads of experts; the last step of a run has one too."""


class GeneratedAnswer(NamedTuple):
    """A generated text."""

    prompt: str
    """The last message where it is a chat."""
    text: str
    reason: str
    """stop: it ended by itself; length: it was cut off."""
    num_tokens: int

    def as_markdown(self) -> str:
        """Return prompt and text as blocks of code, in which no character has a meaning."""
        return "\n\n".join("    " + part.replace("\n", "\n    ") for part in (self.prompt, self.text))


class MetricsLog:
    """Writes the records of a run. A context manager; `close` flushes.

    `tokens` returns the number of tokens in the first so many samples; None: seq_length each. `loss_unit` is what a
    validation's loss is divided by, `loss_name` its name in the log. `device_peak_tflops` is
    overridden by `peak_tflops` of the config. Rows of iterations after `resumed_iteration` that an earlier attempt left
    in metrics.jsonl are moved out, so that the file holds each iteration once.
    """

    def __init__(
        self,
        config: Config,
        *,
        writes: bool,
        world_size: int,
        device_peak_tflops: float | None,
        total_iterations: int,
        tokens: Callable[[int], int] | None = None,
        resumed_iteration: int = 0,
        loss_unit: str = "tokens",
        loss_name: str = "lm loss",
    ):
        self._writes = writes
        self._total_iterations, self._pictured_at = total_iterations, -PICTURE_STEPS
        self._world_size = world_size
        self._loss_unit = loss_unit
        # defined for a cross-entropy a token
        self._has_perplexity = loss_unit == "tokens" and config.training.own_loss is None
        # the user's number first, as for a chip that is not in our table or runs at another clock
        self._peak_tflops = config.logging.peak_tflops or device_peak_tflops
        seq_length = config.training.seq_length
        self.tokens_of = tokens or (lambda samples: samples * seq_length)
        self._flops = FlopsOfSamples(config)
        # samples at the last log line; unknown here in a resumed run
        self._last_samples = 0 if resumed_iteration == 0 else None
        self.totals = self._no_totals()
        """Totals of all rows in metrics.jsonl, those of earlier attempts too."""
        # before anything is opened: the ranks share the folder
        if not writes:
            return
        options, self._errors = config.logging, WriteErrors()
        self._has_answers = options.generate_prompts is not None
        self._folder: Path | None = None
        self._rows: RowFile | None = None
        self._answers: RowFile | None = None
        tensorboard_dir = options.tensorboard_dir
        if options.results_dir is not None:
            self._folder = Path(options.results_dir)
            self._folder.mkdir(parents=True, exist_ok=True)
            # an evaluation trains no iteration again
            iteration = sys.maxsize if config.training.skip_train else resumed_iteration
            self._open_rows(iteration)
            tensorboard_dir = tensorboard_dir or str(self._folder / "tensorboard")
        self._tensorboard = TensorBoardLog(tensorboard_dir) if tensorboard_dir else None
        self._trackers = start_trackers(config, resumed_iteration)
        self._console = Console(options, self._errors, total_iterations, resumed_iteration, loss_name)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close everything. A second call does nothing. `failed`: the run ended by an error."""
        if not self._writes:
            return
        # first, so that an error while it closes cannot bring it back here
        self._writes = False
        self._console.close()
        for tracker in self._trackers:
            tracker.close(failed=failed)
        if self._tensorboard is not None:
            with self._errors.reported("TensorBoard's event file"):
                self._tensorboard.close()
        self._close_rows()
        self._errors.close()

    def message(self, text: str) -> None:
        """Print a plain text, and keep it in train.log."""
        if self._writes:
            self._console.message(text)

    def log_step(self, step: step_metrics.StepMetrics) -> None:
        """Log the steps since the previous call."""
        if not self._writes:
            return
        speed = self._speed(step)
        self._last_samples = step.consumed_samples
        self._write_row("train", step_metrics.step_row(step, speed))
        self._write_scalars(step_metrics.step_scalars(step, speed), step.iteration, step.consumed_samples)
        self._console.step(step, speed)
        if step.experts is not None:
            self._log_experts(step.experts, step.iteration)

    def _log_experts(self, loads: LoadReport, iteration: int) -> None:
        """Log the loads of all experts, now and then, and the warnings of them."""
        for line in loads.warnings:
            self._console.message(line)
        # many experts in many layers are some tens of kilobytes
        is_due = iteration - self._pictured_at >= PICTURE_STEPS or iteration == self._total_iterations
        if not is_due:
            return
        self._pictured_at = iteration
        shares = {str(layer): [round(share, 4) for share in of_layer] for layer, of_layer in loads.shares.items()}
        self._write_row("experts", {"iteration": iteration, "balanced": loads.balanced, "shares": shares})
        if self._tensorboard is not None:
            with self._errors.reported("TensorBoard's event file"):
                self._tensorboard.write_image("experts/loads", load_picture(loads), iteration)

    def log_validation(
        self,
        iteration: int,
        consumed_samples: int,
        lm_loss: float,
        count: int,
        split: Literal["valid", "test"] = "valid",
        metrics: Mapping[str, float] | None = None,
        dataset: str | None = None,
    ) -> None:
        """Log the loss over `count` held-out tokens, its perplexity exp(min(20, loss)), and the task's metrics.

        `dataset`: the one of several that these are of; None: all. There is no perplexity if the loss is not divided by
        tokens, or is a function of the user's (`--loss`).
        """
        if not self._writes:
            return
        perplexity = None
        if self._has_perplexity:
            perplexity = math.exp(min(lm_loss, MAX_LOG_PERPLEXITY))  # in this order NaN stays NaN
        validation = step_metrics.Validation(lm_loss, perplexity, count, self._loss_unit, metrics or {})
        kind, row = step_metrics.validation_row_of(validation, split, dataset)
        at = {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            "consumed_tokens": self.tokens_of(consumed_samples),
        }
        self._write_row(kind, at | row)
        name = {"valid": "validation", "test": "test"}[split]
        if dataset:
            name = f"{name} {dataset}"
        self._write_scalars(step_metrics.validation_scalars(validation, name), iteration, consumed_samples)
        self._console.validation(name, iteration, validation)

    def log_answers(self, iteration: int, consumed_samples: int, answers: Sequence[GeneratedAnswer]) -> None:
        """Log generated texts: a line and a row of answers.jsonl each, and one text of TensorBoard."""
        if not self._writes:
            return
        for answer in answers:
            prompt, text = (_one_line(each) for each in (answer.prompt[-SHOWN_PROMPT:], answer.text))
            # cut off by the limit of tokens
            if answer.reason != "stop":
                text += " ..."
            self._console.message(f" answer at iteration {iteration} | {prompt} | {text}")
            if self._answers is not None:
                with self._errors.reported(ANSWERS_FILE):
                    self._answers.write_row(
                        {"iteration": iteration, "consumed_samples": consumed_samples, **answer._asdict()}
                    )
        if self._tensorboard is not None:
            with self._errors.reported("TensorBoard's event file"):
                self._tensorboard.write_texts(
                    {f"answers/{i}": each.as_markdown() for i, each in enumerate(answers)}, iteration
                )

    def log_tasks(self, iteration: int, consumed_samples: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Log the metrics of each task of lm-eval."""
        if not self._writes:
            return
        self._write_row("lm_eval", {"iteration": iteration, "consumed_samples": consumed_samples, "results": results})
        scalars: dict[str, float] = {}
        for task, metrics in results.items():
            scalars |= {f"lm-eval/{task}/{name}": value for name, value in metrics.items()}
            values = " | ".join(f"{name}: {value:.4f}" for name, value in metrics.items())
            self._console.message(f" lm-eval at iteration {iteration} | {task} | {values}")
        self._write_scalars(scalars, iteration, consumed_samples)

    def log_memory(
        self, event: str, iteration: int, values: Mapping[str, RankStats], *, was_printed: bool = False
    ) -> None:
        """Log the memory of all ranks (memory.py). `was_printed`: on stdout, before this log was open."""
        if not self._writes:
            return
        self._write_row("memory", {"iteration": iteration, "event": event, **_nested(values)})
        self._write_scalars(
            {
                f"memory/{key} {part}": value
                for key, stats in values.items()
                for part, value in (("min", stats.min), ("mean", stats.mean), ("max", stats.max))
            },
            iteration,
        )
        self._console.memory(event, iteration, values, was_printed=was_printed)

    def log_timers(self, iteration: int, consumed_samples: int, values: Mapping[str, RankStats]) -> None:
        """Log the time of each phase of the steps since the previous call (timers.py)."""
        if not self._writes or not values:
            return
        self._write_row("timers", {"iteration": iteration, **_nested(values)})
        # the slowest rank's, as in Megatron
        self._write_scalars({name: stats.max for name, stats in values.items()}, iteration, consumed_samples)
        self._console.timers(values)

    def log_links(self, row: dict[str, Any], slowest_share: float) -> None:
        """Log a probe of the links (slow_links.py)."""
        if self._writes:
            self._write_row("links", row)
            self._write_scalars({"links/slowest of expected": slowest_share}, row["iteration"])

    def log_bad_step(self, row: dict[str, Any]) -> None:
        """Write the guard's record of a step, as a row of its own kind."""
        if self._writes:
            self._write_row("bad_step", row)

    def log_recheck(self, row: dict[str, Any]) -> None:
        """Write which ranks did not compute what others did."""
        if self._writes:
            self._write_row("recheck", row)

    def log_saved(self, iteration: int) -> None:
        """Log a complete checkpoint, for trackers alone: the log has a line on it."""
        if self._writes:
            for tracker in self._trackers:
                tracker.log({SAVED: iteration}, iteration)

    def rewind(self, iteration: int, consumed_samples: int) -> None:
        """Resume from an earlier iteration: rows of later ones are moved out, as at the start of a resumed run."""
        self._last_samples = consumed_samples
        if not self._writes:
            return
        if self._rows is not None and self._folder is not None:
            # closed before it is replaced: the open file would be the old one
            self._close_rows()
            # RowFile passes each row that stays to them once more
            self.totals = self._no_totals()
            self._open_rows(iteration)
        self._console.rewind(iteration)

    def _open_rows(self, iteration: int) -> None:
        assert self._folder is not None
        self._rows = RowFile(self._folder / METRICS_FILE, iteration, self.totals.add)
        if self._has_answers:
            self._answers = RowFile(self._folder / ANSWERS_FILE, iteration, lambda row: None)

    def _close_rows(self) -> None:
        for file in (self._rows, self._answers):
            if file is not None:
                file.close()

    def _no_totals(self) -> step_metrics.RunTotals:
        return step_metrics.RunTotals(self._flops.last, self._peak_tflops, self._world_size)

    def _speed(self, step: step_metrics.StepMetrics) -> step_metrics.Speed:
        samples, steps = step.global_batch_size, 1
        if self._last_samples is not None:  # the global batch may have grown since the last log line
            samples, steps = step.consumed_samples - self._last_samples, step.steps
        # of packed chats the tokens themselves are counted, not places
        tokens = self.tokens_of(step.consumed_samples) - self.tokens_of(step.consumed_samples - samples)
        per_second = math.nan
        if step.elapsed_s > 0:
            per_second = 1 / (steps * step.elapsed_s)
        per_device = tokens * per_second / self._world_size
        flops = self._flops.per_token(step.consumed_samples - samples, step.consumed_samples)
        tflops, mfu = per_device * flops / 1e12, None
        if self._peak_tflops:
            mfu = tflops / self._peak_tflops
        return step_metrics.Speed(samples * per_second, tokens * per_second, per_device, tflops, mfu)

    def _write_row(self, kind: str, row: dict[str, Any]) -> None:
        self.totals.add({"kind": kind, **row})
        if self._rows is not None:
            with self._errors.reported(METRICS_FILE):
                self._rows.write_row({"kind": kind, **row})

    def _write_scalars(self, scalars: dict[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        """Write by iteration and, where `consumed_samples` is given, once more by it."""
        values = dict(scalars)
        if consumed_samples is not None:
            values["consumed_samples"] = consumed_samples
        for tracker in self._trackers:
            tracker.log(values, iteration)
        if self._tensorboard is None:
            return
        with self._errors.reported("TensorBoard's event file"):
            self._tensorboard.write(scalars, iteration)
            if consumed_samples is not None:
                # Megatron's second axis: runs of different batch sizes are compared by samples
                by_samples = {f"{tag} vs samples": value for tag, value in scalars.items()}
                self._tensorboard.write(by_samples, consumed_samples)


def _one_line(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _nested(values: Mapping[str, RankStats]) -> dict[str, dict[str, float]]:
    return {key: vars(stats) for key, stats in values.items()}
