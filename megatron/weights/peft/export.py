"""Adapters of ours as a folder of PEFT: adapter_config.json and adapter_model.safetensors.

Names and shapes are those that PEFT's save_pretrained writes for transformers' model of the base, so that
PeftModel.from_pretrained loads the folder onto it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.models.adapters import Module, modules_of, rank_and_alpha
from megatron.models.family import HuggingFaceForm
from megatron.models.registry import family_of
from megatron.options.config import Config
from megatron.options.extension import EXTENDED
from megatron.options.model import LoraConfig
from megatron.parallel.shards import Shard, declared_shards
from megatron.weights.base_identity import BaseIdentity, recorded_identity, write_identity
from megatron.weights.folder_files import Precision
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface import MappedTensor, NameMap, parts_of, sync_export, write_tensors
from megatron.weights.huggingface_config import OUTPUT, form_of
from megatron.weights.huggingface_files import DTYPES, WeightsWriter, open_safetensors, write_json
from megatron.weights.model import config_of_source, different
from megatron.weights.peft.folder import CONFIG, PREFIX, WEIGHTS
from megatron.weights.tokenizer_files import copy_tokenizer

EXPERT = ".mlp.experts."
START = "lora_start_"
"""Begins the names of what PiSSA keeps of the factors' start (parallel/low_rank.py)."""
FACTORS = {
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "lora_magnitude_vector": "lora_magnitude_vector",
    "lora_embedding_A": "lora_embedding_A",
    "lora_embedding_B": "lora_embedding_B",
    "lora_embedding_magnitude_vector": "lora_magnitude_vector",
}
"""Kinds of an adapter's parameters in our names, and in PEFT's."""


def start_of(factor: str) -> str:
    """Return the name of what PiSSA keeps of a factor's start."""
    return factor.replace("lora_", START)


