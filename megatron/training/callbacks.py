"""Callbacks: a user's objects that observe a training, in InstructLab's form.

    class Losses(TrainerCallback):
        def on_log(self, context):
            if context.is_world_process_zero:
                print(context.step, context.loss)

`--callbacks package.module:Losses` or `--callbacks file.py:Losses` names the class, of which each rank makes an object
without arguments. Hooks run in a thread of their own, in order, and may be `async`. They see a copy of the context, and
cannot change the training. An error of theirs is logged, and ends the run on all ranks unless `callback_errors=log`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.options.config import Config, ConfigError
from megatron.options.plugins import import_attribute
from megatron.resilience.errors import raise_on_all_ranks
from megatron.runtime.accelerator import current

if TYPE_CHECKING:
    from megatron.options.progress import Progress
    from megatron.options.schedule import Schedule
    from megatron.training.engine import Engine, StepResult

log = logging.getLogger("megatron.callbacks")

LAST_WAIT_S = 10.0
"""Longest wait for hooks at the end of the training."""


@dataclass
class TrainingContext:
    """State of the training when a hook is called.

    Equal on all ranks, but for times, memory and the last two fields, and for the counts of loss tokens and validation
    results: these are right on pipeline stages that read data, the first and the last, as rank 0 does.
    """

    hook_name: str = ""
    step: int = 0
    """Optimizer step, from 1."""
    epoch: int = 0
    """From 0."""
    total_samples: int = 0
    total_tokens: int = 0
    loss: float | None = None
    """Mean over the loss tokens of the global batch; from on_pre_optimizer_step on."""
    learning_rate: float | None = None
    grad_norm: float | None = None
    elapsed_time: float | None = None
    """Seconds of the step."""
    overall_throughput: float | None = None
    """Samples a second."""
    cuda_mem_allocated: float | None = None
    """GiB allocated on this rank's device now; None on a device without such a number."""
    batch_metrics: dict[str, Any] = field(default_factory=dict)
    """total_samples, total_length (tokens) and num_loss_counted_tokens of the global batch; the microbatches of a rank
    as grad_accum_steps and num_minibatches."""
    val_metrics: dict[str, Any] = field(default_factory=dict)
    """`val_loss`, `val_num_tokens` (of pairs: `val_num_pairs`) and the task's metrics, at on_evaluate and after."""
    checkpoint_path: str | None = None
    """Folder of the checkpoint or export, at on_save alone."""
    checkpoint_format: str = ""
    """native (a checkpoint to resume from), huggingface or peft (an export), at on_save alone."""
    output_dir: str = ""
    model_name_or_path: str = ""
    max_epochs: int = 0
    world_size: int = 1
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


class TrainerCallback:
    """Base of callbacks; its hooks do nothing. They are called on every rank.

    on_before_forward and on_after_backward are called for each microbatch, on_pre_optimizer_step and on_optimizer_step
    only where the optimizer updates, on_save once a checkpoint or a Hugging Face export is complete: with
    async_save, some steps after the one that was saved.
    """

    def on_train_begin(self, context: TrainingContext) -> Any: ...
    def on_epoch_begin(self, context: TrainingContext) -> Any: ...
    def on_step_begin(self, context: TrainingContext) -> Any: ...
    def on_before_forward(self, context: TrainingContext) -> Any: ...
    def on_after_backward(self, context: TrainingContext) -> Any: ...
    def on_pre_optimizer_step(self, context: TrainingContext) -> Any: ...
    def on_optimizer_step(self, context: TrainingContext) -> Any: ...
    def on_log(self, context: TrainingContext) -> Any: ...
    def on_evaluate(self, context: TrainingContext) -> Any: ...
    def on_save(self, context: TrainingContext) -> Any: ...
    def on_step_end(self, context: TrainingContext) -> Any: ...
    def on_epoch_end(self, context: TrainingContext) -> Any: ...
    def on_train_end(self, context: TrainingContext) -> Any: ...


