"""Low-rank adapters as declarations: which modules get one, under which names, and what is trained. No torch.

Shapes: [out, in] the weight of a linear layer, r the rank. An adapter adds scale * x A^T B^T to the output of a module,
with A [r, in] and B [out, r]. That of an embedding is the same with x one-hot: A [r, vocabulary], B [hidden, r].
Source: Hu et al. 2021 (arXiv:2106.09685).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatron.options.config import Config
from megatron.options.model import LoraConfig
from megatron.parallel.costs import Attention, MatrixProduct, PassSizes
from megatron.parallel.shards import Adapter, LayerDeclaration, Shard

ALL_LINEAR = "all-linear"
OUTPUT, OUR_OUTPUT = "lm_head", "output"
INITS = r"default|pissa(_niter_[1-9]\d*)?"
"""Values of lora_init."""
SHOWN = 12
"""Names that a message lists."""


class TheirNames(Protocol):
    """The names in a HuggingFaceForm (models/family.py), which imports this file."""

    def their_modules(self, ours: str) -> tuple[str, ...]: ...


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
    is_tied_output: bool = False
    """The output projection of a model whose embedding is its weight: only its adapter is its own."""

    @property
    def place(self) -> tuple[str, str]:
        return self.layer, self.prefix

    @property
    def is_output(self) -> bool:
        return self.names[0] == OUR_OUTPUT

    @property
    def short(self) -> str:
        """Last word of its name, as transformers has it."""
        return self.names[-1].rpartition(".")[2]

    def matches(self, target: str) -> bool:
        return any(
            name == target or name.endswith(f".{target}") or fnmatch.fnmatchcase(name, target) for name in self.names
        )


@dataclass(frozen=True)
class LowRank:
    """Declaration of a linear layer with adapters: `lora_A<suffix>` and `lora_B<suffix>` of each, cut as the base is.

    Column-parallel: A is whole, and applied to the residual stream; B is cut as the base's rows. Row-parallel: A is
    cut as the base's columns; B is whole, and applied to each rank's partial sums. DoRA's magnitudes
    `lora_magnitude_vector<suffix>` are one number a row. PiSSA keeps what A and B start from, frozen, as
    `lora_start_A<suffix>` and `lora_start_B<suffix>`.
    """

    adapters: tuple[Adapter, ...]
    dropout: float
    use_dora: bool

    def shards(self, weight: Shard) -> dict[str, Shard]:
        found: dict[str, Shard] = {}
        rows, columns = weight.shape
        for adapter in self.adapters:
            # each rank that shares an expert applies A for its own rows of B alone
            used_on: Literal["stream", "heads"] = "stream" if weight.expert is None else "heads"
            down = Shard((adapter.rank, columns), bound=columns**-0.5, used_on=used_on)
            if weight.dim == 0:
                pieces = weight.pieces[adapter.first : adapter.stop]
                up = Shard((sum(pieces), adapter.rank), dim=0, pieces=pieces, padding=weight.padding)
            else:
                down = dataclasses.replace(down, dim=1, pieces=weight.pieces, used_on=None)
                up = Shard((rows, adapter.rank), used_on="heads")
            found |= {f"lora_A{adapter.suffix}": down, f"lora_B{adapter.suffix}": up}
            if adapter.is_principal:
                kept = {f"lora_start_A{adapter.suffix}": down, f"lora_start_B{adapter.suffix}": up}
                found |= {name: dataclasses.replace(shard, bound=None, trained=False) for name, shard in kept.items()}
            if self.use_dora:
                found[f"lora_magnitude_vector{adapter.suffix}"] = dataclasses.replace(up, shape=up.shape[:1], value=1.0)
        return found

    @property
    def scales_weight(self) -> bool:
        return self.use_dora

    def kept_bytes(self, weight: Shard, sizes: PassSizes) -> int:
        """The products with A, B by its scale, fused A, DoRA's output before it is scaled, and what dropout makes."""
        rank, number = sum(adapter.rank for adapter in self.adapters), sizes.number_size
        rows, columns = weight.local_shape(sizes.tensor_size)
        kept = (sizes.tokens + rows) * rank * number
        if len(self.adapters) > 1:
            kept += columns * rank * number
        if self.use_dora:  # the factors' gradients need it
            kept += sizes.tokens * rows * number
        if self.dropout > 0:
            tokens = sizes.own_tokens if weight.dim == 0 else sizes.tokens
            kept += columns * tokens * sizes.mask_size
            # the dropped input instead of the input, which the core of the attention keeps too
            if isinstance(weight.cost, MatrixProduct) and isinstance(weight.cost.reads, Attention):
                kept += columns * tokens * number
        return kept

    def linear_method(self) -> Any:
        from megatron.parallel.low_rank import LowRankMethod

        return LowRankMethod(self.adapters, self.dropout, use_dora=self.use_dora)


