"""Layers to a running engine: DeepSpeed's pipeline engine, or its plain one over the same layers in sequence."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.timer import NoopTimer
from torch import Tensor, nn

from megatron.accelerator import quiet
from megatron.config.options import Config
from megatron.models.families.registry import build_layers
from megatron.models.transformer import compute_dtype
from megatron.observability.timers import StepTimers
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import initialise, shard_of
from megatron.tasks.task import Microbatch
from megatron.training.deepspeed_config import deepspeed_config
from megatron.training.optimizer import Gate, build_optimizer
from megatron.training.state import uncounted_gradients

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step tells, on every rank. Tensors stay on the device until they are logged."""

    loss: Tensor
    grad_norm: Tensor | float
    skipped: bool
    """Whether weights and optimizer are as they were before."""
    is_finite: bool = True
    """Whether loss and gradient are."""
    observed: tuple[float, float] | None = None
    """Loss and gradient norm as the guard judged them, equal bit for bit on every rank; None: DeepSpeed itself refused
    a norm that is not finite."""
    microbatch_losses: Sequence[Tensor] = ()
    """Of this rank's microbatches; none on inner stages."""


class SequentialModel(nn.Module):
    """The list of layers in one process, under the names that PipelineModule gives them.

    Source of the names: `<index of the layer>.<name>`, and `tied_modules.<key>.<name>` for tied layers.
    """

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self._names: list[str] = []
        for index, spec in enumerate(specs):
            name = str(index)
            if isinstance(spec, TiedLayerSpec):
                name = f"tied_modules.{spec.key}"
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
            else:
                self.add_module(name, spec.build())
            self._names.append(name)

    def forward(self, inputs: Any, project: Callable[[tuple[Tensor, Tensor]], Any]) -> Any:
        """project((hidden, output weight)), called inside the last layer."""
        *body, last = (self.get_submodule(name) for name in self._names)
        for layer in body:
            inputs = layer(inputs)
        return last(inputs, project)


class Engine:
    """One face for both of DeepSpeed's engines."""

    def __init__(
        self, engine: Any, config: Config, ctx: ParallelContext, loss: LossFunction, masks_loss: bool, gate: Gate
    ) -> None:
        self.deepspeed, self.config, self.ctx, self.gate = engine, config, ctx, gate
        self._loss, self._masks_loss = loss, masks_loss
        self._num_microbatches = 0  # set by the first step
        self._draws = config.model.hidden_dropout > 0 or config.model.attention_dropout > 0
        self.dropout_seed = config.training.seed
        """Of the random streams. A resumed run keeps that of its checkpoint."""
        self.timers = StepTimers(config.logging.timing_log_level, ctx.device)
        self.timers.watch(engine, is_pipeline=config.uses_pipeline)
        # what DeepSpeed's engine itself reads after the step
        gate.norm = lambda: getattr(engine.optimizer, "_global_grad_norm", None)
        gate.uncounted = uncounted_gradients(self)
        if config.training.fp16:
            # at its end the scale stays; the guard counts, and gives up with a message
            engine.optimizer.loss_scaler.raise_error_at_min_scale = False

    @property
    def module(self) -> nn.Module:
        return self.deepspeed.module  # type: ignore[no-any-return]

    @property
    def reads_data(self) -> bool:
        """Whether this rank feeds tokens or labels: inner stages do not."""
        return self.ctx.is_first_stage or self.ctx.is_last_stage

    @property
    def loss_scale(self) -> float:
        return float(getattr(self.deepspeed.optimizer, "cur_scale", 1.0)) if self.config.training.fp16 else 1.0

    def train_step(
        self,
        microbatches: Sequence[Microbatch],
        *,
        num_microbatches: int | None = None,
        consumed_samples: int,
        lr: float,
    ) -> StepResult:
        """Forward, backward and update over one global batch, of which these are this rank's microbatches.

        Every rank has as many, but inner pipeline stages, which read none, pass none: for them `num_microbatches` says
        how many they are. `consumed_samples` counts those before this step.
        """
        ctx = self.ctx
        self._expect(len(microbatches) if num_microbatches is None else num_microbatches)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr
        if self._draws:
            ctx.streams.seed_step(self.dropout_seed, consumed_samples, ctx.stage, ctx.grad_rank, ctx.tensor_rank)
        batches, _ = self._weighted(microbatches)
        self.gate.begin_step()
        skipped_before = self.deepspeed.skipped_steps
        loss = self.deepspeed.train_batch(batches) if self.config.uses_pipeline else self._sequential_step(batches)
        gate = self.gate
        return StepResult(
            loss.detach(),
            self.deepspeed.get_global_grad_norm(),
            skipped=gate.refused or self.deepspeed.skipped_steps > skipped_before,
            is_finite=gate.is_finite,
            observed=gate.observed,
            microbatch_losses=gate.losses,
        )

    def _expect(self, num_microbatches: int) -> None:
        """Tell DeepSpeed how many microbatches the next step has."""
        if num_microbatches == self._num_microbatches:
            return
        engine = self.deepspeed
        engine.set_train_batch_size(num_microbatches * engine.train_micro_batch_size_per_gpu() * self.ctx.grad_size)
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            # ZeRO's own copy, by which it adds up offloaded gradients; DeepSpeed 0.19.8 leaves it as it was
            engine.optimizer.gradient_accumulation_steps = num_microbatches
        self._num_microbatches = num_microbatches

    def _weighted(self, microbatches: Sequence[Microbatch]) -> tuple[Iterator[Any], float]:
        """(inputs, (labels, token weights)) of each microbatch, weighted so that DeepSpeed's mean over microbatches and
        data-parallel ranks is the sum over loss tokens divided by their number in the whole batch. And that number.
        """
        count = sum(batch.num_loss_tokens for batch in microbatches)
        # ranks hold different numbers of loss tokens only where a mask drops some
        total = self.ctx.sum_over_batch_ranks(count) if self._masks_loss else count * self.ctx.grad_size
        factor = len(microbatches) * self.ctx.grad_size / max(total, 1.0)
        return iter([(batch.inputs, (batch.labels, batch.loss_mask * factor)) for batch in microbatches]), total

    def _sequential_step(self, batches: Iterator[Any]) -> Tensor:
        engine, losses = self.deepspeed, self.gate.losses
        steps = engine.gradient_accumulation_steps()
        for index, (inputs, labels) in enumerate(batches):
            engine.set_gradient_accumulation_boundary(index == steps - 1)
            with self.timers("forward-compute"):
                loss = self._sequential_loss(inputs, labels)
            losses.append(loss.detach())
            with self.timers("backward-compute"):
                engine.backward(loss)
            with self.timers("optimizer"):
                engine.step()
        return self._mean_over_grad_ranks(torch.stack(losses).mean())

    def _sequential_loss(self, inputs: Any, labels: Any) -> Tensor:
        device = self.ctx.device
        with self.timers("batch-generator"):
            labels = tuple(part.to(device) for part in labels)
            inputs = inputs.to(device) if isinstance(inputs, Tensor) else tuple(part.to(device) for part in inputs)
        return self.deepspeed(inputs, partial(self._loss_of, labels=labels))  # type: ignore[no-any-return]

    def _loss_of(self, outputs: tuple[Tensor, Tensor], labels: Any) -> Tensor:
        return self._loss(outputs, labels)

    def _mean_over_grad_ranks(self, loss: Tensor) -> Tensor:
        if self.ctx.grad_group is not None:
            dist.all_reduce(loss, group=self.ctx.grad_group)
            loss /= self.ctx.grad_size
        return loss

    def evaluate(self, microbatches: Sequence[Microbatch], num_microbatches: int) -> tuple[Tensor, float]:
        """Mean loss per loss token over these microbatches of every data-parallel rank, and the number of those tokens
        (0 on inner pipeline stages, which read none). No update.
        """
        batches, tokens = self._weighted(microbatches)
        if self.config.uses_pipeline:
            loss: Tensor = self.deepspeed.eval_batch(batches, num_micro_batches=num_microbatches)
            self.module.train()
            return loss, tokens
        self.deepspeed.eval()
        with torch.no_grad():
            losses = [self._sequential_loss(inputs, labels) for inputs, labels in batches]
        self.deepspeed.train()
        return self._mean_over_grad_ranks(torch.stack(losses).mean()), tokens


