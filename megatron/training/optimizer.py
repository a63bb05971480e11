"""The optimizer that DeepSpeed is given: it steps only through an open gate, and clips as it updates.

A table builds each by its name; megatron/options/optimizer.py has what is known of it without torch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.options.config import Config, ConfigError
from megatron.options.optimizer import OptimizerConfig, OptimizerName
from megatron.parallel.context import ParallelContext
from megatron.parallel.layout import Layout
from megatron.parallel.phase_clock import OPTIMIZER
from megatron.parallel.shards import Shard, shard_of
from megatron.runtime.devices import device_of
from megatron.training.deepspeed.experts import EXPERT_GROUP
from megatron.training.deepspeed.reduction import GradientBuffers
from megatron.training.update_gate import UpdateGate

log = logging.getLogger(__name__)

Groups = list[dict[str, Any]]
"""Groups of parameters with their options, as torch's optimizers take them."""


def build_optimizer(model: nn.Module, config: Config, ctx: ParallelContext) -> GatedOptimizer:
    """Return the configured optimizer over the groups of `parameter_groups`; its attribute `gate` may refuse updates.

    In float32 without ZeRO, DeepSpeed leaves it bare: then it finds the norm, and clips by it, itself.
    """
    options = config.optimizer
    inner = BUILDERS[options.optimizer](parameter_groups(model, config, ctx), options, ctx)
    if config.effective_zero_stage == 0:
        return BareOptimizer(inner, ctx, options.clip_grad)
    return GatedOptimizer(inner)


def parameter_groups(model: nn.Module, config: Config, layout: Layout) -> Groups:
    """Return the trained parameters in groups: matrices, which decay, and biases and norms, which do not.

    Experts that lie over the ranks otherwise than the rest of the model are in groups of their own.

    With LoRA+ the adapters' B and magnitudes, and the embedding's adapter have learning rates of their own, as in PEFT.
    The weight decay of a group is the schedule's times its `wd_mult`, its learning rate times `lr_mult`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not layout.divides_experts:
        return _groups_of(trained, config)
    shared = [parameter for parameter in trained if shard_of(parameter).expert is None]
    experts = [parameter for parameter in trained if shard_of(parameter).expert is not None]
    return _groups_of(shared, config) + [{**group, **EXPERT_GROUP} for group in _groups_of(experts, config)]


def _groups_of(trained: Sequence[nn.Parameter], config: Config) -> Groups:
    lr, weight_decay = config.optimizer.lr, config.optimizer.weight_decay
    # in the order of the model, equal on all ranks: ZeRO cuts each group into flat partitions by it
    by_rate: dict[float, list[nn.Parameter]] = {1.0: []}
    kept: list[nn.Parameter] = []
    for parameter in trained:
        decayed = by_rate.setdefault(_lr_mult(parameter, config), [])
        if _decays(parameter):
            decayed.append(parameter)
        else:
            kept.append(parameter)
    groups: Groups = [
        {"params": decayed, "weight_decay": weight_decay, "wd_mult": 1.0, "lr": lr * rate, "lr_mult": rate}
        for rate, decayed in by_rate.items()
    ]
    # without `lr` of its own the optimizer's default holds; `lr_mult` 1 follows the schedule
    groups.append({"params": kept, "weight_decay": 0.0, "wd_mult": 0.0, "lr_mult": 1.0})
    return [group for group in groups if group["params"]]


def add_placeholder(model: nn.Module, ctx: ParallelContext) -> None:
    """Give a pipeline stage of frozen layers one number to optimize, since DeepSpeed needs one.

    Its gradient is zero in every step; it belongs to no layer, and no norm and no checkpoint has it.
    """
    parameters = list(model.parameters())
    if any(parameter.requires_grad for parameter in parameters):
        return
    dtype = parameters[0].dtype if parameters else torch.float32  # a stage may have no layers at all
    placeholder: Any = nn.Parameter(torch.zeros(1, dtype=dtype, device=ctx.device))
    placeholder.shard, placeholder.is_placeholder = Shard((1,), used_on="stream"), True
    # DeepSpeed's own marks: as a copy of another stage's it counts in no norm
    placeholder.tensor_model_parallel, placeholder.ds_pipe_replicated = False, True
    model.register_parameter("placeholder", placeholder)


def _lr_mult(parameter: Any, config: Config) -> float:
    """Return the learning rate of a parameter, relative to lr: LoRA+ as PEFT applies it, also to all vectors."""
    ratio, shard = config.lora.loraplus_lr_ratio, shard_of(parameter)
    if ratio == 1.0 or hasattr(parameter, "is_placeholder"):  # of a stage that trains nothing
        return 1.0
    name = parameter.full_name.rpartition(".")[2]
    if name in ("lora_embedding_A", "lora_embedding_B"):
        return config.lora.loraplus_lr_embedding / config.optimizer.lr
    if name.startswith("lora_B") or len(shard.shape) == 1:
        return ratio
    return 1.0


def _decays(parameter: Tensor) -> bool:
    """Return True for a matrix, and for DoRA's magnitudes, which decay in transformers' trainer too."""
    return len(shard_of(parameter).shape) > 1 or shard_of(parameter).added


class GatedOptimizer(torch.optim.Optimizer):
    """An optimizer around another one, of torch, Habana or bitsandbytes, which updates only through an open gate."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # without torch's constructor: groups, states and defaults are those of `inner`
        self.inner: Any = inner
        self.gate: UpdateGate | None = None
        """None while DeepSpeed is being built, which steps once to allocate states."""
        self.divisor: Tensor | None = None
        """Divisor of the gradients in the next update, of `clip_divisor`."""

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
        return self.inner.step()

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


