"""A folder of PEFT as what a run of adapters starts from: its options, and its tensors on any layout."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.format import CheckpointError, read_metadata
from megatron.checkpoint.lineage import of_run
from megatron.checkpoint.reader import checkpoint_folders, own_run
from megatron.checkpoint.source import Slice, WeightSource
from megatron.models.adapters import Module, modules_of, weight_of, with_adapters
from megatron.models.registry import family_of
from megatron.options.config import Config, ConfigError
from megatron.options.model import LoraConfig
from megatron.parallel.shards import Shard
from megatron.runtime.commands import command_name
from megatron.weights.folder_files import is_adapter_folder
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface import CHUNK_BYTES, MappedTensor, NameMap, name_map
from megatron.weights.huggingface_config import OUTPUT
from megatron.weights.huggingface_files import StoredTensor, some
from megatron.weights.huggingface_source import MappedSource, check_copy
from megatron.weights.peft.export import AdaptedModel, ends_with, shortest_ends
from megatron.weights.peft.folder import CONFIG, PREFIX, PeftAdapter, open_adapter

TIED = PREFIX + OUTPUT
OF_THE_FILES = (
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
    "lora_modules_to_save",
    "lora_bias",
    "use_rslora",
    "use_dora",
    "lora_init",
    "lora_rank_pattern",
    "lora_alpha_pattern",
)
"""Options that a folder settles; the others are the run's."""


# Options


def with_options_of(config: Config, folder: Path, given: Collection[str]) -> Config:
    """Return the config with the options of the adapters in `folder`.

    `given`: names of the options that the user has given. Raises ConfigError for those that contradict the folder, and
    for adapters of another model.
    """
    if not os.path.lexists(folder):
        return _with_saved_options(config, given)
    if not is_adapter_folder(folder):  # a whole model beside them counts
        return config
    try:
        adapter = open_adapter(folder, ForeignFiles())
        found = _options(adapter, config, given)
    except CheckpointError as error:
        raise ConfigError([str(error)]) from None
    layers, form = family_of(config).declare(config), family_of(config).huggingface_form(config.model)

    def declared(lora: LoraConfig) -> Any:
        lora = replace(lora, lora_dropout=0.0)
        return [(layer.name, layer.shards, layer.methods) for layer in with_adapters(layers, form, lora)]

    expected, wrong = declared(found), []
    for name in (name for name in OF_THE_FILES if name in given):
        value = getattr(config.lora, name)
        try:
            is_same = declared(replace(found, **{name: value})) == expected
        except ValueError:  # a pattern that is none; reported as such
            is_same = True
        if value is not None and not is_same:
            wrong.append(
                f"{name}={_shown(value)} contradicts the adapters in load={folder}, which have "
                f"{_shown(getattr(found, name))}; leave it out, or give theirs"
            )
    if wrong:
        raise ConfigError(wrong)
    return replace(config, lora=found)


def _with_saved_options(config: Config, given: Collection[str]) -> Config:
    """Return the config with the options of the adapters that its own run has saved, if it has."""
    try:
        run = own_run(config.checkpoint)
    except CheckpointError as error:
        raise ConfigError([str(error)]) from None
    if run is None:
        return config
    newest = of_run(run, checkpoint_folders(Path(config.checkpoint.save or "")), with_ancestors=False)[:1]
    metadata = read_metadata(newest[0]) if newest else None
    saved = (metadata or {}).get("config", {}).get("lora", {})
    names = [name for name in (*OF_THE_FILES, "lora_dropout") if name in saved and name not in given]
    return replace(config, lora=replace(config.lora, **{name: saved[name] for name in names}))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "nothing"
    return str(value)


