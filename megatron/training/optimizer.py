"""The optimizer that DeepSpeed is given: it steps only through an open gate. And the norm where DeepSpeed adds none."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.finite_checks import GRADIENT, UPDATE, PassPlace
from megatron.parallel.phase_clock import OPTIMIZER, WAIT
from megatron.parallel.shards import Shard, shard_of
from megatron.training.losses import SpikeDetector, StepLosses
from megatron.training.state import EngineState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Observation:
    """Loss and gradient of a step before its update, equal bit for bit on every rank."""

    loss: float
    grad_norm: float
    is_finite: bool
    """No rank saw a loss or gradient that is not finite."""
    spikes: tuple[str, ...] = ()
    """A reason for each spike."""
    is_applied: bool = True
    """The optimizer updates."""
    is_stop_seen: bool = False
    """Some rank saw a reason to stop the run."""


class UpdateGate:
    """Decides once a training step, on all ranks alike, if the optimizer updates.

    Refuses steps that are not finite, and spikes where the detector refuses them. The optimizer queries it when
    DeepSpeed lets it step: after the reduction, before anything is changed; under ZeRO-2 and 3 once a parameter group.
    One reduction over all ranks gives the norm and what the decision needs. ZeRO-2 and 3 find the norm themselves, and
    except in bf16 refuse one that is not finite, and then do not step. What the norm does not show is examined here
    too: the loss, and the gradients of which another tensor-parallel rank's copies count.
    """

    def __init__(
        self, ctx: ParallelContext, state: EngineState, losses: StepLosses, detector: SpikeDetector | None
    ) -> None:
        self._ctx, self._state, self._losses, self._detector = ctx, state, losses, detector
        self._facts: _Facts | None = None
        self.clock = ctx.state.clock
        self.observation: Observation | None = None
        """The one of this step; None until the optimizer steps."""
        self.sees_stop: Callable[[], bool] = lambda: False
        """Returns True if this rank sees a reason to stop the run, which is reduced with the rest."""
        self.before_update: Callable[[Observation], None] | None = None
        """Called once a step, before the optimizer updates."""
        self.refuses_all = False
        """Refuse every step, and keep it from the detector."""

    def begin_step(self) -> None:
        self.observation = self._facts = None

    @torch.no_grad()
    def find_norm(self, counted: list[Tensor], uncounted: list[Tensor], scale: float = 1.0) -> Tensor:
        """Return the L2 norm of the whole model's gradient, a float32 scalar on the device, equal on every rank.

        `counted`: this rank's gradients, `scale` times too large, each number of the model's on one rank alone;
        `uncounted`: copies of what other ranks count. Collective over all ranks; waits for nothing.
        """
        with self.clock.phase(OPTIMIZER):
            squares = torch.zeros((), dtype=torch.float32, device=self._ctx.device)
            if counted:
                norms = torch._foreach_norm(counted, dtype=torch.float32)
                squares = torch.stack(norms).square().sum() / scale**2
            if self._ctx.grad_size == 1:  # this rank's own gradient: otherwise it was checked before the sum
                self._ctx.state.checks.whole(squares, GRADIENT, PassPlace(UPDATE))
            self._facts = self._reduce(squares, uncounted)
        return self._facts.sums[1].sqrt_().clone()

    def is_norm_finite(self) -> bool:
        """Return False if this step's norm is not. Waits for the device, as the decision would."""
        assert self._facts is not None, "find_norm comes first"
        return math.isfinite(self._facts.read()[1])

    def is_open(self) -> bool:
        """Return the decision. Collective over all ranks at the first call of a step without `find_norm`."""
        if self.observation is None:
            self.observation = self._observe()
            if self.before_update is not None and self.observation.is_applied:
                self.before_update(self.observation)
        return self.observation.is_applied

    @torch.no_grad()
    def _observe(self) -> Observation:
        """Decide. The wait for the sum is the only one of a step, but for those of DeepSpeed's ZeRO optimizers."""
        facts = self._facts
        if facts is None:  # DeepSpeed has found the norm: the first rank's is everyone's
            norm = self._state.gradient_norm()
            norm = torch.as_tensor(0.0 if norm is None else norm, dtype=torch.float32, device=self._ctx.device)
            facts = self._reduce(norm, self._state.uncounted_gradients(), is_everyones=True)
        mean_loss, grad_norm, num_bad, num_stops = facts.read()
        is_finite, is_stop_seen = not num_bad and math.isfinite(grad_norm), num_stops > 0
        if not is_finite or self.refuses_all:
            return Observation(mean_loss, grad_norm, is_finite, is_applied=False, is_stop_seen=is_stop_seen)
        spikes = () if self._detector is None else self._detector.find(mean_loss, grad_norm)
        is_applied = not spikes or self._detector is None or not self._detector.refuses_spikes
        return Observation(mean_loss, grad_norm, True, spikes, is_applied, is_stop_seen)

    def _reduce(self, size: Tensor, uncounted: list[Tensor], *, is_everyones: bool = False) -> _Facts:
        """Sum mean loss, `size` of the gradient, and the numbers of ranks that see something not finite or a reason to
        stop.

        All ranks read the same sum, so their numbers are equal bit for bit. `is_everyones`: each rank has the sum of
        the sizes already.
        """
        ctx = self._ctx
        sums = torch.zeros(4, dtype=torch.float32)
        sums[3] = self.sees_stop()
        sums = sums.to(ctx.device, non_blocking=True)
        seen = [size.view(1)]
        if self._losses.values:
            loss = torch.stack(self._losses.values).float().mean()
            seen.append(loss.view(1))
            if ctx.tensor_rank == 0:
                sums[0] = loss / ctx.grad_size
        if ctx.rank == 0 or not is_everyones:
            sums[1] = size
        if uncounted:
            # the largest number shows whatever is not finite, and no square can overflow
            largest = torch.stack(torch._foreach_norm(uncounted, float("inf"))).float().max()
            if ctx.grad_size == 1:
                ctx.state.checks.whole(largest, GRADIENT, PassPlace(UPDATE))
            seen.append(largest.view(1).to(ctx.device))  # offloaded gradients are on the host
        sums[2] = (~torch.isfinite(torch.cat(seen))).any()
        if ctx.world_size > 1:
            with ctx.state.clock.phase(WAIT):
                dist.all_reduce(sums)
        return _Facts(sums)