@dataclass(frozen=True)
class AdaptedModel:
    """A config's model with its adapters, and where each trained tensor is in a folder of PEFT.

    Raises CheckpointError if transformers has no such model.
    """

    config: Config

    @cached_property
    def form(self) -> HuggingFaceForm:
        return form_of(self.config.model)

    @cached_property
    def held(self) -> dict[str, Shard]:
        """Parameters that a checkpoint holds, by name, as full tensors without padding and roles: not the base's."""
        declared = declared_shards(family_of(self.config).layers(self.config))
        held = {name: shard for name, shard in declared.items() if shard.trained or shard.added}
        return {name: Shard(shard.shape, shard.dim, shard.pieces) for name, shard in held.items()}

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """Trained parameters; those of PiSSA with their start beside them, as factors of twice the rank."""
        shards = {name: shard for name, shard in self.held.items() if START not in name}
        for name, (_, kind) in self.factors.items():
            if start_of(name) in self.held:
                rows, columns = shards[name].shape
                # [A; start A] is [2 rank, in], [B, -start B] is [out, 2 rank]
                shape = (2 * rows, columns) if kind == "lora_A" else (rows, 2 * columns)
                shards[name] = Shard(shape, shards[name].dim, shards[name].pieces)
        return shards

    @cached_property
    def modules(self) -> list[Module]:
        """All modules of the model that have a weight."""
        return modules_of(family_of(self.config).declare(self.config), self.form)

    @cached_property
    def factors(self) -> dict[str, tuple[Module, str]]:
        """The adapters' parameters, by name: the module that each belongs to, and its kind, of FACTORS."""
        factors = {}
        for layer in family_of(self.config).layers(self.config):
            for local, shard in layer.shards.items():
                if shard.added and START not in local:
                    factors[layer.full_name(local)] = self._module_and_kind(layer.name, local)
        return factors

    @cached_property
    def _by_place(self) -> dict[tuple[str, str], list[Module]]:
        found: dict[tuple[str, str], list[Module]] = {}
        for module in self.modules:
            found.setdefault(module.place, []).append(module)
        return found

    def _module_and_kind(self, layer: str, parameter: str) -> tuple[Module, str]:
        prefix, _, name = parameter.rpartition(".")
        kind = next(kind for kind in FACTORS if name.startswith(kind))
        modules = self._by_place[layer, prefix]
        if kind.startswith("lora_embedding"):
            modules = [module for module in modules if not module.is_output]
        # a tied embedding is a module, and as the output the one after it
        return [module for module in modules if module.suffix == name.removeprefix(kind)][-1], kind

    @cached_property
    def adapted(self) -> list[Module]:
        """Modules that have an adapter, in the order of the layers."""
        with_adapter = {module.names[-1] for module, _ in self.factors.values()}
        return [module for module in self.modules if module.names[-1] in with_adapter]

    def rank_and_alpha(self, module: Module) -> tuple[int, float]:
        """Return those of a module's adapter in PEFT's folder, where PiSSA's has its start beside it."""
        rank, alpha = rank_and_alpha(module, self.config.lora)
        principal = {self.factors[name][0].names[-1] for name in self.factors if start_of(name) in self.held}
        if module.names[-1] not in principal:
            return rank, alpha
        return _doubled(rank, alpha, self.config.lora)

    @cached_property
    def saved(self) -> list[str]:
        """Modules that are trained whole, by transformers' names; of a tied embedding also the output projection."""
        names = {name.removesuffix(".weight") for name in self.shards if name.endswith(".weight")}
        return [m.names[-1] for m in self.modules if f"{m.layer}.{m.prefix}".rstrip(".") in names]

    @property
    def trains_tied(self) -> bool:
        """Return True if the word embedding is trained, and is the output projection too."""
        return "embedding.word.weight" in self.shards and not self.config.model.untie_embeddings_and_output_weights

    @cached_property
    def map(self) -> NameMap:
        """Tensors of PEFT's folder by our names. The copy of a tied embedding comes last among its parts."""
        return NameMap(self.form, self.shards, {name: tuple(self._parts(name)) for name in self.shards})

    def _parts(self, name: str) -> Iterator[MappedTensor]:
        model, shard = self.config.model, self.shards[name]
        heads = model.num_attention_heads, model.num_kv_heads
        if name in self.factors:
            module, kind = self.factors[name]
            # rows of A are of the rank, those of B and of the magnitudes are outputs of the weight, in its order
            is_by_head = kind != "lora_A" and self.form.qkv_by_head and module.prefix.endswith("attention.qkv")
            theirs = f"{PREFIX}{module.names[-1]}.{FACTORS[kind]}"
            yield MappedTensor(theirs, shard.shape, 0, shard.shape[0], heads=heads if is_by_head else None)
            return
        for part in parts_of(self.form, heads, name, shard):
            theirs = part.name
            bias_of = part.name.removesuffix(".bias")
            if bias_of in self._adapted_names:  # PEFT has an adapted module as the `base_layer` of its own
                theirs = f"{bias_of}.base_layer.bias"
            yield replace(part, name=PREFIX + theirs)
            if self.trains_tied and name == "embedding.word.weight":
                yield replace(part, name=PREFIX + OUTPUT)

    @cached_property
    def _adapted_names(self) -> set[str]:
        return {module.names[-1] for module in self.adapted}


def adapter_config(config: Config, base_name: str | None, revision: str | None = None) -> dict[str, Any]:
    """Return the adapter_config.json of a run's adapters; `base_name` is PEFT's base_model_name_or_path.

    Keys that newer releases of PEFT have added are left to their defaults, so that older ones read the file.
    """
    model, lora = AdaptedModel(config), config.lora
    assert lora.lora_rank is not None
    rank, alpha = lora.lora_rank, lora.lora_alpha or lora.lora_rank
    if lora.lora_init != "default":
        rank, alpha = _doubled(rank, alpha, lora)
    adapted = {module.names[-1]: model.rank_and_alpha(module) for module in model.adapted}
    ranks = {name: rank for name, (rank, _) in adapted.items()}
    alphas = {name: _number(alpha) for name, (_, alpha) in adapted.items()}
    every = {module.names[-1] for module in model.modules}
    content = {
        "auto_mapping": None,
        "base_model_name_or_path": base_name,
        "bias": lora.lora_bias,
        "fan_in_fan_out": model.form.transposed,
        "inference_mode": True,
        # also of PiSSA: with their start beside them the factors belong to the base as it was
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _number(alpha),
        "lora_dropout": lora.lora_dropout,
        # PEFT matches these by the end of the text, targets by whole words
        "modules_to_save": shortest_ends(model.saved, every - set(model.saved), str.endswith) or None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": _pattern(ranks, rank),
        "alpha_pattern": _pattern(alphas, alpha),
        "revision": revision,
        "target_modules": shortest_ends(adapted, every - set(adapted), ends_with),
        "task_type": "CAUSAL_LM",
        "use_dora": lora.use_dora,
        "use_rslora": lora.use_rslora,
    }
    if model.trains_tied:  # a key of newer releases, which older ones need not know of other adapters
        content["ensure_weight_tying"] = True
    return content


