"""The rule by which PEFT selects what it trains of a model: by the names of modules alone.

Each line follows `peft.tuners.tuners_utils.check_target_module_exists`, and for modules trained whole
`peft.utils.other._set_trainable`. Names are those of transformers' model.
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
    """The fields of adapter_config.json that select modules."""

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
        found = {module for module in matrices if self._adapts(module)}
        if self.ties and self._names_embedding(self.targets) and not self._names_embedding(self.saved):
            found |= set(tied)
        return found

    def whole(self, modules: Iterable[str], tied: Collection[str] = ()) -> set[str]:
        """Return the modules that are trained whole, or lie in one that is."""
        found = {module for module in modules if self._saves(module)}
        if self.ties and self._names_embedding(self.saved):
            found |= set(tied)
        return found

    def _adapts(self, module: str) -> bool:
        if _ends(self.excluded, module) or any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.saved):
            return False
        if self.is_all_linear:
            return module.rpartition(".")[2] not in (*INPUTS, *OUTPUTS, *POSITIONS)
        if isinstance(self.targets, str) or module in self.targets:
            return _ends(self.targets, module)
        return _ends(self.targets, module) and (not self.layers or self._number(module) in self.layers)

    def _number(self, module: str) -> int | None:
        """Return the number of the layer that a module lies in, None outside of the layers."""
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in self.layers_patterns] or [FIRST_NUMBER]
        found = next(filter(None, (re.match(pattern, module) for pattern in patterns)), None)
        return None if found is None else int(found[found.lastindex or 1])

    def _saves(self, module: str) -> bool:
        words = module.split(".")
        outer = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        return any(name.endswith(saved) for name in outer for saved in self.saved)

    def _names_embedding(self, names: list[str] | str) -> bool:
        if isinstance(names, str):
            return any(re.fullmatch(names, name) for name in TIED_BY_PEFT)
        return any(name.rpartition(".")[2] in TIED_BY_PEFT for name in names)

    def biases(self, names: Iterable[str], adapted: Collection[str]) -> set[str]:
        """Return the biases that are trained, of the tensors with these names."""
        found = {name for name in names if name.rpartition(".")[2] == "bias"}
        if self.bias == "all":
            return found
        return {name for name in found if self.bias == "lora_only" and name.removesuffix(".bias") in adapted}


def _ends(names: list[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
