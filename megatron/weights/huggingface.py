"""Hugging Face folders in both directions, a tensor at a time, by the forms that the families have.

`name_map` says, for each of our parameters, which of their tensors make it and how they lie in it. A `MappedTensor` is
a view of our full tensor in the shape of theirs, so one map serves both directions: reading copies into the view,
writing out of it, a few rows at a time. Beside the current parameter, only a buffer of CHUNK_BYTES is in memory.

Nothing in a folder is trusted: no pickle is executed, no path leads out of it, each of its tensors is accounted for.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.models.family import HuggingFaceForm
from megatron.models.registry import family_of
from megatron.options.config import Config
from megatron.parallel.shards import Shard, declared_shards
from megatron.runtime.files import sync_folder
from megatron.weights.folder_files import own_file, read_json
from megatron.weights.huggingface_config import SPECIAL_TOKENS, form_of, restored_config, their_config
from megatron.weights.huggingface_files import Precision, WeightsWriter, some, write_json
from megatron.weights.tokenizer_files import TEMPLATES, copy_tokenizer, special_token_ids

CHUNK_BYTES = 1 << 24
"""Bytes of a tensor that are read or written at once."""


@dataclass(frozen=True)
class MappedTensor:
    """One tensor of theirs, and where it lies in our full tensor: `length` rows from `begin`."""

    name: str
    shape: tuple[int, ...]
    """Theirs."""
    begin: int
    length: int
    transposed: bool = False
    heads: tuple[int, int] | None = None
    """Query and key/value heads. Given: their rows are [key/value head][its q, k, v][head size], ours [q, k, v][head]
    [head size]."""

    @cached_property
    def _their_heads(self) -> list[int]:
        """Number of theirs for each of our heads of rows."""
        assert self.heads is not None
        num_heads, groups = self.heads
        own = num_heads // groups  # query heads of a key/value head
        queries = [head // own * (own + 2) + head % own for head in range(num_heads)]
        return queries + [group * (own + 2) + own + piece for piece in (0, 1) for group in range(groups)]

    @property
    def head_size(self) -> int:
        return self.length // len(self._their_heads)

    def row_by_head(self, row: Any) -> Any:
        """Return the number of theirs for a row of ours, or for a tensor of them, under `heads`."""
        return torch.tensor(self._their_heads)[row // self.head_size] * self.head_size + row % self.head_size

    def _stretches(self, ours: Tensor) -> Iterator[Tensor]:
        """Views of these rows of our full tensor that make theirs, one after the other."""
        rows = ours.narrow(0, self.begin, self.length)
        if self.heads is None:
            yield rows.t() if self.transposed else rows
            return
        size, heads = self.head_size, self._their_heads
        for head in sorted(range(len(heads)), key=heads.__getitem__):
            yield rows[head * size : (head + 1) * size]

    def chunks(self, ours: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, end row, the view of them) of theirs, CHUNK_BYTES of float32 at a time."""
        first = 0
        for view in self._stretches(ours):
            count = view.shape[0]
            # rows of the view within CHUNK_BYTES of float32; one at least
            step = max(1, CHUNK_BYTES * count // max(1, 4 * view.numel()))
            for begin in range(0, count, step):
                end = min(begin + step, count)
                yield first + begin, first + end, view[begin:end]
            first += count


class Stretch(NamedTuple):
    """Place of a tensor of one expert in one of theirs that holds all experts."""

    name: str
    shape: tuple[int, ...]
    """[experts, rows, columns]."""
    expert: int
    first: int
    """First row within the expert's."""


@dataclass(frozen=True)
class NameMap:
    """A model of ours as one of theirs."""

    form: HuggingFaceForm
    shards: Mapping[str, Shard]
    """Our parameters, in the order of the layers, without vocabulary padding."""
    parts: Mapping[str, tuple[MappedTensor, ...]]
    """For each of our parameters, the tensors of theirs that make it."""
    stretches: Mapping[str, Stretch] = field(default_factory=dict)
    """By the names of those that may be in one tensor with other experts', or are where the form `writes_fused`."""

    @property
    def written_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors of a folder that this project writes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for part in itertools.chain.from_iterable(self.parts.values()):
            stretch = self.stretches.get(part.name) if self.form.writes_fused else None
            shapes |= {part.name: part.shape} if stretch is None else {stretch.name: stretch.shape}
        return shapes

    def written(self, part: MappedTensor) -> tuple[str, int]:
        """Return the tensor that a part is written to, and the number of the first element there."""
        if not self.form.writes_fused or part.name not in self.stretches:
            return part.name, 0
        name, (_, rows, columns), expert, first = self.stretches[part.name]
        return name, (expert * rows + first) * columns

    def assemble(self, name: str, read: Callable[[str, int, int], Tensor], memory: Tensor | None = None) -> Tensor:
        """Our full tensor, float32, of `read(their name, first row, end row)`; in this flat memory, if given."""
        shape = self.shards[name].shape
        full = torch.empty(shape) if memory is None else memory[: math.prod(shape)].view(shape)
        for part in self.parts[name]:
            for begin, end, view in part.chunks(full):
                view.copy_(read(part.name, begin, end).view(view.shape))
        return full


def parameters_of(config: Config) -> dict[str, Shard]:
    """Return every parameter of the model by name, in the order of the layers.

    The shards are those of full tensors: no vocabulary padding, no initialisation, no roles.
    """
    shards = declared_shards(family_of(config).layers(config))
    return {name: Shard(shard.shape, shard.dim, shard.pieces) for name, shard in shards.items()}


def name_map(config: Config) -> NameMap:
    """Raises CheckpointError where transformers has no such model, naming the options."""
    form = form_of(config.model)
    shards = parameters_of(config)
    heads = config.model.num_attention_heads, config.model.num_kv_heads
    parts = {name: tuple(parts_of(form, heads, name, shard)) for name, shard in shards.items()}
    return NameMap(form, shards, parts, _stretches(form, config.model.num_experts, shards, parts))


def _stretches(
    form: HuggingFaceForm,
    num_experts: int | None,
    shards: Mapping[str, Shard],
    parts: Mapping[str, tuple[MappedTensor, ...]],
) -> dict[str, Stretch]:
    if num_experts is None or not form.fused_experts:
        return {}
    found: dict[str, Stretch] = {}
    for name, shard in shards.items():
        module = name.rpartition(".")[0]
        fused = form.fused_name(module)
        if fused is not None:
            # layers.3.mlp.experts.1.down
            expert = int(module.split(".")[-2])
            shape = (num_experts, *shard.shape)
            found |= {part.name: Stretch(fused, shape, expert, part.begin) for part in parts[name]}
    return found


def parts_of(form: HuggingFaceForm, heads: tuple[int, int], name: str, shard: Shard) -> Iterator[MappedTensor]:
    """Yield the tensors of theirs that make a parameter of ours. Raises CheckpointError if there are none.

    `heads`: as in MappedTensor.
    """
    module, _, kind = name.rpartition(".")
    if module == "output":
        yield MappedTensor(form.output, shard.shape, 0, shard.shape[0])
        return
    theirs = form.their_modules(module)
    if not theirs:
        raise CheckpointError(
            f"transformers' {form.class_name} has no place for {name}; keep the model as native or universal"
        )
    # one tensor of theirs holds all pieces of ours, one after the other, or each piece has its own
    pieces = shard.pieces if len(theirs) > 1 else shard.shape[:1]
    # only matrices within the layers: embeddings are [vocabulary, hidden] everywhere
    transposed = form.transposed and module.startswith("layers.") and len(shard.shape) == 2
    by_head = form.qkv_by_head and module.endswith(".attention.qkv")
    begin = 0
    for their_module, length in zip(theirs, pieces, strict=True):
        shape = (length, *shard.shape[1:])
        yield MappedTensor(
            f"{their_module}.{kind}",
            shape[::-1] if transposed else shape,
            begin,
            length,
            transposed,
            heads if by_head else None,
        )
        begin += length


# Ours to theirs


def export_huggingface(
    folder: Path,
    config: Config,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    write: Callable[[WeightsWriter, NameMap, Iterable[tuple[str, Tensor]]], None] | None = None,
    precision: Precision | None = None,
    max_shard_bytes: int = 5 * 10**9,
    source: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> list[str]:
    """Write the model into an empty folder: weights, config.json, generation_config.json, tokenizer files.

    `tensors` gives each of our parameters once, whole and without padding, in any order, which may be the memory's
    only one. `precision` is the run's unless given. `source` is what `ImportedModel.source` was, if the model came
    from there. `write`: has other processes write them, in place of `write_tensors`. Returns the names of the
    tokenizer files. Every file is on disk when this returns.
    Raises CheckpointError if transformers has no such model, a tensor is missing, or does not fit `precision`.
    """
    precision = precision or config.training.precision
    mapped = name_map(config)
    copied = [] if tokenizer is None else copy_tokenizer(tokenizer, folder, config.model.vocab_size)
    special_tokens = _special_tokens(config, source, tokenizer)
    content = their_config(config, precision, special_tokens)
    if source is not None:
        tokens = _special_tokens(config, source, None), special_tokens
        content = restored_config(source["config"], config, precision, tokens)
    write_json(folder / "config.json", content)
    generation = _generation_config(source, tokenizer)
    # _from_model_config: transformers' mark of one that only repeats config.json
    write_json(folder / "generation_config.json", generation or {"_from_model_config": True, **special_tokens})
    # last, since it takes long: what can be refused is refused before
    with WeightsWriter(folder, mapped.written_shapes, precision, max_shard_bytes) as writer:
        (write or write_tensors)(writer, mapped, tensors)
    sync_export(folder)
    return copied


def write_tensors(
    writer: WeightsWriter,
    mapped: NameMap,
    tensors: Iterable[tuple[str, Tensor]],
    names: Collection[str] | None = None,
) -> None:
    """Write each of our parameters, or those of these names, as the tensors of theirs that it makes.

    Raises CheckpointError if one is missing, of another shape, or does not fit the dtype.
    """
    # popped one by one: what is left at the end was never given
    missing = {name: mapped.shards[name] for name in (mapped.shards if names is None else names)}
    for name, tensor in tensors:
        shard = missing.pop(name, None)
        if shard is None:
            raise CheckpointError(f"{name} {list(tensor.shape)} is not a parameter of this model, or comes twice")
        if tuple(tensor.shape) != shard.shape:
            raise CheckpointError(f"{name} is {list(tensor.shape)}, but the config makes it {list(shard.shape)}")
        for part in mapped.parts[name]:
            written, first = mapped.written(part)
            writer.write(written, (view for _, _, view in part.chunks(tensor)), first)
        del tensor  # before the next one is made
    if missing:
        raise CheckpointError(f"the checkpoint lacks {some(list(missing))}; it is not of this model")


def sync_export(folder: Path) -> None:
    """Wait until the names of an export's files are on the disk."""
    if (folder / TEMPLATES).is_dir():
        sync_folder(folder / TEMPLATES)
    sync_folder(folder)


def _generation_config(source: Mapping[str, Any] | None, tokenizer: Path | None) -> dict[str, Any] | None:
    """Return the generation config beside the tokenizer, or of the source model, with the tokenizer's own end added."""
    if tokenizer is not None and os.path.lexists(tokenizer / "generation_config.json"):
        return read_json(own_file(tokenizer, "generation_config.json"))
    content: dict[str, Any] | None = (source or {}).get("generation_config")
    if content is None or tokenizer is None:
        return content
    end = special_token_ids(tokenizer).get("eos_token_id")
    if end is None:
        return content
    known = content.get("eos_token_id")
    if known is None or known == []:
        return content | {"eos_token_id": end}
    ends = known if isinstance(known, list) else [known]
    if end in ends:
        return content
    # a chat's turns end otherwise than the text that the model was first trained on
    return content | {"eos_token_id": [*ends, end]}


def _special_tokens(config: Config, source: Mapping[str, Any] | None, tokenizer: Path | None) -> dict[str, Any]:
    """Ids of the special tokens, of the first that has them: generation config, tokenizer, source model, run."""
    candidates: list[Mapping[str, Any]] = [_generation_config(source, tokenizer) or {}]
    if tokenizer is not None:
        candidates.append(special_token_ids(tokenizer))
    candidates.append((source or {}).get("config") or {})
    candidates.append({"eos_token_id": config.data.eod_token_id})
    return {name: _first_given(candidates, name) for name in SPECIAL_TOKENS}


def _first_given(candidates: Iterable[Mapping[str, Any]], name: str) -> Any:
    return next((ids[name] for ids in candidates if ids.get(name) is not None), None)
