"""Groups of parameters that an optimizer treats alike: matrices, which decay, biases and norms, experts, adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.layout import Layout
from megatron.parallel.shards import Shard, shard_of
from megatron.training.deepspeed.experts import EXPERT_GROUP

Groups = list[dict[str, Any]]
"""Groups of parameters with their options, as torch's optimizers take them."""


def parameter_groups(model: nn.Module, config: Config, layout: Layout) -> Groups:
    """Return the trained parameters in groups: matrices, which decay, and biases and norms, which do not.

    Experts that lie over the ranks otherwise than the rest of the model are in groups of their own.

    With LoRA+ the adapters' B and magnitudes, and the embedding's adapter have learning rates of their own, as in PEFT.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not layout.divides_experts:
        return _groups_of(trained, config)
    shared = [parameter for parameter in trained if shard_of(parameter).expert is None]
    experts = [parameter for parameter in trained if shard_of(parameter).expert is not None]
    return _groups_of(shared, config) + [{**group, **EXPERT_GROUP} for group in _groups_of(experts, config)]


@dataclass(frozen=True)
class Treatment:
    """Rates of a parameter's update. Those that are treated alike are a group, which ZeRO cuts as one flat tensor."""

    lr_mult: float = 1.0
    """Its learning rate is the schedule's times this."""
    wd_mult: float = 1.0
    """Its weight decay is the schedule's times this."""
    is_decoupled: bool = False
    """The schedule's learning rate is that of word embedding and output layer (decoupled_lr)."""
    by_muon: bool = False
    """Muon updates it: the weight of a linear layer, where that is the optimizer."""


def treatment_of(parameter: Any, config: Config) -> Treatment:
    """Return how a trained parameter, or the placeholder of a stage that trains nothing, is updated."""
    shard = shard_of(parameter)
    optimizer = config.optimizer
    if optimizer.optimizer == "muon" and shard.is_linear_weight:
        return Treatment((optimizer.muon_lr or optimizer.lr) / optimizer.lr, by_muon=True)
    # Megatron-LM's `is_embedding_or_output_parameter`: the tables of tokens, tied or not, and no positions
    is_decoupled = config.optimizer.decoupled_lr is not None and shard.vocabulary and not shard.added
    width = config.model.width_multiplier if shard.is_hidden_matrix else 1.0
    # muP. What a step subtracts is lr x weight decay, which stays the same over widths as in the `mup` package
    return Treatment(_lr_mult(parameter, config) / width, float(_decays(parameter)) * width, is_decoupled)


def _groups_of(trained: Sequence[nn.Parameter], config: Config) -> Groups:
    # in the order of the model, equal on all ranks: ZeRO cuts each group into flat partitions by it
    by_treatment: dict[Treatment, list[nn.Parameter]] = {}
    for parameter in trained:
        by_treatment.setdefault(treatment_of(parameter, config), []).append(parameter)
    # Muon's come first, what does not decay last, and other learning rates after the schedule's own
    treatments = sorted(by_treatment, key=lambda each: (each.wd_mult == 0.0, not each.by_muon, each.lr_mult != 1.0))
    return [_group(each, by_treatment[each], config) for each in treatments]


def _group(treatment: Treatment, parameters: list[nn.Parameter], config: Config) -> dict[str, Any]:
    optimizer = config.optimizer
    lr = optimizer.lr
    if treatment.is_decoupled and optimizer.decoupled_lr is not None:
        lr = optimizer.decoupled_lr
    return {
        "params": parameters,
        "lr": lr * treatment.lr_mult,
        "weight_decay": optimizer.weight_decay * treatment.wd_mult,
        **dataclasses.asdict(treatment),
    }


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