def _options(adapter: PeftAdapter, config: Config, given: Collection[str]) -> LoraConfig:
    family = family_of(config)
    layers = family.declare(config)
    modules = modules_of(layers, family.huggingface_form(config.model))
    names = {module.names[-1]: module for module in modules}
    whole = {name.rpartition(".")[0] for name in adapter.whole if name.endswith(".weight")}
    whole -= adapter.low_rank.keys()  # PEFT saves an adapted embedding beside its adapter
    if strange := sorted({*adapter.low_rank, *whole} - names.keys()):
        raise CheckpointError(
            f"load={adapter.path} holds adapters of {some(strange)}, which the model of the options does not have; "
            "give the options of their base model"
        )
    by_name = {layer.name: layer for layer in layers}
    matrices = [name for name, module in names.items() if len(weight_of(by_name, module).shape) == 2]
    tied = _tied(names)
    if adapter.selection.ties and (joint := sorted(tied & adapter.low_rank.keys())):
        raise CheckpointError(
            f"{adapter.path / CONFIG} has ensure_weight_tying, by which PEFT trains one adapter for the input and the "
            f"output: {', '.join(joint)}. Here they would be trained apart; train new "
            "adapters, or merge these into a base whose embeddings are not tied"
        )
    theirs = name_map(replace(config, lora=LoraConfig())).parts.values()
    adapter.check_complete(matrices, {part.name for parts in theirs for part in parts}, tied)
    ranks = {module: factors.a.shape[0] for module, factors in adapter.low_rank.items()}
    alphas = {module: factors.alpha for module, factors in adapter.low_rank.items()}
    return replace(
        config.lora,
        lora_rank=adapter.rank,
        lora_alpha=float(adapter.alpha),
        lora_dropout=config.lora.lora_dropout if "lora_dropout" in given else adapter.dropout,
        lora_target_modules=tuple(shortest_ends(_in_order(ranks, names), names.keys() - ranks.keys(), ends_with)),
        lora_modules_to_save=tuple(_in_order(_without_tied_output(adapter, whole, names), names)),
        lora_bias=adapter.selection.bias,
        use_rslora=adapter.rslora,
        use_dora=any(factors.magnitude is not None for factors in adapter.low_rank.values()),
        lora_init="default",
        lora_rank_pattern=_patterns(ranks, adapter.rank, names),
        lora_alpha_pattern=_patterns(alphas, adapter.alpha, names),
    )


def _in_order(found: Collection[str], names: Mapping[str, Module]) -> list[str]:
    return [name for name in names if name in found]


def _patterns(values: Mapping[str, float], default: float, names: Mapping[str, Module]) -> tuple[str, ...]:
    """Return NAME=VALUE for the modules whose value is not the default."""
    found: list[str] = []
    for value in dict.fromkeys(values.values()):
        same = [name for name in _in_order(values, names) if values[name] == value]
        ends = shortest_ends(same, values.keys() - set(same), ends_with) if value != default else []
        found += [f"{end}={value}" for end in ends]
    return tuple(found)


def _tied(names: Mapping[str, Module]) -> set[str]:
    """Return the output projection of a tied model, and the embedding that has its weight."""
    outputs = [module.place for module in names.values() if module.is_tied_output]
    return {name for name, module in names.items() if module.place in outputs}


def _without_tied_output(adapter: PeftAdapter, whole: set[str], names: Mapping[str, Module]) -> set[str]:
    """Leave out the output projection of a tied model. Raises CheckpointError if only one of the two is trained."""
    tied = _tied(names)
    trained = whole & tied
    if trained and trained != tied and not adapter.selection.ties:
        raise CheckpointError(
            f"{adapter.path / CONFIG} has modules_to_save {', '.join(trained)} without ensure_weight_tying: PEFT has "
            f"trained it apart from {', '.join(tied - trained)}, which shares its weight in the base. Give a "
            "base whose embedding is not tied to its output"
        )
    return whole - {name for name in tied if names[name].is_tied_output}


# Tensors


