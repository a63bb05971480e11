"""The optimizer that DeepSpeed is given: it steps only through an open gate, and clips as it updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.parallel.context import ParallelContext
from megatron.parallel.phase_clock import OPTIMIZER
from megatron.parallel.shards import shard_of
from megatron.training.deepspeed.reduction import GradientBuffers
from megatron.training.optimizers.groups import Groups
from megatron.training.optimizers.update_gate import UpdateGate


class OptimizerAround(torch.optim.Optimizer):
    """An optimizer around another one, of which it has the groups, states and defaults."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # without torch's constructor, which would make its own
        self.inner: Any = inner

    # DeepSpeed puts its flat partitions in the place of the parameters
    @property
    def param_groups(self) -> Groups:  # type: ignore[override]
        return self.inner.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, groups: Groups) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class GatedOptimizer(OptimizerAround):
    """An optimizer around one of torch, Habana or bitsandbytes, which updates only through an open gate."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.gate: UpdateGate | None = None
        """None while DeepSpeed is being built, which steps once to allocate states."""
        self.divisor: Tensor | None = None
        """Divisor of the gradients in the next update, of `clip_divisor`."""
        self.after_update: Callable[[Groups], None] | None = None
        """Called with the groups of an update, before anything is made of the new weights."""

    def step(self, closure: Any = None) -> Any:
        # used once: a step that is refused must not leave it to the next
        divisor, self.divisor = self.divisor, None
        if self.gate is None:
            return self._update(divisor)
        if not self.gate.is_open():
            return None
        with self.gate.clock.phase(OPTIMIZER):
            return self._update(divisor)

    def _update(self, divisor: Tensor | None) -> Any:
        # only torch's fused kernels read `grad_scale`; others get gradients that are divided already
        if divisor is not None and not self.defaults.get("fused"):
            parameters = [p for group in self.param_groups for p in group["params"]]
            torch._foreach_div_([p.grad for p in parameters if p.grad is not None], divisor)
            divisor = None
        self.inner.grad_scale = divisor  # torch's fused kernels divide by it while they read the gradient
        result = self.inner.step()
        if self.after_update is not None:
            self.after_update(self.param_groups)
        return result

    def allocate_states(self, tensors: Sequence[Tensor], kinds: Sequence[str], step: float, *, counts: bool) -> None:
        """Allocate states as the first step would, and set how many steps they have seen, if the optimizer `counts`."""
        for tensor in tensors:
            # bitsandbytes pages its states, which must come from its own allocator
            if hasattr(self.inner, "allocate_moments"):  # in memory of its own: paged_adamw.py
                self.inner.allocate_moments(tensor, step)
                continue
            state = self.state[tensor]
            for kind in kinds:
                if state.get(kind) is None:
                    state[kind] = torch.zeros_like(tensor, requires_grad=False)
            if counts:
                # torch's optimizers keep it per tensor, on the device where they are fused
                state["step"] = torch.tensor(step, dtype=torch.float32, device=tensor.device)
        for group in self.param_groups:
            if "step" in group:  # Habana's FusedAdamW counts in the group
                group["step"] = int(step)


class BareOptimizer(GatedOptimizer):
    """An optimizer that DeepSpeed wraps nothing around: it finds the model's norm, and clips by it."""

    def __init__(self, inner: torch.optim.Optimizer, ctx: ParallelContext, max_norm: float) -> None:
        super().__init__(inner)
        self._ctx, self._max_norm = ctx, max_norm
        self.buffers: GradientBuffers | None = None
        """Sums of the gradients over data-parallel ranks; None on a single one."""
        # read by DeepSpeed's engine under these names
        self._global_grad_norm: float | Tensor = 0.0
        self.overflow = False

    def step(self, closure: Any = None) -> Any:
        assert self.gate is not None
        for parameter in self._parameters():
            # torch's optimizers skip a parameter without a gradient, and with it the count of steps
            if parameter.grad is None and hasattr(parameter, "is_placeholder"):  # steps are counted with it
                parameter.grad = torch.zeros_like(parameter)
        if self.buffers is None:
            counted, uncounted = self._own_gradients()
        else:
            counted, uncounted = self.buffers.counted, self.buffers.uncounted
        norm = self._global_grad_norm = self.gate.find_norm(counted, uncounted)
        # the decision, which DeepSpeed's engine counts as a skipped step
        self.overflow = not self.gate.is_open()
        self.divisor = clip_divisor(norm, self._max_norm)
        return super().step(closure)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _own_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of a single data-parallel rank that the norm counts here, and its others.

        Replicated parameters count on the first tensor-parallel rank, tied ones on their first stage.
        """
        counted: list[Tensor] = []
        uncounted: list[Tensor] = []
        for parameter in self._parameters():
            # a tied weight's gradient is summed over its stages, so that of one stage is the whole
            if parameter.grad is None or getattr(parameter, "ds_pipe_replicated", False):
                continue
            if self._ctx.counts(shard_of(parameter)):
                counted.append(parameter.grad)
            else:
                uncounted.append(parameter.grad)
        return counted, uncounted


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor | None:
    """Return what gradients of this norm are divided by to be clipped, at least 1; None: `max_norm` 0 clips nothing."""
    if max_norm <= 0.0:
        return None
    # as torch.nn.utils.clip_grad_norm_: gradients times max_norm / (norm + 1e-6), at most 1
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)