@dataclass(frozen=True)
class VocabularyLowRank:
    """Declaration of an embedding, an output projection, or one weight that is both, with an adapter for either use.

    That of the output, `lora_A` and `lora_B`, is a column-parallel layer's. Of the embedding's, named as PEFT names
    them, `lora_embedding_A` is cut as the vocabulary and starts at zero; `lora_embedding_B` is whole, and applied to
    the rows that each rank has found; so is DoRA's `lora_embedding_magnitude_vector`, a number for each channel.
    """

    embedding: Adapter | None
    output: Adapter | None
    dropout: float
    use_dora: bool

    def shards(self, weight: Shard) -> dict[str, Shard]:
        found: dict[str, Shard] = {}
        if self.embedding is not None:
            (vocabulary, hidden), rank = weight.shape, self.embedding.rank
            found["lora_embedding_A"] = Shard((rank, vocabulary), 1, weight.pieces, weight.padding)
            found["lora_embedding_B"] = Shard((hidden, rank), std=1.0, used_on="heads")
            if self.use_dora:
                found["lora_embedding_magnitude_vector"] = Shard((hidden,), value=1.0, used_on="heads")
        if self.output is None:
            return found
        return found | LowRank((self.output,), self.dropout, self.use_dora).shards(weight)

    @property
    def scales_weight(self) -> bool:
        return self.output is not None and self.use_dora

    def kept_bytes(self, weight: Shard, sizes: PassSizes) -> int:
        """DoRA's rows before they are scaled; what the output's adapter keeps is part of the loss."""
        if self.embedding is None or not self.use_dora:
            return 0
        return sizes.tokens * weight.shape[1] * sizes.number_size

    def linear_method(self) -> Any:
        from megatron.parallel.low_rank import VocabularyAdapters

        return VocabularyAdapters(self.embedding, self.output, self.dropout, self.use_dora)


# ---------------------------------------------------------------------------------------------------------------------
# Modules and their names


def modules_of(layers: Iterable[LayerDeclaration], form: TheirNames | None) -> list[Module]:
    """Return the modules of the model that have a weight, in order, each under our name and transformers' own."""
    found: dict[tuple[str, str], list[Module]] = {}
    layers = list(layers)
    for layer in layers:
        for local, shard in layer.shards.items():
            module, _, kind = f"{layer.name}.{local}".rpartition(".")
            if kind == "weight" and not shard.added:
                prefix = local.rpartition(".")[0]
                found[layer.name, prefix] = list(_pieces(layer, prefix, module, shard, form))
    last = layers[-1]
    if is_tied := [layer.name for layer in layers].count(last.name) > 1:
        found[OUR_OUTPUT, ""] = [Module(last.name, "", (OUR_OUTPUT, OUTPUT), 0, 1, "", is_tied)]
    return [module for modules in found.values() for module in modules]


def _pieces(layer: LayerDeclaration, prefix: str, ours: str, shard: Shard, form: TheirNames | None) -> Iterator[Module]:
    theirs = () if form is None else form.their_modules(ours)
    if ours == OUR_OUTPUT:
        theirs = (OUTPUT,)
    if len(theirs) < 2:
        yield Module(layer.name, prefix, (ours, *theirs), 0, len(shard.pieces), "")
        return
    for index, name in enumerate(theirs):
        yield Module(layer.name, prefix, (ours, name), index, index + 1, f"_{name.rpartition('.')[2]}")