class _Facts:
    """Sums over all ranks of what they see of a step."""

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums
        self._read: list[float] | None = None

    def read(self) -> list[float]:
        """Return the sums on the host; waits for the device the first time."""
        if self._read is None:
            self._read = self.sums.tolist()
        return self._read


def build_optimizer(model: nn.Module, config: Config, ctx: ParallelContext) -> torch.optim.Optimizer:
    """Return AdamW, Adam or SGD over groups: matrices, which decay, and biases and norms, which do not. With LoRA+ the
    adapters' B and magnitudes, and the embedding's adapter have learning rates of their own, as in PEFT. The weight
    decay of a group is the schedule's times its `wd_mult`, its learning rate times `lr_mult`.

    Its attribute `gate` may refuse updates. In float32 without ZeRO, DeepSpeed leaves the optimizer bare: then it finds
    the norm, and clips by it, itself.
    """
    options = config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed: dict[str, Any] = {"weight_decay": options.weight_decay, "wd_mult": 1.0}
    rates = dict.fromkeys([1.0, *(_lr_mult(p, config) for p in trained)])
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in trained if _decays(p) and _lr_mult(p, config) == rate],
            **decayed,
            "lr": options.lr * rate,
            "lr_mult": rate,
        }
        for rate in rates
    ]
    groups.append(
        {"params": [p for p in trained if not _decays(p)], "weight_decay": 0.0, "wd_mult": 0.0, "lr_mult": 1.0}
    )
    groups = [group for group in groups if group["params"]]
    cls, arguments = _choose(config, ctx)
    gated = _gated(_without_compiler(cls))
    if config.effective_zero_stage == 0:
        return _clipping(gated)(groups, lr=options.lr, ctx=ctx, max_norm=options.clip_grad, **arguments)
    return gated(groups, lr=options.lr, **arguments)


