"""The optimizer that DeepSpeed is given: it asks before it updates. And the norm where DeepSpeed adds none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.options import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import shard_of

Judge = Callable[[float, float], bool]
"""(loss, gradient norm) of a step, finite and equal on all ranks -> whether the optimizer may apply it."""


class Gate:
    """Decides once a training step, on all ranks alike, whether the optimizer updates.

    Non-finite steps are refused; of the others `judge` may refuse some. The optimizer is what asks, when DeepSpeed lets
    it step: after the reduction and the norm, before anything is changed. It asks once a parameter group under ZeRO,
    where all but the first get the same answer. DeepSpeed's own optimizers refuse a non-finite norm themselves; then
    nobody asks. What their norm does not show is looked at here: the loss, and gradients that it leaves out because
    another tensor-parallel rank's copies count.
    """

    def __init__(self, ctx: ParallelContext) -> None:
        self._ctx = ctx
        self.judge: Judge = lambda loss, norm: True
        self.norm: Callable[[], Tensor | float | None] = lambda: None
        """The gradient norm that DeepSpeed has found in this step."""
        self.uncounted: Callable[[], list[Tensor]] = list
        """Gradients of this rank that the norm leaves out."""
        self.losses: list[Tensor] = []
        """Of this rank's microbatches in this step; none on inner stages."""
        self._answer: bool | None = True  # nobody decides outside of a training step
        self.observed: tuple[float, float] | None = None
        """Loss and norm of this step, equal on all ranks; None where nobody asked."""

        self.is_finite = True
        """Whether loss and gradient of this step are, as far as anybody asked."""
        self.is_bad_here: Tensor | bool = False
        """Whether this rank itself saw something that is not."""

    @property
    def refused(self) -> bool:
        """Whether the optimizer asked in this step, in vain."""
        return self._answer is False

    def begin_step(self) -> None:
        self.losses = []
        self._answer, self.observed, self.is_finite, self.is_bad_here = None, None, False, False

    def recording(self, loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """A pipeline's loss function that leaves each training loss in `losses`."""

        def recorded(outputs: Any, labels: Any) -> Tensor:
            value = loss(outputs, labels)
            if torch.is_grad_enabled():
                self.losses.append(value.detach())
            return value

        return recorded

    def lets_step(self) -> bool:
        """Whether to update. Collective over all ranks, at the first call of a step."""
        if self._answer is None:
            loss, norm, num_bad = self._observe()
            self.observed, self.is_finite = (loss, norm), num_bad == 0
            self._answer = self.is_finite and self.judge(loss, norm)
        return self._answer

    @torch.no_grad()
    def _observe(self) -> list[float]:
        """Mean loss, gradient norm, and the number of ranks that see something not finite: equal bit for bit, for all
        read the same sum. The one wait for the device is for that sum; the norm was waited for before.
        """
        ctx = self._ctx
        facts = torch.zeros(3, dtype=torch.float32, device=ctx.device)
        seen = [facts[:1]]
        if self.losses:
            loss = torch.stack(self.losses).float().mean()
            seen.append(loss.view(1))
            if ctx.tensor_rank == 0:
                facts[0] = loss / ctx.grad_size
        norm = self.norm()
        if norm is not None:
            norm = torch.as_tensor(norm, dtype=torch.float32, device=ctx.device)
            seen.append(norm.view(1))
            if ctx.rank == 0:
                facts[1] = norm
        if uncounted := self.uncounted():
            # the largest number shows whatever is not finite, and no square can overflow
            largest = torch.stack(torch._foreach_norm(uncounted, float("inf"))).float().max()
            seen.append(largest.view(1).to(ctx.device))  # offloaded gradients are on the host
        facts[2] = self.is_bad_here = (~torch.isfinite(torch.cat(seen))).any()
        if ctx.world_size > 1:
            dist.all_reduce(facts)
        return facts.tolist()


def build_optimizer(model: nn.Module, config: Config, ctx: ParallelContext, gate: Gate) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD over two groups: matrices, which decay, and biases and normalisation weights, which don't.

    It updates only what `gate` lets pass. In float32 without ZeRO, DeepSpeed leaves the optimizer bare: then it finds
    the norm, and clips by it, itself.
    """
    options = config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if _decays(p)], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if not _decays(p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    cls, arguments = _choose(config, ctx)
    if config.effective_zero_stage == 0:
        return _clipping(cls)(groups, lr=options.lr, gate=gate, ctx=ctx, max_norm=options.clip_grad, **arguments)
    return _guarded(cls)(groups, lr=options.lr, gate=gate, **arguments)


def _decays(parameter: Tensor) -> bool:
    return len(shard_of(parameter).shape) > 1


def _choose(config: Config, ctx: ParallelContext) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    options = config.optimizer
    if options.optimizer == "sgd":
        return torch.optim.SGD, {"momentum": options.sgd_momentum}
    arguments: dict[str, Any] = {"betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}
    if ctx.device.type == "hpu" and options.optimizer != "adam":
        from habana_frameworks.torch.hpex.optimizers import FusedAdamW

        return FusedAdamW, arguments
    arguments["fused"] = ctx.device.type in ("cpu", "cuda")
    return (torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW), arguments


def _guarded(cls: Any) -> Callable[..., torch.optim.Optimizer]:
    """`cls` that asks the gate before it updates anything."""

    class Guarded(cls):  # type: ignore[misc]
        def __init__(self, groups: Any, *, gate: Gate, **arguments: Any) -> None:
            super().__init__(groups, **arguments)
            self._gate = gate

        def step(self, closure: Any = None) -> Any:
            return super().step(closure) if self._gate.lets_step() else None

    return _named_as(Guarded, cls)


def _clipping(cls: Any) -> Callable[..., torch.optim.Optimizer]:
    """`_guarded` where DeepSpeed wraps nothing around it: it also finds the whole model's norm, and clips by it."""

    class Clipping(cls):  # type: ignore[misc]
        def __init__(self, groups: Any, *, gate: Gate, ctx: ParallelContext, max_norm: float, **arguments: Any) -> None:
            super().__init__(groups, **arguments)
            self._gate, self._ctx, self._max_norm = gate, ctx, max_norm
            # read by DeepSpeed's engine under these names
            self._global_grad_norm: float | Tensor = 0.0
            self.overflow = False

        def step(self, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = self._global_grad_norm = gradient_norm(parameters, self._ctx)
            self.overflow = not self._gate.lets_step()
            if self.overflow:
                return None
            if self._max_norm > 0.0:
                torch._foreach_mul_([p.grad for p in parameters], (self._max_norm / (norm + 1e-6)).clamp(max=1.0))
            return super().step(closure)

    return _named_as(Clipping, cls)


def _named_as(made: Any, cls: Any) -> Callable[..., torch.optim.Optimizer]:
    made.__name__ = cls.__name__
    made.__signature__ = inspect.signature(cls)
    return made  # type: ignore[no-any-return]


def gradient_norm(parameters: Iterable[Tensor], ctx: ParallelContext) -> Tensor:
    """L2 norm of the whole model's gradient, a float32 scalar equal on every rank.

    Counts each parameter once: replicated ones on the first tensor-parallel rank, tied ones on their first stage.
    """
    own = [
        p.grad
        for p in parameters
        if p.grad is not None
        and (ctx.tensor_rank == 0 or shard_of(p).dim is not None)
        and not getattr(p, "ds_pipe_replicated", False)
    ]
    squares = torch.zeros((), dtype=torch.float32, device=ctx.device)
    if own:
        squares = torch.stack(torch._foreach_norm(own)).float().square().sum()
    if ctx.model_group is not None:
        dist.all_reduce(squares, group=ctx.model_group)
    return squares.sqrt()
