"""Low-rank adapters as declarations: which modules get one, under which names, and what is trained. No torch.

Shapes: [out, in] the weight of a linear layer, r the rank. An adapter adds scale * x A^T B^T to the output of a module,
with A [r, in] and B [out, r]. Source: Hu et al. 2021 (arXiv:2106.09685).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.config.adapters import LoraConfig
from megatron.config.options import Config
from megatron.parallel.adapter_layout import Adapter
from megatron.parallel.shards import LayerDeclaration, Shard

ALL_LINEAR = "all-linear"
OUTPUT = "lm_head"
SHOWN = 12
"""Names that a message lists."""


class TheirNames(Protocol):
    """The names in a HuggingFaceForm (models/family.py), which imports this file."""

    @property
    def prefix(self) -> str: ...
    @property
    def modules(self) -> Mapping[str, tuple[str, ...]]: ...


@dataclass(frozen=True)
class Module:
    """A module as users name it: one of ours, or one of transformers' that is a piece of ours."""

    layer: str
    """Name of the declared layer, `layers.0`."""
    prefix: str
    """Its linear layer or other module, `attention.qkv`; empty for the layer itself."""
    names: tuple[str, ...]
    """Full names, ours first: `layers.0.attention.qkv`, `model.layers.0.self_attn.q_proj`."""
    first: int
    """Its first piece of the weight."""
    stop: int
    suffix: str
    """End of the names of its adapter's parameters; empty where the module is all of ours."""

    def matches(self, target: str) -> bool:
        return any(
            name == target or name.endswith(f".{target}") or fnmatch.fnmatchcase(name, target) for name in self.names
        )


@dataclass(frozen=True)
class LowRank:
    """Declaration of a linear layer with adapters: `lora_A<suffix>` and `lora_B<suffix>` of each, cut as the base is.

    Column-parallel: A is whole, and applied to the residual stream; B is cut as the base's rows. Row-parallel: A is
    cut as the base's columns; B is whole, and applied to each rank's partial sums.
    """

    adapters: tuple[Adapter, ...]
    dropout: float

    def shards(self, weight: Shard) -> dict[str, Shard]:
        found: dict[str, Shard] = {}
        rows, columns = weight.shape
        for adapter in self.adapters:
            down = Shard((adapter.rank, columns), bound=columns**-0.5, used_on="stream")
            if weight.dim == 0:
                pieces = weight.pieces[adapter.first : adapter.stop]
                up = Shard((sum(pieces), adapter.rank), dim=0, pieces=pieces)
            else:
                down = dataclasses.replace(down, dim=1, pieces=weight.pieces, used_on=None)
                up = Shard((rows, adapter.rank), used_on="heads")
            found |= {f"lora_A{adapter.suffix}": down, f"lora_B{adapter.suffix}": up}
        return found

    def linear_method(self) -> Any:
        from megatron.parallel.low_rank import LowRankMethod

        return LowRankMethod(self.adapters, self.dropout)


# ---------------------------------------------------------------------------------------------------------------------
# Modules and their names


def modules_of(layers: Iterable[LayerDeclaration], form: TheirNames | None) -> list[Module]:
    """Return the modules of the model that have a weight, in order, each under our name and transformers' own."""
    found: dict[tuple[str, str], list[Module]] = {}
    for layer in layers:
        for local, shard in layer.shards.items():
            module, _, kind = f"{layer.name}.{local}".rpartition(".")
            if kind == "weight" and not shard.added:
                prefix = local.rpartition(".")[0]
                found[layer.name, prefix] = list(_pieces(layer, prefix, module, shard, form))
    return [module for modules in found.values() for module in modules]


def _pieces(layer: LayerDeclaration, prefix: str, ours: str, shard: Shard, form: TheirNames | None) -> Iterator[Module]:
    number = "" if layer.number is None else str(layer.number)
    theirs: tuple[str, ...] = ()
    if form is not None:
        place = ours.replace(f".{number}.", ".*.", 1) if number else ours
        theirs = tuple(f"{form.prefix}{name.replace('*', number)}" for name in form.modules.get(place, ()))
    if ours == "output":
        theirs = (OUTPUT,)
    if len(theirs) < 2:
        yield Module(layer.name, prefix, (ours, *theirs), 0, len(shard.pieces), "")
        return
    for index, name in enumerate(theirs):
        yield Module(layer.name, prefix, (ours, name), index, index + 1, f"_{name.rpartition('.')[2]}")


