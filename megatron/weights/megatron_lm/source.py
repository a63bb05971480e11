"""A checkpoint of Megatron-LM in its legacy format as a source of weights: each rank reads the rows it needs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.foreign import megatron_lm_folder
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.source import Slice, WeightSource, read_windows
from megatron.options.config import Config
from megatron.parallel.shards import Shard
from megatron.weights.deepspeed.deepspeed_checkpoint import MAX_DRIFT, agreed_copy
from megatron.weights.deepspeed.origins import VOCABULARY, WORD_EMBEDDING
from megatron.weights.foreign_files import as_damage
from megatron.weights.huggingface import CHUNK_BYTES, parameters_of
from megatron.weights.huggingface_files import some
from megatron.weights.megatron_args import described_config
from megatron.weights.megatron_lm.distributed_optimizer import Buffers
from megatron.weights.megatron_lm.files import ModelParallelFiles, RankContent
from megatron.weights.megatron_lm.names import (
    Named,
    OptimizerError,
    RowOrder,
    RowPart,
    TensorPlace,
    check_version,
    named,
    num_layers,
)
from megatron.weights.megatron_lm.optimizer import REMEDY, RankState, check_kinds, rank_state

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """A rank's tensors of a parameter."""

    paths: tuple[Path, ...]
    """Files that hold it, the model's first."""
    name: str
    """Theirs."""
    kinds: Mapping[str, Tensor]
    rounded: Tensor | None
    """The model's own weights, where `weight` is the optimizer's in float32."""

    @property
    def path(self) -> Path:
        return self.paths[0]


Holders = dict[str, list[list[Held]]]
"""By our name: of each tensor-parallel rank its tensor, then later stages' copies of it (tied weights)."""


