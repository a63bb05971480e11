"""Adapter folders of PEFT: adapter_config.json, and the tensors of adapter_model.safetensors or .bin.

LoRA alone is read. Whatever in the config changes what an adapter computes, and is not understood here, is refused by
name. Nothing is executed, and every tensor of the file is accounted for.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import MANIFEST, CheckpointError
from megatron.runtime.commands import command_name
from megatron.weights.folder_files import ADAPTER_CONFIG as CONFIG
from megatron.weights.folder_files import own_file, read_json
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface_config import shown
from megatron.weights.huggingface_files import StoredTensor, open_bin, open_safetensors, some
from megatron.weights.peft.selection import INPUTS, OUTPUTS, Selection

WEIGHTS = "adapter_model"
COPY_AGAIN = "copy the folder again"
PREFIX = "base_model.model."
"""PeftModel.base_model.model is the model that the adapter belongs to."""

# what changes nothing that a trained adapter computes, or follows from its tensors
_HARMLESS = {
    "auto_mapping", "corda_config", "eva_config", "inference_mode", "loftq_config",
    "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "runtime_config", "task_type",
}  # fmt: skip
_UNCHANGED_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base's weights as they are."""
_PISSA = "pissa"
"""Takes the largest singular values out of the base's weights: the same again, for the same base."""


@dataclass(frozen=True)
class PeftFactors:
    """The two factors of one module's update, `alpha / divisor * B @ A`, and the update of its bias, if it has one."""

    a: StoredTensor
    """(rank, in_features), of an embedding (rank, vocabulary)."""
    b: StoredTensor
    """(out_features, rank), of an embedding (hidden, rank)."""
    alpha: float
    divisor: float
    """The rank; its square root with rsLoRA."""
    of_embedding: bool
    bias: StoredTensor | None
    magnitude: StoredTensor | None = None
    """DoRA: length of each row of the adapted weight, (out_features), of an embedding (hidden)."""
    starts_from_svd: bool = False
    """PiSSA: B @ A began as the largest singular values of the base's weight, which were taken out of it."""

    def scaling(self, weight: float) -> float:
        """Return the factor of `B @ A`, rounded as PEFT's `set_scale(adapter, weight)` rounds it."""
        return weight * self.alpha / self.divisor


@dataclass(frozen=True)
class BaseName:
    """Name of the base in adapter_config.json."""

    name: str | None
    """base_model_name_or_path: a folder, or a name on the hub."""
    revision: str | None


@dataclass
class PeftAdapter:
    """One adapter. Modules and tensors have the names that transformers' model gives them."""

    path: Path
    base: BaseName
    selection: Selection
    fan_in_fan_out: bool
    dropout: float
    rank: int
    alpha: float
    rslora: bool
    low_rank: dict[str, PeftFactors] = field(default_factory=dict)
    """By module."""
    whole: dict[str, StoredTensor] = field(default_factory=dict)
    """By tensor: those of modules_to_save, trained biases, and embeddings that PEFT saves beside an adapter."""

    def check_complete(
        self, matrices: Collection[str], names: Collection[str], tied: Collection[str] = (), *, lora_only: bool = True
    ) -> None:
        """Raise CheckpointError unless the tensors are those that PEFT trains by this config, no more and no less.

        Args:
            matrices: Modules of the base whose weight is a matrix.
            names: Tensors of the base.
            tied: Embedding and output, where they share their weight.
            lora_only: Whether biases of adapted modules must be there too, which releases of PEFT have left out.
        """
        selection = self.selection
        adapted = selection.adapted(matrices, tied)
        saved = selection.whole({_module(name) for name in names}, tied)
        whole = {name for name in names if _module(name) in saved}
        biases = selection.biases(names, adapted)
        needed = whole
        if lora_only or selection.bias == "all":
            needed = whole | biases
        missing = (adapted - self.low_rank.keys()) | (needed - self.whole.keys())
        if missing:
            raise CheckpointError(f"{self.path} lacks {some(sorted(missing))}, which its {CONFIG} names; {COPY_AGAIN}")
        # PEFT saves embeddings also frozen, beside an adapter or with tokens added
        surplus = {name for name in self.whole.keys() - whole - biases if not _is_of_vocabulary(_module(name))}
        surplus_adapters = self.low_rank.keys() - adapted
        if selection.ties:  # onto a base that is not tied
            surplus_adapters = {module for module in surplus_adapters if not _is_of_vocabulary(module)}
        surplus |= surplus_adapters
        if surplus:
            raise CheckpointError(
                f"{self.path} holds {some(sorted(surplus))}, which its {CONFIG} does not name; {COPY_AGAIN}"
            )


