"""A model family: one record that holds all that is particular to it. Importable without torch.

A family is a file in families/ with a record `FAMILY`, or a user's own as `--architecture package.module:RECORD`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron.models import adapters
from megatron.options.config import Config, ConfigError, ModelConfig
from megatron.parallel.costs import MatrixProduct
from megatron.parallel.layout import Layout, LayoutError
from megatron.parallel.operators.fp8_weights import size_faults
from megatron.parallel.operators.nf4_layout import cut_fault
from megatron.parallel.shards import LayerDeclaration, declared_shards


class ConfigFields(Protocol):
    """A Hugging Face config.json while it is read: weights/huggingface_config.py."""

    where: Path | str

    def take(self, *names: str, default: Any = ..., kind: type | None = None) -> Any:
        """Return the value under the first of these names that is there; without a default one must be.

        `kind`: int, float (any number), bool or str, which the value must be. None: that of the default, else int.
        """

    def has(self, name: str) -> bool:
        """Return True if the key is there, null or not."""

    def texts(self, name: str) -> list[str]:
        """Return the list of texts under a name; an empty one where it is missing or null."""

    def integers(self, name: str) -> list[int]:
        """Return the list of integers under a name; an empty one where it is missing or null."""

    def numbers(self, name: str) -> list[float]:
        """Return the list of numbers under a name, which must be there."""

    def demand(self, name: str, *allowed: Any) -> None:
        """Refuse other values than these; a missing one is transformers' default, the first of them."""

    def nested(self, *names: str, apart_from: str = "") -> ConfigFields:
        """Return the fields of the mapping under the first of these names. Others may differ in one key alone."""

    def refuse(self, fault: str) -> None:
        """Refuse a value, with the reason."""

    def finish(self) -> None:
        """Raise CheckpointError with every refused value."""


_NUMBER = re.compile(r"(^layers\.|\.experts\.)(\d+)(?=\.)")
"""Number of a layer or an expert in the name of a module."""


def _starred(module: str) -> tuple[str, list[str]]:
    """Return a module's name with `*` for the numbers of its layer and its expert, and the numbers."""
    return _NUMBER.sub(r"\1*", module), [number for _, number in _NUMBER.findall(module)]


def _numbered(name: str, numbers: Iterable[str]) -> str:
    for number in numbers:
        name = name.replace("*", number, 1)
    return name


@dataclass(frozen=True)
class HuggingFaceForm:
    """One of transformers' classes: its modules' names, the order of its matrices, its config.json."""

    model_type: str
    class_name: str
    prefix: str
    """Prefix of every name but the output projection's; folders saved from the bare model lack it."""
    modules: Mapping[str, tuple[str, ...]]
    """Their module, or those that are the pieces of ours, in order, by our module; `*` is the number of a layer, then
    that of an expert."""
    options: Callable[[ConfigFields], tuple[dict[str, Any], Any]]
    """Our model's options and longest sequence, read from their config.json."""
    config_fields: Callable[[Config], dict[str, Any]]
    """Their config.json's fields for our model, beside those that all forms have."""
    unsupported: Callable[[ModelConfig], list[str]]
    """Options of our model that this form cannot express, as `name=value`; those of PARTICULAR need not be named."""
    expresses: frozenset[str] = frozenset()
    """Those of PARTICULAR (options/model.py) that it can."""
    output: str = "lm_head.weight"
    """Name of the output projection's weight in files."""
    published_code: Mapping[str, str] | None = None
    """Entries of `auto_map` in published folders, whose code became transformers' class; other code is refused."""
    transposed: bool = False
    """Matrices of the layers are [in, out] (GPT-2's Conv1D)."""
    qkv_by_head: bool = False
    """Rows of the fused projection are [key/value head][its q, k, v][head size]; ours [q, k, v][head][head size]."""
    buffers: str = r"(?!)"
    """Constants that old files hold among the weights: a regular expression of their names."""
    fused_experts: Mapping[str, str] = field(default_factory=dict)
    """Tensors [experts, rows, columns] that hold a module of every expert, by our module, instead of `modules`."""
    writes_fused: bool = False
    """Written so too: the names of `modules` are in no file."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Other names of the same tensors in files: what replaces the first match, by regular expression."""

    def their_modules(self, ours: str) -> tuple[str, ...]:
        """Return the full names of the modules that make `layers.3.mlp.experts.1.down`; (): there are none."""
        pattern, numbers = _starred(ours)
        return tuple(_numbered(self.prefix + name, numbers) for name in self.modules.get(pattern, ()))

    def fused_name(self, ours: str) -> str | None:
        """Return the full name of the tensor that holds this module of every expert."""
        pattern, numbers = _starred(ours)
        name = self.fused_experts.get(pattern)
        return None if name is None else _numbered(self.prefix + name, numbers)

    def full_name(self, name: str) -> str:
        """Return a name of a file as `modules` and `fused_experts` have it; files may shorten it."""
        full = name if name == self.output or name.startswith(self.prefix) else self.prefix + name
        for pattern, replacement in self.renamed.items():
            full = re.sub(pattern, replacement, full, count=1)
        return full

    def cannot_express(self, model: ModelConfig) -> list[str]:
        """Return every option of our model that this form cannot express, as `name=value`."""
        others = model.particular().items()
        return self.unsupported(model) + [f"{name}={value}" for name, value in others if name not in self.expresses]


