"""Parameter names in DeepSpeed's files, which count the layers of the pipeline: `2.attention.qkv.weight`.

A layer's number is its place in the model's list of layers; a layer that is listed twice is in `tied_modules`. The only
place where our names are turned into such numbers and back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.models.registry import family_of
from megatron.models.sequential import module_names
from megatron.options.config import Config
from megatron.parallel.layout import LayoutError
from megatron.parallel.shards import Shard
from megatron.weights.deepspeed.files import RankTensors, UniversalFolder
from megatron.weights.foreign_files import Inert
from megatron.weights.huggingface import parameters_of

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
        # layers 0 and 1 are the embeddings, so block n is layer n + 2
        return cls(_decoder(max([1, *blocks]) - 1, is_tied="0.weight" not in names))

    def theirs(self, ours: str) -> str:
        """Return DeepSpeed's name of a parameter."""
        # the longest: `embedding.word.weight` is of the layer embedding.word, not of embedding
        layer = max((layer for layer in self._theirs if ours.startswith(f"{layer}.")), key=len, default=None)
        return ours if layer is None else self._theirs[layer] + ours.removeprefix(layer)

    def ours(self, theirs: str) -> str:
        """Return our name of a parameter; one that belongs to no layer keeps DeepSpeed's."""
        match = re.match(r"\d+|tied_modules\.\w+", theirs)
        if match is None or match[0] not in self._ours:
            return theirs
        return self._ours[match[0]] + theirs[match.end() :]


def _decoder(num_layers: int, *, is_tied: bool) -> list[str]:
    blocks = [f"layers.{number}" for number in range(num_layers)]
    return ["embedding.word", "embedding", *blocks, "final_norm", "embedding.word" if is_tied else "output"]


def current(theirs: str) -> str:
    """Return the present name of a parameter in files of the first release, whose modules had other names."""
    theirs = theirs.replace("tied_modules.word_embedding.", "tied_modules.embedding_word.")
    theirs = re.sub(r"^1\.positions$", "1.position.weight", theirs)
    return re.sub(r"^(?!1\.)(\d+)\.norm\.", r"\1.", theirs)