def _module(tensor: str) -> str:
    """Return the module that a tensor belongs to."""
    return tensor.rpartition(".")[0]


def _is_of_vocabulary(module: str) -> bool:
    return module.rpartition(".")[2] in INPUTS + OUTPUTS


class _Fields:
    """Values of adapter_config.json. Raises CheckpointError for a value of another type."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._left = read_json(path)

    # `type`, not isinstance: True is an int to Python, but no rank
    def take(self, name: str, default: Any, *kinds: type) -> Any:
        value = self._left.pop(name, None)
        if value is None:  # PEFT writes null for many defaults
            value = default
        if type(value) not in (*kinds, type(default)):
            raise CheckpointError(f"{self.path} has {name}: {shown(value)}, of another type than PEFT's; copy it again")
        return value

    def take_names(self, name: str, *kinds: type) -> Any:
        value = self.take(name, [], *kinds)
        if isinstance(value, list) and not all(isinstance(entry, str) and entry for entry in value):
            raise CheckpointError(f"{self.path} has {name}: {shown(value)}; it must be a list of module names")
        if isinstance(value, str):
            _check_pattern(self.path, name, value)
        return value

    def take_numbers(self, name: str, *kinds: type) -> dict[str, Any]:
        value: dict[str, Any] = self.take(name, {})
        for pattern, number in value.items():
            _check_pattern(self.path, name, pattern)
            if type(number) not in kinds or not 0 < number < math.inf:
                raise CheckpointError(f"{self.path} has {name} {pattern}: {shown(number)}; it must be a number above 0")
        return value

    def refuse_others(self) -> None:
        """Raise CheckpointError for every field that is set and not understood."""
        others = [
            f"{name}: {shown(value)}"
            for name, value in sorted(self._left.items())
            # newer releases write fields that are off, which change nothing
            if name not in _HARMLESS and value not in (None, False, "", [], {})
        ]
        if others:
            raise CheckpointError(
                f"{self.path} has {'; '.join(others)}: features of PEFT that are not read here. Merge such an adapter "
                "with PEFT's merge_and_unload"
            )


def _check_pattern(path: Path, name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"{path} has {name} {shown(pattern)}, which is not a regular expression: {error}"
        ) from None


def open_adapter(folder: Path, files: ForeignFiles) -> PeftAdapter:
    """Read an adapter's config and open its tensors.

    Raises CheckpointError for a config that is not LoRA's or has features that are not read, for damaged files, and for
    tensors that lack their counterpart or have another rank than the config says.
    """
    if not folder.is_dir():
        raise CheckpointError(f"adapter {folder} is not a folder; give one that holds {CONFIG}: download it first")
    if not os.path.lexists(folder / CONFIG) and any((*folder.glob(MANIFEST), *folder.glob(f"*/{MANIFEST}"))):
        raise CheckpointError(
            f"adapter {folder} is a checkpoint of a run, not in PEFT's format; convert it first: "
            f"{command_name('convert_checkpoint')} --load {folder} --to peft --save FOLDER"
        )
    fields = _Fields(own_file(folder, CONFIG))
    kind = fields.take("peft_type", "", str)
    if kind != "LORA":
        raise CheckpointError(f"{fields.path} has peft_type: {shown(kind)}; only LORA is read")
    start = fields.take("init_lora_weights", True, bool, str)
    if start not in (*_UNCHANGED_BASE, _PISSA):
        raise CheckpointError(
            f"{fields.path} has init_lora_weights: {shown(start)}, which changes the base's weights at the start, in a "
            "way that cannot be repeated. Save the adapter with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...), which undoes that"
        )
    scales = _Scales(fields)
    adapter = PeftAdapter(
        path=folder,
        base=BaseName(fields.take("base_model_name_or_path", "") or None, fields.take("revision", "") or None),
        selection=_selection(fields),
        fan_in_fan_out=fields.take("fan_in_fan_out", False),
        dropout=_dropout(fields),
        rank=scales.default_rank,
        alpha=scales.default_alpha,
        rslora=scales.rslora,
    )
    # what is left in `fields` after the last `take` is not understood
    form = _Form(fields.take("lora_bias", False), fields.take("use_dora", False), start == _PISSA)
    fields.refuse_others()
    _sort_tensors(adapter, _tensors(folder, files), scales, form)
    return adapter


def _selection(fields: _Fields) -> Selection:
    """Return what selects the trained modules. Raises CheckpointError for what PEFT refuses too."""
    layers = fields.take("layers_to_transform", [], int)
    if isinstance(layers, int):
        layers = [layers]
    patterns = fields.take_names("layers_pattern", str)
    if isinstance(patterns, str):
        patterns = [patterns]
    selection = Selection(
        targets=fields.take_names("target_modules", str),
        excluded=fields.take_names("exclude_modules", str),
        saved=fields.take_names("modules_to_save"),
        layers=layers,
        layers_patterns=patterns,
        bias=fields.take("bias", "none"),
        ties=fields.take("ensure_weight_tying", False),
    )
    for name in (*selection.saved, *selection.layers_patterns):
        _check_pattern(fields.path, "modules_to_save or layers_pattern", name)
    if not all(type(number) is int for number in layers):
        raise CheckpointError(f"{fields.path} has layers_to_transform: {shown(layers)}; it must be numbers of layers")
    if layers and isinstance(selection.targets, str):
        raise CheckpointError(
            f"{fields.path} has layers_to_transform beside target_modules as one text, which PEFT refuses; list the "
            "names of the modules"
        )
    if selection.bias not in ("none", "all", "lora_only"):
        raise CheckpointError(f"{fields.path} has bias: {shown(selection.bias)}; it must be none, all or lora_only")
    return selection


def _dropout(fields: _Fields) -> float:
    dropout = float(fields.take("lora_dropout", 0.0, int))
    if not 0 <= dropout < 1:
        raise CheckpointError(f"{fields.path} has lora_dropout: {dropout}; it must be at least 0 and below 1")
    return dropout


def _tensors(folder: Path, files: ForeignFiles) -> dict[str, StoredTensor]:
    for suffix, opened in ((".safetensors", open_safetensors), (".bin", open_bin)):  # PEFT's order
        if os.path.lexists(folder / f"{WEIGHTS}{suffix}"):
            return opened(own_file(folder, f"{WEIGHTS}{suffix}"), files)
    raise CheckpointError(f"{folder} holds neither {WEIGHTS}.safetensors nor {WEIGHTS}.bin; copy the whole folder")


class _Scales:
    """Rank and alpha of each module."""

    def __init__(self, fields: _Fields) -> None:
        # 8 and 8 are LoraConfig's defaults, for files without the fields
        self.default_rank = fields.take("r", 8)
        self.default_alpha = fields.take("lora_alpha", 8, float)
        if self.default_rank < 1 or not 0 < self.default_alpha < math.inf:
            raise CheckpointError(
                f"{fields.path} has r: {self.default_rank}, lora_alpha: {self.default_alpha}; r must be at least 1, "
                "lora_alpha finite and above 0"
            )
        self._ranks = fields.take_numbers("rank_pattern", int)
        self._alphas = fields.take_numbers("alpha_pattern", int, float)
        self.rslora = fields.take("use_rslora", False)

    def rank(self, module: str) -> int:
        return int(_first_match(self._ranks, module, self.default_rank))

    def alpha(self, module: str) -> float:
        alpha: float = _first_match(self._alphas, module, self.default_alpha)  # an integer stays one, as in PEFT
        return alpha

    def divisor(self, module: str) -> float:
        return math.sqrt(self.rank(module)) if self.rslora else self.rank(module)


def _first_match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    # the first that matches, by PEFT's get_pattern_key: the order of the file counts
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


@dataclass(frozen=True)
class _Form:
    """Options of an adapter on which its tensors depend."""

    lora_bias: bool
    use_dora: bool
    starts_from_svd: bool


_FACTORS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "embedding A",
    ".lora_embedding_B": "embedding B",
    ".lora_B.bias": "bias",
    ".lora_magnitude_vector": "magnitude",
}


def _sort_tensors(adapter: PeftAdapter, tensors: Mapping[str, StoredTensor], scales: _Scales, form: _Form) -> None:
    """Fill the adapter's `low_rank` and `whole`. Raises CheckpointError for a tensor that belongs to neither."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        # where bias is all, PEFT saves the biases of a module trained whole three times: frozen, and under two names
        if ".original_module." in name or re.search(r"\.modules_to_save\.[^.]+\..*\.bias$", name):
            continue
        ending = next((ending for ending in _FACTORS if name.endswith(ending)), "")
        module = name.removesuffix(ending)
        if name == key or "lora_" in module:
            # a key without PEFT's prefix, or of another kind of adapter, is not passed over
            unknown.append(key)
        elif ending:
            modules.setdefault(module, {})[_FACTORS[ending]] = tensor
        else:
            module, _, kind = name.rpartition(".")
            # PEFT wraps modules: an adapted one is the wrapper's `base_layer`, a trained copy its `modules_to_save`
            module = module.removesuffix(".base_layer").removesuffix(".modules_to_save")
            adapter.whole[f"{module}.{kind}"] = tensor
    if unknown:
        raise CheckpointError(f"{adapter.path} holds {some(sorted(unknown))}, which are not tensors of a LoRA adapter")
    if not modules and not adapter.whole:
        raise CheckpointError(f"{adapter.path} holds no tensors; save the adapter again")
    for module, factors in modules.items():
        adapter.low_rank[module] = _low_rank(adapter.path, module, factors, scales, form)


