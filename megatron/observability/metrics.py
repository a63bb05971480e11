"""What a run tells: Megatron's log line, `metrics.jsonl`, TensorBoard and wandb, all with the same values.

One rank writes (`writes=True`); on the others every method returns at once. Nothing here communicates: the caller has
already reduced what it passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import orjson

from megatron.accelerator import MAX_ALLOCATED
from megatron.config.options import Config
from megatron.files import replacing
from megatron.observability.rank_stats import RankStats
from megatron.observability.rank_times import StragglerStats
from megatron.observability.run_totals import RunTotals
from megatron.observability.wandb_log import WandbLog
from megatron.planning.estimate import flops_per_token

METRICS_FILE = "metrics.jsonl"
# rows that a resumed run will write anew are moved here, out of the way but not lost
SUPERSEDED_FILE = "metrics.superseded.jsonl"

# behind the name of a timer, in rows and tags, as in Megatron's
TIMER_SUFFIX = "-time"

# Megatron caps the exponent of the perplexity here, so that an untrained model's prints
MAX_LOG_PERPLEXITY = 20.0


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What the loop knows after the last step of a log interval."""

    iteration: int
    steps: int
    """Since the last log line."""
    consumed_samples: int
    """Up to and including this step; so consumed_tokens."""
    consumed_tokens: int
    elapsed_s: float
    """Mean over the steps since the last log line."""
    learning_rate: float
    """Used in this step."""
    global_batch_size: int
    """Of this step."""
    lm_loss: float
    """Mean over the steps since the last log line."""
    loss_scale: float
    grad_norm: float | None
    """Of this step, before clipping. None where the engine has none, as after a skipped step."""
    skipped_iterations: int
    nan_iterations: int
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The task's own, over the steps since the last log line."""
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """As `accelerator.memory_stats` gives it."""
    straggler: StragglerStats | None = None
    """Over the ranks, where log_straggler is on."""
    compiled_graphs: int | None = None
    """By rank 0's HPU since the process began; None on other devices. It goes on growing where shapes keep changing."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast the steps since the last log line were. MFU: share of the peak that the model's own arithmetic used."""

    samples_per_second: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None


