"""Adapters in a folder of PEFT as a source of weights: each rank reads the rows it needs, on any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.source import Slice, WeightSource
from megatron.options.config import Config
from megatron.parallel.shards import Shard
from megatron.runtime.commands import command_name
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface import CHUNK_BYTES, MappedTensor, NameMap
from megatron.weights.huggingface_config import OUTPUT
from megatron.weights.huggingface_files import StoredTensor, some
from megatron.weights.huggingface_source import MappedSource, check_copy
from megatron.weights.peft.export import AdaptedModel
from megatron.weights.peft.folder import CONFIG, PREFIX, PeftAdapter, open_adapter

TIED = PREFIX + OUTPUT


class PeftSource(MappedSource):
    """The adapters of a folder of PEFT. Raises CheckpointError if they are not all that `config` has, in its shapes."""

    format, title = "peft", "PEFT"

    def __init__(self, folder: Path, config: Config) -> None:
        files = ForeignFiles()
        adapter, model = open_adapter(folder, files), AdaptedModel(config)
        self.base = adapter.base
        stored = _by_key(adapter)
        # PEFT saves an adapted embedding's frozen weight too, by which the base can be compared
        self._copies = _copies(adapter, model)
        mapped = NameMap(model.form, model.shards, {name: _parts(model, name) for name in model.shards})
        # PEFT saves a weight that is trained for both its uses twice
        if model.trains_tied and TIED in stored:
            (embedding,) = mapped.parts["embedding.word.weight"]
            if embedding.name in stored:
                check_copy(stored.pop(TIED), stored[embedding.name])
        faults = _faults(mapped, stored)
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
                # uncounted: every rank may read them, and the base's identity counts each number once
                at = Slice(name, Shard(copy.shape, 0, (rows,)), begin * columns, count * columns)
                # in the copy's dtype: PEFT may have held a float32 base in 16 bits
                values = base.read(at).to(copy.dtype).view(count, columns)
                if not torch.equal(values, copy.rows(begin, begin + count)):
                    raise CheckpointError(
                        f"{self.folder} holds another {name} than its base, which it was saved with; give its own base "
                        "as --lora-base"
                    )


def _parts(model: AdaptedModel, name: str) -> tuple[MappedTensor, ...]:
    """Return the tensors that make a parameter, the first of two copies, by the keys of `_by_key`."""
    parts = [replace(part, name=part.name.replace(".base_layer.", ".")) for part in model.map.parts[name]]
    # the second copy is compared with the first and dropped, so no parameter is made of it
    return tuple(part for part in parts if part.name != TIED or name == "output.weight")


def _faults(mapped: NameMap, stored: Mapping[str, StoredTensor]) -> list[str]:
    shapes = {part.name: part.shape for parts in mapped.parts.values() for part in parts}
    faults = []
    if lacking := sorted(shapes.keys() - stored):
        faults.append(f"it lacks {some(lacking)}")
    if surplus := sorted(stored.keys() - shapes):
        faults.append(f"it also holds {some(surplus)}")
    for key in (key for key in shapes if key in stored):
        if stored[key].shape != shapes[key]:
            faults.append(f"{key} is {list(stored[key].shape)}, the model makes it {list(shapes[key])}")
            break  # a wrong rank makes all of them wrong
    return faults


def _by_key(adapter: PeftAdapter) -> dict[str, StoredTensor]:
    """Return the trained tensors of a folder by their keys, without `base_layer`."""
    tensors: dict[str, StoredTensor] = {}
    for module, factors in adapter.low_rank.items():
        if factors.bias is not None:
            raise CheckpointError(f"{adapter.path / CONFIG} has lora_bias, which is merged but not trained here")
        if factors.starts_from_svd:
            raise CheckpointError(
                f"{adapter.path / CONFIG} has init_lora_weights: pissa, which is for a base that PEFT has changed. "
                "Save it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), or merge it with "
                f"{command_name('merge_adapter')}"
            )
        kinds = ("lora_embedding_A", "lora_embedding_B") if factors.of_embedding else ("lora_A.weight", "lora_B.weight")
        for kind, tensor in zip(kinds, (factors.a, factors.b), strict=True):
            tensors[f"{PREFIX}{module}.{kind}"] = tensor
        if factors.magnitude is not None:
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = factors.magnitude
    for name, tensor in adapter.whole.items():
        if not _is_copy(adapter, name):
            tensors[PREFIX + name] = tensor
    return tensors


def _is_copy(adapter: PeftAdapter, name: str) -> bool:
    """Return True for the frozen weight of an adapted embedding, which PEFT saves too."""
    return name.endswith(".weight") and name.removesuffix(".weight") in adapter.low_rank


def _copies(adapter: PeftAdapter, model: AdaptedModel) -> list[tuple[str, StoredTensor]]:
    """Return the frozen weights that are in the folder, each with our name."""
    ours = {f"{module.names[-1]}.weight": ".".join(filter(None, module.place)) for module in model.modules}
    return [(f"{ours[name]}.weight", tensor) for name, tensor in adapter.whole.items() if _is_copy(adapter, name)]