def _low_rank(
    path: Path, module: str, factors: Mapping[str, StoredTensor], scales: _Scales, form: _Form
) -> PeftFactors:
    of_embedding = "embedding A" in factors or "embedding B" in factors
    names = ["embedding A", "embedding B"] if of_embedding else ["A", "B"]
    wanted = set(names)
    if form.lora_bias and not of_embedding:
        wanted.add("bias")
    if form.use_dora:
        wanted.add("magnitude")
    # no more than wanted either: a magnitude without use_dora would be left out in silence
    if set(factors) != wanted:
        raise CheckpointError(
            f"{path} holds {', '.join(sorted(factors))} of {module}; it must be {', '.join(sorted(wanted))}"
        )
    a, b = (factors[name] for name in names)
    rank = scales.rank(module)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"{path} holds A {list(a.shape)} and B {list(b.shape)} of {module}, but {CONFIG} gives it rank {rank}: A "
            f"must have {rank} rows, and B {rank} columns; copy both files from one place"
        )
    magnitude = factors.get("magnitude")
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        raise CheckpointError(
            f"{path} holds the magnitudes of {module} as {list(magnitude.shape)}; it must be {list(b.shape[:1])}, one "
            "for each row of B"
        )
    return PeftFactors(
        a,
        b,
        scales.alpha(module),
        scales.divisor(module),
        of_embedding,
        factors.get("bias"),
        magnitude,
        # PiSSA too starts an embedding's adapter at zero
        starts_from_svd=form.starts_from_svd and not of_embedding,
    )