class PeftSource(MappedSource):
    """The adapters of a folder of PEFT. Raises CheckpointError if they are not all that `config` has, in its shapes."""

    format, title = "peft", "PEFT"

    def __init__(self, folder: Path, config: Config) -> None:
        files = ForeignFiles()
        adapter, model = open_adapter(folder, files), AdaptedModel(config)
        self.base = adapter.base
        stored, self._copies = _by_key(adapter), _copies(adapter, model)
        mapped = NameMap(model.form, model.shards, {name: _parts(model, name) for name in model.shards})
        wanted = {part.name: part.shape for parts in mapped.parts.values() for part in parts}
        if model.trains_tied and TIED in stored:
            (embedding,) = mapped.parts["embedding.word.weight"]
            if embedding.name in stored:
                check_copy(stored.pop(TIED), stored[embedding.name])
        faults = [
            f"{what} {some(sorted(names))}"
            for what, names in (("it lacks", wanted.keys() - stored), ("it also holds", stored.keys() - wanted))
            if names
        ]
        faults += [
            f"{key} is {list(stored[key].shape)}, the model makes it {list(shape)}"
            for key, shape in wanted.items()
            if key in stored and stored[key].shape != shape
        ][:1]
        if faults:
            raise CheckpointError(
                f"{folder} does not hold the adapters that its {CONFIG} describes for this model: {'; '.join(faults)}. "
                "Copy the whole folder again, or give the options of its base"
            )
        super().__init__(folder, mapped, stored, files, config=config)

    def check_base(self, base: WeightSource) -> None:
        """Raise CheckpointError unless the base has the embeddings that PEFT saved with their adapters."""
        for name, copy in self._copies:
            rows, columns = copy.shape
            step = max(1, CHUNK_BYTES // (4 * columns))
            for begin in range(0, rows, step):
                count = min(step, rows - begin)
                at = Slice(name, Shard(copy.shape, 0, (rows,)), begin * columns, count * columns)
                values = base.read(at).to(copy.dtype).view(count, columns)
                if not torch.equal(values, copy.rows(begin, begin + count)):
                    raise CheckpointError(
                        f"{self.folder} holds another {name} than its base, which it was saved with; give its own base "
                        "as --lora-base"
                    )


def _parts(model: AdaptedModel, name: str) -> tuple[MappedTensor, ...]:
    """Return the tensors that make a parameter, the first of two copies, by the keys of `_by_key`."""
    parts = [replace(part, name=part.name.replace(".base_layer.", ".")) for part in model.map.parts[name]]
    return tuple(part for part in parts if part.name != TIED or name == "output.weight")


def _by_key(adapter: PeftAdapter) -> dict[str, StoredTensor]:
    """Return the trained tensors of a folder by their keys, without `base_layer`."""
    found: dict[str, StoredTensor] = {}
    for module, factors in adapter.low_rank.items():
        if factors.bias is not None:
            raise CheckpointError(f"{adapter.path / CONFIG} has lora_bias, which is merged but not trained here")
        if factors.starts_from_svd:
            raise CheckpointError(
                f"{adapter.path / CONFIG} has init_lora_weights: pissa, which is for a base that PEFT has changed. "
                "Save it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), or merge it with "
                f"{command_name('merge_adapter')}"
            )
        if factors.magnitude is not None:
            found[f"{PREFIX}{module}.lora_magnitude_vector"] = factors.magnitude
        kinds = ("lora_embedding_A", "lora_embedding_B") if factors.of_embedding else ("lora_A.weight", "lora_B.weight")
        found |= dict(zip((f"{PREFIX}{module}.{kind}" for kind in kinds), (factors.a, factors.b), strict=True))
    whole = {name: tensor for name, tensor in adapter.whole.items() if not _is_copy(adapter, name)}
    return found | {PREFIX + name: tensor for name, tensor in whole.items()}


def _is_copy(adapter: PeftAdapter, name: str) -> bool:
    """Return True for the frozen weight of an adapted embedding, which PEFT saves too."""
    return name.endswith(".weight") and name.removesuffix(".weight") in adapter.low_rank


def _copies(adapter: PeftAdapter, model: AdaptedModel) -> list[tuple[str, StoredTensor]]:
    """Return the frozen weights that are in the folder, each with our name."""
    names = {f"{module.names[-1]}.weight": ".".join(filter(None, module.place)) for module in model.modules}
    return [(f"{names[n]}.weight", tensor) for n, tensor in adapter.whole.items() if _is_copy(adapter, n)]
