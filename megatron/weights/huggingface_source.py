"""A folder of transformers as a source of weights: each rank reads the rows it needs, on any layout."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.source import Slice, WeightSource, read_windows
from megatron.options.config import Config
from megatron.weights.folder_files import own_file, read_json
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface import CHUNK_BYTES, MappedTensor, NameMap, Stretch, name_map
from megatron.weights.huggingface_config import OUTPUT, config_of, other_model
from megatron.weights.huggingface_files import DTYPES, Precision, StoredTensor, open_weights, some, stretch_of


class MappedSource(WeightSource):
    """Weights of transformers' form in a folder of others, by the map of their names.

    Where the run has a larger vocabulary, the rows that the folder lacks start as the mean of those it has: of the word
    embedding, and of an output projection of its own. Computed in float64, in the order of the rows, so that it is the
    same on every layout.
    """

    holds_run = False

    def __init__(
        self,
        folder: Path,
        mapped: NameMap,
        stored: Mapping[str, StoredTensor],
        files: ForeignFiles | None,
        *,
        config: Config,
        metadata: dict[str, Any] | None = None,
        moments: Mapping[str, Mapping[str, StoredTensor]] | None = None,
    ) -> None:
        """`stored`: their tensors, by the names of the map. `moments`: the optimizer's by kind, each as `stored`.

        `files`: None where the subclass verifies its own.
        """
        self._by_kind = {"weight": stored, **(moments or {})}
        super().__init__(folder, mapped.shards, kinds=tuple(self._by_kind), metadata=metadata, config=config)
        self.map, self.stored, self._files = mapped, stored, files
        self._means: dict[str, Tensor] = {}

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        """Compares those of .bin files; safetensors carry none."""
        assert self._files is not None
        return self._files.verify({tensor.file for tensor in self.stored.values()}, share)

    def read_full(self, name: str, kind: str = "weight") -> Tensor:
        return self._assembled(name, kind)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each is overwritten by the next."""
        memory = torch.empty(max(math.prod(shard.shape) for shard in self.parameters.values()))
        for name in self.parameters:
            yield name, self._assembled(name, "weight", memory)

    def _assembled(self, name: str, kind: str, memory: Tensor | None = None) -> Tensor:
        stored = self._by_kind[kind]
        return self.map.assemble(name, lambda theirs, begin, end: stored[theirs].rows(begin, end), memory)

    def read(self, at: Slice, kind: str = "weight") -> Tensor:
        """Reads the rows of theirs that it takes numbers from: of a matrix that ranks cut by columns, all."""
        if at.name not in self.map.parts or kind not in self.kinds:
            raise CheckpointError(f"{self.folder} holds no {kind} of {at.name}: it is of another model")
        return read_windows(at, partial(self._windows, at.name, kind))

    def _windows(
        self, name: str, kind: str, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield that rectangle of our full tensor as Windows has it, some rows at a time."""
        end = 0
        for part in self.map.parts[name]:
            end = part.begin + part.length
            first, last = max(rows[0], part.begin) - part.begin, min(rows[1], end) - part.begin
            if first >= last:
                continue
            for begin, window in self._of_part(part, self._by_kind[kind][part.name], first, last, columns):
                yield part.begin + begin, columns[0], window
        # tokens that the folder does not have: rows behind the last of its parts
        step = max(1, CHUNK_BYTES // (4 * (columns[1] - columns[0])))
        for begin in range(max(rows[0], end), rows[1], step):
            count = min(begin + step, rows[1]) - begin
            # no moment of a token that was never trained
            row = self._mean(name) if kind == "weight" else torch.zeros(columns[1])
            yield begin, columns[0], row[columns[0] : columns[1]].expand(count, -1)

    def _of_part(
        self, part: MappedTensor, stored: StoredTensor, first: int, last: int, columns: tuple[int, int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Rows [first, last) of what one tensor of theirs is in ours."""
        if part.transposed:  # its rows are our columns
            step = max(1, CHUNK_BYTES // (4 * part.shape[1]))
            window = torch.empty(last - first, columns[1] - columns[0])
            for begin in range(*columns, step):
                end = min(begin + step, columns[1])
                window[:, begin - columns[0] : end - columns[0]] = stored.rows(begin, end)[:, first:last].t()
            yield first, window
            return
        step = max(1, CHUNK_BYTES // (4 * math.prod(part.shape[1:])))
        begin = first
        while begin < last:
            end, theirs = min(begin + step, last), begin
            if part.heads is not None:
                theirs = int(part.row_by_head(begin))
                # rows of one head and piece alone are neighbours on both sides
                end = min(end, begin + part.head_size - begin % part.head_size)
            yield begin, stored.matrix(theirs, theirs + end - begin, columns).float()
            begin = end

    def _mean(self, name: str) -> Tensor:
        """Return the mean of all rows that the folder has of a tensor: float32 [columns]."""
        if name not in self._means:
            (part,) = self.map.parts[name]
            step, total = max(1, CHUNK_BYTES // (8 * part.shape[1])), torch.zeros(part.shape[1], dtype=torch.float64)
            for begin in range(0, part.length, step):
                end = min(begin + step, part.length)
                total += self.stored[part.name].rows(begin, end).double().sum(dim=0)
            self._means[name] = (total / part.length).float()
        return self._means[name]


class HuggingFaceSource(MappedSource):
    """A folder of transformers, checked whole as it is opened: config.json, files, names and shapes of all tensors."""

    format, title = "huggingface", "Hugging Face"
    config: Config
    """The model, its longest sequence, and the precision that holds each weight exactly; all else at its default."""

    def __init__(self, folder: Path, config: Config | None = None, architecture: str | None = None) -> None:
        """Raises CheckpointError naming the file, field or tensor at fault, or each option in which `config` differs.

        Args:
            config: That of the run. None: the folder's own.
            architecture: Without `config`, a family outside this package that the folder may be of.
        """
        if config is not None:
            architecture = config.model.architecture
        path = own_file(folder, "config.json")
        theirs = read_json(path)
        described = config_of(theirs, path, architecture=architecture)
        files = ForeignFiles()
        stored = open_weights(folder, files)
        # before a map of as many layers and experts as config.json pretends is built
        if described.model.num_layers > len(stored):
            raise CheckpointError(f"{path} has {described.model.num_layers} layers, but {folder} lacks most of them")
        most_experts = max([len(stored), *(tensor.shape[0] for tensor in stored.values() if len(tensor.shape) == 3)])
        if (described.model.num_experts or 0) > most_experts:
            raise CheckpointError(f"{path} has {described.model.num_experts} experts, but {folder} lacks most of them")
        mapped = name_map(described)
        tensors = _checked_tensors(
            folder, mapped, stored, is_tied=not described.model.untie_embeddings_and_output_weights
        )
        dtypes = {tensor.dtype for tensor in tensors.values()}
        # tensors of several dtypes are held exactly by float32 alone
        precision: Precision = next((name for name, dtype in DTYPES.items() if dtypes == {dtype}), "fp32")
        described = config_of(theirs, str(path), precision, architecture)
        if config is not None and (fault := other_model(folder, config, described)) is not None:
            raise CheckpointError(fault)
        generation = folder / "generation_config.json"
        source = {
            "format": "huggingface",
            "config": theirs,
            "generation_config": read_json(own_file(folder, generation.name)) if os.path.lexists(generation) else None,
        }
        super().__init__(folder, mapped, tensors, files, config=described, metadata={"source": source})


def _checked_tensors(
    folder: Path, mapped: NameMap, stored: Mapping[str, StoredTensor], *, is_tied: bool
) -> dict[str, StoredTensor]:
    """Return the tensors of the map by their full names. Raises CheckpointError with all that are not as they must be.

    `is_tied`: there may be a copy of the word embedding under lm_head.weight.
    """
    expected = {part.name: part for parts in mapped.parts.values() for part in parts}
    # all faults in one message: a folder of another model has many of each kind
    tensors, faults = _by_full_name(mapped, stored, expected)
    lacking = set(expected) - set(tensors)
    if mapped.form.writes_fused:
        lacking = {mapped.stretches[name].name if name in mapped.stretches else name for name in lacking}
    if missing := sorted(lacking):
        faults.append(f"missing: {some(missing)}")
    wrong = [
        f"{name} in {tensors[name].file.name} is {list(tensors[name].shape)} of {tensors[name].dtype}, config.json "
        f"makes it {list(part.shape)}"
        for name, part in expected.items()
        if name in tensors and not _is_like(tensors[name], part)
    ]
    if wrong:
        faults.append(some(wrong))
    if faults:
        raise CheckpointError(f"{folder} is not a whole {mapped.form.class_name}: {'; '.join(faults)}")
    output = mapped.form.output
    if is_tied and output in tensors:
        (embedding,) = mapped.parts["embedding.word.weight"]
        check_copy(tensors.pop(output), tensors[embedding.name])
    return tensors


def _by_full_name(
    mapped: NameMap, stored: Mapping[str, StoredTensor], expected: Mapping[str, MappedTensor]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors by their full names, which files may shorten, and the faults of the names.

    A tensor that holds all experts is those of each.
    """
    form = mapped.form
    fused: dict[str, dict[str, Stretch]] = {}
    for name, stretch in mapped.stretches.items():
        fused.setdefault(stretch.name, {})[name] = stretch
    tensors: dict[str, StoredTensor] = {}
    faults, unknown = [], []
    for name, tensor in stored.items():
        full = form.full_name(name)
        # causal masks and the like, which old releases saved among the weights, and are computed
        if re.fullmatch(form.buffers, full):
            continue
        found = {full: tensor}
        if full in fused:
            stretches = fused[full]
            shape = next(iter(stretches.values())).shape
            if tensor.shape != shape:
                faults.append(
                    f"{name} in {tensor.file.name} is {list(tensor.shape)}, config.json makes it {list(shape)}"
                )
                continue
            found = {
                own: stretch_of(tensor, at.expert, at.first, expected[own].length) for own, at in stretches.items()
            }
        if twice := next((own for own in found if own in tensors), None):
            faults.append(f"{twice} is there twice, in {tensors[twice].file.name} and in {tensor.file.name}")
        elif found.keys() <= expected.keys() or full == form.output:
            tensors |= found
        else:
            unknown.append(f"{name} in {tensor.file.name}")
    if unknown:
        faults.append(f"unknown to a {form.class_name} of this size: {some(unknown)}")
    return tensors, faults


def _is_like(tensor: StoredTensor, part: MappedTensor) -> bool:
    return tensor.shape == part.shape and tensor.dtype.is_floating_point


def check_copy(output: StoredTensor, embedding: StoredTensor) -> None:
    """Raise CheckpointError unless the output projection's tensor is a copy of the tied embedding."""
    if not are_equal(output, embedding):
        raise CheckpointError(
            f"{OUTPUT} in {output.file} is not the word embedding, but config.json ties the two; set "
            "tie_word_embeddings to false if it is a weight of its own"
        )


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape:
        return False
    step = max(1, CHUNK_BYTES // (4 * math.prod(one.shape[1:])))
    for begin in range(0, one.shape[0], step):
        end = min(begin + step, one.shape[0])
        if not torch.equal(one.rows(begin, end), other.rows(begin, end)):
            return False
    return True