def weight_of(layers: Mapping[str, LayerDeclaration], module: Module) -> Shard:
    return layers[module.layer].shards[f"{module.prefix}.weight" if module.prefix else "weight"]


def _short_names(modules: Iterable[Module]) -> str:
    """The last words of the modules' names as transformers has them, each once."""
    return ", ".join(dict.fromkeys(module.short for module in modules))


# ---------------------------------------------------------------------------------------------------------------------
# Declarations


def with_adapters(
    layers: Sequence[LayerDeclaration], form: TheirNames | None, lora: LoraConfig
) -> list[LayerDeclaration]:
    """Return the layers of a model with its base frozen and the adapters added that the options name."""
    modules = modules_of(layers, form)
    by_name = {layer.name: layer for layer in layers}
    targets = _adapted(by_name, modules, lora.lora_target_modules)
    saved = {module.place for module in modules if _is_saved(module, lora)}
    places: dict[str, dict[str, list[Module]]] = {}  # in order
    for module in targets:
        places.setdefault(module.layer, {}).setdefault(module.prefix, []).append(module)
    adapted = {module.place for module in targets}
    found = []
    for layer in layers:
        layer = _frozen(layer, saved, adapted, lora.lora_bias)
        for prefix, own in places.get(layer.name, {}).items():
            layer = layer.with_method(prefix, _method(own, weight_of(by_name, own[0]).vocabulary, lora))
        found.append(layer)
    return found


def _method(modules: Sequence[Module], of_vocabulary: bool, lora: LoraConfig) -> LowRank | VocabularyLowRank:
    """Return the declaration of the adapters of one weight."""
    if not of_vocabulary:
        return LowRank(tuple(_adapter(module, lora) for module in modules), lora.lora_dropout, lora.use_dora)
    by_use = {module.is_output: _adapter(module, lora) for module in modules}
    embedding = by_use.get(False)
    if embedding is not None:  # PiSSA too starts it at zero
        embedding = dataclasses.replace(embedding, is_principal=False, svd_iterations=None)
    return VocabularyLowRank(embedding, by_use.get(True), lora.lora_dropout, lora.use_dora)


def _is_saved(module: Module, lora: LoraConfig) -> bool:
    return not module.is_tied_output and any(module.matches(name) for name in lora.lora_modules_to_save)


def _adaptable(layers: Mapping[str, LayerDeclaration], modules: Iterable[Module]) -> tuple[list[Module], list[Module]]:
    """Return the linear layers, and with the embedding and the output projection all that can have an adapter."""
    # a norm over all heads together is cut over ranks too, and is a vector
    cut = [module for module in modules if weight_of(layers, module).dim is not None]
    matrices = [module for module in cut if len(weight_of(layers, module).shape) == 2]
    return [module for module in matrices if not weight_of(layers, module).vocabulary], matrices


def _adapted(layers: Mapping[str, LayerDeclaration], modules: Iterable[Module], targets: Sequence[str]) -> list[Module]:
    linear, adaptable = _adaptable(layers, modules)
    everywhere = {module.names[0] for module in linear} if ALL_LINEAR in targets else set()
    return [m for m in adaptable if m.names[0] in everywhere or any(m.matches(target) for target in targets)]


def _frozen(
    layer: LayerDeclaration, saved: Set[tuple[str, str]], adapted: Set[tuple[str, str]], bias: str
) -> LayerDeclaration:
    """Freeze all but the modules that are trained whole, and the biases that are."""

    def is_trained(local: str) -> bool:
        prefix, _, kind = local.rpartition(".")
        place = (layer.name, prefix)
        return place in saved or (kind == "bias" and (bias == "all" or (bias == "lora_only" and place in adapted)))

    # the bias of a router, which no optimizer trains, is frozen with its base
    shards = {
        local: shard if shard.trained and is_trained(local) else shard.frozen() for local, shard in layer.shards.items()
    }
    return dataclasses.replace(layer, shards=shards)


def rank_and_alpha(module: Module, lora: LoraConfig) -> tuple[int, float]:
    """Return the rank and alpha of a module's adapter."""
    rank = int(_pattern(lora.lora_rank_pattern, module) or lora.lora_rank or 0)
    return rank, float(_pattern(lora.lora_alpha_pattern, module) or lora.lora_alpha or rank)


