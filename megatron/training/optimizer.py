"""The optimizer that DeepSpeed is given: it steps only through an open gate. And the norm where DeepSpeed adds none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.options import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import shard_of
from megatron.training.losses import StepLosses
from megatron.training.spikes import SpikeDetector
from megatron.training.state import EngineState


@dataclass(frozen=True)
class Observation:
    """Loss and gradient of a step before its update; but for `is_bad_here` equal bit for bit on every rank."""

    loss: float
    grad_norm: float
    is_finite: bool
    """No rank saw a loss or gradient that is not finite."""
    is_bad_here: Tensor | bool
    """This rank itself saw one."""
    spikes: tuple[str, ...] = ()
    """A reason for each spike."""
    is_applied: bool = True
    """The optimizer updates."""
    is_stop_seen: bool = False
    """Some rank saw a reason to stop the run."""


class UpdateGate:
    """Decides once a training step, on all ranks alike, if the optimizer updates.

    Refuses steps that are not finite, and spikes where the detector refuses them. The optimizer queries it when
    DeepSpeed lets it step: after the reduction and the norm, before anything is changed; under ZeRO once a parameter
    group. Except in bf16, DeepSpeed's ZeRO refuses a norm that is not finite itself, and then does not step. What the
    norm does not show is examined here too: the loss, and the gradients of which another tensor-parallel rank's copies
    count.
    """

    def __init__(
        self, ctx: ParallelContext, state: EngineState, losses: StepLosses, detector: SpikeDetector | None
    ) -> None:
        self._ctx, self._state, self._losses, self._detector = ctx, state, losses, detector
        self.observation: Observation | None = None
        """The one of this step; None until the optimizer steps."""
        self.sees_stop: Callable[[], bool] = lambda: False
        """Returns True if this rank sees a reason to stop the run, which is reduced with the rest."""
        self.before_update: Callable[[Observation], None] | None = None
        """Called once a step, before the optimizer updates."""

    def begin_step(self) -> None:
        self.observation = None

    def is_open(self) -> bool:
        """Return the decision. Collective over all ranks at the first call of a step."""
        if self.observation is None:
            self.observation = self._observe()
            if self.before_update is not None and self.observation.is_applied:
                self.before_update(self.observation)
        return self.observation.is_applied

    @torch.no_grad()
    def _observe(self) -> Observation:
        """Reduce mean loss, gradient norm, and the numbers of ranks that see something not finite or a reason to stop.

        All ranks read the same sum, so their numbers are equal bit for bit. The wait for that sum is the only one of a
        step, but for those of DeepSpeed's ZeRO optimizers.
        """
        ctx = self._ctx
        facts = torch.zeros(4, dtype=torch.float32)
        facts[3] = self.sees_stop()
        facts = facts.to(ctx.device, non_blocking=True)
        seen = [facts[:1]]
        if self._losses.values:
            loss = torch.stack(self._losses.values).float().mean()
            seen.append(loss.view(1))
            if ctx.tensor_rank == 0:
                facts[0] = loss / ctx.grad_size
        norm = self._state.gradient_norm()
        if norm is not None:
            norm = torch.as_tensor(norm, dtype=torch.float32, device=ctx.device)
            seen.append(norm.view(1))
            if ctx.rank == 0:
                facts[1] = norm
        if uncounted := self._state.uncounted_gradients():
            # the largest number shows whatever is not finite, and no square can overflow
            largest = torch.stack(torch._foreach_norm(uncounted, float("inf"))).float().max()
            seen.append(largest.view(1).to(ctx.device))  # offloaded gradients are on the host
        facts[2] = is_bad_here = (~torch.isfinite(torch.cat(seen))).any()
        if ctx.world_size > 1:
            dist.all_reduce(facts)
        mean_loss, grad_norm, num_bad, num_stops = facts.tolist()
        is_stop_seen = num_stops > 0
        if num_bad:
            return Observation(mean_loss, grad_norm, False, is_bad_here, is_applied=False, is_stop_seen=is_stop_seen)
        spikes = () if self._detector is None else self._detector.find(mean_loss, grad_norm)
        is_applied = not spikes or self._detector is None or not self._detector.refuses_spikes
        return Observation(mean_loss, grad_norm, True, is_bad_here, spikes, is_applied, is_stop_seen)


def build_optimizer(model: nn.Module, config: Config, ctx: ParallelContext) -> torch.optim.Optimizer:
    """Return AdamW, Adam or SGD over two groups: matrices, which decay, and biases and norms, which do not. The weight
    decay of a group is the schedule's times its `wd_mult`.

    Its attribute `gate` may refuse updates. In float32 without ZeRO, DeepSpeed leaves the optimizer bare: then it finds
    the norm, and clips by it, itself.
    """
    options = config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if _decays(p)], "weight_decay": options.weight_decay, "wd_mult": 1.0},
        {"params": [p for p in trained if not _decays(p)], "weight_decay": 0.0, "wd_mult": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    cls, arguments = _choose(config, ctx)
    gated = _gated(_without_compiler(cls))
    if config.effective_zero_stage == 0:
        return _clipping(gated)(groups, lr=options.lr, ctx=ctx, max_norm=options.clip_grad, **arguments)
    return gated(groups, lr=options.lr, **arguments)


def _decays(parameter: Tensor) -> bool:
    return len(shard_of(parameter).shape) > 1


def _choose(config: Config, ctx: ParallelContext) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    options = config.optimizer
    if options.optimizer == "sgd":
        return torch.optim.SGD, {"momentum": options.sgd_momentum}
    arguments: dict[str, Any] = {"betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}
    if ctx.device.type == "hpu" and options.decoupled_weight_decay:
        from habana_frameworks.torch.hpex.optimizers import FusedAdamW

        return FusedAdamW, arguments
    arguments["fused"] = ctx.device.type in ("cpu", "cuda")
    return (torch.optim.AdamW if options.decoupled_weight_decay else torch.optim.Adam), arguments


def _without_compiler(cls: Any) -> Any:
    """Return a subclass of an optimizer of torch's whose methods do not import torch's compiler.

    torch marks them as not to be compiled, and imports the compiler for that at the first call: 2 s of each start.
    """
    if not cls.__module__.startswith("torch.optim"):
        return cls
    step = inspect.unwrap(cls.step)

    class Plain(cls):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                return step(self, closure)

    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(Plain, name, inspect.unwrap(getattr(cls, name)))
    return _named_as(Plain, cls)


def _gated(cls: Any) -> Any:
    """Return a subclass that updates only through an open gate, and clips as it updates."""

    class Gated(cls):  # type: ignore[misc]
        gate: UpdateGate | None = None
        """None while DeepSpeed is being built, which steps once to allocate states."""
        divisor: Tensor | None = None
        """Divisor of the gradients in the next update, of `clip_divisor`."""

        def step(self, closure: Any = None) -> Any:
            divisor, self.divisor = self.divisor, None
            if self.gate is not None and not self.gate.is_open():
                return None
            if divisor is not None and not self.defaults.get("fused"):
                torch._foreach_div_(
                    [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None], divisor
                )
                divisor = None
            self.grad_scale = divisor  # torch's fused kernels divide by it while they read the gradient
            return super().step(closure)

    return _named_as(Gated, cls)


def _clipping(gated: Any) -> Any:
    """Return a subclass for where DeepSpeed wraps nothing around it: finds the model's norm, and clips by it."""

    class Clipping(gated):  # type: ignore[misc]
        def __init__(self, groups: Any, *, ctx: ParallelContext, max_norm: float, **arguments: Any) -> None:
            super().__init__(groups, **arguments)
            self._ctx, self._max_norm = ctx, max_norm
            # read by DeepSpeed's engine under these names
            self._global_grad_norm: float | Tensor = 0.0
            self.overflow = False

        def step(self, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"]]
            norm = self._global_grad_norm = gradient_norm(parameters, self._ctx)
            self.overflow = not (self.gate is None or self.gate.is_open())
            self.divisor = clip_divisor(norm, self._max_norm)
            return super().step(closure)

    return _named_as(Clipping, gated)


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor | None:
    """Return what gradients of this norm are divided by to be clipped, at least 1; None: `max_norm` 0 clips nothing."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0.0 else None


def _named_as(made: Any, cls: Any) -> Any:
    made.__name__ = cls.__name__
    made.__signature__ = inspect.signature(cls)
    return made


def gradient_norm(parameters: Iterable[Tensor], ctx: ParallelContext) -> Tensor:
    """Return the L2 norm of the whole model's gradient, a float32 scalar equal on every rank.

    Counts each parameter once: replicated ones on the first tensor-parallel rank, tied ones on their first stage.
    """
    own = [
        p.grad
        for p in parameters
        if p.grad is not None
        and (ctx.tensor_rank == 0 or shard_of(p).dim is not None)
        and not getattr(p, "ds_pipe_replicated", False)
    ]
    return norm_over_model(own, ctx)


def norm_over_model(own: list[Tensor], ctx: ParallelContext) -> Tensor:
    """Return the L2 norm over all ranks of one copy of the model, from the gradients that this rank counts.

    A float32 scalar on the device, equal on every rank. Collective over the model's ranks.
    """
    squares = torch.zeros((), dtype=torch.float32, device=ctx.device)
    if own:
        squares = torch.stack(torch._foreach_norm(own)).float().square().sum()
    if ctx.model_group is not None:
        dist.all_reduce(squares, group=ctx.model_group)
    return squares.sqrt()
