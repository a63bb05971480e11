"""The optimizer that DeepSpeed is given, and the norm and clipping of gradients where DeepSpeed adds none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import shard_of


def build_optimizer(model: nn.Module, config: Config, ctx: ParallelContext) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD over two groups: matrices, which decay, and biases and normalisation weights, which don't.

    In float32 without ZeRO, DeepSpeed leaves the optimizer bare: then it clips and reports the norm itself.
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
        return _clipping(cls)(groups, lr=options.lr, ctx=ctx, max_norm=options.clip_grad, **arguments)
    return cls(groups, lr=options.lr, **arguments)


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


def _clipping(cls: Any) -> Callable[..., torch.optim.Optimizer]:
    """`cls` that clips by the whole model's norm before it steps, and skips a step whose norm is not finite."""

    class Clipping(cls):  # type: ignore[misc]
        def __init__(self, groups: Any, *, ctx: ParallelContext, max_norm: float, **arguments: Any) -> None:
            super().__init__(groups, **arguments)
            self._ctx, self._max_norm = ctx, max_norm
            # read by DeepSpeed's engine under these names
            self._global_grad_norm: float | Tensor = 0.0
            self.overflow = False

        def step(self, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = self._global_grad_norm = gradient_norm(parameters, self._ctx)
            self.overflow = not bool(torch.isfinite(norm))
            if self.overflow:
                return None
            if self._max_norm > 0.0:
                torch._foreach_mul_([p.grad for p in parameters], (self._max_norm / (norm + 1e-6)).clamp(max=1.0))
            return super().step(closure)

    Clipping.__name__ = cls.__name__
    Clipping.__signature__ = inspect.signature(cls)  # type: ignore[attr-defined]
    return Clipping


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
