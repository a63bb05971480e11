"""Norms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from habana_frameworks.torch import stand_in
from habana_frameworks.torch.core import step_closure
from torch import Tensor


class FusedRMSNorm:
    """The published one is an autograd function; torch's own operators give the gradients here."""

    @staticmethod
    def apply(
        data_in: Tensor,
        gamma: Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> Tensor:
        stand_in.calls.append(("FusedRMSNorm", {"eps": eps, "use_stages": use_stages, "fast_math": fast_math}))
        exact = data_in.float()
        return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * gamma).to(data_in.dtype)


class FusedClipNorm:
    def __init__(self, parameters: Iterable[torch.nn.parameter.Parameter], max_norm: Any) -> None:
        params_list = list(parameters)
        self.dtype = params_list[0].dtype if params_list else torch.float32
        device = params_list[0].device if params_list else "cpu"
        self.max_norm_t = (torch.ones(1) * max_norm).to(self.dtype).to(device)
        self.norm_type = 2.0

    def clip_norm(self, parameters: Any) -> Tensor:
        step_closure._mark_step_if_lazy()
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        stand_in.calls.append(("FusedClipNorm", {"count": len(gradients)}))
        if not gradients:
            return torch.tensor(0.0)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        for gradient in gradients:
            gradient.mul_((self.max_norm_t / (norm + 1e-6)).clamp(max=1.0))
        step_closure._mark_step_if_lazy()
        return norm