MEGATRON_BLOCK = {
    "input_layernorm": "attention_norm",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.dense": "attention.dense",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
"""Modules of a transformer layer; older versions write `attention` for `self_attention`."""
NO_LAYER = -1
"""In the place of a layer's number: that of tied modules."""
MEGATRON_ENDS = {
    "word_embeddings.weight": WORD_EMBEDDING,
    "position_embeddings.weight": "embedding.position.weight",
    "word_embeddings.norm.weight": "embedding.norm.weight",
    "word_embeddings.norm.bias": "embedding.norm.bias",
    "weight": "final_norm.weight",
    "bias": "final_norm.bias",
    "final_layernorm.weight": "final_norm.weight",
    "final_layernorm.bias": "final_norm.bias",
    "lm_head.weight": OUTPUT,
}
"""Parameters outside the transformer layers, by their name in their layer's file."""
MEGATRON_MARK = ".input_layernorm."
MEGATRON_NAME = re.compile(r"(?:(\d+)|tied_modules\.\w+)\.(.+)")


@dataclass(frozen=True)
class Origin:
    """Tensors of a foreign checkpoint that make one of our parameters.

    `theirs` is its name there, then those of its copies (tied weights). `cut` is their full tensor as their ranks shard
    it: its rows may be in another order, and rows of vocabulary padding may follow. With `num_heads`, the number of
    query heads, the rows are grouped by key/value head: [q of the group; k; v].
    """

    theirs: tuple[str, ...]
    shard: Shard
    cut: Shard
    num_heads: int | None = None
    is_megatron: bool = False
    """Copies may differ a little, and are averaged; padding may hold numbers."""

    def reordered(self, full: Tensor) -> Tensor:
        """Return the rows of their full tensor, padding removed, in our order."""
        return full if self.num_heads is None else _ungrouped(full, self.shard.pieces, self.num_heads)


def _ungrouped(grouped: Tensor, pieces: Sequence[int], num_heads: int) -> Tensor:
    """Rows [key/value head][its query heads, k, v][head size] -> [q; k; v], each with its heads in order."""
    # with grouped queries several query heads share a key/value head, and lie before it in the file
    q_size, kv_size, _ = pieces
    head_size = q_size // num_heads
    groups = grouped.unflatten(0, (kv_size // head_size, -1, head_size))  # [kv heads, q heads of each + 2, head size]
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return torch.cat([part.reshape(-1, *grouped.shape[1:]) for part in parts])


# Our models, saved by DeepSpeed


def our_origins(source: RankTensors, config: Config | None, folder: Path) -> dict[str, Origin]:
    """Return the origins in a checkpoint of our own model; without a config, universal files describe their cuts."""
    theirs_of = {current(name): name for name in source.names}
    shards: Mapping[str, Shard]
    if config is not None:
        names, shards = PipelineNames.of_config(config), parameters_of(config)
    elif isinstance(source, UniversalFolder):
        names = PipelineNames.of_theirs(theirs_of)
        shards = {names.ours(name): source.shard(theirs) for name, theirs in theirs_of.items()}
    else:
        raise CheckpointError(
            f"{folder} has no progress.json with the run's config, which describes how tensors are sharded; copy that "
            "file too, or give the model's config (--config)"
        )
    origins = {}
    for ours, shard in shards.items():
        theirs = [theirs_of[name] for name in _names_in_files(ours, names, theirs_of) if name in theirs_of]
        if not theirs:
            raise CheckpointError(
                f"{folder} lacks {ours} of this model; copy the whole checkpoint, or give its own config"
            )
        origins[ours] = _our_origin(source, ours, tuple(theirs), shard)
    known = {name for origin in origins.values() for name in origin.theirs}
    unknown = [name for name in source.names if name not in known]
    if unknown:
        raise CheckpointError(
            f"{folder} holds {unknown[0]} ({len(unknown)} such), which this model does not have; give the config of "
            "the run that saved it"
        )
    return origins


def _names_in_files(ours: str, names: PipelineNames, held: Mapping[str, str]) -> list[str]:
    """DeepSpeed's names of a parameter; in a pipeline's layer files, tied weights are under their layers' numbers."""
    name = names.theirs(ours)
    if ours == WORD_EMBEDDING and names.is_tied and name not in held:
        return ["0.weight", f"{names.last_index}.weight"]
    return [name]


def _our_origin(source: RankTensors, ours: str, theirs: tuple[str, ...], shard: Shard) -> Origin:
    local, cut = source.shape(theirs[0]), shard
    if ours in VOCABULARY and len(local) == 2:  # padded for the layout that saved
        # at least the model's own: a smaller vocabulary then fails the comparison below
        rows = max(local[0] * source.tensor_size, shard.shape[0])
        cut = Shard((rows, shard.shape[1]), dim=0, pieces=(rows,))
    try:
        expected = cut.local_shape(source.tensor_size)
    except LayoutError as error:
        raise CheckpointError(f"{source.path(theirs[0], 'weight')}: {theirs[0]}: {error}") from None
    if local != expected:
        raise CheckpointError(
            f"{source.path(theirs[0], 'weight')} holds {theirs[0]} as {local}, but {ours} of this model has {expected} "
            f"on one of {source.tensor_size} tensor-parallel ranks; it is a checkpoint of another model or vocabulary"
        )
    return Origin(theirs, shard, cut)


# Megatron-DeepSpeed


def is_megatron(names: Sequence[str]) -> bool:
    return any(MEGATRON_MARK in f".{name}" for name in names)


def megatron_origins(source: RankTensors, config: Config | None, folder: Path) -> dict[str, Origin]:
    """Return the origins in a Megatron-DeepSpeed checkpoint, whose blocks are found by name: versions number them
    differently.
    """
    facts = _megatron_facts(source.client, config, folder)
    theirs_of = _megatron_names(source, folder)

    def row_parallel_size(block: str, name: str) -> int:
        """Return the columns of a row-parallel weight: the rows of what is before it, which their names do not say."""
        if (block, name) not in theirs_of:
            raise CheckpointError(f"{folder} holds no tensor for {block}{name}; copy the whole checkpoint")
        return source.shape(theirs_of[block, name][0])[1] * source.tensor_size

    origins = {}
    for (block, name), theirs in theirs_of.items():
        if name.startswith("attention.qkv."):
            q_size = row_parallel_size(block, "attention.dense.weight")
            origin = _qkv_origin(source, facts, theirs, q_size, folder)
        elif name.startswith("mlp.up."):
            origin = _up_origin(source, theirs, row_parallel_size(block, "mlp.down.weight"))
            if len(origin.shard.pieces) > 1:
                name = name.replace("up", "gate_up")
        else:
            origin = _plain_origin(source, facts, name, theirs)
        origins[block + name] = origin
    return origins


def _megatron_names(source: RankTensors, folder: Path) -> dict[tuple[str, str], list[str]]:
    """Return the names of theirs by (block, name) of ours, checked to be those of whole blocks."""
    parsed = _parsed_megatron_names(source, folder)
    blocks = sorted({layer for layer, name in parsed.values() if name == "input_layernorm.weight"} - {NO_LAYER})
    # from whatever number the first block has, but without gaps
    if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        gap = next(layer for layer in range(blocks[0], blocks[-1]) if layer not in blocks)
        raise CheckpointError(f"{folder} lacks the files of layer {gap}; copy the whole checkpoint")
    theirs_of: dict[tuple[str, str], list[str]] = {}
    for theirs, (layer, name) in parsed.items():
        module, _, kind = name.rpartition(".")
        if layer in blocks and module in MEGATRON_BLOCK:
            key = f"layers.{layer - blocks[0]}.", f"{MEGATRON_BLOCK[module]}.{kind}"
        elif layer not in blocks and name in MEGATRON_ENDS:
            key = "", MEGATRON_ENDS[name]
        else:
            raise CheckpointError(
                f"{source.path(theirs, 'weight')} holds {theirs}, which has no place in BLOOM or Llama; it is a "
                "checkpoint of another model"
            )
        theirs_of.setdefault(key, []).append(theirs)
    _check_blocks(theirs_of, len(blocks), folder)
    return theirs_of


def _parsed_megatron_names(source: RankTensors, folder: Path) -> dict[str, tuple[int, str]]:
    """Return (number in the pipeline, name within the layer) of each tensor."""
    parsed = {}
    for theirs in source.names:
        match = MEGATRON_NAME.fullmatch(theirs)
        if match is None:
            raise CheckpointError(f"{folder} holds {theirs}, not a name of a Megatron pipeline; it cannot be converted")
        name = re.sub(r"^attention\.", "self_attention.", match[2])
        if not name.endswith("inv_freq"):  # rotary tables are computed, not kept
            parsed[theirs] = (int(match[1] or NO_LAYER), name)
    return parsed


@dataclass(frozen=True)
class _MegatronFacts:
    """Facts that the names and shapes of a Megatron checkpoint leave open; None: unknown."""

    num_heads: int | None
    vocab_size: int | None


def _megatron_facts(client: Mapping[str, Any], config: Config | None, folder: Path) -> _MegatronFacts:
    version = client.get("checkpoint_version", 3.0)
    if isinstance(version, int | float) and version < 2:
        raise CheckpointError(
            f"{folder} has checkpoint_version {version}, which orders q, k and v differently; load and save it with a "
            "Megatron that writes version 2 or later"
        )
    arguments = client.get("args")
    info = client.get("universal_checkpoint_info")
    num_heads = arguments.get("num_attention_heads") if isinstance(arguments, Inert) else None
    vocab_size = info.get("original_vocab_size") if isinstance(info, dict) else None
    stored = {"num_attention_heads": num_heads, "vocab_size": vocab_size}
    if config is None:
        known = {option: value for option, value in stored.items() if isinstance(value, int)}
        return _MegatronFacts(known.get("num_attention_heads"), known.get("vocab_size"))
    for option, value in stored.items():
        own = getattr(config.model, option)
        if value not in (None, own):
            raise CheckpointError(f"{folder} is of a model with {option}={value}, not {own}; give its own config")
    return _MegatronFacts(config.model.num_attention_heads, config.model.vocab_size)


def _check_blocks(found: Mapping[tuple[str, str], object], num_layers: int, folder: Path) -> None:
    """Check that every transformer layer has the same parameters, and that both ends are there."""
    # what one block has, all must have
    expected = {name for block, name in found if block}
    missing = [
        f"layers.{number}.{name}"
        for number in range(num_layers)
        for name in sorted(expected)
        if (f"layers.{number}.", name) not in found
    ]
    missing += [name for name in (WORD_EMBEDDING, "final_norm.weight") if ("", name) not in found]
    if missing:
        raise CheckpointError(f"{folder} holds no tensor for {missing[0]}; copy the whole checkpoint")


def _plain_origin(source: RankTensors, facts: _MegatronFacts, name: str, theirs: Sequence[str]) -> Origin:
    """Origin of a parameter whose rows are in our order: vocabulary, row-parallel or replicated."""
    size, local = source.tensor_size, source.shape(theirs[0])
    if name in VOCABULARY:
        rows = local[0] * size
        # unknown: nothing shows which rows are padding, so all are kept
        vocab_size = facts.vocab_size or rows
        if vocab_size > rows:
            raise CheckpointError(
                f"{source.path(theirs[0], 'weight')} holds {rows} rows of {theirs[0]}, fewer than vocab_size="
                f"{vocab_size}; it is a checkpoint of another vocabulary"
            )
        shard, cut = (Shard((count, local[1]), dim=0, pieces=(count,)) for count in (vocab_size, rows))
        return Origin(tuple(theirs), shard, cut, is_megatron=True)
    if name in ("attention.dense.weight", "mlp.down.weight"):
        columns = local[1] * size
        shard = Shard((local[0], columns), dim=1, pieces=(columns,))
        # cut by columns: each rank has its own, so there are no copies to average
        return Origin(tuple(theirs), shard, shard)
    return Origin(tuple(theirs), Shard(local), Shard(local), is_megatron=True)


def _qkv_origin(source: RankTensors, facts: _MegatronFacts, theirs: Sequence[str], q_size: int, folder: Path) -> Origin:
    local = source.shape(theirs[0])
    rows = local[0] * source.tensor_size
    if facts.num_heads is None:
        raise CheckpointError(
            f"{folder} does not say how many attention heads its model has: its mp_rank files hold no args; give the "
            "config of the model"
        )
    kv_size = (rows - q_size) // 2  # with grouped queries smaller than q
    head_size = q_size // facts.num_heads
    fits = q_size % facts.num_heads == 0 and kv_size > 0 and kv_size % head_size == 0 and q_size % kv_size == 0
    if not fits or q_size + 2 * kv_size != rows:
        raise CheckpointError(
            f"{source.path(theirs[0], 'weight')} holds {rows} rows of q, k and v, {q_size} of them q, which is not "
            f"{facts.num_heads} heads; give the number of heads of its own model"
        )
    # cut in one piece: whole groups of heads lie on each rank, so q, k and v are not cut apart
    cut = Shard((rows, *local[1:]), dim=0, pieces=(rows,))
    return Origin(tuple(theirs), replace(cut, pieces=(q_size, kv_size, kv_size)), cut, num_heads=facts.num_heads)


def _up_origin(source: RankTensors, theirs: Sequence[str], ffn_size: int) -> Origin:
    """Origin of the MLP's first matrix; with SwiGLU each rank holds its part of gate, then of up."""
    local = source.shape(theirs[0])
    rows = local[0] * source.tensor_size
    # nothing states whether the MLP is gated: its first matrix has then twice the rows that the second reads
    pieces = (ffn_size, ffn_size) if rows == 2 * ffn_size else (rows,)
    shard = Shard((rows, *local[1:]), dim=0, pieces=pieces)
    return Origin(tuple(theirs), shard, shard)