@dataclass(frozen=True)
class Family:
    """All that is particular to a model family; the rest of the project queries this record."""

    declare: Callable[[Config], list[LayerDeclaration]]
    """The model's layers, in order, the last of them the output projection."""
    huggingface: Mapping[str, HuggingFaceForm] = field(default_factory=dict)
    """The family's forms in transformers, by `position_embedding_type`; under "" that of all others."""
    rules: Callable[[Config], Iterable[str]] = lambda config: ()
    """Faults of a config that this family refuses."""

    def layers(self, config: Config) -> list[LayerDeclaration]:
        """Return the declared layers, with adapters and what `freeze` and `quantize_base` say of their parameters.

        Raises ConfigError where the options name nothing of the model.
        """
        layers, patterns, lora = self.declare(config), config.model.freeze, config.lora
        _check_costs(layers)
        multiplier = config.model.width_multiplier
        if multiplier != 1.0:
            layers = [_narrower_start(layer, multiplier) for layer in layers]
        faults = list(_unmatched(patterns, list(declared_shards(layers))))
        if faults := [*faults, *self._adapter_faults(layers, config)]:
            raise ConfigError(faults)
        if lora.lora_rank is not None:
            layers = adapters.with_adapters(layers, self.huggingface_form(config.model), lora)
        elif patterns:
            layers = [_frozen(layer, patterns) for layer in layers]
        if config.model.quantize_base == "none":
            return layers
        return [_quantized(layer, trains=not config.training.skip_train) for layer in layers]

    def faults(self, config: Config) -> Iterator[str]:
        """Yield every fault of a config that concerns the family: its rules, `freeze`, and adapters."""
        yield from self.rules(config)
        layers = self.declare(config)
        yield from self._adapter_faults(layers, config)
        names = list(declared_shards(layers))
        yield from _unmatched(config.model.freeze, names)
        if names and all(_matches(name, config.model.freeze) for name in names):
            yield f"freeze={' '.join(config.model.freeze)} matches every parameter; leave some to train"
        if config.optimizer.qk_clip:
            yield from _clip_faults(config, layers)
        if config.model.quantize_base != "none":
            with contextlib.suppress(ConfigError):  # of `freeze`, reported above
                yield from _quantization_faults(config, self.layers(config))
        # Gaudi's engine has rules of its own
        if config.fp8.uses_fp8 and config.fp8_recipe != "delayed":
            with contextlib.suppress(LayoutError):  # of sizes that cannot be cut, reported above
                yield from size_faults(layers, config, Layout.of(config.parallel))

    def idle(self, config: Config) -> Iterator[str]:
        """Yield a message for every name in the options of adapters that selects nothing."""
        yield from adapters.unmatched(self.declare(config), self.huggingface_form(config.model), config.lora)

    def _adapter_faults(self, layers: Sequence[LayerDeclaration], config: Config) -> Iterator[str]:
        return adapters.faults(layers, self.huggingface_form(config.model), config)

    def huggingface_form(self, model: ModelConfig) -> HuggingFaceForm | None:
        """Return the form nearest to this model; None: the family has none."""
        return self.huggingface.get(model.position_embedding_type) or self.huggingface.get("")