def build_engine(
    config: Config,
    ctx: ParallelContext,
    loss: LossFunction,
    *,
    masks_loss: bool,
    will_restore: bool = False,
    after_model: Callable[[], None] = lambda: None,
) -> Engine:
    """Allocate this rank's layers, start their parameters, and wrap them in DeepSpeed. Collective.

    `will_restore`: leave out the start, since a checkpoint is going to fill every parameter. `after_model` is called
    between the model and its optimizer.
    """
    settings = deepspeed_config(config, ctx.grad_size)
    specs, gate = build_layers(config, ctx), Gate(ctx)
    with quiet():
        model = (
            _pipeline(config, ctx, specs, gate.recording(loss))
            if config.uses_pipeline
            else _sequential(config, ctx, specs, settings)
        )
        if not will_restore:
            _start_parameters(model, config, ctx)
        model.to(ctx.device)
    after_model()
    with quiet():
        optimizer = build_optimizer(model, config, ctx, gate)
        _import_muon_uncompiled()
        mpu = None if config.uses_pipeline else ctx.grid
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
    if config.uses_pipeline and ctx.grad_size == 1 and not isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        # alone, a rank has nothing to reduce; DeepSpeed would copy every gradient into a buffer and back
        engine.pipeline_enable_backward_allreduce = False
    if config.uses_pipeline and engine.steps_per_print() is None:
        # DeepSpeed's own timer keeps two events of every step until it prints, which it is not asked to
        engine.timers = NoopTimer()
    if config.training.torch_compile:
        engine.module.compile()
    return Engine(engine, config, ctx, loss, masks_loss, gate)


def _import_muon_uncompiled() -> None:
    """Keep torch's compiler out of the start of a run.

    DeepSpeed 0.19.8 asks of each optimizer whether it is its Muon, and that module hands functions to torch.compile
    when it is imported: 2 s of processor time a rank, for an optimizer that nobody chose.
    """
    with contextlib.suppress(ImportError), patch.object(compiler, "compile", lambda: compiler.dummy_decorator):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def _pipeline(config: Config, ctx: ParallelContext, specs: list[LayerSpec], loss: LossFunction) -> nn.Module:
    # without no_grad, its broadcast of tied weights would become part of their autograd graph
    with _default_dtype(compute_dtype(config)), torch.no_grad():
        return PipelineModule(
            specs,
            topology=ctx.topology,
            loss_fn=loss,
            partition_method=config.parallel.pipeline_partition_method,
            activation_checkpoint_interval=0,
            dynamic_shape=config.varies_shapes,
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
    for name, parameter in model.named_parameters():
        if config.optimizer.zero_stage == 3:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if ctx.grad_rank == 0:
                    initialise([(name, parameter)], config.training.seed, ctx.tensor_rank, ctx.tensor_size)
        else:
            initialise([(name, parameter)], config.training.seed, ctx.tensor_rank, ctx.tensor_size)
        assert shard_of(parameter) is not None


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