def _doubled(rank: int, alpha: float, lora: LoraConfig) -> tuple[int, float]:
    """Return rank and alpha of PiSSA's factors with their start beside them: alpha / rank stays, or / sqrt(rank)."""
    return 2 * rank, alpha * (math.sqrt(2) if lora.use_rslora else 2)


def _number(value: float) -> float:
    """Return whole numbers as integers, as PEFT's own files have them."""
    return int(value) if float(value).is_integer() else value


def ends_with(name: str, end: str) -> bool:
    """Return whether the last words of a module's name are `end`."""
    return name == end or name.endswith(f".{end}")


def shortest_ends(wanted: Iterable[str], others: Iterable[str], matches: Callable[[str, str], bool]) -> list[str]:
    """Return the shortest ends of names, in whole words, that match all that is wanted and none of the others."""
    others = list(others)

    def shortest_end(name: str) -> str:
        words = name.split(".")
        for count in range(1, len(words)):
            end = ".".join(words[-count:])
            # the first end, from the shortest on, by which no other module would be adapted too
            if not any(matches(other, end) for other in others):
                return end
        return name

    return list(dict.fromkeys(map(shortest_end, wanted)))


def _pattern(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Return the values that differ from the default, by ends of the names that have them."""
    pattern: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value != default:
            same = [name for name in values if values[name] == value]
            pattern |= dict.fromkeys(shortest_ends(same, values.keys() - same, ends_with), value)
    return pattern


def check_exportable(config: Config, source: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError if PEFT could not load the adapters of a run onto its base.

    `source`: description of the Hugging Face model that the base comes from, if it does.
    """
    model = AdaptedModel(config)
    _ = model.map  # raises for a model that transformers does not have
    _check_experts(model)
    there = ((source or {}).get("config") or {}).get("vocab_size", config.model.vocab_size)
    if there != config.model.vocab_size:
        raise CheckpointError(
            f"save_hf cannot export adapters for a base of another vocabulary: vocab_size={config.model.vocab_size} "
            f"here, {there} in the base, and PEFT would load them onto that. Pass --save-hf-merged, or add the tokens "
            "to the base first"
        )


def _check_experts(model: AdaptedModel) -> None:
    """Raise CheckpointError unless PEFT can join the adapters of experts as transformers 5 joins their weights."""
    adapted = [module for module in model.adapted if EXPERT in module.names[0]]
    if not adapted:
        return
    options, fault = model.config.model, None
    if model.form.writes_fused:
        fault = f"the files of {model.form.class_name} have no names of single experts"
    elif not all(map(options.has_experts, range(options.num_layers))):
        fault = "layers without experts have an MLP of the same names"
    elif len(adapted) < sum(EXPERT in module.names[0] for module in model.modules):
        fault = "some projections of some experts have none"
    elif len({model.rank_and_alpha(module) for module in adapted}) > 1:
        fault = "they differ in rank or alpha"
    elif model.config.lora.use_dora:
        fault = "DoRA's magnitudes have no place there"
    if fault is not None:
        raise CheckpointError(
            f"PEFT has the adapters of all experts in one tensor, but {fault}: it could not load these. Export with "
            "them merged (--save-hf-merged), or adapt the attention alone"
        )


def export_adapter(
    folder: Path,
    config: Config,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    base_name: str | None,
    identity: BaseIdentity | None = None,
    precision: Precision = "fp32",
    tokenizer: Path | None = None,
) -> list[str]:
    """Write the adapters into an empty folder: weights, adapter_config.json, the base's identity, tokenizer files.

    `tensors` gives each trained parameter once, whole. `precision` is float32 unless given, whatever the run's, so that
    training can go on from the very weights. Returns the names of the tokenizer files. Every file is on disk when this
    returns. Raises CheckpointError if transformers has no such model, a tensor is missing, or does not fit `precision`.
    """
    model = AdaptedModel(config)
    _check_experts(model)
    # B A and start B start A are both large beside what was trained, which is their difference
    if precision != "fp32" and any(START in name for name in model.held):
        raise CheckpointError(
            f"{precision} would round PiSSA's factors, whose difference is what was trained: a small run lost 12 to "
            "15 % of it; write float32, which is the default, or the merged model, with --to hf"
        )
    mapped = model.map
    copied = [] if tokenizer is None else copy_tokenizer(tokenizer, folder, config.model.vocab_size)
    revision = None
    if identity is not None:
        revision = identity.revision
        write_identity(folder, identity.to_json())
    write_json(folder / CONFIG, adapter_config(config, base_name, revision))
    shapes = {part.name: part.shape for parts in mapped.parts.values() for part in parts}
    # in one file: PEFT reads no index of several
    with WeightsWriter(folder, shapes, precision, float("inf"), stem=WEIGHTS) as writer:
        write_tensors(writer, mapped, tensors)
    sync_export(folder)
    return copied


# Checkpoints of adapters


@dataclass(frozen=True)
class NativeAdapter:
    """The trained weights in a checkpoint of adapters, one tensor at a time."""

    checkpoint: Checkpoint
    config: Config
    shards: Mapping[str, Shard]
    """In the order of the layers."""

    @property
    def base_name(self) -> str | None:
        """Name of the base on the hub, or its folder, where it is transformers': what PEFT loads the adapters onto.

        Raises CheckpointError where that has other positions than the adapters: PEFT's format has no place for them.
        """
        # a name on the hub is the same on every machine; a folder is not
        record, identity = self.checkpoint.metadata["base"], self.identity
        if record.get(EXTENDED):
            raise CheckpointError(
                f"{self.checkpoint.folder} holds adapters of an extended context, which PEFT would load onto the base "
                "with that one's positions; write the whole model, with --to hf"
            )
        if identity is not None and identity.name is not None:
            return identity.name
        return record["folder"] if record.get("format") == "huggingface" else None

    @property
    def identity(self) -> BaseIdentity | None:
        """Identity of the base; None in checkpoints from before there was one."""
        return recorded_identity(self.checkpoint)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full float32 tensor), each trained parameter once."""
        for name in self.shards:
            yield name, self.read(name)

    def read(self, name: str) -> Tensor:
        """Return one of them. PiSSA's B A - start B start A is [B, -start B] [A; start A]."""
        tensor = self.checkpoint.read_full(name)
        if tensor.shape == self.shards[name].shape:
            return tensor
        # the shapes differ by PiSSA alone: there is a start, and both lie side by side in the folder
        start = self.checkpoint.read_full(start_of(name))
        is_up = tensor.shape[0] == self.shards[name].shape[0]
        if is_up:
            return torch.cat([tensor, -start], dim=1)
        return torch.cat([tensor, start])


