"""Layers to a running engine: DeepSpeed's pipeline engine, or its plain one over the same layers in sequence."""

from __future__ import annotations

import contextlib
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime import compiler
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, ReduceTiedGrads
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.timer import NoopTimer
from torch import Tensor, nn

from megatron.accelerator import marked, quiet
from megatron.config.options import Config, ConfigError
from megatron.models.sequential import SequentialModel, build_layers, compute_dtype
from megatron.observability.profiling import is_profiled
from megatron.observability.timers import StepTimers, around
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import initialise, named_parameters
from megatron.planning.progress import Progress
from megatron.tasks.task import Microbatch, Task
from megatron.training.deepspeed_config import deepspeed_config
from megatron.training.lean_optimizers import lean
from megatron.training.losses import StepLosses
from megatron.training.optimizer import Observation, UpdateGate, build_optimizer
from megatron.training.spikes import SpikeDetector
from megatron.training.state import EngineState


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
    """Sums and weights of the task's metrics on this rank: input of `Engine.read_metrics`."""

    @property
    def is_finite(self) -> bool:
        """Loss and gradient are finite."""
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
        self._num_microbatches = 0  # set by the first step
        self._draws = config.model.hidden_dropout > 0 or config.model.attention_dropout > 0
        self.dropout_seed = config.training.seed
        """Seed of the random streams. A resumed run keeps that of its checkpoint."""
        marks = is_profiled(config.logging, ctx.rank)
        self.timers = StepTimers(config.logging.timing_log_level, ctx.device, marks=marks)
        self.state = EngineState(engine.module, engine.optimizer, config, ctx)
        self._gate = UpdateGate(ctx, self.state, losses, detector)
        if config.training.skip_train:
            return
        self.state.torch_optimizer.gate = self._gate  # type: ignore[attr-defined]
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
    @abstractmethod
    def called_module(self) -> nn.Module:
        """The module whose call is the forward pass of one microbatch on this rank."""

    @property
    def reads_data(self) -> bool:
        """This rank feeds inputs or targets: inner stages do not."""
        return self.ctx.is_first_stage or self.ctx.is_last_stage

    @property
    def loss_scale(self) -> float:
        return float(getattr(self.deepspeed.optimizer, "cur_scale", 1.0)) if self.config.training.fp16 else 1.0

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
        weight_decay: float | None = None,
    ) -> StepResult:
        """Run forward, backward and update over one global batch; `microbatches` are this rank's share.

        Every rank has as many, but inner pipeline stages, which read none, pass none: for them `num_microbatches` is
        the number. `consumed_samples` counts those before this step. `weight_decay`: None leaves it as it is.
        """
        ctx = self.ctx
        self._set_num_microbatches(len(microbatches) if num_microbatches is None else num_microbatches)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr
            if weight_decay is not None:
                group["weight_decay"] = weight_decay * group["wd_mult"]
        if self._draws:
            ctx.streams.seed_step(self.dropout_seed, consumed_samples, ctx.stage, ctx.grad_rank, ctx.tensor_rank)
        normaliser = self._begin(microbatches)
        self._gate.begin_step()
        skipped_before = self.deepspeed.skipped_steps
        self._train(iter([(batch.inputs, batch.targets) for batch in microbatches]))
        observation = self._gate.observation
        refused = observation is not None and not observation.is_applied
        return StepResult(
            # the gate has reduced and read it; where DeepSpeed refused the step, on all ranks alike, it has not
            observation.loss if observation is not None else float(self._mean_loss()),
            self.deepspeed.get_global_grad_norm(),
            skipped=refused or self.deepspeed.skipped_steps > skipped_before,
            normaliser=normaliser,
            observation=observation,
            microbatch_losses=self._losses.values,
            metrics=self._losses.metrics,
        )

    def evaluate(self, microbatches: Sequence[Microbatch], num_microbatches: int) -> Evaluation:
        """Return the loss over one global batch, of which `microbatches` are this rank's share. No update."""
        normaliser = self._begin(microbatches)
        loss = self._evaluate([(batch.inputs, batch.targets) for batch in microbatches], num_microbatches)
        return Evaluation(loss, normaliser, self._losses.metrics)

    def watch(self, fire: Callable[[str, float | None], None]) -> None:
        """Call `fire` with the name of a hook and the loss, where it is known, at the events within training steps."""
        self._gate.before_update = lambda seen: fire("on_pre_optimizer_step", seen.loss)
        self._watch_microbatches(
            lambda: fire("on_before_forward", None) if self.module.training else None,
            lambda: fire("on_after_backward", None),
        )

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

    def _set_num_microbatches(self, number: int) -> None:
        """Set DeepSpeed's number of microbatches for the next step."""
        if number == self._num_microbatches:
            return
        engine = self.deepspeed
        engine.set_train_batch_size(number * engine.train_micro_batch_size_per_gpu() * self.ctx.grad_size)
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            # ZeRO's own copy, by which it adds up offloaded gradients; DeepSpeed 0.19.8 leaves it as it was
            engine.optimizer.gradient_accumulation_steps = number
        self._num_microbatches = number

    def _begin(self, microbatches: Sequence[Microbatch]) -> float:
        """Set the scale of the losses, and return the normaliser of the global batch.

        The scale makes DeepSpeed's mean over microbatches and data-parallel ranks the summed loss divided by the
        normaliser.
        """
        own = sum(batch.normaliser for batch in microbatches)
        total = self.ctx.sum_over_batch_ranks(own) if self._task.varies_normaliser else own * self.ctx.grad_size
        self._losses.begin_step(len(microbatches) * self.ctx.grad_size / (total if total > 0 else 1.0))
        return total

    def read_metrics(self, sums: Tensor | None) -> dict[str, float]:
        """Return the task's metrics over all ranks from each rank's sums. Collective if the task declares metrics.

        A metric without weight is NaN.
        """
        names = self._task.metrics
        if not names:
            return {}
        total = torch.zeros((len(names), 2), dtype=torch.float32, device=self.ctx.device)
        if sums is not None and self.ctx.tensor_rank == 0:  # tensor-parallel ranks hold equal sums
            total += sums
        if self.ctx.world_size > 1:
            dist.all_reduce(total)
        return {
            name: numerator / weight if weight else math.nan
            for name, (numerator, weight) in zip(names, total.tolist(), strict=True)
        }