def is_linear(layer: LayerDeclaration, module: Module) -> bool:
    """Return True for a column- or row-parallel linear layer: not for embeddings, the output projection and norms."""
    shard = layer.shards[f"{module.prefix}.weight" if module.prefix else "weight"]
    return len(shard.shape) == 2 and shard.dim is not None and not shard.vocabulary


def _short_names(modules: Iterable[Module]) -> str:
    """The last words of the modules' names as transformers has them, each once."""
    return ", ".join(dict.fromkeys(module.names[-1].rpartition(".")[2] for module in modules))


# ---------------------------------------------------------------------------------------------------------------------
# Declarations


def with_adapters(
    layers: Sequence[LayerDeclaration], form: TheirNames | None, lora: LoraConfig
) -> list[LayerDeclaration]:
    """Return the layers of a model with its base frozen and the adapters added that the options name."""
    modules = modules_of(layers, form)
    by_name = {layer.name: layer for layer in layers}
    targets = _adapted(by_name, modules, lora.lora_target_modules)
    saved = {(m.layer, m.prefix) for m in modules if any(m.matches(name) for name in lora.lora_modules_to_save)}
    places = {(module.layer, module.prefix) for module in targets}
    found = []
    for layer in layers:
        layer = _frozen(layer, saved, places, lora.lora_bias)
        for prefix in [prefix for name, prefix in places if name == layer.name]:
            own = [module for module in targets if (module.layer, module.prefix) == (layer.name, prefix)]
            adapters = tuple(_adapter(module, lora) for module in own)
            layer = layer.with_method(prefix, LowRank(adapters, lora.lora_dropout))
        found.append(layer)
    return found


def _adapted(layers: Mapping[str, LayerDeclaration], modules: Iterable[Module], targets: Sequence[str]) -> list[Module]:
    linear = [module for module in modules if is_linear(layers[module.layer], module)]
    if ALL_LINEAR in targets:
        return linear
    return [module for module in linear if any(module.matches(target) for target in targets)]


def _frozen(
    layer: LayerDeclaration, saved: set[tuple[str, str]], adapted: set[tuple[str, str]], bias: str
) -> LayerDeclaration:
    """Freeze all but the modules that are trained whole, and the biases that are."""

    def is_trained(local: str) -> bool:
        prefix, _, kind = local.rpartition(".")
        place = (layer.name, prefix)
        return place in saved or (kind == "bias" and (bias == "all" or (bias == "lora_only" and place in adapted)))

    shards = {local: dataclasses.replace(shard, trained=is_trained(local)) for local, shard in layer.shards.items()}
    return dataclasses.replace(layer, shards=shards)


def _adapter(module: Module, lora: LoraConfig) -> Adapter:
    rank = int(_pattern(lora.lora_rank_pattern, module) or lora.lora_rank or 0)
    alpha = float(_pattern(lora.lora_alpha_pattern, module) or lora.lora_alpha or rank)
    return Adapter(
        module.suffix, module.first, module.stop, rank, alpha / (math.sqrt(rank) if lora.use_rslora else rank)
    )