class _WithoutCompiler(torch.optim.Optimizer):
    """Methods that torch marks as not to be compiled, without the mark.

    At the first call of a marked one torch imports its compiler: 2 s of each start.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(_WithoutCompiler, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Adam(_WithoutCompiler, torch.optim.Adam):
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class SGD(_WithoutCompiler, torch.optim.SGD):
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def _sgd(groups: Groups, options: OptimizerConfig, ctx: ParallelContext) -> torch.optim.Optimizer:
    return SGD(groups, lr=options.lr, momentum=options.sgd_momentum)


def _adam(groups: Groups, options: OptimizerConfig, ctx: ParallelContext) -> torch.optim.Optimizer:
    """Return Adam, fused where the device has a kernel for it."""
    arguments = _adam_arguments(options)
    device = device_of(ctx.device.type)
    # Habana's FusedAdamW decouples the decay from the gradient; Adam with the decay in it is torch's
    if device.adamw is not None and options.decoupled_weight_decay:
        own: torch.optim.Optimizer = device.adamw()(groups, **arguments)
        return own
    adam = AdamW if options.decoupled_weight_decay else Adam
    return adam(groups, **arguments, fused=device.fuses_adam)


def _paged_adamw(groups: Groups, options: OptimizerConfig, ctx: ParallelContext) -> torch.optim.Optimizer:
    """Return bitsandbytes' on CUDA, elsewhere AdamW. Raises ConfigError where it cannot be used."""
    device = device_of(ctx.device.type)
    if not device.has_bitsandbytes:
        if ctx.rank == 0:
            states = "which offload_optimizer can offload"
            if device.is_host:
                states = "whose states are in host memory"
            text = "optimizer=paged_adamw_32bit pages its states on CUDA only; on %s it is adamw, %s"
            log.warning(text, device.name, states)
        return _adam(groups, options, ctx)
    try:
        from megatron.training.paged_adamw import PagedAdamW
    except Exception as error:  # bitsandbytes' native library fails in many ways
        raise ConfigError(
            [
                f"optimizer=paged_adamw_32bit needs bitsandbytes on CUDA, which is not usable ({error}); pip install "
                "bitsandbytes, or use optimizer=adamw with offload_optimizer"
            ]
        ) from None
    return PagedAdamW(groups, **_adam_arguments(options))


def _adam_arguments(options: OptimizerConfig) -> dict[str, Any]:
    return {"lr": options.lr, "betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}


Builder = Callable[[Groups, OptimizerConfig, ParallelContext], torch.optim.Optimizer]
BUILDERS: dict[OptimizerName, Builder] = {
    "adamw": _adam,
    "adam": _adam,
    "sgd": _sgd,
    "fusedadamw": _adam,
    "paged_adamw_32bit": _paged_adamw,
}