class MetricsLog:
    """Writes one record a logged step, validation, record of the memory and of the timers. A context manager; `close`
    flushes.

    `tokens` says how many the first so many samples hold, unless they are of seq_length each. `device_peak_tflops` is
    overridden by `peak_tflops` of the config. Rows of iterations after `resumed_iteration` that
    an earlier attempt left in metrics.jsonl are moved out, so that the file holds each iteration once.
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
    ):
        self._writes = writes
        self._world_size = world_size
        self._peak_tflops = config.logging.peak_tflops or device_peak_tflops
        self._total_iterations = total_iterations
        seq_length = config.training.seq_length
        self.tokens_of = tokens or (lambda samples: samples * seq_length)
        self._flops_per_token = flops_per_token(config.model, config.training.seq_length)
        # where the last log line left off; the samples that a resumed run starts from are not known here
        self._last_samples = 0 if resumed_iteration == 0 else None
        self.totals = self._no_totals()
        """Of all rows in metrics.jsonl, those of earlier attempts too."""
        self._folder: Path | None = None
        self._jsonl: int | None = None
        self._lost: Counter[str] = Counter()  # what could not be written, by where it should have gone
        self._tensorboard: Any = None
        self._bar: Any = None
        self._wandb: WandbLog | None = None
        if not writes:
            return
        logging = config.logging
        if logging.results_dir is not None:
            folder = self._folder = Path(logging.results_dir)
            folder.mkdir(parents=True, exist_ok=True)
            _supersede(folder, resumed_iteration, self.totals)
            self._jsonl = os.open(folder / METRICS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        tensorboard_dir = logging.tensorboard_dir or (
            str(Path(logging.results_dir) / "tensorboard") if logging.results_dir is not None else None
        )
        if tensorboard_dir is not None:
            from megatron.observability.event_file import EventFile  # late: TensorBoard takes its time to import

            # no SessionLog to purge by: its step counts in iterations, and would drop "vs samples" points of before
            # the resumption. TensorBoard itself drops what a step that goes back has superseded
            self._tensorboard = EventFile(tensorboard_dir)
        if logging.wandb_project is not None:
            self._wandb = WandbLog(config, resumes=resumed_iteration > 0)
        if sys.stdout.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_iterations,
                initial=resumed_iteration,
                desc="training",
                unit="step",
                file=sys.stdout,
                dynamic_ncols=True,
                leave=False,
            )

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close everything. A second call does nothing. `failed`: the run ended by a fault."""
        if self._bar is not None:
            self._bar.close()
        if self._wandb is not None:
            self._wandb.close(failed=failed)
        if self._tensorboard is not None:
            with self._surviving("TensorBoard's events"):
                self._tensorboard.close()
        if self._jsonl is not None:
            os.close(self._jsonl)
        self._bar = self._tensorboard = self._jsonl = self._wandb = None
        for place, times in self._lost.items():
            _complain(f"WARNING: {place}: {times} writes failed; what they held was not written")
        self._lost.clear()

    @contextlib.contextmanager
    def _surviving(self, place: str) -> Iterator[None]:
        """A disk that is full, or away, costs what is told, but no training. It is said once, and again at the end."""
        try:
            yield
        except OSError as error:
            self._lost[place] += 1
            if self._lost[place] == 1:
                _complain(f"WARNING: {place} could not be written: {error.strerror}; training goes on")

    def message(self, text: str) -> None:
        """Print a plain line, above the progress bar where there is one."""
        if not self._writes:
            return
        with self._surviving("stdout"):
            if self._bar is not None:
                self._bar.write(text, file=sys.stdout)
            else:
                print(text)
            # a launcher's pipe is block-buffered; a run that dies must not take its last lines along
            sys.stdout.flush()

    def log_step(self, step: StepMetrics) -> None:
        """Tell of the steps since the last call."""
        if not self._writes:
            return
        speed = self._speed(step)
        self._last_samples = step.consumed_samples
        self._write_row("train", _step_row(step, speed))
        self._write_scalars(_step_scalars(step, speed), step.iteration, step.consumed_samples)
        if self._bar is not None:
            self._bar.set_postfix_str(f"lm loss {step.lm_loss:.4f}", refresh=False)
            self._bar.update(step.iteration - self._bar.n)
        self.message(step_line(step, speed, self._total_iterations))

    def log_validation(
        self,
        iteration: int,
        consumed_samples: int,
        lm_loss: float,
        num_tokens: int,
        split: Literal["valid", "test"] = "valid",
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Tell of the loss over `num_tokens` held-out tokens, and of its perplexity, exp(min(20, loss))."""
        if not self._writes:
            return
        perplexity = math.exp(min(lm_loss, MAX_LOG_PERPLEXITY))  # in this order NaN stays NaN
        self._write_row(
            split,
            {
                "iteration": iteration,
                "consumed_samples": consumed_samples,
                "consumed_tokens": self.tokens_of(consumed_samples),
                "lm_loss": lm_loss,
                "perplexity": perplexity,
                "num_tokens": num_tokens,
                **({"metrics": metrics} if metrics else {}),
            },
        )
        name = "validation" if split == "valid" else "test"
        tag = f"lm-loss-validation/lm loss {name}"
        scalars = {tag: lm_loss, f"{tag} ppl": perplexity}
        scalars |= {f"metrics-validation/{key} {name}": value for key, value in (metrics or {}).items()}
        self._write_scalars(scalars, iteration, consumed_samples)
        self.message(
            f" {name} loss at iteration {iteration} | lm loss value: {lm_loss:.6E} | lm loss PPL: {perplexity:.6E} |"
            f" tokens: {num_tokens} |{''.join(f' {key}: {value:.6E} |' for key, value in (metrics or {}).items())}"
        )

    def log_memory(self, event: str, iteration: int, values: Mapping[str, RankStats]) -> None:
        """Write what all ranks held; `event` says when (training/memory.py)."""
        if not self._writes:
            return
        self._write_row("memory", {"iteration": iteration, "event": event, **_nested(values)})
        self._write_scalars(
            {
                f"memory/{key} {part}": value
                for key, spread in values.items()
                for part, value in (("min", spread.min), ("mean", spread.mean), ("max", spread.max))
            },
            iteration,
        )

    def log_timers(self, iteration: int, consumed_samples: int, values: Mapping[str, RankStats]) -> None:
        """Tell what the steps since the last call went to (training/timers.py)."""
        if not self._writes or not values:
            return
        self._write_row("timers", {"iteration": iteration, **_nested(values)})
        # the slowest rank's, as Megatron writes them
        self._write_scalars({name: spread.max for name, spread in values.items()}, iteration, consumed_samples)
        self.message(timer_lines(values))

    def log_bad_step(self, row: dict[str, Any]) -> None:
        """Keep what the guard found of a step, as a row of its own kind."""
        self._write_row("bad_step", row)

    def rewind(self, iteration: int, consumed_samples: int) -> None:
        """The run goes on from there: what was written of later iterations is moved out, as at a resumption."""
        self._last_iteration, self._last_samples = iteration, consumed_samples
        if self._jsonl is not None and self._folder is not None:
            os.close(self._jsonl)
            self.totals = self._no_totals()
            _supersede(self._folder, iteration, self.totals)
            self._jsonl = os.open(self._folder / METRICS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if self._bar is not None:
            self._bar.n = iteration
            self._bar.refresh()

    def _no_totals(self) -> RunTotals:
        return RunTotals(self._flops_per_token, self._peak_tflops, self._world_size)

    def _speed(self, step: StepMetrics) -> Speed:
        samples, steps = step.global_batch_size, 1
        if self._last_samples is not None:  # the global batch may have grown since the last log line
            samples, steps = step.consumed_samples - self._last_samples, step.steps
        tokens = self.tokens_of(step.consumed_samples) - self.tokens_of(step.consumed_samples - samples)
        per_second = 1 / (steps * step.elapsed_s) if step.elapsed_s > 0 else math.nan
        per_device = tokens * per_second / self._world_size
        tflops = per_device * self._flops_per_token / 1e12
        return Speed(
            samples_per_second=samples * per_second,
            tokens_per_second=tokens * per_second,
            tokens_per_second_per_device=per_device,
            tflops_per_device=tflops,
            mfu=tflops / self._peak_tflops if self._peak_tflops else None,
        )

    def _write_row(self, kind: str, row: dict[str, Any]) -> None:
        self.totals.add({"kind": kind, **row})
        if self._jsonl is not None:
            # one write of a whole line to a file opened for appending; orjson writes NaN and infinity as null
            line = orjson.dumps({"kind": kind, **row, "time": time.time()}, option=orjson.OPT_APPEND_NEWLINE)
            with self._surviving(METRICS_FILE):
                end = os.fstat(self._jsonl).st_size
                if os.write(self._jsonl, line) < len(line):
                    os.ftruncate(self._jsonl, end)  # the disk is full: no torn row before later ones
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _write_scalars(self, scalars: dict[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        """By iteration and, where `consumed_samples` is given, once more by it."""
        if self._wandb is not None:
            self._wandb.log(scalars, iteration, consumed_samples)
        if self._tensorboard is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # one event for all tags: SummaryWriter.add_scalar writes one each, at several times the cost
            for suffix, position in (("", iteration), (" vs samples", consumed_samples)):
                if position is not None:
                    values = [Summary.Value(tag=tag + suffix, simple_value=value) for tag, value in scalars.items()]
                    with self._surviving("TensorBoard's events"):
                        self._tensorboard.add_summary(Summary(value=values), position)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def step_line(step: StepMetrics, speed: Speed, total_iterations: int) -> str:
    """Megatron's log line. Its `memory (GB)` is the peak so far."""
    parts = [
        f" iteration {step.iteration:8d}/{total_iterations:8d}",
        f"consumed samples: {step.consumed_samples:12d}",
        f"consumed tokens: {step.consumed_tokens:12d}",
        f"elapsed time per iteration (ms): {step.elapsed_s * 1000:.1f}",
        f"learning rate: {step.learning_rate:.3E}",
        f"global batch size: {step.global_batch_size:5d}",
        f"lm loss: {step.lm_loss:.6E}",
        *(f"{key}: {value:.6E}" for key, value in step.metrics.items()),
        f"loss scale: {step.loss_scale:.1f}",
    ]
    if step.grad_norm is not None:
        parts.append(f"grad norm: {step.grad_norm:.3f}")
    parts += [
        f"number of skipped iterations: {step.skipped_iterations:3d}",
        f"number of nan iterations: {step.nan_iterations:3d}",
        f"samples per second: {speed.samples_per_second:.3f}",
        f"tokens/s/device: {speed.tokens_per_second_per_device:.1f}",
        f"TFLOP/s/device: {speed.tflops_per_device:.4g}",
    ]
    if speed.mfu is not None:
        parts.append(f"MFU: {speed.mfu:.1%}")
    if MAX_ALLOCATED in step.memory:
        parts.append(f"memory (GB): {step.memory[MAX_ALLOCATED]:.2f}")
    if step.compiled_graphs is not None:
        parts.append(f"compiled graphs: {step.compiled_graphs}")
    if step.straggler is not None:
        parts.append(str(step.straggler))
    return " | ".join(parts) + " |"


def timer_lines(timers: Mapping[str, RankStats]) -> str:
    """Megatron's table of the log."""
    names = [(name.removesuffix(TIMER_SUFFIX) + " ").ljust(48, ".") for name in timers]
    rows = [
        f"    {name}: ({spread.min * 1e3:.2f}, {spread.max * 1e3:.2f})"
        for name, spread in zip(names, timers.values(), strict=True)
    ]
    return "\n".join(["(min, max) time across ranks (ms):", *rows])


def _step_row(step: StepMetrics, speed: Speed) -> dict[str, Any]:
    row = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    row["iteration_time_s"] = row.pop("elapsed_s")
    memory = row.pop("memory")
    straggler = row.pop("straggler")
    if step.compiled_graphs is None:
        del row["compiled_graphs"]
    if not step.metrics:
        del row["metrics"]
    return {**row, **vars(speed), **memory, **({} if straggler is None else vars(straggler))}


def _step_scalars(step: StepMetrics, speed: Speed) -> dict[str, float]:
    """By Megatron-DeepSpeed's tags, and of the same make where it has none."""
    scalars = {
        "lm-loss-training/lm loss": step.lm_loss,
        "learning-rate/learning-rate": step.learning_rate,
        "batch-size/batch-size": step.global_batch_size,
        "loss-scale/loss-scale": step.loss_scale,
        "grad-norm/grad-norm": step.grad_norm,
        "iteration-time/iteration-time": step.elapsed_s,
        "throughput/samples_per_sec": speed.samples_per_second,
        "throughput/tokens_per_sec": speed.tokens_per_second,
        "throughput/tokens_per_device_per_sec": speed.tokens_per_second_per_device,
        "throughput/tflops": speed.tflops_per_device,
        "throughput/mfu": speed.mfu,
        "memory/max_memory_allocated (GB)": step.memory.get(MAX_ALLOCATED),
        "compiled-graphs/compiled-graphs": step.compiled_graphs,
    }
    scalars |= {f"metrics-training/{key}": value for key, value in step.metrics.items()}
    if step.straggler is not None:
        scalars |= {
            "straggler/own time min": step.straggler.own_time_min_s,
            "straggler/own time median": step.straggler.own_time_median_s,
            "straggler/own time max": step.straggler.own_time_max_s,
            "straggler/slowest rank": step.straggler.slowest_rank,
            "straggler/slowest ratio": step.straggler.slowest_ratio,
            "straggler/data wait max": step.straggler.data_wait_max_s,
        }
    return {tag: value for tag, value in scalars.items() if value is not None}


def _nested(values: Mapping[str, RankStats]) -> dict[str, dict[str, float]]:
    return {key: vars(spread) for key, spread in values.items()}


def _supersede(folder: Path, resumed_iteration: int, totals: RunTotals) -> None:
    """Move rows of iterations after `resumed_iteration`, and torn ones, from metrics.jsonl to SUPERSEDED_FILE; all of
    them for a run that starts at 0, which begins with a validation of its own. What stays is added to `totals`.

    metrics.jsonl is replaced in one piece: a crash leaves the old file or the new.
    """
    path = folder / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept: list[bytes] = []
    moved: list[bytes] = []
    for line in lines:
        row = _row_until(line, resumed_iteration)
        (moved if row is None else kept).append(line)
        if row is not None:
            totals.add(row)
    if not moved:
        return
    with open(folder / SUPERSEDED_FILE, "ab") as file:
        file.writelines(line.rstrip(b"\n") + b"\n" for line in moved)
    with replacing(path, partial_name=f"{path.name}.new") as rows:
        rows.writelines(kept)


def _row_until(line: bytes, iteration: int) -> dict[str, Any] | None:
    """The row, if the line is a whole one of this iteration or an earlier one, and the run does not start at 0."""
    if iteration == 0 or not line.endswith(b"\n"):
        return None  # the writer was killed in the middle of it
    try:
        row = orjson.loads(line)
        return row if isinstance(row, dict) and int(row["iteration"]) <= iteration else None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None