def load_callback(name: str) -> TrainerCallback:
    """Return an object of the class that `package.module:CLASS` or `FILE.py:CLASS` names. Raises ConfigError."""
    made = import_attribute("callbacks", name)
    try:
        callback = made()
    except Exception as error:  # a user's class may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            [f"callbacks={name} cannot be made: {reason}; give package.module:CLASS, made without arguments"]
        ) from error
    if not isinstance(callback, TrainerCallback):
        raise ConfigError([f"callbacks={name} is not a subclass of megatron.training.callbacks.TrainerCallback"])
    return callback


class CallbackThread:
    """Thread that calls hooks in order, and continues async ones while others run."""

    def __init__(self, callbacks: Sequence[TrainerCallback]):
        self._callbacks = callbacks
        self.error: str | None = None
        """The first error of a hook, with its name and step."""
        # one loop for all callbacks: plain hooks run one after the other, async ones go on between them
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        # a daemon: a hook that never returns must not keep the process of a rank
        self._thread = threading.Thread(target=self._loop.run_forever, name="callbacks", daemon=True)
        self._thread.start()

    def call(self, hook: str, context: TrainingContext) -> None:
        """Have the hook called with a copy of the context."""
        for callback in self._callbacks:
            # a hook that is not overridden costs neither a copy nor a call
            if getattr(type(callback), hook) is not getattr(TrainerCallback, hook):
                # the training goes on meanwhile, and changes its own
                seen = copy.copy(context)
                seen.hook_name = hook
                # copy.copy would share the two dicts
                seen.batch_metrics, seen.val_metrics = dict(context.batch_metrics), dict(context.val_metrics)
                self._loop.call_soon_threadsafe(self._begin, getattr(callback, hook), seen)

    def close(self) -> None:
        """Wait for the hooks that were called, LAST_WAIT_S at most, and end the thread."""
        # the loop takes calls in order: behind this one's turn no hook is left that has not begun
        settled = asyncio.run_coroutine_threadsafe(self._settle(), self._loop)
        if wait([settled], LAST_WAIT_S).not_done:
            log.warning("callbacks have not returned after %g s; the run does not wait for them", LAST_WAIT_S)
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, hook: Callable[[TrainingContext], Any], context: TrainingContext) -> None:
        try:
            result = hook(context)
        except (
            Exception,
            SystemExit,
            KeyboardInterrupt,
        ) as error:  # the last two would end the thread of all callbacks
            self._note(error, hook.__qualname__, context.step)
            return
        # the loop refers to its tasks weakly; without a set of them one could be collected while it waits
        if inspect.iscoroutine(result):
            task = self._loop.create_task(self._awaited(result, hook.__qualname__, context.step))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _awaited(self, result: Any, name: str, step: int) -> None:
        try:
            await result
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._note(error, name, step)

    def _note(self, error: BaseException, name: str, step: int) -> None:
        log.exception("%s failed at step %d", name, step)
        # later ones are often its consequences
        self.error = self.error or f"{name} failed at step {step}: {type(error).__name__}: {error}"

    async def _settle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)


