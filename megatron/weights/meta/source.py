"""A Llama as Meta publishes it, as a source of weights: consolidated.*.pth and params.json."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import CheckpointError
from megatron.options.config import Config
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface import NameMap, name_map
from megatron.weights.huggingface_config import OUTPUT, config_of, other_model
from megatron.weights.huggingface_files import DTYPES, Precision, StoredTensor
from megatron.weights.huggingface_source import MappedSource, are_equal
from megatron.weights.meta.names import EMBEDDING, in_halves, known_names, wrong_names
from megatron.weights.meta.params import Params
from megatron.weights.meta.shards import Shards, whole_tensors


class MetaSource(MappedSource):
    """A folder of Meta's, checked whole as it is opened: params.json, every file, name and shape of each tensor."""

    format, title = "meta", "Meta"
    config: Config
    """The model, its longest sequence, and the precision that holds each weight exactly; all else at its default."""

    def __init__(self, folder: Path, config: Config | None = None) -> None:
        """Raises CheckpointError naming the file, field or tensor at fault, or options in which `config` differs."""
        params, shards = Params(folder), Shards(folder, ForeignFiles())
        # before a map of as many layers as params.json pretends is built
        if params.num_layers > len(shards.names):
            raise CheckpointError(f"{params.path} has {params.num_layers} layers, but {folder} lacks most of them")
        theirs = params.config_json(params.vocab_size or shards.vocab_size(params.width))
        mapped = name_map(config_of(theirs, params.path))
        stored = _checked_tensors(shards, params, mapped, theirs)
        dtypes = {tensor.dtype for tensor in stored.values()}
        precision: Precision = next((name for name, dtype in DTYPES.items() if dtypes == {dtype}), "fp32")
        described = config_of(theirs, params.path, precision)
        if config is not None and (fault := other_model(folder, config, described)) is not None:
            raise CheckpointError(fault)
        # as of a folder of transformers: an export keeps it, with the ids of Meta's special tokens
        source = {"format": "huggingface", "config": theirs, "generation_config": None}
        super().__init__(folder, mapped, stored, None, config=described, metadata={"source": source})
        self._shards = shards

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        return self._shards.files.verify(self._shards.paths, share)


def _checked_tensors(
    shards: Shards, params: Params, mapped: NameMap, theirs: dict[str, Any]
) -> dict[str, StoredTensor]:
    """Return the tensors by transformers' names. Raises CheckpointError with all that are not as they must be."""
    shapes = {part.name: part.shape for parts in mapped.parts.values() for part in parts}
    names, strange = known_names(shards.names)
    is_tied = theirs["tie_word_embeddings"]
    # the files of a model that ties them hold a copy all the same
    if is_tied and OUTPUT in names:
        shapes[OUTPUT] = shapes[EMBEDDING]
    faults = list(wrong_names(shapes.keys(), {**names, **dict.fromkeys(strange, "")}))
    if faults:
        raise CheckpointError(
            f"{shards.folder} is not the whole Llama of its {params.path.name}: {'; '.join(faults)}; copy the whole "
            "folder"
        )
    stored = in_halves(whole_tensors(shards, names, shapes, params.path), params.num_heads, params.num_groups)
    if is_tied and OUTPUT in stored and not are_equal(stored.pop(OUTPUT), stored[EMBEDDING]):
        raise CheckpointError(
            f"{shards.folder} has another output.weight than tok_embeddings.weight, but {params.path.name} has the "
            "sizes of a Llama 3.2, which ties the two; give that model in transformers' format, with its config.json"
        )
    return stored
