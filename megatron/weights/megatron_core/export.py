"""Models written as megatron-core's distributed checkpoints, which its own loader and Megatron-LM open.

torch.distributed.checkpoint writes the files, one tensor at a time: each is read from the source when it is written.
Layers and experts are stacked, as megatron-core has them by default. The vocabulary is written without padding:
megatron-core takes the rows that are there.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.checkpoint.foreign import TRACKER
from megatron.checkpoint.format import CheckpointError
from megatron.options.config import Config
from megatron.runtime.files import sync_file, write_durably
from megatron.weights.huggingface import parameters_of
from megatron.weights.huggingface_files import DTYPES
from megatron.weights.megatron_args import arguments_of, config_of
from megatron.weights.megatron_core.names import Place, parts, written_place
from megatron.weights.megatron_core.source import COMMON
from megatron.weights.model import ReportNumel, WholeModel

ITERATION = "iter_0000000"
_CONTENT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_LINEAR = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
_EXPERT = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")


class _Stack(Tensor):
    """A tensor of theirs without numbers; torch reads each chunk when it writes it."""

    num_stacked: int
    """Leading dimensions, of layers and of experts: a chunk has one of each."""
    chunks: dict[tuple[int, ...], Callable[[], Tensor]]
    """By the numbers of layer and expert."""
    # operations give plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(shape: tuple[int, ...], num_stacked: int) -> _Stack:
        stack = torch.empty(shape, device="meta").as_subclass(_Stack)
        stack.num_stacked, stack.chunks = num_stacked, {}
        return stack

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        inner = tuple(self.shape[self.num_stacked :])
        sizes = torch.Size((1,) * self.num_stacked + inner)
        return [ChunkStorageMetadata(torch.Size(index + (0,) * len(inner)), sizes) for index in self.chunks]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=torch.float32)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        # with leading dimensions of one, as ranks of a pipeline hold their layers
        numbers = tuple(index.offset[: self.num_stacked])
        return self.chunks[numbers]().view(*(1 for _ in numbers), *self.shape[self.num_stacked :])


def write(model: WholeModel, folder: Path, progress: ReportNumel) -> None:
    """Write weights in float32 as iteration 0 into an empty folder.

    Raises CheckpointError where megatron-core has no such model.
    """
    config = model.config
    # refused before anything is written
    arguments = arguments_of(config)
    _check_arguments(config, arguments, folder)
    # as Megatron names the folder of an iteration
    inside = folder / ITERATION
    inside.mkdir()
    state: dict[str, object] = dict(_stacks(model, progress))
    state |= {key: [None] for key in _extra_states(config)}
    # one file: a reader takes stretches of it, on any layout
    writer = checkpoint.FileSystemWriter(inside, single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about one process, which is meant
        planner = checkpoint.DefaultSavePlanner(flatten_state_dict=False)
        checkpoint.save(state, storage_writer=writer, planner=planner, no_dist=True)
    # Megatron-LM's --use-checkpoint-args, and this project, take the model from here
    with (inside / COMMON).open("wb") as file:
        torch.save({"args": argparse.Namespace(**arguments), "iteration": 0, "checkpoint_version": 3.0}, file)
        sync_file(file)
    write_durably(inside / "metadata.json", json.dumps(_CONTENT).encode())
    # last: it names what is whole
    write_durably(folder / TRACKER, b"0")


def _check_arguments(config: Config, arguments: dict[str, object], folder: Path) -> None:
    """Raise CheckpointError unless the arguments describe the model whole."""
    fault = f"architecture={config.model.architecture} is another"
    try:
        there = config_of(arguments, folder, config.model.vocab_size).model
    except CheckpointError as error:
        fault = str(error)
    else:
        # by what the options compute: a default that is stated is the same model
        length = config.training.seq_length
        here, read = config.model.computed(length), there.computed(length)
        differing = sorted(name for name in here if here[name] != read.get(name))
        if not differing:
            return
        fault = "its arguments do not state " + ", ".join(f"{name}={here[name]}" for name in differing)
    raise CheckpointError(f"megatron-core has no such model ({fault}); keep the model as native, universal or hf")


def _stacks(model: WholeModel, progress: ReportNumel) -> dict[str, _Stack]:
    """Return their tensors by key, whose chunks are read from the source."""
    config = model.config
    stacks: dict[str, _Stack] = {}
    for name, shard in parameters_of(config).items():
        place = written_place(name)
        # the first of a stack gives the shape of all
        if place.key not in stacks:
            lengths = (config.model.num_layers, config.model.num_experts or 0)[: len(place.index)]
            stacks[place.key] = _Stack.of((*lengths, *shard.shape), len(place.index))

        # read when torch writes it, so that one tensor is in memory at a time
        def read(name: str = name, place: Place = place) -> Tensor:
            return _theirs(model, name, place, progress)

        stacks[place.key].chunks[place.index] = read
    for key, stack in stacks.items():
        expected = 1
        for length in stack.shape[: stack.num_stacked]:
            expected *= length
        # a stack has no place for layers of another kind
        if len(stack.chunks) != expected:
            raise CheckpointError(
                f"megatron-core stacks {key} of all layers, but {len(stack.chunks)} of {expected} have it; keep the "
                "model as native, universal or hf"
            )
    return stacks


def _theirs(model: WholeModel, name: str, place: Place, progress: ReportNumel) -> Tensor:
    """Return their tensor of a parameter, in their order of rows."""
    # whole, since their rows are in another order
    full = model.source.read_full(name)
    # one place: stacked tensors hold gate and up one after the other
    (part,) = parts(name, model.source.parameters[name], (place,), model.config)
    rows = full if part.heads is None else torch.cat([view for _, _, view in part.chunks(full)])
    progress(full.numel())
    return rows.to(DTYPES["fp32"]).contiguous()


def _extra_states(config: Config) -> list[str]:
    """Return the names of the states that its linear layers save beside their weights, which are nothing."""
    layers, experts = config.model.num_layers, config.model.num_experts
    names = [f"{module}._extra_state/shard_{layer}_{layers}" for module in _LINEAR for layer in range(layers)]
    # where experts take the place of the MLP, theirs are by layer and expert
    if experts is not None:
        names = [name for name in names if not name.startswith("mlp.")]
        names += [
            f"{module}._extra_state/shard_{layer}.{expert}_{layers}.{experts}"
            for module in _EXPERT
            for layer in range(layers)
            for expert in range(experts)
        ]
    return [f"decoder.layers.{name}" for name in names]
