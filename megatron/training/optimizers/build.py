"""The optimizers by name: a table of what builds each; megatron/options/optimizer.py is what is known without torch."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.options.config import Config, ConfigError
from megatron.options.optimizer import OptimizerConfig, OptimizerName
from megatron.parallel.context import ParallelContext
from megatron.runtime.devices import device_of
from megatron.training.optimizers.gated import BareOptimizer, GatedOptimizer
from megatron.training.optimizers.groups import Groups, parameter_groups

log = logging.getLogger(__name__)


def build_optimizer(model: nn.Module, config: Config, ctx: ParallelContext) -> GatedOptimizer:
    """Return the configured optimizer over the groups of `parameter_groups`; its attribute `gate` may refuse updates.

    In float32 without ZeRO, DeepSpeed leaves it bare: then it finds the norm, and clips by it, itself.
    """
    # muP: every gradient shrinks with the width, since the logits are divided by it
    eps = config.optimizer.adam_eps / config.model.width_multiplier
    options = dataclasses.replace(config.optimizer, adam_eps=eps)
    inner = BUILDERS[options.optimizer](parameter_groups(model, config, ctx), options, ctx)
    if config.effective_zero_stage == 0:
        return BareOptimizer(inner, ctx, options.clip_grad)
    return GatedOptimizer(inner)


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
        from megatron.training.optimizers.paged_adamw import PagedAdamW
    except Exception as error:  # bitsandbytes' native library fails in many ways
        raise ConfigError(
            [
                f"optimizer=paged_adamw_32bit needs bitsandbytes on CUDA, which is not usable ({error}); pip install "
                "bitsandbytes, or use optimizer=adamw with offload_optimizer"
            ]
        ) from None
    return PagedAdamW(groups, **_adam_arguments(options))


def _muon(groups: Groups, options: OptimizerConfig, ctx: ParallelContext) -> torch.optim.Optimizer:
    from megatron.training.optimizers.muon import Muon  # late: few runs need it

    return Muon(_adam(groups, options, ctx), options)


def _adam_arguments(options: OptimizerConfig) -> dict[str, Any]:
    return {"lr": options.lr, "betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}


Builder = Callable[[Groups, OptimizerConfig, ParallelContext], torch.optim.Optimizer]
BUILDERS: dict[OptimizerName, Builder] = {
    "adamw": _adam,
    "adam": _adam,
    "sgd": _sgd,
    "fusedadamw": _adam,
    "paged_adamw_32bit": _paged_adamw,
    "muon": _muon,
}