def _pattern(patterns: Iterable[str], module: Module) -> str | None:
    named = (pattern.rpartition("=") for pattern in patterns)
    return next((value for name, _, value in named if module.matches(name)), None)


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def faults(layers: Sequence[LayerDeclaration], form: TheirNames | None, config: Config) -> Iterator[str]:
    """Yield a message for every option of adapters that does not fit the model, or that they do not fit."""
    lora, freeze, exports = config.lora, config.model.freeze, config.checkpoint.save_hf
    if lora.lora_rank is None:
        return
    if exports is not None:
        yield f"save_hf={exports} exports whole models, not adapters (lora_rank={lora.lora_rank}); leave save_hf out"
    if freeze:
        yield (
            f"freeze={' '.join(freeze)} is given with lora_rank={lora.lora_rank}, which freezes the whole base model; "
            "leave freeze out, and name the modules to adapt in lora_target_modules"
        )
    wrong = [
        *_wrong_patterns("lora_rank_pattern", lora.lora_rank_pattern, int),
        *_wrong_patterns("lora_alpha_pattern", lora.lora_alpha_pattern, float),
    ]
    yield from wrong
    modules, by_name = modules_of(layers, form), {layer.name: layer for layer in layers}
    linear = [module for module in modules if is_linear(by_name[module.layer], module)]
    targets = _adapted(by_name, modules, lora.lora_target_modules)
    if not targets:
        yield (
            f"lora_target_modules={' '.join(lora.lora_target_modules) or 'nothing'} matches no linear layer of the "
            f"model; use {ALL_LINEAR}, or names among {_short_names(linear)}"
        )
    for name in lora.lora_modules_to_save:
        if not any(module.matches(name) for module in modules):
            yield f"lora_modules_to_save={name} matches no module of the model; use names among {_short_names(modules)}"
    both = [m for m in targets if any(m.matches(name) for name in lora.lora_modules_to_save)]
    if both:
        yield (
            f"{_short_names(both)} is both in lora_target_modules and in lora_modules_to_save, which trains it whole; "
            "keep it in one of them"
        )
    if not wrong:
        yield from _too_large(targets, by_name, lora)


def _wrong_patterns(option: str, patterns: Iterable[str], kind: type) -> Iterator[str]:
    for pattern in patterns:
        name, _, value = pattern.rpartition("=")
        try:
            fits = bool(name) and 0 < kind(value) < math.inf
        except ValueError:
            fits = False
        if not fits:
            number = "a positive whole number" if kind is int else "a positive number"
            yield f"{option}={pattern!r} is not NAME=NUMBER with {number}, such as q_proj=16; correct it"


def _too_large(modules: Iterable[Module], layers: Mapping[str, LayerDeclaration], lora: LoraConfig) -> Iterator[str]:
    """Yield one message for all modules whose rank is above what saves anything."""
    found: dict[str, tuple[int, str]] = {}
    for module in modules:
        weight, rank = layers[module.layer].shards[f"{module.prefix}.weight"], _adapter(module, lora).rank
        rows = sum(weight.pieces[module.first : module.stop]) if weight.dim == 0 else weight.shape[0]
        short, columns = module.names[-1].rpartition(".")[2], weight.shape[1]
        if rank > min(rows, columns):
            text = f"rank {rank} of the adapter of {short}, which is [{rows}, {columns}], is above {min(rows, columns)}"
            found.setdefault(short, (min(rows, columns), text))
    if found:
        text = min(found.values())[1]
        others = "" if len(found) == 1 else f" (the smallest of {len(found)} such modules: {', '.join(found)})"
        yield f"{text}, where it saves nothing{others}; lower lora_rank, or give others in lora_rank_pattern"


def unmatched(layers: Sequence[LayerDeclaration], form: TheirNames | None, lora: LoraConfig) -> Iterator[str]:
    """Yield a message for every name that selects nothing, beside others that do."""
    if lora.lora_rank is None:
        return
    modules, by_name = modules_of(layers, form), {layer.name: layer for layer in layers}
    linear = [module for module in modules if is_linear(by_name[module.layer], module)]
    targets = _adapted(by_name, modules, lora.lora_target_modules)
    for name in lora.lora_target_modules:
        if name != ALL_LINEAR and not any(module.matches(name) for module in linear):
            yield f"lora_target_modules={name} matches no linear layer; the model has {_short_names(linear)}"
    for option in ("lora_rank_pattern", "lora_alpha_pattern"):
        for pattern in getattr(lora, option):
            if not any(module.matches(pattern.rpartition("=")[0]) for module in targets):
                yield f"{option}={pattern} matches no adapted module; they are {_short_names(targets)}"