def native_adapter(checkpoint: Checkpoint) -> NativeAdapter:
    """Open the adapters. Raises CheckpointError if the checkpoint does not hold those that its config describes."""
    if checkpoint.metadata.get("base") is None:
        raise CheckpointError(f"{checkpoint.folder} holds a whole model, not adapters; write it as hf")
    config = config_of_source(checkpoint)
    model = AdaptedModel(config)
    if fault := different(checkpoint.parameters, model.held):
        raise CheckpointError(f"{checkpoint.folder} does not hold the adapters that its config describes: {fault}")
    return NativeAdapter(checkpoint, config, model.shards)


def compare_export(folder: Path, source: NativeAdapter, precision: Precision) -> int:
    """Compare every tensor of an export with the checkpoint, bit by bit in `precision`, and return their number.

    Raises CheckpointError that names the first one that differs.
    """
    # read back as a foreign folder is, so that what is compared is what others will read
    mapped = AdaptedModel(source.config).map
    stored = open_safetensors(folder / f"{WEIGHTS}.safetensors", ForeignFiles())
    for name, tensor in source.tensors():
        written = mapped.assemble(name, lambda theirs, begin, end: stored[theirs].rows(begin, end))
        expected = tensor.to(DTYPES[precision]).float()
        # as bytes: NaN equals itself, and minus zero differs from zero
        if not torch.equal(written.view(torch.uint8), expected.view(torch.uint8)):
            raise CheckpointError(f"{name} has other values in the result than in the source; nothing was kept")
    return len(mapped.shards)
