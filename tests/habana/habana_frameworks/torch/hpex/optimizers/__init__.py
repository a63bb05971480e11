"""Optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from habana_frameworks.torch import stand_in
from habana_frameworks.torch.core import step_closure


class FusedAdamW(torch.optim.Optimizer):
    """Counts steps in the group, where torch's counts in each parameter's state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        moments_dtype: Any = None,
    ) -> None:
        for name, value, good in (
            ("learning rate", lr, lr >= 0.0),
            ("beta parameter", betas[0], 0.0 <= betas[0] < 1.0),
            ("beta parameter", betas[1], 0.0 <= betas[1] < 1.0),
            ("epsilon value", eps, eps >= 0.0),
        ):
            if not good:
                raise ValueError(f"Invalid {name}: {value}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction})
        self.moments_dtype = moments_dtype

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            step_closure._mark_step_if_lazy()
            trained = [p for p in group["params"] if p.grad is not None]
            if trained:
                self._update(group, trained)
        step_closure._mark_step_if_lazy()
        return loss

    @torch.no_grad()
    def _update(self, group: dict[str, Any], trained: list[Any]) -> None:
        beta1, beta2 = group["betas"]
        group["step"] = group.get("step", 0) + 1
        stand_in.calls.append(("FusedAdamW", {"lr": group["lr"], "step": group["step"], "count": len(trained)}))
        size = group["lr"]
        if group["bias_correction"]:
            size *= math.sqrt(1.0 - beta2 ** group["step"]) / (1.0 - beta1 ** group["step"])
        for p in trained:
            state = self.state[p]
            if not state:
                state["step"] = 0
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros(p.shape, dtype=self.moments_dtype or p.dtype).to(p.device)
            state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1.0 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)
            p.mul_(1.0 - group["weight_decay"] * group["lr"])
            p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-size)
