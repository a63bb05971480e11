"""PEFT's rule of what is trained: modules are selected by their names alone.

Each line follows PEFT's tuners_utils.check_target_module_exists, and for modules trained whole its
other._set_trainable, whatever one would expect of the fields: adapters of another selection are other adapters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

INPUTS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tokens_embed")
OUTPUTS = ("lm_head", "embed_out")
POSITIONS = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "token_type_embeddings")
TIED_BY_PEFT = ("embed_tokens", "lm_head")
"""Last names of the modules that ensure_weight_tying is about."""
ALL_LINEAR = "all-linear"
FIRST_NUMBER = r".*?\.[^.]*\.(\d+)\."


@dataclass(frozen=True)
class Selection:
    """The fields of adapter_config.json that select modules, by the names of transformers' model."""

    targets: list[str] | str
    """target_modules: names, ends of names, or one regular expression."""
    excluded: list[str] | str
    saved: list[str]
    """modules_to_save."""
    layers: list[int]
    """layers_to_transform; empty: all."""
    layers_patterns: list[str]
    """Names of the lists of layers; empty: any."""
    bias: Literal["none", "all", "lora_only"]
    ties: bool
    """ensure_weight_tying: what is trained of an embedding is trained of the output that shares its weight."""

    @property
    def is_all_linear(self) -> bool:
        return isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR

    def adapted(self, matrices: Iterable[str], tied: Collection[str] = ()) -> set[str]:
        """Return the modules that have an adapter.

        Args:
            matrices: Modules whose weight is a matrix: linear layers and embeddings.
            tied: Embedding and output that share their weight in this model.
        """
        modules = {module for module in matrices if self._adapts(module)}
        if self.ties and self._names_embedding(self.targets) and not self._names_embedding(self.saved):
            modules |= set(tied)
        return modules

    def whole(self, modules: Iterable[str], tied: Collection[str] = ()) -> set[str]:
        """Return the modules that are trained whole, or lie in one that is."""
        trained = {module for module in modules if self._saves(module)}
        if self.ties and self._names_embedding(self.saved):
            trained |= set(tied)
        return trained

    def biases(self, names: Iterable[str], adapted: Collection[str]) -> set[str]:
        """Return the biases that are trained, of the tensors with these names."""
        biases = {name for name in names if name.rpartition(".")[2] == "bias"}
        if self.bias == "all":
            return biases
        if self.bias == "lora_only":
            return {name for name in biases if name.removesuffix(".bias") in adapted}
        return set()

    def _adapts(self, module: str) -> bool:
        # first, as in PEFT: what modules_to_save names, or lies within it, never gets an adapter
        is_in_saved = any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.saved)
        if is_in_saved or _ends(self.excluded, module):
            return False
        if self.is_all_linear:
            return module.rpartition(".")[2] not in (*INPUTS, *OUTPUTS, *POSITIONS)
        if not _ends(self.targets, module):
            return False
        # a module that is named in full is adapted in whatever layer it lies
        if isinstance(self.targets, str) or module in self.targets:
            return True
        return not self.layers or self._layer_of(module) in self.layers

    def _layer_of(self, module: str) -> int | None:
        """Return the number of the layer that a module lies in, None outside of the layers."""
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in self.layers_patterns] or [FIRST_NUMBER]
        for pattern in patterns:
            match = re.match(pattern, module)
            if match is not None:
                return int(match[match.lastindex or 1])  # a pattern may have groups of its own
        return None

    def _saves(self, module: str) -> bool:
        words = module.split(".")
        outer = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        # by the end of the text, not of a word, as PEFT does: `head` saves `lm_head` too
        return any(name.endswith(saved) for name in outer for saved in self.saved)

    def _names_embedding(self, names: list[str] | str) -> bool:
        if isinstance(names, str):
            return any(re.fullmatch(names, name) for name in TIED_BY_PEFT)
        return any(name.rpartition(".")[2] in TIED_BY_PEFT for name in names)


def _ends(names: list[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
