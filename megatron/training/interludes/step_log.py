"""The log line of the steps since the last one: mean loss, metrics, times, memory and slow ranks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.observability.expert_loads import LoadWatch
from megatron.observability.metrics import MetricsLog
from megatron.observability.rank_times import Straggler, StragglerStats
from megatron.observability.slow_links import CHECK, watch_links
from megatron.observability.slow_steps import watch_steps
from megatron.observability.step_metrics import StepMetrics
from megatron.options.optimizer import OptimizerConfig
from megatron.options.progress import Progress
from megatron.parallel.shards import named_parameters
from megatron.resilience.watchdog import Watchdog
from megatron.runtime import accelerator
from megatron.runtime.alerts import LINK
from megatron.training.engine import Engine, StepResult

log = logging.getLogger(__name__)


class StepLog:
    """Sums over the steps between two log lines. Metrics stay on the device until they are read: no step waits."""

    def __init__(
        self,
        engine: Engine,
        progress: Progress,
        log: MetricsLog,
        watchdog: Watchdog,
        is_saving: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_saving`: returns whether a save goes on in the background, which slows steps."""
        self._engine, self._progress, self._log, self._watchdog = engine, progress, log, watchdog
        self._every = engine.config.logging.log_interval
        self._fallbacks: set[str] = set()
        self.loads = LoadWatch(engine.config, engine.ctx)
        self._straggler: Straggler | None = None
        if engine.config.logging.log_straggler:
            num_trained = sum(p.numel() for _, p in named_parameters(engine.module) if p.requires_grad)
            self._straggler = Straggler(engine.ctx, engine.config, num_trained)
        self._slow_steps = watch_steps(engine.config, engine.ctx, log.message)
        # last: it starts the clock where nothing else has
        self._links = watch_links(engine.config, engine.ctx)
        self._watches = [watch for watch in (self._slow_steps, self._links) if watch is not None]
        for watch in self._watches:
            watch.is_busy = lambda iteration: is_saving() or engine.config.logging.traces(iteration)
        self._clocked: list[dict[str, float]] = []
        """Phases of the steps since the last log line, as far as they have been read."""
        self.restart()

    def restart(self) -> None:
        self._steps = self._nan_steps = 0
        self._loss = 0.0
        self._metrics: Tensor | None = None
        """Sums and weights of the metrics on this rank over the finite steps."""
        self._largest_logit: Tensor | None = None
        self._began_s = time.perf_counter()
        if self._slow_steps is not None:
            self._slow_steps.restart()

    def roll_back(self) -> None:
        """Forget the steps since the last log line, which a rollback has undone."""
        self.restart()
        self.loads.restart()
        self._read_clock()
        self._clocked.clear()
        for watch in self._watches:
            watch.drop()

    def pause(self, seconds: float) -> None:
        """Leave out time that was not training."""
        self._began_s += seconds
        if self._slow_steps is not None:
            self._slow_steps.pause(seconds)

    def count_positions(self, number: int) -> None:
        """Count the places of the data that this rank has read for a step."""
        if self._straggler is not None:
            self._straggler.count_step(number)

    def add(self, result: StepResult, size: int, num_microbatches: int) -> None:
        """Add a step that has ended, of so many samples, the last ones of the progress."""
        self._steps += 1
        if self._slow_steps is not None:
            begin = self._progress.consumed_samples - size
            self._slow_steps.add(self._progress.iteration, size, begin, num_microbatches)
        if not result.skipped:
            self.loads.add(result.loads)
        if not math.isfinite(result.loss):
            self._nan_steps += 1
            return
        self._loss += result.loss
        if result.largest_logit is not None:
            before = self._largest_logit
            self._largest_logit = result.largest_logit if before is None else before.maximum(result.largest_logit)
        self._metrics = self._engine.metric_table.joined(self._metrics, result.metrics)

    def write_if_due(self, result: StepResult | None, lr: float, decoupled_lr: float | None, size: int) -> None:
        """Write the line of the steps so far, every log_interval steps. Collective.

        `result` None: the last step of the interval was left out. `lr`, `decoupled_lr`: of the last step.
        """
        if self._progress.iteration % self._every == 0 and self._steps:
            self._write(result, lr, decoupled_lr, size)
            self.restart()

    def watch_links(self) -> None:
        """Probe the links where it is time, and name slow ones. Collective."""
        iteration = self._progress.iteration
        if self._links is None or iteration % CHECK:
            return
        self._watchdog.phase("link probe", iteration)
        self._read_clock()
        report = self._links.check(iteration)
        if report is None:
            return
        self._log.log_links(report.row, report.slowest_share)
        if report.warning:
            self._log.message(f"WARNING: {report.warning}")
            self._watchdog.alert(LINK, report.warning)

    def _read_clock(self) -> None:
        """Read the steps that the clock has measured since the last time."""
        clocked = self._engine.ctx.state.clock.read()
        self._clocked += clocked
        if self._links is not None:
            self._links.add(clocked)

    def _write(self, result: StepResult | None, lr: float, decoupled_lr: float | None, size: int) -> None:
        engine, progress = self._engine, self._progress
        elapsed_s, num_finite = (time.perf_counter() - self._began_s) / self._steps, self._steps - self._nan_steps
        progress.nan_iterations += self._nan_steps
        loss, grad_norm = math.nan, None
        if num_finite:
            loss = self._loss / num_finite
        if result is not None and result.grad_norm is not None:
            grad_norm = float(result.grad_norm)
        self._read_clock()
        clocked, self._clocked = self._clocked, []
        predicted_s, parts, lines = None, dict[str, float](), list[str]()
        if self._slow_steps is not None:
            predicted_s, parts = self._slow_steps.predicted_s, self._slow_steps.mean_parts(clocked)
            lines = self._slow_steps.close(clocked)
        self._log.log_step(
            StepMetrics(
                iteration=progress.iteration,
                steps=self._steps,
                consumed_samples=progress.consumed_samples,
                consumed_tokens=self._log.tokens_of(progress.consumed_samples),
                elapsed_s=elapsed_s,
                learning_rate=lr,
                decoupled_learning_rate=decoupled_lr,
                muon_learning_rate=_muon_rate(engine.config.optimizer, lr),
                global_batch_size=size,
                lm_loss=loss,
                straggler=self._slow_ranks(clocked),
                predicted_s=predicted_s,
                parts=parts,
                metrics=engine.read_metrics(self._metrics),
                max_attention_logit=self._read_largest_logit(),
                loss_scale=engine.loss_scale,
                grad_norm=grad_norm,
                skipped_iterations=progress.skipped_iterations,
                nan_iterations=progress.nan_iterations,
                memory=accelerator.memory_stats(),
                compiled_graphs=accelerator.current().compiled_graphs(),
                experts=self.loads.read(),
            )
        )
        for line in lines:
            self._log.message(line)
        self._name_fallbacks()
        timers = engine.timers.read(self._steps, engine.ctx)
        self._log.log_timers(progress.iteration, progress.consumed_samples, timers)

    def _read_largest_logit(self) -> float | None:
        """Return the largest attention logit of all ranks, where it is logged. Collective then."""
        engine = self._engine
        if not engine.config.logging.log_max_attention_logit:
            return None
        largest = self._largest_logit
        if largest is None:  # of a stage without layers
            largest = torch.tensor(-math.inf, device=engine.ctx.device)
        largest = largest.clone()
        if engine.ctx.world_size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        number = float(largest)
        return number if math.isfinite(number) else None

    def _slow_ranks(self, clocked: Sequence[Mapping[str, float]]) -> StragglerStats | None:
        if self._straggler is None:
            return None
        times = self._straggler.read(clocked)
        if times is not None:
            note = times.stragglers and f"until step {self._progress.iteration}: {times.stragglers}"
            self._watchdog.note_stragglers(note)
        return times

    def _name_fallbacks(self) -> None:
        """Warn once, from one rank of each stage, of an operator that the CPU computes for the device."""
        ctx = self._engine.ctx
        if ctx.batch_rank or not ctx.leads_rows:
            return
        fallbacks = accelerator.current().cpu_fallbacks()
        if new := sorted(fallbacks.keys() - self._fallbacks):
            self._fallbacks |= set(new)
            named = ", ".join(f"{name} ({fallbacks[name]} calls)" for name in new)
            log.warning(
                "HPU lacks these operators, so rank %d computed them on the CPU, waiting each time: %s", ctx.rank, named
            )


def _muon_rate(options: OptimizerConfig, lr: float) -> float | None:
    """Return the learning rate of Muon's matrices in a step of this one; None: it is the same, or there are none."""
    if options.muon_lr is None or options.muon_lr == options.lr:
        return None
    return lr * options.muon_lr / options.lr
