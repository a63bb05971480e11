"""Configuration to a running engine: the layers of this rank, their parameters, the optimizer, DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
from deepspeed.utils.timer import NoopTimer
from torch import nn

from megatron.models.sequential import build_layers
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators import fp8
from megatron.parallel.operators.nf4 import quantized_weights
from megatron.parallel.shards import initialise, named_parameters, shard_of
from megatron.plan.flops import declared_layers
from megatron.plan.matrices import ns_precision
from megatron.runtime.accelerator import quiet
from megatron.runtime.devices import device_of
from megatron.tasks.task import Task
from megatron.training.deepspeed import releases
from megatron.training.deepspeed.config import deepspeed_config
from megatron.training.deepspeed.experts import announce_experts
from megatron.training.deepspeed.lean_optimizers import DTYPES, lean
from megatron.training.deepspeed.pipeline_engine import PipelineEngine, pipeline_module
from megatron.training.deepspeed.pipeline_executor import PipelineExecutor
from megatron.training.deepspeed.replicas import shard_within_replica
from megatron.training.engine import Engine, SequentialEngine, sequential_module
from megatron.training.losses import SpikeDetector, StepLosses
from megatron.training.optimizers.build import build_optimizer
from megatron.training.optimizers.gated import GatedOptimizer
from megatron.training.optimizers.groups import add_placeholder
from megatron.training.optimizers.qk_clip import QKClip
from megatron.training.state import start_from_base


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
    settings = releases.adapted(deepspeed_config(config, ctx))
    losses, evaluates = StepLosses(task.objective, ctx, declared_layers(config)), config.training.skip_train
    with quiet():
        model = _build_model(config, ctx, losses, task, settings)
        if not will_restore:
            _start_parameters(model, config, ctx)
    if evaluates:
        model.requires_grad_(False)  # so that no pass keeps what a backward pass needs
    else:
        add_placeholder(model, ctx)
    announce_experts(model, ctx)
    # the optimizer's states come after it: the memory log has a record of each
    after_model()
    with quiet():
        optimizer = None if evaluates else build_optimizer(model, config, ctx)
        engine = _build_deepspeed(model, optimizer, config, ctx, settings)
    _keep_float32(engine.module)
    # evaluations compute in 16 bits
    if config.fp8.uses_fp8 and not evaluates:
        fp8.set_up(ctx.state.fp8, config, ctx)
    cls = PipelineEngine if config.uses_pipeline else SequentialEngine
    built = cls(engine, config, ctx, task, losses, detector)
    if config.optimizer.optimizer == "muon" and not evaluates:
        _place_matrices(built, config, ctx)
    if config.optimizer.qk_clip and not evaluates:
        named, owned = list(named_parameters(built.module)), built.state.trained_slices()
        built.state.torch_optimizer.after_update = QKClip(named, owned, config, ctx).apply
    if not will_restore:  # a restored base brings them, or sets them once it is there
        start_from_base(built.module, built.state, config)
    return built


def _build_model(
    config: Config, ctx: ParallelContext, losses: StepLosses, task: Task, settings: dict[str, Any]
) -> nn.Module:
    specs = build_layers(config, ctx, packs_documents=task.data.packs_documents)
    if config.uses_pipeline:
        model = pipeline_module(config, ctx, specs, losses, task.data.varies_shapes)
    else:
        model = sequential_module(config, ctx, specs, settings)
    return model.to(ctx.device)


def _build_deepspeed(
    model: Any, optimizer: GatedOptimizer | None, config: Config, ctx: ParallelContext, settings: dict[str, Any]
) -> Any:
    """Return DeepSpeed's engine, its seams checked and replaced."""
    # before DeepSpeed builds an engine, for which it would import that module itself
    releases.import_muon_uncompiled()
    releases.sum_norms_as_it_can(device_of(ctx.device.type))
    shard_within_replica(model.mpu() if config.uses_pipeline else ctx.grid, ctx)
    # deepspeed.initialize knows its own pipeline engine alone, so an engine of another class is built directly
    if config.uses_own_schedule:
        engine: Any = PipelineExecutor(config.parallel.schedule, ctx, model, optimizer, settings)
        releases.set_garbage_collection(engine)
    else:
        # a PipelineModule has its topology already, and DeepSpeed refuses a second one
        mpu = None if config.uses_pipeline else ctx.grid
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
    # before anything is replaced: a member under another name would be set, and never called
    releases.check_members(engine)
    releases.check_members(engine.optimizer)
    if optimizer is not None and engine.load_universal_checkpoint():
        from megatron.weights.deepspeed.universal import compare_sizes  # late: few runs need it

        compare_sizes(engine.optimizer, config.parallel.tensor_model_parallel_size)
    # last: it replaces members that were checked above
    lean(engine, config, ctx)
    if config.uses_pipeline and not releases.prints_steps(engine):
        # DeepSpeed's own timer keeps two events of every step until it prints, which it never does here
        engine.timers = NoopTimer()
    return engine


def _place_matrices(engine: Engine, config: Config, ctx: ParallelContext) -> None:
    """Let Muon know which parts of matrices this rank updates. Collective."""
    named = [each for each in named_parameters(engine.module) if each[1].requires_grad]
    dtype = DTYPES[ns_precision(config)]
    engine.state.torch_optimizer.inner.place(named, engine.state.trained_slices(), ctx, dtype)


def _keep_float32(model: nn.Module) -> None:
    """Give parameters back the dtype that DeepSpeed's engine has taken from them; a start or a restore fills them."""
    for _, parameter in named_parameters(model):
        if shard_of(parameter).keeps_float32:
            parameter.data = parameter.data.float()


def _start_parameters(model: nn.Module, config: Config, ctx: ParallelContext) -> None:
    for name, parameter in named_parameters(model):
        if config.optimizer.zero_stage == 3:
            # written on the first rank that shards it, which sends it to the others before it is cut up again
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if ctx.grad_rank % ctx.shard_size == 0:
                    initialise([(name, parameter)], config.training.seed, ctx)
        else:
            initialise([(name, parameter)], config.training.seed, ctx)
    # no parameters, so `named_parameters` does not have them
    for _, weight in quantized_weights(model):
        weight.initialise(config.training.seed)