def _check_costs(layers: Sequence[LayerDeclaration]) -> None:
    for name, shard in declared_shards(layers).items():
        if len(shard.shape) > 1 and shard.cost is None and not shard.added:
            raise LayoutError(
                f"{name} is a matrix without a cost, so that neither FLOPs nor memory could be planned; declare "
                'cost=MatrixProduct("mlp") of megatron/parallel/costs.py, or whatever the layer does with it'
            )


def _narrower_start(layer: LayerDeclaration, multiplier: float) -> LayerDeclaration:
    """Start matrices between widths as muP does: the products of wider inputs stay as large as the base model's."""
    shards = {
        local: dataclasses.replace(shard, std=shard.std / math.sqrt(multiplier))
        if shard.is_hidden_matrix and shard.std is not None
        else shard
        for local, shard in layer.shards.items()
    }
    return dataclasses.replace(layer, shards=shards)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _unmatched(patterns: Iterable[str], names: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            shown = ", ".join(dict.fromkeys([names[0], names[len(names) // 2], names[-1]]))
            yield f"freeze={pattern!r} matches no parameter; use names or shell patterns of them, such as {shown}"


def _frozen(layer: LayerDeclaration, patterns: Iterable[str]) -> LayerDeclaration:
    shards = {
        local: shard.frozen() if _matches(layer.full_name(local), patterns) else shard
        for local, shard in layer.shards.items()
    }
    return dataclasses.replace(layer, shards=shards)


def _quantized(layer: LayerDeclaration, *, trains: bool) -> LayerDeclaration:
    """Hold the frozen weights of a transformer layer's linear layers in 4 bits; all of them where nothing `trains`."""
    shards = {
        local: dataclasses.replace(shard, quantized=True, trained=False)
        for local, shard in layer.shards.items()
        if isinstance(shard.cost, MatrixProduct) and not (trains and shard.trained)
    }
    return dataclasses.replace(layer, shards={**layer.shards, **shards})


def _clip_faults(config: Config, layers: Sequence[LayerDeclaration]) -> Iterator[str]:
    """Yield the faults of `qk_clip`: norms behind the projections that it scales, and projections that do not train."""
    model = config.model
    declared = declared_shards(layers)
    if any(name.endswith((".attention.q_norm.weight", ".attention.k_norm.weight")) for name in declared):
        yield (
            f"qk_clip scales what makes queries and keys, which the norms of architecture={model.architecture} bring "
            "back to their size; these bound the logits already, so leave qk_clip out"
        )
    if config.lora.lora_rank is not None:
        yield f"qk_clip scales weights that lora_rank={config.lora.lora_rank} freezes; leave one of the two out"
    projections = [name for name in declared if name.endswith(".attention.qkv.weight")]
    if any(_matches(name, model.freeze) for name in projections):
        yield f"qk_clip scales weights that freeze={' '.join(model.freeze)} freezes; leave one of the two out"
    queries, keys = model.num_attention_heads * model.head_size, model.num_kv_heads * model.head_size
    if not projections or any(declared[name].pieces != (queries, keys, keys) for name in projections):
        yield (
            f"qk_clip knows projections attention.qkv of [q; k; v] alone, which architecture={model.architecture} has "
            "not; leave qk_clip out"
        )


def _quantization_faults(config: Config, layers: Sequence[LayerDeclaration]) -> Iterator[str]:
    """Yield the faults of `quantize_base`: nothing that is frozen, weights that are cut within a block, and a save."""
    option = f"quantize_base={config.model.quantize_base}"
    weights = {name: shard for name, shard in declared_shards(layers).items() if shard.quantized}
    if not weights:
        yield (
            f"{option} holds frozen weights in 4 bits, but every linear layer of the model is trained, which 4 bits "
            "cannot be; freeze weights (freeze=layers.*.mlp.*), or leave quantize_base out"
        )
    with contextlib.suppress(LayoutError):  # reported by the rules of the layout
        tp, etp = config.parallel.tensor_model_parallel_size, config.parallel.expert_tensor_parallel_size
        sizes = {name: 1 if shard.expert is not None and etp == 1 else tp for name, shard in weights.items()}
        faults = (cut_fault(name, shard, sizes[name]) for name, shard in weights.items())
        yield from itertools.islice(filter(None, faults), 1)
    if config.checkpoint.save is not None and config.lora.lora_rank is None:
        yield f"{option} keeps no weights from which a checkpoint could be saved; leave save out"