def _adapter(module: Module, lora: LoraConfig) -> Adapter:
    rank, alpha = rank_and_alpha(module, lora)
    scale = alpha / (math.sqrt(rank) if lora.use_rslora else rank)
    iterations = lora.lora_init.partition("_niter_")[2]
    return Adapter(
        module.suffix, module.first, module.stop, rank, scale, lora.lora_init != "default", int(iterations or 0) or None
    )


def _pattern(patterns: Iterable[str], module: Module) -> str | None:
    """Return the number in the first NAME=NUMBER that is of a module; None if none is."""
    first = _first_pattern(patterns, module)
    if first is None:
        return None
    return first.rpartition("=")[2]


def _first_pattern(patterns: Iterable[str], module: Module) -> str | None:
    return next((pattern for pattern in patterns if module.matches(pattern.rpartition("=")[0])), None)


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def faults(layers: Sequence[LayerDeclaration], form: TheirNames | None, config: Config) -> Iterator[str]:
    """Yield a message for every option of adapters that does not fit the model, or that they do not fit."""
    lora, freeze = config.lora, config.model.freeze
    if lora.lora_rank is None:
        return
    if freeze:
        yield (
            f"freeze={' '.join(freeze)} is given with lora_rank={lora.lora_rank}, which freezes the whole base model; "
            "leave freeze out, and name the modules to adapt in lora_target_modules"
        )
    if not re.fullmatch(INITS, lora.lora_init):
        yield f"lora_init={lora.lora_init} is not a start of adapters; use default, pissa, or pissa_niter_4"
        return
    if lora.lora_init != "default" and config.model.quantize_base != "none":
        yield (
            f"lora_init={lora.lora_init} takes the adapters from weights in 16 bits or more, but "
            f"quantize_base={config.model.quantize_base} holds them in 4; leave one of them out"
        )
    wrong = [
        *_wrong_patterns("lora_rank_pattern", lora.lora_rank_pattern, int),
        *_wrong_patterns("lora_alpha_pattern", lora.lora_alpha_pattern, float),
    ]
    yield from wrong
    modules, by_name = modules_of(layers, form), {layer.name: layer for layer in layers}
    targets = _adapted(by_name, modules, lora.lora_target_modules)
    if not targets:
        yield (
            f"lora_target_modules={' '.join(lora.lora_target_modules) or 'nothing'} matches no linear layer or "
            f"embedding of the model; use {ALL_LINEAR}, or names among {_short_names(_adaptable(by_name, modules)[1])}"
        )
    yield from _wrongly_saved(modules, targets, lora)
    if not wrong:
        yield from _too_large(targets, by_name, lora)


def _wrongly_saved(modules: Sequence[Module], targets: Sequence[Module], lora: LoraConfig) -> Iterator[str]:
    """Yield the faults of lora_modules_to_save, whose modules are trained whole beside the adapters of `targets`."""
    saveable = [module for module in modules if not module.is_tied_output]
    yield from _unmatched_saves(saveable, lora)
    whole = [module for module in modules if _is_saved(module, lora)]
    places = {module.place for module in whole}
    missing = [module for module in saveable if module.place in places and module not in whole]
    if missing:
        yield (
            f"lora_modules_to_save={_short_names(whole)} leaves out {_short_names(missing)}, fused with it in one "
            "weight, which is trained whole or not at all; name them too"
        )
    both = [m for m in targets if m in whole or (m.is_tied_output and m.place in places)]
    if both:
        yield (
            f"{_short_names(both)} is both in lora_target_modules and in lora_modules_to_save, which trains it whole; "
            "keep it in one of them"
        )


def _unmatched_saves(saveable: Sequence[Module], lora: LoraConfig) -> Iterator[str]:
    for name in lora.lora_modules_to_save:
        if not any(module.matches(name) for module in saveable):
            names = _short_names(saveable)
            yield f"lora_modules_to_save={name} matches no module of the model; use names among {names}"


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
        weight, rank, short = weight_of(layers, module), _adapter(module, lora).rank, module.short
        rows = sum(weight.pieces[module.first : module.stop]) if weight.dim == 0 else weight.shape[0]
        columns = weight.shape[1]
        if rank > min(rows, columns):
            text = f"rank {rank} of the adapter of {short}, which is [{rows}, {columns}], is above {min(rows, columns)}"
            found.setdefault(short, (min(rows, columns), text))
    if found:
        text = min(found.values())[1]
        others = "" if len(found) == 1 else f" (the smallest of {len(found)} such modules: {', '.join(found)})"
        yield f"{text}, where it saves nothing{others}; lower lora_rank, or give others in lora_rank_pattern"


