"""Parameter names in DeepSpeed's files, which count the layers of the pipeline: `2.attention.qkv.weight`.

A layer's number is its place in the model's list of layers; a layer that is listed twice is in `tied_modules`. The only
place where our names are turned into such numbers and back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megatron.config.options import Config
from megatron.models.family import family_of
from megatron.models.sequential import module_names

WORD_EMBEDDING, OUTPUT = "embedding.word.weight", "output.weight"
VOCABULARY = (WORD_EMBEDDING, OUTPUT)
"""Parameters whose rows are padded until they divide over the tensor-parallel ranks."""


class PipelineNames:
    """Names of one model's parameters, ours and DeepSpeed's, from the names of its layers in order."""

    def __init__(self, layers: Sequence[str]) -> None:
        modules = module_names(layers)
        self.is_tied = len(set(layers)) < len(layers)
        self.last_index = len(layers) - 1
        self._theirs = dict(zip(layers, modules, strict=True))
        self._ours = dict(zip(modules, layers, strict=True))

    @classmethod
    def of_config(cls, config: Config) -> PipelineNames:
        return cls([layer.name for layer in family_of(config).layers(config)])

    @classmethod
    def of_ours(cls, names: Iterable[str]) -> PipelineNames:
        """Names of a decoder whose config is unknown, by our names of its parameters."""
        names = list(names)
        blocks = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
        return cls(_decoder(1 + max(blocks, default=-1), is_tied=OUTPUT not in names))

    @classmethod
    def of_theirs(cls, names: Iterable[str]) -> PipelineNames:
        """Names of a decoder whose config is unknown, by DeepSpeed's names of its parameters."""
        names = list(names)
        # a block's parameters are in its submodules, those of the two layers behind it in the layers themselves
        blocks = [int(match[1]) for name in names if (match := re.match(r"(\d+)\..+\.", name))]
        return cls(_decoder(max([1, *blocks]) - 1, is_tied="0.weight" not in names))

    def theirs(self, ours: str) -> str:
        """Return DeepSpeed's name of a parameter."""
        layer = max((layer for layer in self._theirs if ours.startswith(f"{layer}.")), key=len, default=None)
        return ours if layer is None else self._theirs[layer] + ours.removeprefix(layer)

    def ours(self, theirs: str) -> str:
        """Return our name of a parameter; one that belongs to no layer keeps DeepSpeed's."""
        match = re.match(r"\d+|tied_modules\.\w+", theirs)
        return self._ours[match[0]] + theirs[match.end() :] if match and match[0] in self._ours else theirs


def _decoder(num_layers: int, *, is_tied: bool) -> list[str]:
    blocks = [f"layers.{number}" for number in range(num_layers)]
    return ["embedding.word", "embedding", *blocks, "final_norm", "embedding.word" if is_tied else "output"]


def current(theirs: str) -> str:
    """Return the present name of a parameter in files of the first release, whose modules had other names."""
    theirs = theirs.replace("tied_modules.word_embedding.", "tied_modules.embedding_word.")
    theirs = re.sub(r"^1\.positions$", "1.position.weight", theirs)
    return re.sub(r"^(?!1\.)(\d+)\.norm\.", r"\1.", theirs)
