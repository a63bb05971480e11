"""Options of a run that the adapters in a folder of PEFT settle: rank, scale, and the modules that are trained."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import checkpoint_folders, of_run, read_metadata
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import own_run
from megatron.models.adapters import Module, modules_of, weight_of, with_adapters
from megatron.models.registry import family_of
from megatron.options.config import Config, ConfigError
from megatron.options.model import LoraConfig
from megatron.weights.folder_files import is_adapter_folder
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface import name_map
from megatron.weights.huggingface_files import some
from megatron.weights.peft.export import ends_with, shortest_ends
from megatron.weights.peft.folder import CONFIG, PeftAdapter, open_adapter

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
        trained = _TrainedModules(adapter, config)
        trained.check()
        lora = trained.options()
    except CheckpointError as error:
        raise ConfigError([str(error)]) from None
    # not of the folder: it does not change what the adapters compute, so another one may be chosen
    if "lora_dropout" in given:
        lora = replace(lora, lora_dropout=config.lora.lora_dropout)
    faults = _contradictions(config, lora, folder, [name for name in OF_THE_FILES if name in given])
    if faults:
        raise ConfigError(faults)
    return replace(config, lora=lora)


def _contradictions(config: Config, lora: LoraConfig, folder: Path, given: Iterable[str]) -> list[str]:
    """Return a fault for each given option by which other adapters would be declared than by the folder's.

    Declarations are compared, not texts: many lists of names and patterns select the same modules.
    """
    layers, form = family_of(config).declare(config), family_of(config).huggingface_form(config.model)

    def declared(options: LoraConfig) -> Any:
        # the methods hold it too, but another one contradicts nothing
        options = replace(options, lora_dropout=0.0)
        return [(layer.name, layer.shards, layer.methods) for layer in with_adapters(layers, form, options)]

    expected = declared(lora)
    faults = []
    for name in given:
        value = getattr(config.lora, name)
        if value is None:
            continue
        try:
            is_same = declared(replace(lora, **{name: value})) == expected
        except ValueError:  # a pattern that is none; reported as such
            continue
        if not is_same:
            faults.append(
                f"{name}={_shown(value)} contradicts the adapters in load={folder}, which have "
                f"{_shown(getattr(lora, name))}; leave it out, or give theirs"
            )
    return faults


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "nothing"
    return str(value)


def _with_saved_options(config: Config, given: Collection[str]) -> Config:
    """Return the config with the options of the adapters that its own run has saved, if it has."""
    try:
        run = own_run(config.checkpoint)
    except CheckpointError as error:
        raise ConfigError([str(error)]) from None
    if run is None:
        return config
    # the newest first; an ancestor may have had other adapters
    own = of_run(run, checkpoint_folders(Path(config.checkpoint.save or "")), with_ancestors=False)
    metadata = read_metadata(own[0]) if own else None
    saved = (metadata or {}).get("config", {}).get("lora", {})
    settled = {name: saved[name] for name in (*OF_THE_FILES, "lora_dropout") if name in saved.keys() - given}
    return replace(config, lora=replace(config.lora, **settled))


class _TrainedModules:
    """Modules that a folder's adapters train, as those of the model that the options describe.

    Modules have transformers' names. Raises CheckpointError for one that the model does not have.
    """

    def __init__(self, adapter: PeftAdapter, config: Config) -> None:
        self._adapter, self._config = adapter, config
        family = family_of(config)
        self._layers = family.declare(config)
        modules = modules_of(self._layers, family.huggingface_form(config.model))
        self._modules: Mapping[str, Module] = {module.names[-1]: module for module in modules}
        """All modules that have a weight, in the order of the layers."""
        # by the tensors: r and rank_pattern were compared with these as the folder was opened
        self._ranks = {name: factors.a.shape[0] for name, factors in adapter.low_rank.items()}
        weights = {name.rpartition(".")[0] for name in adapter.whole if name.endswith(".weight")}
        # PEFT saves an adapted embedding beside its adapter
        self._whole = weights - self._ranks.keys()
        unknown = sorted({*self._ranks, *self._whole} - self._modules.keys())
        if unknown:
            raise CheckpointError(
                f"load={adapter.path} holds adapters of {some(unknown)}, which the model of the options does not have; "
                "give the options of their base model"
            )
        outputs = [module.place for module in modules if module.is_tied_output]
        self._tied = {name for name, module in self._modules.items() if module.place in outputs}
        """The output projection of a tied model, and the embedding that has its weight."""

    def check(self) -> None:
        """Raise CheckpointError for adapters that are incomplete, or would be trained otherwise here than by PEFT."""
        adapter, tied = self._adapter, self._tied
        joint = sorted(tied & self._ranks.keys())
        if adapter.selection.ties and joint:
            raise CheckpointError(
                f"{adapter.path / CONFIG} has ensure_weight_tying, by which PEFT trains one adapter for the input and "
                f"the output: {', '.join(joint)}. Here they would be trained apart; train new adapters, or merge these "
                "into a base whose embeddings are not tied"
            )
        by_name = {layer.name: layer for layer in self._layers}
        matrices = [name for name, module in self._modules.items() if len(weight_of(by_name, module).shape) == 2]
        # by the names of transformers' model, which PEFT trains
        theirs = name_map(replace(self._config, lora=LoraConfig())).parts.values()
        adapter.check_complete(matrices, {part.name for parts in theirs for part in parts}, tied)
        trained = self._whole & tied
        if trained and trained != tied and not adapter.selection.ties:
            raise CheckpointError(
                f"{adapter.path / CONFIG} has modules_to_save {', '.join(trained)} without ensure_weight_tying: PEFT "
                f"has trained it apart from {', '.join(tied - trained)}, which shares its weight in the base. Give a "
                "base whose embedding is not tied to its output"
            )

    def options(self) -> LoraConfig:
        adapter = self._adapter
        adapted = self._in_order(self._ranks)
        others = self._modules.keys() - self._ranks.keys()
        # a tied output is trained as the embedding, whose weight it has
        whole = [name for name in self._in_order(self._whole) if not self._modules[name].is_tied_output]
        alphas = {name: factors.alpha for name, factors in adapter.low_rank.items()}
        return replace(
            self._config.lora,
            lora_rank=adapter.rank,
            lora_alpha=float(adapter.alpha),
            lora_dropout=adapter.dropout,
            lora_target_modules=tuple(shortest_ends(adapted, others, ends_with)),
            lora_modules_to_save=tuple(whole),
            lora_bias=adapter.selection.bias,
            use_rslora=adapter.rslora,
            use_dora=any(factors.magnitude is not None for factors in adapter.low_rank.values()),
            lora_init="default",  # its factors are read: nothing is drawn, or taken from the base
            lora_rank_pattern=self._patterns(self._ranks, adapter.rank),
            lora_alpha_pattern=self._patterns(alphas, adapter.alpha),
        )

    def _in_order(self, names: Collection[str]) -> list[str]:
        return [name for name in self._modules if name in names]

    def _patterns(self, values: Mapping[str, float], default: float) -> tuple[str, ...]:
        """Return NAME=VALUE for the modules whose value is not the default."""
        patterns: list[str] = []
        for value in dict.fromkeys(values.values()):
            if value != default:
                same = [name for name in self._in_order(values) if values[name] == value]
                ends = shortest_ends(same, values.keys() - set(same), ends_with)
                patterns += [f"{end}={value}" for end in ends]
        return tuple(patterns)