class Events:
    """Calls the callbacks of a run at its events. Without callbacks nothing is measured and nothing waits."""

    def __init__(
        self, config: Config, engine: Engine, progress: Progress, schedule: Schedule, tokens: Callable[[int], int]
    ):
        """`tokens` returns the tokens in the first samples of the run. Collective. Raises ConfigError."""
        self._progress, self._schedule, self._tokens = progress, schedule, tokens
        callbacks = raise_on_all_ranks(engine.ctx, lambda: [load_callback(name) for name in config.logging.callbacks])
        self._aborts = config.logging.callback_errors == "abort"
        self._thread: CallbackThread | None = None
        if callbacks:
            self._thread = CallbackThread(callbacks)
        self._epoch: int | None = None
        self._step_began_s = 0.0
        checkpoint = config.checkpoint
        self._context = TrainingContext(
            output_dir=config.logging.results_dir or "",
            model_name_or_path=checkpoint.load or "",
            max_epochs=config.training.num_epochs or 0,
            world_size=engine.ctx.world_size,
            is_local_process_zero=os.environ.get("LOCAL_RANK", "0") == "0",
            is_world_process_zero=engine.ctx.rank == 0,
        )
        self._export_folder: Path | None = None
        if checkpoint.save_hf is not None:
            self._export_folder = Path(checkpoint.save_hf)
        exports_adapters = config.lora.lora_rank is not None and not checkpoint.save_hf_merged
        self._export_format = "peft" if exports_adapters else "huggingface"
        if self._thread is not None:
            engine.watch(self._within_step)

    def error(self) -> str | None:
        """Return the error of a hook on this rank that is to end the run."""
        if self._thread is None or not self._aborts:
            return None
        return self._thread.error

    def begin(self) -> None:
        """Call on_train_begin."""
        self._count()
        self._fire("on_train_begin")

    def step_begins(self) -> None:
        """Call on_step_begin, before it on_epoch_begin where one begins."""
        self._context.step = self._progress.iteration + 1
        per_epoch = self._schedule.samples_per_epoch
        epoch = 0
        if per_epoch:
            epoch = self._progress.consumed_samples // per_epoch
        # also in the middle of one, where a run resumes
        if epoch != self._epoch:
            self._epoch = self._context.epoch = epoch
            self._fire("on_epoch_begin")
        self._step_began_s = time.perf_counter()
        self._fire("on_step_begin")

    def step_done(self, result: StepResult | None, lr: float, size: int, num_microbatches: int) -> None:
        """Call on_optimizer_step and on_log. `result` None: the step was left out."""
        if self._thread is None or result is None:
            return
        context = self._context
        tokens_before = self._tokens(self._progress.consumed_samples - size)
        self._count()
        context.loss = float(result.loss)  # waits for the device
        context.grad_norm = None
        if result.grad_norm is not None:
            context.grad_norm = float(result.grad_norm)
        context.learning_rate = lr
        context.elapsed_time = time.perf_counter() - self._step_began_s
        context.overall_throughput = size / context.elapsed_time
        context.cuda_mem_allocated = _allocated_gib()
        context.batch_metrics = {
            "total_samples": size,
            "total_length": context.total_tokens - tokens_before,
            "num_loss_counted_tokens": int(result.normaliser),
            "grad_accum_steps": num_microbatches,
            "num_minibatches": num_microbatches,
        }
        if not result.skipped:
            self._fire("on_optimizer_step")
        self._fire("on_log")

    def evaluated(self, loss: float, count: int, metrics: dict[str, float], unit: str) -> None:
        """Call on_evaluate."""
        self._context.val_metrics = {"val_loss": loss, f"val_num_{unit}": count, **metrics}
        self._fire("on_evaluate")

    def saved(self, folder: Path) -> None:
        """Call on_save, for a checkpoint or an export that is complete."""
        is_export = self._export_folder is not None and folder.parent == self._export_folder
        self._context.checkpoint_path = str(folder)
        self._context.checkpoint_format = self._export_format if is_export else "native"
        self._fire("on_save")
        # hooks after it must not see this path
        self._context.checkpoint_path, self._context.checkpoint_format = None, ""

    def step_ends(self) -> None:
        """Call on_step_end, and on_epoch_end where one ends."""
        self._fire("on_step_end")
        if self._schedule.ends_epoch(self._progress.consumed_samples):
            self._fire("on_epoch_end")

    def end(self) -> None:
        """Call on_train_end, and wait for all hooks."""
        self._fire("on_train_end")
        if self._thread is not None:
            self._thread.close()

    def _within_step(self, hook: str, loss: float | None) -> None:
        if loss is not None:
            self._context.loss = loss
        self._fire(hook)

    def _count(self) -> None:
        self._context.step = self._progress.iteration
        self._context.total_samples = self._progress.consumed_samples
        self._context.total_tokens = self._tokens(self._progress.consumed_samples)

    def _fire(self, hook: str) -> None:
        if self._thread is not None:
            self._thread.call(hook, self._context)


def _allocated_gib() -> float | None:
    device = current()
    if device.is_host:
        return None
    return device.memory().allocated / 2**30