class MegatronLMCheckpoint(WeightSource):
    """Weights are the optimizer's in float32 where the files have them, as Megatron resumes from them."""

    format, title = "megatron-lm", "Megatron-LM"

    def __init__(self, folder: Path, config: Config | None, max_drift: float = MAX_DRIFT) -> None:
        """Raises CheckpointError naming the file, argument or tensor at fault, or each option that differs.

        Args:
            config: That of the run. None: the one that the checkpoint's arguments describe.
        """
        ranks = ModelParallelFiles(folder)
        self._files, self._max_drift = ranks.files, max_drift
        arguments = ranks.first.arguments
        if arguments.get("num_experts"):
            raise CheckpointError(
                f"{folder} is of a model with {arguments['num_experts']} experts, which is read from the format "
                "torch_dist alone; save it in that (--ckpt-format torch_dist)"
            )
        config, uncompared = described_config(
            arguments, config, folder, ranks.first.path, lambda: _vocabulary_rows(ranks)
        )
        order = RowOrder(config.model, ranks.tensor_size, ranks.first.version)
        check_version(folder, order)
        states, fault = _states(ranks, config)
        shards = parameters_of(config)
        self._held = _holders(ranks, config, states)
        _check_tensors(folder, order, shards, self._held)
        _check_vocabulary(ranks, config, self._held)
        self._parts = {
            name: order.parts(name, shard, self._held[name][0][0].kinds["weight"].shape[0])
            for name, shard in shards.items()
        }
        kinds = ["weight"]
        if states:
            kinds += check_kinds(list(states.values()))
        metadata = _metadata(ranks, config, list(states.values()))
        super().__init__(folder, shards, kinds=kinds, metadata=metadata, config=config)
        self.uncompared, self.optimizer_fault = uncompared, fault

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        paths = {path for ranks in self._held.values() for copies in ranks for held in copies for path in held.paths}
        return self._files.verify(paths, share)

    def read(self, at: Slice, kind: str = "weight") -> Tensor:
        """Reads the rows and columns that it takes numbers from."""
        shard = self.parameters.get(at.name)
        if shard is None or kind not in self.kinds or (at.shard.shape, at.shard.dim) != (shard.shape, shard.dim):
            raise CheckpointError(f"{self.folder} holds no {kind} of {at.name} {list(at.shard.shape)}: another model")
        return read_windows(at, partial(self._windows, at.name, kind))

    def _windows(
        self, name: str, kind: str, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield what files hold of that rectangle of our full tensor, as Windows has it, some rows at a time."""
        if self.parameters[name].dim is None:
            agreed = self._replicated(name, kind).view(self.parameters[name].shape[0], -1)
            yield rows[0], 0, agreed[rows[0] : rows[1]].float()
            return
        for part in self._parts[name]:
            held, *copies = self._held[name][part.rank]
            width = held.kinds[kind][:1].numel()
            begin, end = max(rows[0], part.begin), min(rows[1], part.begin + part.count)
            if part.column >= columns[1] or part.column + width <= columns[0]:
                continue
            step = max(1, CHUNK_BYTES // (4 * width))
            for first in range(begin, end, step):
                last = min(first + step, end)
                window = self._checked(held, kind, part, first, last)
                for copy in copies:
                    if not torch.equal(self._checked(copy, kind, part, first, last), window):
                        raise CheckpointError(
                            f"{copy.path}: {kind} of {copy.name} differs from {held.name} in {held.path}, the same "
                            "tied weight; its copies had drifted apart, so load an earlier checkpoint"
                        )
                yield first, part.column, window.float().reshape(last - first, width).contiguous()

    def _checked(self, held: Held, kind: str, part: RowPart, begin: int, end: int) -> Tensor:
        """Return our rows [begin, end) of a rank's tensor, as it is stored."""
        self._ensure(held)
        first = part.first + (begin - part.begin) * part.step
        rows = slice(first, first + (end - begin - 1) * part.step + 1, part.step)
        window = held.kinds[kind][rows]
        if kind == "weight" and held.rounded is not None:
            _check_rounding(held, window, held.rounded[rows])
        return window

    def _ensure(self, held: Held) -> None:
        for path in held.paths:
            self._files.ensure(path)

    def _replicated(self, name: str, kind: str) -> Tensor:
        """Return a tensor of which every tensor-parallel rank holds a copy."""
        tensors = []
        for rank in self._held[name]:
            for held in rank:
                self._ensure(held)
                if kind == "weight" and held.rounded is not None:
                    _check_rounding(held, held.kinds[kind], held.rounded)
                tensors.append(held.kinds[kind])
        return agreed_copy(tensors, f"{self.folder}: {kind} of {self._held[name][0][0].name}", self._max_drift)


def _check_rounding(held: Held, exact: Tensor, rounded: Tensor) -> None:
    """Raise CheckpointError unless the optimizer's float32 weights are those that the model's were rounded from."""
    if not torch.equal(exact.to(rounded.dtype), rounded):
        raise CheckpointError(
            f"{held.path}: the float32 weights that the optimizer holds of {held.name} are not those of the model; the "
            "file is of no release that is known, so save the checkpoint again in the format torch_dist"
        )


def open_megatron_lm(path: Path, config: Config | None = None, max_drift: float | None = None) -> MegatronLMCheckpoint:
    """Open a folder of an iteration, or the one that latest_checkpointed_iteration.txt names; see MegatronLMCheckpoint.

    `max_drift` replaces MAX_DRIFT. Raises CheckpointError.
    """
    folder = megatron_lm_folder(path)
    if folder is None:
        raise CheckpointError(f"{path} holds no checkpoint of Megatron-LM; give the folder that it saved to")
    with as_damage(folder, "Megatron-LM's checkpoints"):
        return MegatronLMCheckpoint(folder, config, MAX_DRIFT if max_drift is None else max_drift)


def _vocabulary_rows(ranks: ModelParallelFiles) -> int:
    """Return the rows of the word embedding, its padding included: nothing shows which of them are padding."""
    rank = ranks.first
    for name, tensor in rank.chunks[0].items():
        if _is_embedding(name):
            return len(tensor) * ranks.tensor_size
    raise CheckpointError(f"{rank.path} holds no word embedding; it is not of a language model's first stage")


def _is_embedding(theirs: str) -> bool:
    at = named(theirs, is_gated=False, is_tied=False)
    return at == Named(None, WORD_EMBEDDING)


def _holders(ranks: ModelParallelFiles, config: Config, states: Mapping[tuple[int, int], RankState]) -> Holders:
    """Return the tensors of all ranks by our names. Raises CheckpointError for a name that the model does not have."""
    is_gated = any(name.endswith(".gate_up.weight") for name in parameters_of(config))
    is_tied = not config.model.untie_embeddings_and_output_weights
    held: Holders = {}
    unknown = []
    for tensor_rank in range(ranks.tensor_size):
        offset = 0
        for stage, chunk in ranks.stages():
            rank, state = ranks.ranks[tensor_rank, stage], states.get((tensor_rank, stage))
            for theirs, tensor in rank.chunks[chunk].items():
                at = named(theirs, is_gated=is_gated, is_tied=is_tied)
                if at is None:
                    unknown.append(f"{theirs} in {rank.path}")
                    continue
                of_ranks = held.setdefault(at.full_name(offset), [[] for _ in range(ranks.tensor_size)])
                of_ranks[tensor_rank].append(_held(rank, TensorPlace(chunk, theirs), tensor, state))
            offset += _layers_of(rank, chunk)
        if offset != config.model.num_layers:
            raise CheckpointError(
                f"{ranks.folder} holds {offset} layers of tensor-parallel rank {tensor_rank}, but its model has "
                f"{config.model.num_layers}; copy the whole checkpoint, or give the config of its model"
            )
    if unknown:
        raise CheckpointError(
            f"{ranks.folder} holds tensors that a model of these options does not have: {some(unknown)}; give the "
            "config of its model"
        )
    return held


def _held(rank: RankContent, place: TensorPlace, tensor: Tensor, state: RankState | None) -> Held:
    kinds: dict[str, Tensor] = {"weight": tensor}
    if state is not None:
        kinds |= state.tensors[place]
    exact = kinds["weight"]
    paths = {rank.path: None} if state is None else {rank.path: None, state.path: None}
    return Held(tuple(paths), place.name, kinds, None if exact is tensor else tensor)


def _layers_of(rank: RankContent, chunk: int) -> int:
    try:
        return num_layers(rank.chunks[chunk])
    except ValueError as error:
        raise CheckpointError(f"{rank.path} lacks {error}; copy the whole checkpoint") from None


def _check_tensors(folder: Path, order: RowOrder, shards: Mapping[str, Shard], held: Holders) -> None:
    """Raise CheckpointError, with all faults, unless these are the tensors of the model, in its shapes."""
    faults = []
    if missing := sorted(set(shards) - set(held)):
        faults.append(f"missing: {some(missing)}")
    if surplus := sorted(set(held) - set(shards)):
        faults.append(f"unknown to a model of these options: {some(surplus)}")
    wrong = []
    for name in sorted(set(shards) & set(held)):
        expected = order.local_shape(name, shards[name])
        for rank, copies in enumerate(held[name]):
            if not copies:
                wrong.append(f"{name} is not there on tensor-parallel rank {rank}")
            elif len(copies) > 1 and name != WORD_EMBEDDING:
                wrong.append(f"{name} is there twice, in {copies[0].path} and {copies[1].path}")
            wrong += [
                f"{each.name} in {each.path} is {list(each.kinds['weight'].shape)}, its model makes it {list(expected)}"
                for each in copies
                if not _is_like(each.kinds["weight"], expected, is_padded=name in VOCABULARY)
            ]
    if wrong:
        faults.append(some(wrong))
    if faults:
        raise CheckpointError(f"{folder} does not hold the model that its arguments describe: {'; '.join(faults)}")


def _is_like(tensor: Tensor, expected: Sequence[int], *, is_padded: bool) -> bool:
    # the rows of a vocabulary depend on its padding
    return tuple(tensor.shape[is_padded:]) == tuple(expected[is_padded:]) and tensor.dim() == len(expected)


def _check_vocabulary(ranks: ModelParallelFiles, config: Config, held: Holders) -> None:
    """Raise CheckpointError unless the rows of the vocabulary are those of the model, with the run's padding."""
    multiple = ranks.first.arguments.get("make_vocab_size_divisible_by")
    size = config.model.vocab_size
    for name in VOCABULARY:
        rows = {len(each.kinds["weight"]) for copies in held.get(name, []) for each in copies}
        if not rows:
            continue
        total = max(rows) * ranks.tensor_size
        padded = total
        if isinstance(multiple, int) and multiple > 0:
            unit = multiple * ranks.tensor_size
            padded = -(-size // unit) * unit
        if len(rows) > 1 or total < size or (padded != total and size != total):
            raise CheckpointError(
                f"{ranks.folder} holds {total} rows of {name} with its padding, which are not those of "
                f"vocab_size={size}; it is a checkpoint of another vocabulary"
            )


def _states(ranks: ModelParallelFiles, config: Config) -> tuple[dict[tuple[int, int], RankState], str | None]:
    """Return the optimizer's state of all ranks, empty where there is none, or the reason why it cannot be read."""
    held = {}
    is_shared = ranks.pipeline_size > 1 and not config.model.untie_embeddings_and_output_weights
    try:
        for place, rank in ranks.ranks.items():
            shared = _shared(rank) if is_shared else ()
            state = rank_state(rank, ranks.files, Buffers.of(rank, place[1], shared))
            if state is not None:
                held[place] = state
    except OptimizerError as error:
        return {}, f"{error}; {REMEDY}"
    if held and len(held) < len(ranks.ranks):
        lacking = next(rank for place, rank in ranks.ranks.items() if place not in held)
        raise CheckpointError(f"{lacking.path} holds no optimizer state, but other ranks do; copy the whole checkpoint")
    return held, None


def _shared(rank: RankContent) -> set[TensorPlace]:
    """Return the word embedding, and its copy on the last stage."""
    return {
        TensorPlace(number, theirs)
        for number, chunk in enumerate(rank.chunks)
        for theirs in chunk
        if named(theirs, is_gated=False, is_tied=True) == Named(None, WORD_EMBEDDING)
    }


def _metadata(ranks: ModelParallelFiles, config: Config, states: Sequence[RankState]) -> dict[str, Any]:
    """Return the metadata of a resuming run, as far as the files have it: see training/checkpoints.py."""
    first = ranks.first
    samples = first.arguments.get("consumed_train_samples")
    scheduler = first.content.get("opt_param_scheduler", first.content.get("lr_scheduler"))
    position = scheduler.get("num_steps") if isinstance(scheduler, dict) else None
    # Megatron counts the schedule in samples too, and keeps both apart
    if isinstance(position, int) and isinstance(samples, int) and samples not in (0, position):
        log.warning(
            "%s: the schedule stands at %d samples, the data at %d; both go on from %d", first.path, position, samples,
            samples,
        )  # fmt: skip
    optimizer = None
    if states:
        steps = [state.step for state in states if state.step is not None]
        optimizer = {"step": max(steps, default=float(first.iteration)), "loss_scaler": dict(states[0].loss_scaler)}
    return {
        "config": config.to_dict(),
        "progress": {"iteration": first.iteration, "consumed_samples": samples if isinstance(samples, int) else 0},
        "optimizer": optimizer,
    }