def unmatched(layers: Sequence[LayerDeclaration], form: TheirNames | None, lora: LoraConfig) -> Iterator[str]:
    """Yield a message for every name that selects nothing beside others that do, and for a part of tied embeddings."""
    if lora.lora_rank is None:
        return
    modules, by_name = modules_of(layers, form), {layer.name: layer for layer in layers}
    _, adaptable = _adaptable(by_name, modules)
    targets = _adapted(by_name, modules, lora.lora_target_modules)
    for name in lora.lora_target_modules:
        if name != ALL_LINEAR and not any(module.matches(name) for module in adaptable):
            yield (
                f"lora_target_modules={name} matches no linear layer or embedding; the model has "
                f"{_short_names(adaptable)}"
            )
    yield from _half_tied(modules, targets)
    for option in ("lora_rank_pattern", "lora_alpha_pattern"):
        yield from _idle_patterns(option, getattr(lora, option), targets)
    yield from _idle_bias(layers, targets, lora)
    yield from _idle_of_embedding(by_name, targets, lora)


def _idle_patterns(option: str, patterns: Sequence[str], targets: Sequence[Module]) -> Iterator[str]:
    applied = {_first_pattern(patterns, module) for module in targets}
    for pattern in patterns:
        if not any(module.matches(pattern.rpartition("=")[0]) for module in targets):
            yield f"{option}={pattern} matches no adapted module; they are {_short_names(targets)}"
        elif pattern not in applied:
            yield (
                f"{option}={pattern} has no effect behind others that match the same modules, as the first that "
                "matches applies; give it before them, or leave it out"
            )


def _idle_bias(layers: Sequence[LayerDeclaration], targets: Iterable[Module], lora: LoraConfig) -> Iterator[str]:
    biased = {
        (layer.name, local.rpartition(".")[0])
        for layer in layers
        for local, shard in layer.shards.items()
        if local.rpartition(".")[2] == "bias" and shard.trained
    }
    owners = "the model has"
    if lora.lora_bias == "lora_only":
        biased &= {module.place for module in targets}
        owners = "the adapted modules have"
    if lora.lora_bias != "none" and not biased:
        yield f"lora_bias={lora.lora_bias} has no effect, as {owners} no biases; leave it out"


def _idle_of_embedding(
    layers: Mapping[str, LayerDeclaration], targets: Sequence[Module], lora: LoraConfig
) -> Iterator[str]:
    """Yield a message for each option that is for the adapter of an embedding, or not for it, where others are."""
    embeddings = [module for module in targets if weight_of(layers, module).vocabulary and not module.is_output]
    default = LoraConfig()
    rate = lora.loraplus_lr_embedding
    # without a ratio neither has an effect, which is reported apart
    if not embeddings and lora.loraplus_lr_ratio != 1 and rate != default.loraplus_lr_embedding:
        yield (
            f"loraplus_lr_embedding={rate} has no effect, as the embedding has no adapter; name it in "
            "lora_target_modules, or leave it out"
        )
    if len(embeddings) < len(targets):
        return
    for name in ("lora_dropout", "lora_init"):
        value = getattr(lora, name)
        if value != getattr(default, name):
            yield f"{name}={value} has no effect on the adapter of an embedding, which alone is adapted; leave it out"


def _half_tied(modules: Sequence[Module], targets: Sequence[Module]) -> Iterator[str]:
    tied = {module.layer for module in modules if module.is_tied_output}
    adapted = [module for module in targets if module.layer in tied]
    if adapted:
        yield (
            f"lora_target_modules={_short_names(adapted)}: embedding and output share a weight, but no adapter, as in "
            "PEFT; to merge the adapter, untie the embeddings of the base first"
        )
