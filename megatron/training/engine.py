"""The face of an engine: a step and an evaluation over a global batch, whatever runs its microbatches."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from megatron.models.experts import RouterBalance
from megatron.models.sequential import SequentialModel, compute_dtype, default_dtype
from megatron.observability.instruction_trace import InstructionTrace
from megatron.observability.profiling import is_profiled
from megatron.observability.timers import StepTimers, around
from megatron.options.config import Config
from megatron.options.progress import Progress
from megatron.parallel.context import ParallelContext
from megatron.runtime.accelerator import marked
from megatron.runtime.devices import device_of
from megatron.tasks.data import Microbatch
from megatron.tasks.objective import OfOutputs
from megatron.tasks.task import Task
from megatron.training.losses import SpikeDetector, StepLosses
from megatron.training.optimizers.update_gate import Observation, UpdateGate
from megatron.training.state import EngineState
from megatron.training.step_checks import PassCounter

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
"""DeepSpeed's own, which each step advances."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, on every rank. Tensors stay on the device until they are logged."""

    loss: float
    """Mean over the microbatches of all ranks."""
    grad_norm: Tensor | float
    skipped: bool
    """Weights and optimizer are as they were before."""
    normaliser: float = 0.0
    """Sum over the global batch, for language models its loss tokens; right on the ranks that read data."""
    observation: Observation | None = None
    """Basis of the decision to update; None if DeepSpeed's ZeRO itself refused a norm that is not finite."""
    microbatch_losses: Sequence[Tensor] = ()
    """Losses of this rank's microbatches; none on inner stages."""
    metrics: Tensor | None = None
    """Sums and weights of the metrics on this rank, in rows of `Engine.metric_table`: input of `read_metrics`."""
    loads: Mapping[int, Tensor] = field(default_factory=dict)
    """Choices of experts on this rank by layer: `ExpertLoads.by_layer`."""
    largest_logit: Tensor | None = None
    """Largest attention logit on this rank; None: it was not recorded."""

    @property
    def layer_loss(self) -> float:
        """Sum of the layers' own loss terms, weighed: optimised with `loss`, and not in it."""
        if self.observation is None:
            return 0.0
        return self.observation.layer_loss

    @property
    def is_finite(self) -> bool:
        """Loss, terms of layers and gradient are finite."""
        return self.observation is not None and self.observation.is_finite


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation over one global batch."""

    loss: Tensor
    """Summed loss divided by the normaliser."""
    normaliser: float
    """Sum over the global batch; right on the ranks that read data."""
    metrics: Tensor | None
    """As in StepResult."""


class Engine(ABC):
    """Trains and evaluates over global batches. Its two subclasses differ in how they run the microbatches."""

    def __init__(
        self,
        engine: Any,
        config: Config,
        ctx: ParallelContext,
        task: Task,
        losses: StepLosses,
        detector: SpikeDetector | None,
    ) -> None:
        self.deepspeed, self.config, self.ctx = engine, config, ctx
        self._task, self._losses = task, losses
        self.metric_table = losses.table
        self._num_microbatches = 0  # set by the first step
        self._passes = 0
        """Microbatches of the step or evaluation under way."""
        model = config.model
        shares = model.hidden_dropout, model.attention_dropout, config.lora.lora_dropout, model.moe_input_jitter_eps
        draws_noise = config.training.neftune_noise_alpha is not None
        self._draws = max(shares) > 0 or draws_noise or task.objective.draws_numbers
        self.dropout_seed = config.training.seed
        """Seed of the random streams. A resumed run keeps that of its checkpoint."""
        self.base: dict[str, Any] | None = None
        """With adapters, where the base model comes from and its identity."""
        self.start_fingerprint: str | None = None
        """Fingerprint of the weights that the run started from, where a task needs it: training/start.py."""
        marks = is_profiled(config.logging, ctx.rank)
        self.timers = StepTimers(config.logging.timing_log_level, ctx.device, marks=marks)
        self.passes = PassCounter(ctx)
        self.trace = InstructionTrace(ctx, wanted=config.logging.profile_instructions)
        self.state = EngineState(engine.module, engine.optimizer, config, ctx)
        self._gate = UpdateGate(ctx, self.state, losses, detector)
        self._balance = RouterBalance(engine.module, model.moe_router_bias_update_rate, ctx)
        if config.training.skip_train:  # without an optimizer
            return
        self.state.torch_optimizer.gate = self._gate
        if config.training.fp16:
            # at its end the scale stays; the guard counts, and aborts with a message
            engine.optimizer.loss_scaler.raise_error_at_min_scale = False

    def join_stop_decision(self, sees_stop: Callable[[], bool]) -> None:
        """Reduce with each step's loss and norm if a rank `sees_stop`: `Observation.is_stop_seen`."""
        self._gate.sees_stop = sees_stop

    @property
    def module(self) -> nn.Module:
        return self.deepspeed.module  # type: ignore[no-any-return]

    @property
    def reads_data(self) -> bool:
        """This rank feeds inputs or targets: inner stages do not."""
        return self.ctx.is_first_stage or self.ctx.is_last_stage

    @property
    def loss_scale(self) -> float:
        if not self.config.training.fp16:
            return 1.0
        return float(getattr(self.deepspeed.optimizer, "cur_scale", 1.0))

    def count_from(self, progress: Progress) -> None:
        """Set DeepSpeed's own counters."""
        self.deepspeed.global_steps = progress.iteration
        self.deepspeed.global_samples = progress.consumed_samples
        self.deepspeed.skipped_steps = progress.skipped_iterations

    def train_step(
        self,
        microbatches: Sequence[Microbatch],
        *,
        num_microbatches: int | None = None,
        consumed_samples: int,
        lr: float,
        decoupled_lr: float | None = None,
        weight_decay: float | None = None,
    ) -> StepResult:
        """Run forward, backward and update over one global batch; `microbatches` are this rank's share.

        Every rank has as many, but inner pipeline stages, which read none, pass none: for them `num_microbatches` is
        the number. `consumed_samples` counts those before this step. `decoupled_lr`: of word embedding and output
        layer; None: `lr`. `weight_decay`: None leaves it as it is.
        """
        ctx, checks, loads, logits = self.ctx, self.ctx.state.checks, self.ctx.state.loads, self.ctx.state.logits
        if num_microbatches is None:
            num_microbatches = len(microbatches)
        self._set_num_microbatches(num_microbatches)
        self._passes = num_microbatches
        self._set_rates(lr, decoupled_lr, weight_decay)
        if self._draws:  # it sets the device's generator, which takes time
            ctx.state.streams.seed_step(self.dropout_seed, consumed_samples, ctx)
        # before the step begins: its forward passes must not count as those of the step
        microbatches = self._task.objective.before_step(microbatches, self.forward, ctx)
        normaliser = self._begin(microbatches)
        self._gate.begin_step()
        if self.state.average is not None:
            self.state.average.start()
        # none where DeepSpeed reduces by itself: ZeRO-2, ZeRO-3 and offload
        buffers = getattr(self.deepspeed.optimizer, "buffers", None)
        if buffers is not None:
            buffers.begin_step(num_microbatches)
        skipped_before = self.deepspeed.skipped_steps  # in float16 DeepSpeed refuses steps by itself
        self.passes.begin_step()
        ctx.state.fp8.begin_step()
        terms = self._losses.layer_terms(self.loss_scale)
        # each finite check, fault, loss term, load and logit within belongs to this step
        with checks.step(), loads.step(checks), logits.step(checks), self._task.objective.naming_faults(), terms:
            self._train(iter([(batch.inputs, batch.targets) for batch in microbatches]))
        observation = self._gate.observation
        if observation is None:  # DeepSpeed refused the step, on all ranks alike, so the gate has not reduced the loss
            loss, is_refused = float(self._mean_loss()), False
        else:
            loss, is_refused = observation.loss, not observation.is_applied
        is_skipped = is_refused or self.deepspeed.skipped_steps > skipped_before
        if not is_skipped:
            self._follow_update(loads.by_layer)
        return StepResult(
            loss,
            self.deepspeed.get_global_grad_norm(),
            skipped=is_skipped,
            normaliser=normaliser,
            observation=observation,
            microbatch_losses=self._losses.values,
            metrics=self._losses.metrics,
            loads=loads.by_layer,
            largest_logit=logits.largest(),
        )

    def _set_rates(self, lr: float, decoupled_lr: float | None, weight_decay: float | None) -> None:
        # functions of the samples consumed: a scheduler of DeepSpeed's would have a state of its own to resume
        for group in self.deepspeed.optimizer.param_groups:
            rate = lr
            if decoupled_lr is not None and group["is_decoupled"]:
                rate = decoupled_lr
            group["lr"] = rate * group["lr_mult"]
            if weight_decay is not None:
                group["weight_decay"] = weight_decay * group["wd_mult"]

    def _follow_update(self, loads: Mapping[int, Tensor]) -> None:
        """Move what follows each step that was applied: biases of routers, and the average of the weights."""
        self._balance.update(loads)
        if self.state.average is not None:
            self.state.average.count_step()

    def run_without_update(
        self, microbatches: Sequence[Microbatch], *, num_microbatches: int, consumed_samples: int
    ) -> None:
        """Run a step whose update is refused, so that the device compiles its passes. The arguments: `train_step`.

        The next step is bit for bit what it would have been: each seeds its random streams.
        """
        engine, lr = self.deepspeed, self.config.optimizer.lr
        counted = {name: getattr(engine, name) for name in COUNTERS}
        scaler = vars(getattr(engine.optimizer, "loss_scaler", None) or SimpleNamespace())
        scale = dict(scaler)  # of fp16, which follows the steps
        self._gate.refuses_all = True
        try:
            self.train_step(microbatches, num_microbatches=num_microbatches, consumed_samples=consumed_samples, lr=lr)
        finally:
            self._gate.refuses_all = False
        # DeepSpeed counts a refused step too, and fp16's scaler follows it
        vars(engine).update(counted)
        scaler.update(scale)
        self.timers.read(1, self.ctx)  # forget what the compilation took

    def evaluate(self, microbatches: Sequence[Microbatch], num_microbatches: int) -> Evaluation:
        """Return the loss over one global batch, of which `microbatches` are this rank's share. No update."""
        self._passes = num_microbatches
        microbatches = self._task.objective.before_step(microbatches, self.forward, self.ctx)
        normaliser = self._begin(microbatches)
        with self._losses.layer_terms():
            loss = self._evaluate([(batch.inputs, batch.targets) for batch in microbatches], num_microbatches)
        return Evaluation(loss, normaliser, self._losses.metrics)

    @property
    def num_graphs(self) -> int:
        """Number of graphs of the device that evaluations have captured on this rank."""
        return 0

    def forward(
        self,
        microbatches: Sequence[Microbatch],
        of_outputs: OfOutputs,
        *,
        adapters: bool = True,
        num_microbatches: int | None = None,
    ) -> list[Tensor]:
        """Return what `of_outputs` computes of each microbatch, without gradients: `tasks.task.Forward`."""
        passes = self._passes if num_microbatches is None else num_microbatches
        switched = contextlib.nullcontext() if adapters else self.ctx.state.adapters.off()
        with self._losses.collect(of_outputs) as results, switched:
            self._run_forward([(batch.inputs, batch.targets) for batch in microbatches], passes)
        return results

    def watch(self, fire: Callable[[str, float | None], None]) -> None:
        """Call `fire` with the name of a hook and the loss, where it is known, at the events within training steps."""
        gate = self._gate

        def before_forward() -> None:
            # evaluations and steps that only compile run the same passes, and are not events of the training
            if self.module.training and not gate.refuses_all:
                fire("on_before_forward", None)

        def after_backward() -> None:
            if not gate.refuses_all:
                fire("on_after_backward", None)

        gate.before_update = lambda seen: fire("on_pre_optimizer_step", seen.loss)
        self._watch_microbatches(before_forward, after_backward)

    @abstractmethod
    def _watch_microbatches(self, before_forward: Callable[[], None], after_backward: Callable[[], None]) -> None:
        """Have these called before the forward and after the backward pass of each microbatch."""

    @abstractmethod
    def _train(self, batches: Iterator[tuple[Any, Any]]) -> None:
        """Run a training step over (inputs, targets) pairs."""

    @abstractmethod
    def _mean_loss(self) -> Tensor:
        """Return the mean loss of this step's microbatches over all ranks. Collective."""

    @abstractmethod
    def _evaluate(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> Tensor:
        """Return the mean loss of microbatches and ranks, without gradients."""

    @abstractmethod
    def _run_forward(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> None:
        """Run the forward passes of microbatches, without dropout and gradients."""

    def _set_num_microbatches(self, number: int) -> None:
        """Set DeepSpeed's number of microbatches for the next step."""
        if number == self._num_microbatches:
            return
        engine = self.deepspeed
        # DeepSpeed's public way to set the accumulation steps: it divides by microbatch and data-parallel size
        engine.set_train_batch_size(number * engine.train_micro_batch_size_per_gpu() * self.ctx.grad_size)
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            # ZeRO's own copy, by which it adds up offloaded gradients; DeepSpeed 0.19.8 leaves it as it was
            engine.optimizer.gradient_accumulation_steps = number
        self._num_microbatches = number

    def _begin(self, microbatches: Sequence[Microbatch]) -> float:
        """Set the scale of the losses, and return the normaliser of the global batch.

        The scale makes DeepSpeed's mean over microbatches and data-parallel ranks the summed loss divided by the
        normaliser. Ranks that share rows have the same loss, that of whole rows.
        """
        own = sum(batch.normaliser for batch in microbatches)
        # the sum waits for the device, so it is left out where each rank knows the whole from its own share
        if self._task.data.varies_normaliser:
            total = self.ctx.sum_over_batch_ranks(own)
        else:
            total = own * self.ctx.num_batch_ranks
        # with m microbatches, d ranks and normaliser N:  mean over m, d of (m d / N) sum(w l)  =  sum of all w l, / N
        scale = float(len(microbatches) * self.ctx.num_batch_ranks)
        # 0 where every token is masked: each loss is 0 then, under any scale
        if total > 0:
            scale /= total
        if self._losses.coefficients:
            self._losses.begin_step(scale, self._count_tokens(microbatches))
        else:
            self._losses.begin_step(scale)
        return total

    def _count_tokens(self, microbatches: Sequence[Microbatch]) -> float:
        """Return the tokens of the global batch, on inner stages too, which read none. Collective."""
        own = float(sum(batch.num_tokens for batch in microbatches))
        if self.reads_data:
            own = self.ctx.sum_over_batch_ranks(own)
        # a batch may be padding alone
        return max(1.0, self.ctx.from_first_stage(own))

    def read_metrics(self, sums: Tensor | None) -> dict[str, float]:
        """Return the metrics over all ranks from each rank's sums. Collective if the task or a layer declares metrics.

        A metric without weight is NaN.
        """
        table = self.metric_table
        if not table.names:
            return {}

        def reduce(numbers: Tensor, is_max: bool) -> None:
            if self.ctx.world_size > 1:
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM)

        if sums is None:
            sums = table.nothing(self.ctx.device)
        return dict(zip(table.names, table.over_ranks(sums, reduce), strict=True))


def to_device(tensors: Any, device: torch.device) -> Any:
    """Copy a tensor or a tuple of tensors, without a wait if they are pinned."""
    if isinstance(tensors, Tensor):
        return tensors.to(device, non_blocking=True)
    return tuple(part.to(device, non_blocking=True) for part in tensors)


def pinned(batch: Microbatch, device: torch.device) -> Microbatch:
    """Return the microbatch in memory from which the device copies by itself; on a CPU as it is."""
    if device_of(device.type).is_host:
        return batch
    pin = get_accelerator().pin_memory

    def pinned_part(part: Any) -> Any:
        if isinstance(part, Tensor):
            return pin(part)
        return tuple(pin(tensor) for tensor in part)

    if batch.beside is not None:
        batch = replace(batch, beside=pinned(batch.beside, device))
    return replace(batch, inputs=pinned_part(batch.inputs), targets=pinned_part(batch.targets))


class SequentialEngine(Engine):
    """One microbatch after the other through the whole model, for ZeRO-2, ZeRO-3 and offload."""

    def __init__(self, engine: Any, *arguments: Any) -> None:
        super().__init__(engine, *arguments)
        self.timers.watch_sequential(engine)
        if self.trace.wanted:
            engine.allreduce_gradients = self.trace.recorded("ReduceGrads", engine.allreduce_gradients)
            engine.step = self.trace.recorded("OptimizerStep", engine.step)
        forward = self.passes.counted("ForwardPass", marked(self.ctx.state.fp8.around(self._loss)))
        self._forward = self.trace.recorded("ForwardPass", forward)
        backward = self.passes.counted("BackwardPass", marked(self.ctx.state.fp8.around_backward(engine.backward)))
        self._backward = self.trace.recorded("BackwardPass", backward)

    def _watch_microbatches(self, before_forward: Callable[[], None], after_backward: Callable[[], None]) -> None:
        self._forward = around(self._forward, before=before_forward)
        self._backward = around(self._backward, after=after_backward)

    def _train(self, batches: Iterator[tuple[Any, Any]]) -> None:
        engine, steps = self.deepspeed, self.deepspeed.gradient_accumulation_steps()
        for index, (inputs, targets) in enumerate(batches):
            # DeepSpeed's own rule, micro_steps modulo the accumulation steps, is wrong once their number has changed
            engine.set_gradient_accumulation_boundary(index == steps - 1)
            with self.timers("forward-compute"):
                loss = self._forward(inputs, targets)
            with self.timers("backward-compute"):
                self._backward(loss)
            del loss  # its graph holds the output's weight and input, which the next forward pass would have beside it
            with self.timers("optimizer"):
                engine.step()

    def _evaluate(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> Tensor:
        self._run_forward(batches, num_microbatches)
        return self._mean_loss()

    def _run_forward(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> None:
        self.deepspeed.eval()
        with torch.no_grad():
            for inputs, targets in batches:
                self._forward(inputs, targets)
        self.deepspeed.train()

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        with self.timers("batch-generator"):
            inputs, targets = (to_device(part, self.ctx.device) for part in (inputs, targets))
        # inside the last layer's forward pass, where ZeRO-3 has its weight gathered
        loss: Tensor = self.deepspeed(inputs, partial(self._losses.compute, targets=targets))
        self._losses.keep(loss)
        return loss

    def _mean_loss(self) -> Tensor:
        loss = torch.stack(self._losses.values).mean()
        if self.ctx.grad_group is not None:
            dist.all_reduce(loss, group=self.ctx.grad_group)
            loss /= self.ctx.grad_size
        return loss


def sequential_module(
    config: Config, ctx: ParallelContext, specs: list[LayerSpec], settings: dict[str, Any]
) -> nn.Module:
    """Allocate the whole model, in ZeRO-3 cut up over the ranks of a replica. Collective there."""
    if config.optimizer.zero_stage < 3:
        with default_dtype(compute_dtype(config)):
            return SequentialModel(specs)
    # each parameter is cut up over these ranks as soon as it is made: the whole never fits.
    # its `dtype` argument must stay unset: DeepSpeed 0.19.8 takes it for bfloat16 where float16 is unsupported
    with deepspeed.zero.Init(
        data_parallel_group=ctx.shard_groups.within or ctx.grid.get_data_parallel_group(),
        config_dict_or_path=settings,
        mem_efficient_linear=False,  # would replace torch's linear for the whole process
        mpu=ctx.grid,
    ):
        return SequentialModel(specs)