class PipelineEngine(Engine):
    """DeepSpeed's 1F1B schedule over a PipelineModule, of one stage or more."""

    def __init__(self, engine: Any, *arguments: Any) -> None:
        super().__init__(engine, *arguments)
        if getattr(engine.optimizer, "use_grad_accum_attribute", False):
            engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {ReduceTiedGrads: _reduce_tied_gradients}
        for instruction in (ForwardPass, BackwardPass):
            engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {
                instruction: marked(engine._INSTRUCTION_MAP[instruction])
            }
        self._aggregate: Callable[[], Tensor] = engine._aggregate_total_loss
        if engine.steps_per_print() is None and not engine.monitor.enabled:
            engine._aggregate_total_loss = lambda: None  # the gate reduces the loss; DeepSpeed's own log needs it too
        self.timers.watch_pipeline(engine)

    @property
    def called_module(self) -> nn.Module:
        return self.module  # the pipeline engine calls it itself

    def _watch_microbatches(self, before_forward: Callable[[], None], after_backward: Callable[[], None]) -> None:
        table = self.deepspeed._INSTRUCTION_MAP
        self.deepspeed._INSTRUCTION_MAP = table | {
            ForwardPass: around(table[ForwardPass], before=before_forward),
            BackwardPass: around(table[BackwardPass], after=after_backward),
        }

    def _train(self, batches: Iterator[tuple[Any, Any]]) -> None:
        self.deepspeed.train_batch(self._on_device(batches))

    def _mean_loss(self) -> Tensor:
        return self._aggregate()

    def _evaluate(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> Tensor:
        loss: Tensor = self.deepspeed.eval_batch(self._on_device(batches), num_micro_batches=num_microbatches)
        self.module.train()
        return loss

    def _on_device(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Copy what this stage uses of each microbatch when DeepSpeed takes it, whose own copies wait."""
        ctx = self.ctx
        for inputs, targets in batches:
            yield (
                _to_device(inputs, ctx.device) if ctx.is_first_stage else inputs,
                _to_device(targets, ctx.device) if ctx.is_last_stage else targets,
            )


def _reduce_tied_gradients(engine: Any) -> None:
    """Sum the accumulated gradients of tied weights over their stages.

    DeepSpeed 0.19.8 sums `.grad`, from which ZeRO has moved them where it accumulates in another dtype than it trains.
    """
    for weight, group in engine.module.get_tied_weights_and_groups():
        if weight.requires_grad:
            dist.all_reduce(weight.grad_accum, group=group)


class SequentialEngine(Engine):
    """One microbatch after the other through the whole model, for ZeRO-2, ZeRO-3 and offload."""

    def __init__(self, engine: Any, *arguments: Any) -> None:
        super().__init__(engine, *arguments)
        self.timers.watch_sequential(engine)
        self._forward, self._backward = marked(self._loss), marked(engine.backward)

    @property
    def called_module(self) -> nn.Module:
        return self.deepspeed  # type: ignore[no-any-return]  # called itself

    def _watch_microbatches(self, before_forward: Callable[[], None], after_backward: Callable[[], None]) -> None:
        self._forward = around(self._forward, before=before_forward)
        self._backward = around(self._backward, after=after_backward)

    def _train(self, batches: Iterator[tuple[Any, Any]]) -> None:
        engine, steps = self.deepspeed, self.deepspeed.gradient_accumulation_steps()
        for index, (inputs, targets) in enumerate(batches):
            engine.set_gradient_accumulation_boundary(index == steps - 1)
            with self.timers("forward-compute"):
                loss = self._forward(inputs, targets)
            with self.timers("backward-compute"):
                self._backward(loss)
            with self.timers("optimizer"):
                engine.step()

    def _evaluate(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> Tensor:
        self.deepspeed.eval()
        with torch.no_grad():
            for inputs, targets in batches:
                self._forward(inputs, targets)
        self.deepspeed.train()
        return self._mean_loss()

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        with self.timers("batch-generator"):
            inputs, targets = (_to_device(part, self.ctx.device) for part in (inputs, targets))
        loss: Tensor = self.deepspeed(inputs, partial(self._losses.compute, targets=targets))
        self._losses.values.append(loss.detach())
        return loss

    def _mean_loss(self) -> Tensor:
        loss = torch.stack(self._losses.values).mean()
        if self.ctx.grad_group is not None:
            dist.all_reduce(loss, group=self.ctx.grad_group)
            loss /= self.ctx.grad_size
        return loss


def _to_device(tensors: Any, device: torch.device) -> Any:
    """Copy a tensor or a tuple of tensors, without a wait if they are pinned."""
    if isinstance(tensors, Tensor):
        return tensors.to(device, non_blocking=True)
    return tuple(part.to(device, non_blocking=True) for part in tensors)


def pinned(batch: Microbatch, device: torch.device) -> Microbatch:
    """Return the microbatch in memory from which the device copies by itself; on a CPU as it is."""
    if device.type == "cpu":
        return batch
    pin = get_accelerator().pin_memory
    inputs, targets = (
        pin(part) if isinstance(part, Tensor) else tuple(pin(tensor) for tensor in part)
        for part in (batch.inputs, batch.targets)
    )
    return replace(batch, inputs=inputs, targets=targets)


def build_engine(
    config: Config,
    ctx: ParallelContext,
    task: Task,
    detector: SpikeDetector | None = None,
    *,
    will_restore: bool = False,
    after_model: Callable[[], None] = lambda: None,
) -> Engine:
    """Allocate this rank's layers, initialise their parameters, and wrap them in DeepSpeed. Collective.

    `detector` finds the spikes that the update gate refuses; None: only what is not finite is refused. `will_restore`:
    leave out the initialisation, since a checkpoint is going to fill every parameter. `after_model` is called between
    the model and its optimizer.
    """
    settings = deepspeed_config(config, ctx.grad_size)
    specs, losses = build_layers(config, ctx), StepLosses(task, ctx)
    with quiet():
        model = (
            _pipeline(config, ctx, specs, losses, task.varies_shapes)
            if config.uses_pipeline
            else _sequential(config, ctx, specs, settings)
        )
        if not will_restore:
            _start_parameters(model, config, ctx)
        model.to(ctx.device)
    evaluates = config.training.skip_train
    model.requires_grad_(not evaluates) if evaluates else _prepare_frozen(model, ctx)
    after_model()
    with quiet():
        optimizer = None if evaluates else build_optimizer(model, config, ctx)
        _import_muon_uncompiled()
        mpu = None if config.uses_pipeline else ctx.grid
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
    if optimizer is not None and engine.load_universal_checkpoint():
        from megatron.interop.universal import compare_sizes  # late: few runs need it

        compare_sizes(engine.optimizer, config.parallel.tensor_model_parallel_size)
    lean(engine.optimizer, ctx)
    if config.uses_pipeline and ctx.grad_size == 1 and not isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        # alone, a rank has nothing to reduce; DeepSpeed would copy every gradient into a buffer and back
        engine.pipeline_enable_backward_allreduce = False
    if config.uses_pipeline and engine.steps_per_print() is None:
        # DeepSpeed's own timer keeps two events of every step until it prints, which it never does here
        engine.timers = NoopTimer()
    cls = PipelineEngine if config.uses_pipeline else SequentialEngine
    return cls(engine, config, ctx, task, losses, detector)


def _prepare_frozen(model: nn.Module, ctx: ParallelContext) -> None:
    """Raise ConfigError, on every rank alike, if a stage has no trained parameter: DeepSpeed needs one to optimize."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    is_frozen = bool(frozen) and len(frozen) == len(list(model.parameters()))
    stages = sorted({stage for stage, found in ctx.gather_objects((ctx.stage, is_frozen)) if found})
    if stages:
        raise ConfigError(
            [
                f"freeze leaves no trained parameter on pipeline stage {', '.join(map(str, stages))}; every stage "
                "needs one: train more parameters, or use fewer stages"
            ]
        )
    for parameter in frozen:
        parameter._hp_grad = None  # type: ignore[attr-defined]  # read by DeepSpeed where weights are tied over stages


def _import_muon_uncompiled() -> None:
    """Keep torch's compiler out of the start of a run.

    DeepSpeed 0.19.8 checks each optimizer for its Muon, and that module passes functions to torch.compile when it is
    imported: 2 s of processor time a rank, for an optimizer that is not in use.
    """
    with contextlib.suppress(ImportError), patch.object(compiler, "compile", lambda: compiler.dummy_decorator):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def _pipeline(
    config: Config, ctx: ParallelContext, specs: list[LayerSpec], losses: StepLosses, varies_shapes: bool
) -> nn.Module:
    # without no_grad, its broadcast of tied weights would become part of their autograd graph
    with _default_dtype(compute_dtype(config)), torch.no_grad():
        return PipelineModule(
            specs,
            topology=ctx.topology,
            loss_fn=losses,
            partition_method=config.parallel.pipeline_partition_method,
            activation_checkpoint_interval=0,
            dynamic_shape=varies_shapes,
        )


def _sequential(config: Config, ctx: ParallelContext, specs: list[LayerSpec], settings: dict[str, Any]) -> nn.Module:
    if config.optimizer.zero_stage < 3:
        with _default_dtype(compute_dtype(config)):
            return SequentialModel(specs)
    # each parameter is cut up over the data-parallel ranks as soon as it is made: the whole never fits.
    # its `dtype` argument must stay unset: DeepSpeed 0.19.8 takes it for bfloat16 where float16 is unsupported
    with deepspeed.zero.Init(
        data_parallel_group=ctx.grid.get_data_parallel_group(),
        config_dict_or_path=settings,
        mem_efficient_linear=False,  # would replace torch's linear for the whole process
        mpu=ctx.grid,
    ):
        return SequentialModel(specs)


def _start_parameters(model: nn.Module, config: Config, ctx: ParallelContext) -> None:
    for name, parameter in named_parameters(model):
        if config.optimizer.zero_stage == 3:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if ctx.grad_rank == 0:
                    initialise([(name, parameter)], config.training.seed, ctx.tensor_rank, ctx.tensor_size)
        else:
            initialise([(name, parameter)], config.training.seed, ctx.tensor_rank, ctx.tensor_size)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