def add_placeholder(model: nn.Module, ctx: ParallelContext) -> None:
    """Give a pipeline stage of frozen layers one number to optimize, since DeepSpeed needs one.

    Its gradient is zero in every step; it belongs to no layer, and no norm and no checkpoint has it.
    """
    parameters = list(model.parameters())
    if any(parameter.requires_grad for parameter in parameters):
        return
    dtype = parameters[0].dtype if parameters else torch.float32
    found: Any = nn.Parameter(torch.zeros(1, dtype=dtype, device=ctx.device))
    found.shard, found.is_placeholder = Shard((1,), used_on="stream"), True
    found.tensor_model_parallel, found.ds_pipe_replicated = False, True
    model.register_parameter("placeholder", found)


def _lr_mult(parameter: Any, config: Config) -> float:
    """Return the learning rate of a parameter, relative to lr: LoRA+ as PEFT applies it, also to all vectors."""
    ratio, shard = config.lora.loraplus_lr_ratio, shard_of(parameter)
    if ratio == 1.0 or hasattr(parameter, "is_placeholder"):  # of a stage that trains nothing
        return 1.0
    name = parameter.full_name.rpartition(".")[2]
    if name in ("lora_embedding_A", "lora_embedding_B"):
        return config.lora.loraplus_lr_embedding / config.optimizer.lr
    return ratio if name.startswith("lora_B") or len(shard.shape) == 1 else 1.0


def _decays(parameter: Tensor) -> bool:
    """Return True for a matrix, and for DoRA's magnitudes, which decay in transformers' trainer too."""
    return len(shard_of(parameter).shape) > 1 or shard_of(parameter).added


def _choose(config: Config, ctx: ParallelContext) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    options = config.optimizer
    if options.optimizer == "sgd":
        return torch.optim.SGD, {"momentum": options.sgd_momentum}
    arguments: dict[str, Any] = {"betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}
    if options.optimizer == "paged_adamw_32bit":
        if ctx.device.type == "cuda":
            from megatron.training.paged_adamw import paged_adamw

            return paged_adamw(), arguments
        if ctx.rank == 0:
            log.warning(
                "optimizer=paged_adamw_32bit pages its states on CUDA only; on %s it is adamw, %s",
                ctx.device.type,
                "whose states are in host memory"
                if ctx.device.type == "cpu"
                else "which offload_optimizer can offload",
            )
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
            with contextlib.nullcontext() if self.gate is None else self.gate.clock.phase(OPTIMIZER):
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
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if parameter.grad is None and hasattr(parameter, "is_placeholder"):  # steps are counted with it
                    parameter.grad = torch.zeros_like(parameter)
            buffers = getattr(self, "buffers", None)
            counted, uncounted = self._alone() if buffers is None else (buffers.counted, buffers.uncounted)
            norm = self._global_grad_norm = self.gate.find_norm(counted, uncounted)
            self.overflow = not self.gate.is_open()
            self.divisor = clip_divisor(norm, self._max_norm)
            return super().step(closure)

        def _alone(self) -> tuple[list[Tensor], list[Tensor]]:
            """Return the gradients of a single data-parallel rank that the norm counts here, and its others.

            Replicated parameters count on the first tensor-parallel rank, tied ones on their first stage.
            """
            parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            own = [p for p in parameters if not getattr(p, "ds_pipe_replicated", False)]
            is_counted = [self._ctx.tensor_rank == 0 or shard_of(p).dim is not None for p in own]
            return (
                [p.grad for p, counts in zip(own, is_counted, strict=True) if counts],
                [p.grad for p, counts in zip(own, is_counted, strict=True) if not counts],
            )

    return _named_as(Clipping, gated)


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor | None:
    """Return what gradients of this norm are divided by to be clipped, at least 1; None: `max_norm` 0 clips nothing."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0.0 else None


def _named_as(made: Any, cls: Any) -> Any:
    made.__name__ = cls.__name__
    made.__signature__ = inspect.signature(cls)
    return made
