"""DeepSpeed's checkpoints: its universal folders in both directions, its own shards and Megatron-DeepSpeed's inwards.

What is read comes in our names and our row order, as full float32 tensors, whoever wrote it:

    foreign = read(Path("run/global_step100_universal"))
    for name, kind, tensor in foreign.parameters(): ...

`theirs` is a name in the foreign checkpoint, `ours` one of this project. The files are opened by `foreign.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.config.command_line import from_dict
from megatron.config.options import Config, ConfigError
from megatron.files import replacing, sync_file, sync_folder
from megatron.interop.deepspeed_files import (
    FILE_OF_KIND,
    LAYER_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    Inert,
    ModelFiles,
    Source,
    UniversalFolder,
    ZeroShards,
    numbered,
    verify_file,
)
from megatron.interop.pipeline_names import OUTPUT, TIED, WORD_EMBEDDING, our_names, pipeline_names
from megatron.parallel.shards import LayoutError, Shard

log = logging.getLogger(__name__)

Layout = Literal["universal", "deepspeed", "megatron-deepspeed"]

VOCABULARY = (WORD_EMBEDDING, OUTPUT)
MEGATRON_MARK = ".input_layernorm."

PARAMETER_GROUPS = 16
"""DeepSpeed restores as many parameter groups as the file lists, and stops at the model's own number."""


# ---------------------------------------------------------------------------------------------------------------------
# Their names and row order -> ours


@dataclass(frozen=True)
class _Origin:
    """Where one of our parameters comes from.

    `theirs` is its name there, then those of its copies (tied weights). `cut` is their full tensor, as their ranks cut
    it: its rows may lie in another order, and rows of vocabulary padding may follow. With `num_heads`, the number of
    query heads, the rows are grouped by key/value head, [q of the group; k; v].
    """

    theirs: tuple[str, ...]
    shard: Shard
    cut: Shard
    num_heads: int | None = None
    megatron: bool = False
    """Copies may differ, and are averaged; padding holds numbers."""


def _our_origins(source: Source, config: Config | None, folder: Path) -> dict[str, _Origin]:
    """Origins in a checkpoint of our own model; the config tells the cuts, or else the universal files themselves."""
    shards: Mapping[str, Shard]
    if config is not None:
        from megatron.interop.huggingface import parameters_of

        shards = parameters_of(config)
    elif isinstance(source, UniversalFolder):
        shards = {ours: source.shard(theirs) for theirs, ours in our_names(source.names).items()}
    else:
        raise CheckpointError(
            f"{folder} does not say how its tensors are cut over ranks: it has no progress.json with the run's config; "
            "copy that file too, or give the model's config (--config)"
        )
    theirs_of = pipeline_names(shards)
    origins = {ours: _our_origin(source, folder, ours, theirs_of[ours], shard) for ours, shard in shards.items()}
    known = {name for origin in origins.values() for name in origin.theirs}
    strange = [name for name in source.names if name not in known]
    if strange:
        raise CheckpointError(
            f"{folder} holds {strange[0]} ({len(strange)} such), which this model does not have; give the config of "
            "the run that saved it"
        )
    return origins


def _our_origin(source: Source, folder: Path, ours: str, name: str, shard: Shard) -> _Origin:
    theirs = [name]
    if name not in source.names and ours == WORD_EMBEDDING:
        # a pipeline's layer files know nothing of ties: the first layer holds the weight, and maybe the last a copy
        last = max((int(name.split(".")[0]) for name in source.names if name[0].isdigit()), default=0)
        theirs = [name for name in dict.fromkeys(["0.weight", f"{last}.weight"]) if name in source.names]
    if not theirs or theirs[0] not in source.names:
        raise CheckpointError(f"{folder} lacks {ours} of this model; copy the whole checkpoint, or give its own config")
    local, cut = source.shape(theirs[0]), shard
    if ours in VOCABULARY and len(local) == 2:
        rows = max(local[0] * source.tensor_size, shard.shape[0])
        cut = Shard((rows, shard.shape[1]), dim=0, pieces=(rows,))
    _check_shape(source, theirs[0], cut, ours)
    return _Origin(tuple(theirs), shard, cut)


def _check_shape(source: Source, theirs: str, cut: Shard, ours: str) -> None:
    local = source.shape(theirs)
    try:
        expected = cut.local_shape(source.tensor_size)
    except LayoutError as error:
        raise CheckpointError(f"{source.path(theirs, 'weight')}: {theirs}: {error}") from None
    if local != expected:
        raise CheckpointError(
            f"{source.path(theirs, 'weight')} holds {theirs} as {local}, but {ours} of this model has {expected} on "
            f"one of {source.tensor_size} tensor-parallel ranks; it is a checkpoint of another model or vocabulary"
        )


MEGATRON_BLOCK = {
    "input_layernorm": "attention_norm",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.dense": "attention.dense",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
"""A transformer layer's modules; older versions write `attention` for `self_attention`."""

MEGATRON_NAME = re.compile(r"(?:(\d+)|tied_modules\.\w+)\.(.+)")


@dataclass(frozen=True)
class _MegatronFacts:
    """What the names and shapes of a Megatron checkpoint leave open. None: not known."""

    num_heads: int | None
    vocab_size: int | None


def _megatron_facts(client: Mapping[str, Any], config: Config | None, folder: Path) -> _MegatronFacts:
    version = client.get("checkpoint_version", 3.0)
    if isinstance(version, int | float) and version < 2:
        raise CheckpointError(
            f"{folder} has checkpoint_version {version}, whose q, k and v lie in another order; load and save it with "
            "a Megatron that writes version 2 or later"
        )
    arguments = client.get("args")
    info = client.get("universal_checkpoint_info")
    num_heads = arguments.get("num_attention_heads") if isinstance(arguments, Inert) else None
    vocab_size = info.get("original_vocab_size") if isinstance(info, dict) else None
    if config is not None:
        wanted = config.model.num_attention_heads, config.model.vocab_size
        for found, own, option in zip(
            (num_heads, vocab_size), wanted, ("num_attention_heads", "vocab_size"), strict=True
        ):
            if found not in (None, own):
                raise CheckpointError(f"{folder} is of a model with {option}={found}, not {own}; give its own config")
        num_heads, vocab_size = wanted
    return _MegatronFacts(
        num_heads if isinstance(num_heads, int) else None, vocab_size if isinstance(vocab_size, int) else None
    )


def _megatron_origins(source: Source, facts: _MegatronFacts, folder: Path) -> dict[str, _Origin]:
    """Layers are found by their names: versions begin to count at different numbers."""
    parsed: dict[str, tuple[int | None, str]] = {}
    for theirs in source.names:
        match = MEGATRON_NAME.fullmatch(theirs)
        if match is None:
            raise CheckpointError(f"{folder} holds {theirs}, no name of a Megatron pipeline; it cannot be converted")
        name = re.sub(r"^attention\.", "self_attention.", match[2])
        if not name.endswith("inv_freq"):  # rotary tables are computed, not kept
            parsed[theirs] = (int(match[1]) if match[1] else None), name
    blocks = sorted(
        {layer for layer, name in parsed.values() if layer is not None and name == "input_layernorm.weight"}
    )
    if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        gap = next(layer for layer in range(blocks[0], blocks[-1]) if layer not in blocks)
        raise CheckpointError(f"{folder} lacks the files of layer {gap}; copy the whole checkpoint")
    ends = {
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
    theirs_of: dict[str, list[str]] = {}
    for theirs, (layer, name) in parsed.items():
        if layer in blocks:
            module, _, part = name.rpartition(".")
            ours = f"layers.{layer - blocks[0]}.{MEGATRON_BLOCK[module]}.{part}" if module in MEGATRON_BLOCK else None
        else:
            ours = ends.get(name)
        if ours is None:
            raise CheckpointError(
                f"{source.path(theirs, 'weight')} holds {theirs}, which has no place in BLOOM or Llama; it is a "
                "checkpoint of another model"
            )
        theirs_of.setdefault(ours, []).append(theirs)
    origins = {
        origin_name: origin
        for ours, theirs in theirs_of.items()
        for origin_name, origin in [_megatron_origin(source, facts, folder, ours, tuple(theirs), theirs_of)]
    }
    _check_blocks(origins, len(blocks), folder)
    return origins


def _megatron_origin(
    source: Source,
    facts: _MegatronFacts,
    folder: Path,
    ours: str,
    theirs: tuple[str, ...],
    theirs_of: Mapping[str, Sequence[str]],
) -> tuple[str, _Origin]:
    """The parameter's own name, which for SwiGLU differs from `ours`, and its origin."""
    size, local = source.tensor_size, source.shape(theirs[0])
    layer, name = _split(ours)
    if ours in VOCABULARY:
        rows = local[0] * size
        vocab_size = facts.vocab_size or rows
        if not vocab_size <= rows:
            raise CheckpointError(
                f"{source.path(theirs[0], 'weight')} holds {rows} rows of {theirs[0]}, fewer than vocab_size="
                f"{vocab_size}; it is a checkpoint of another vocabulary"
            )
        shard = Shard((vocab_size, local[1]), dim=0, pieces=(vocab_size,))
        return ours, _Origin(theirs, shard, Shard((rows, local[1]), dim=0, pieces=(rows,)), megatron=True)
    if name in ("attention.dense.weight", "mlp.down.weight"):
        columns = local[1] * size
        shard = Shard((local[0], columns), dim=1, pieces=(columns,))
        return ours, _Origin(theirs, shard, shard)
    if name.startswith(("attention.qkv.", "mlp.up.")):
        rows = local[0] * size
        if name.startswith("attention.qkv."):
            q_size = source.shape(_only(theirs_of, f"{layer}.attention.dense.weight", folder))[1] * size
            if facts.num_heads is None:
                raise CheckpointError(
                    f"{folder} does not say how many attention heads its model has: its mp_rank files hold no args; "
                    "give the config of the model"
                )
            kv_size = (rows - q_size) // 2
            head_size = q_size // facts.num_heads
            fits = q_size % facts.num_heads == 0 and kv_size > 0 and kv_size % head_size == 0 and q_size % kv_size == 0
            if not fits or q_size + 2 * kv_size != rows:
                raise CheckpointError(
                    f"{source.path(theirs[0], 'weight')} holds {rows} rows of q, k and v, {q_size} of them q, which do "
                    f"not make {facts.num_heads} heads; give the number of heads of its own model"
                )
            whole = Shard((rows, *local[1:]), dim=0, pieces=(rows,))
            shard = replace(whole, pieces=(q_size, kv_size, kv_size))
            return ours, _Origin(theirs, shard, whole, num_heads=facts.num_heads)
        down = source.shape(_only(theirs_of, f"{layer}.mlp.down.weight", folder))[1] * size
        if rows == 2 * down:  # SwiGLU: each rank holds its part of gate, then of up
            shard = Shard((rows, *local[1:]), dim=0, pieces=(down, down))
            return ours.replace("mlp.up", "mlp.gate_up"), _Origin(theirs, shard, shard)
        shard = Shard((rows, *local[1:]), dim=0, pieces=(rows,))
        return ours, _Origin(theirs, shard, shard)
    return ours, _Origin(theirs, Shard(local), Shard(local), megatron=True)


def _split(ours: str) -> tuple[str, str]:
    """`layers.3.mlp.up.weight` -> (`layers.3`, `mlp.up.weight`); a name outside the layers is left whole."""
    match = re.fullmatch(r"(layers\.\d+)\.(.+)", ours)
    return (match[1], match[2]) if match else ("", ours)


def _only(theirs_of: Mapping[str, Sequence[str]], ours: str, folder: Path) -> str:
    if ours not in theirs_of:
        raise CheckpointError(f"{folder} holds no tensor for {ours}; copy the whole checkpoint")
    return theirs_of[ours][0]


def _check_blocks(origins: Mapping[str, _Origin], num_layers: int, folder: Path) -> None:
    """Every transformer layer holds the same parameters, and the ends are there."""
    layers: dict[str, set[str]] = {f"layers.{number}": set() for number in range(num_layers)}
    for ours in origins:
        layer, name = _split(ours)
        if layer:
            layers[layer].add(name)
    expected = set.union(*layers.values())
    missing = [f"{layer}.{name}" for layer, names in layers.items() for name in sorted(expected - names)]
    missing += [name for name in (WORD_EMBEDDING, "final_norm.weight") if name not in origins]
    if missing:
        raise CheckpointError(f"{folder} holds no tensor for {missing[0]}; copy the whole checkpoint")


def _check_model(origins: Mapping[str, _Origin], config: Config, folder: Path) -> None:
    """That the config describes the model that was found."""
    from megatron.interop.huggingface import parameters_of

    expected = {name: shard.shape for name, shard in parameters_of(config).items()}
    found = {name: origin.shard.shape for name, origin in origins.items()}
    if found != expected:
        name = next(name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name))
        raise CheckpointError(
            f"{folder} holds {name} as {found.get(name, 'no parameter')}, but the config's model has "
            f"{expected.get(name, 'no such parameter')}; give the config of the checkpoint's own model"
        )


def _ungrouped(grouped: Tensor, pieces: Sequence[int], num_heads: int) -> Tensor:
    """Rows [key/value head][its query heads, k, v][head size] -> [q; k; v], each with its heads in order."""
    q_size, kv_size, _ = pieces
    head_size = q_size // num_heads
    groups = grouped.unflatten(0, (kv_size // head_size, -1, head_size))
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return torch.cat([part.reshape(-1, *grouped.shape[1:]) for part in parts])


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class ForeignCheckpoint:
    """A foreign checkpoint in our names. Tensors are read when asked for, one at a time, by any process.

    `shards` describes each full tensor, without padding. `kinds` are those that every parameter has: `weight`, and the
    optimizer's `exp_avg`, `exp_avg_sq` or `momentum_buffer`. `facts`, each where the checkpoint tells it: `iteration`,
    `consumed_samples`, `step` (the optimizer's), `args` (Megatron's arguments), `metadata` (ours).
    """

    def __init__(
        self, folder: Path, layout: Layout, source: Source, origins: Mapping[str, _Origin], facts: dict[str, Any]
    ) -> None:
        self.folder, self.layout, self.facts = folder, layout, facts
        self.shards: Mapping[str, Shard] = {ours: origin.shard for ours, origin in origins.items()}
        self._source, self._origins = source, origins
        found = {ours: source.kinds(origin.theirs[0]) for ours, origin in origins.items()}
        self.kinds = tuple(kind for kind in FILE_OF_KIND if any(kind in kinds for kinds in found.values()))
        for ours, kinds in found.items():
            if kinds != self.kinds:
                lacking = next(kind for kind in self.kinds if kind not in kinds)
                raise CheckpointError(
                    f"{folder} lacks {lacking} of {ours}, which its other parameters have; copy the whole checkpoint"
                )

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """The full tensor in float32, without padding. Where nothing must be converted, a view of the mapped file.

        Raises CheckpointError if the checkpoint has no such parameter or kind, or its copies differ.
        """
        if name not in self._origins or kind not in self.kinds:
            has = f"kinds {', '.join(self.kinds)} of {len(self._origins)} parameters"
            raise CheckpointError(f"{self.folder} has no {kind} of {name}; it has {has}. Is it of another model?")
        origin = self._origins[name]
        local = [self._checked_local(origin, name, kind, theirs) for theirs in origin.theirs]
        for theirs, copy in zip(origin.theirs[1:], local[1:], strict=True):
            if not all(map(torch.equal, copy, local[0])):
                raise CheckpointError(
                    f"{self._source.path(theirs, kind)}: {theirs} differs from {origin.theirs[0]}, though they are one "
                    "tied weight; the checkpoint was saved while its copies had drifted apart"
                )
        return self._assembled(origin, name, kind, local[0]).float()

    def _checked_local(self, origin: _Origin, name: str, kind: str, theirs: str) -> list[Tensor]:
        local = self._source.local(theirs, kind)
        expected = origin.cut.local_shape(self._source.tensor_size)
        for tensor in local:
            if tuple(tensor.shape) != expected:
                raise CheckpointError(
                    f"{self._source.path(theirs, kind)} holds {kind} of {theirs} as {tuple(tensor.shape)}; {name} has "
                    f"{expected} on one of {self._source.tensor_size} tensor-parallel ranks"
                )
        return local

    def _assembled(self, origin: _Origin, name: str, kind: str, local: Sequence[Tensor]) -> Tensor:
        if origin.cut.dim is None:
            if all(torch.equal(tensor, local[0]) for tensor in local[1:]):
                return local[0]
            path = self._source.path(origin.theirs[0], kind)
            if not origin.megatron:
                raise CheckpointError(
                    f"{path}: {kind} of {name} differs between tensor-parallel ranks, which hold copies of it; resume "
                    "from an earlier checkpoint"
                )
            # BLOOM's normalisation weights drifted apart in training; its own conversion averages them too
            log.warning("%s: %s of %s differs between tensor-parallel ranks; their mean is taken", path, kind, name)
            return torch.stack([tensor.float() for tensor in local]).mean(dim=0)
        full = local[0] if len(local) == 1 else origin.cut.assemble(local)
        length = origin.shard.shape[origin.cut.dim]
        if not origin.megatron and full.narrow(origin.cut.dim, length, full.shape[origin.cut.dim] - length).any():
            raise CheckpointError(
                f"{self._source.path(origin.theirs[0], kind)}: {kind} of {name} holds numbers in rows of padding, "
                f"behind the {length} of this model; it is a checkpoint of a larger vocabulary"
            )
        full = full.narrow(origin.cut.dim, 0, length)
        return full if origin.num_heads is None else _ungrouped(full, origin.shard.pieces, origin.num_heads)

    def read(
        self, name: str, kind: str, shard: Shard, tensor_rank: int, tensor_size: int, start: int, numel: int
    ) -> Tensor:
        """Flat float32 [numel] of a local tensor, as `reader.Checkpoint.read` gives it; the full one is read for it."""
        local = shard.take(self.tensor(name, kind), tensor_rank, tensor_size)
        return local.view(-1)[start : start + numel]

    @property
    def metadata(self) -> dict[str, Any]:
        """What a resuming run asks for, as far as the checkpoint tells it: see training/checkpoints.py."""
        facts = self.facts
        ours = facts.get("metadata") or {}
        iteration = int(facts.get("iteration") or 0)
        return {
            **ours,
            "progress": {
                **ours.get("progress", {}),
                "iteration": iteration,
                "consumed_samples": int(facts.get("consumed_samples") or 0),
            },
            # a bare ZeRO-3 folder does not count the optimizer's steps; one was taken each iteration
            "optimizer": {**(ours.get("optimizer") or {}), "step": facts.get("step", iteration)},
        }

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Compare the checksums of the share-th part of the files. Raises CheckpointError, naming the damaged one."""
        for path in sorted(self.folder.rglob("*.pt"))[share[0] :: share[1]]:
            verify_file(path)

    def parameters(self) -> Iterator[tuple[str, str, Tensor]]:
        """(name, kind, full tensor), one at a time: every kind of a parameter, then the next parameter."""
        for name in self.shards:
            for kind in self.kinds:
                yield name, kind, self.tensor(name, kind)


def recognise(path: Path) -> Layout | None:
    """What a folder holds, or the one that its `latest_universal` or `latest` names; None: nothing of DeepSpeed's."""
    folder = _resolved(path)
    if folder is None:
        return None
    if _is_universal(folder):
        return "universal"
    with _as_damage(folder):
        return "megatron-deepspeed" if _is_megatron(_source_of(folder).names) else "deepspeed"


def read(path: Path, config: Config | None = None) -> ForeignCheckpoint:
    """Open a universal, DeepSpeed or Megatron-DeepSpeed folder, or the one its `latest_universal` or `latest` names.

    `config` is the model's, where the checkpoint does not tell it: its shapes are then checked against it, and
    Megatron's number of heads and vocabulary size come from it. Raises CheckpointError, naming the file.
    """
    folder = _resolved(path)
    if folder is None:
        raise CheckpointError(
            f"{path} holds no checkpoint of DeepSpeed's: neither zero/<parameter>/fp32.pt nor *_model_states.pt; give "
            "the folder of one step, or one whose `latest_universal` or `latest` names it"
        )
    with _as_damage(folder):
        source = _source_of(folder)
        facts = _facts(folder, source)
        config = config or _saved_config(folder, facts)
        if config is not None:
            facts["metadata"] = {"config": config.to_dict(), **facts.get("metadata", {})}
        megatron = _is_megatron(source.names)
        if megatron:
            origins = _megatron_origins(source, _megatron_facts(source.client, config, folder), folder)
            if config is not None:
                _check_model(origins, config, folder)
        else:
            origins = _our_origins(source, config, folder)
        layout: Layout = "megatron-deepspeed" if megatron else "deepspeed"
        if isinstance(source, UniversalFolder):
            layout = "universal"
        return ForeignCheckpoint(folder, layout, source, origins, facts)


@contextlib.contextmanager
def _as_damage(folder: Path) -> Iterator[None]:
    """What files of an unexpected structure lead to, as CheckpointError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{folder} is not built as DeepSpeed builds its checkpoints ({type(error).__name__}: {error}); copy it "
            "again from its source"
        ) from error


def _resolved(path: Path) -> Path | None:
    """The folder of one step: `path`, or what a pointer in it names."""
    if not path.is_dir():
        return None
    if _holds_tensors(path):
        return path
    for pointer in ("latest_universal", "latest"):
        if not (path / pointer).is_file():
            continue
        tag = (path / pointer).read_text(encoding="utf-8", errors="replace").strip()
        if not tag or tag in (".", "..") or Path(tag).name != tag:
            raise CheckpointError(f"{path / pointer} holds {tag!r}; it must be the name of a folder beside it")
        if (path / tag).is_dir() and _holds_tensors(path / tag):
            return path / tag
    return None


def _holds_tensors(folder: Path) -> bool:
    return bool(_is_universal(folder) or numbered(folder, MODEL_FILE) or numbered(folder, LAYER_FILE))


def _is_universal(folder: Path) -> bool:
    return any((folder / "zero").glob("*/fp32.pt"))


def _source_of(folder: Path) -> Source:
    if _is_universal(folder):
        return UniversalFolder(folder)
    # moments and float32 weights, where each is known by name; weights as they are otherwise
    source: Source = ZeroShards(folder) if numbered(folder, OPTIMIZER_FILE) else ModelFiles(folder)
    if not source.names:
        raise CheckpointError(f"{folder} has files of DeepSpeed's, but no weights in them; copy the whole checkpoint")
    return source


def _is_megatron(names: Sequence[str]) -> bool:
    return any(MEGATRON_MARK in f".{name}" for name in names)


def _saved_config(folder: Path, facts: Mapping[str, Any]) -> Config | None:
    """The run's: of our metadata, or of the progress.json that our first checkpoints have beside DeepSpeed's."""
    saved = (facts.get("metadata") or {}).get("config") or _progress(folder).get("config")
    if not isinstance(saved, dict):
        return None
    try:
        return from_dict(saved)
    except ConfigError as error:
        raise CheckpointError(f"{folder} was saved with a config that is no longer valid: {error}") from None


def _progress(folder: Path) -> dict[str, Any]:
    path = folder / "progress.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy it again from its source") from None
    return content if isinstance(content, dict) else {}


def _facts(folder: Path, source: Source) -> dict[str, Any]:
    client = source.client
    arguments = client.get("args")
    known = arguments.state if isinstance(arguments, Inert) and isinstance(arguments.state, dict) else {}
    args = {name: value for name, value in known.items() if _is_plain(value)}
    progress = _progress(folder).get("progress") or {}
    found = {
        "iteration": progress.get("iteration", client.get("iteration", client.get("global_steps"))),
        "consumed_samples": progress.get(
            "consumed_samples",
            client.get("consumed_samples", args.get("consumed_train_samples", client.get("global_samples"))),
        ),
        "step": source.step(),
        "args": args or None,
    }
    facts = {name: value for name, value in found.items() if value is not None}
    metadata = client.get("metadata")
    if isinstance(metadata, str):
        try:
            facts["metadata"] = json.loads(metadata)
        except ValueError as error:
            raise CheckpointError(f"{folder}: the metadata in its model states are damaged ({error})") from None
        if not isinstance(facts["metadata"], dict):
            raise CheckpointError(f"{folder}: the metadata in its model states are no JSON object; copy it again")
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write(checkpoint: Checkpoint | ForeignCheckpoint, folder: Path) -> None:
    """Write DeepSpeed's universal folder, which its loader takes with `checkpoint: {load_universal: true}`.

    The folder appears when it is whole. One tensor is in memory at a time. Raises CheckpointError if it exists.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists; give a new folder, or remove it")
    shards = checkpoint.shards if isinstance(checkpoint, ForeignCheckpoint) else checkpoint.parameters
    for name in shards:
        if not re.fullmatch(r"\w+(\.\w+)+", name):
            raise CheckpointError(f"{checkpoint.folder} holds a parameter {name!r}, whose name cannot be a folder's")
    facts = checkpoint.facts if isinstance(checkpoint, ForeignCheckpoint) else _native_facts(checkpoint)
    theirs_of = pipeline_names(shards)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.partial-{secrets.token_hex(4)}"
    try:
        (partial / "zero").mkdir(parents=True)
        for name, shard in shards.items():
            theirs = theirs_of[name]
            (partial / "zero" / theirs).mkdir()
            for kind in checkpoint.kinds:
                tensor = (
                    checkpoint.tensor(name, kind)
                    if isinstance(checkpoint, ForeignCheckpoint)
                    else checkpoint.read_full(name, kind)
                )
                content = {"param": tensor.contiguous(), **_restoring(name, theirs, shard)}
                _save(content, partial / "zero" / theirs / f"{FILE_OF_KIND[kind]}.pt")
            if len(checkpoint.kinds) > 1:
                step = torch.tensor(float(facts.get("step", facts.get("iteration", 0))))
                _save(step, partial / "zero" / theirs / "step.pt")
        _write_states(partial, shards, facts)
        _flush_folders(partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def point_latest(folder: Path) -> None:
    """Let `latest_universal`, beside a universal folder, name it; replaced at once."""
    pointer = folder.parent / "latest_universal"
    with replacing(pointer) as file:
        file.write(folder.name.encode())


def universal_info(shards: Mapping[str, Shard], tensor_size: int) -> dict[str, Any]:
    """DeepSpeed's `universal_checkpoint_info`: how its converter puts each parameter together from `tensor_size` ranks.

    Saved as client state under that name, it lets DeepSpeed's own ds_to_universal convert our models. Each pattern is
    derived from the names and shards.
    """
    from deepspeed.checkpoint import constants

    theirs_of = pipeline_names(shards)
    named = {theirs_of[name]: shard for name, shard in shards.items()}
    ends = [theirs_of[name] for name in VOCABULARY if name in theirs_of]
    rows, vocabulary, replicated = [], [], []
    parts: list[dict[str, Any]] = []
    widths: dict[str, list[list[int]]] = {}
    for pattern, (name, shard) in _patterns(named).items():
        if shard.dim is None:
            replicated.append(pattern)
        elif len(shard.pieces) > 1:
            parts.append({"patterns": [pattern], "shape": _pieces_shape(shard), "partition_dim": shard.dim})
            widths[pattern] = [[piece // tensor_size] * tensor_size for piece in shard.pieces]
        elif shard.dim == 1:
            rows.append(pattern)
        elif name in ends:
            vocabulary.append(pattern)
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        constants.ORIGINAL_VOCAB_SIZE: next((named[name].shape[0] for name in ends), 0),
        constants.VOCABULARY_PARAMETER_PATTERNS: vocabulary,
        constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS: [r"tied_modules\."] if TIED in named else [],
        constants.TP_REPLICATED_PARAMETER_PATTERNS: replicated,
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: rows,
        constants.PARAMETER_WITH_SUB_PARAMS: parts,
        constants.SUB_PARAM_SHARD_WIDTHS: widths,
    }


def _patterns(shards: Mapping[str, Shard]) -> dict[str, tuple[str, Shard]]:
    """A pattern for all layers' parameter of a name, where all are cut alike; else one for each. With one such."""
    by_name: dict[str, list[str]] = {}
    for full_name in shards:
        layer, _, name = full_name.partition(".")
        by_name.setdefault(name if layer.isdigit() else full_name, []).append(full_name)
    patterns = {}
    for name, members in by_name.items():
        first = members[0]
        alike = all(shards[member] == shards[first] for member in members)
        if alike and first != name:
            patterns[rf"\d+\.{re.escape(name)}$"] = first, shards[first]
        else:
            patterns |= {f"{re.escape(member)}$": (member, shards[member]) for member in members}
    return patterns


def _restoring(name: str, theirs: str, shard: Shard) -> dict[str, Any]:
    """What DeepSpeed's loader must know beside a tensor in order to cut it for its own ranks."""
    if shard.dim is None:
        return {}
    if len(shard.pieces) > 1:
        from deepspeed.checkpoint import SubparamShape

        shape = SubparamShape(patterns=[f"{re.escape(theirs)}$"], shape=_pieces_shape(shard), partition_dim=shard.dim)
        return {"sub_param_shape": shape}
    padded = {"vocab_tensor": True} if name in VOCABULARY else {}
    return {"cat_dim": shard.dim, **padded}


def _pieces_shape(shard: Shard) -> tuple[Any, ...]:
    return tuple(shard.pieces if dim == shard.dim else length for dim, length in enumerate(shard.shape))


def _native_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    metadata = checkpoint.metadata
    progress, optimizer = metadata.get("progress") or {}, metadata.get("optimizer") or {}
    facts = {name: progress[name] for name in ("iteration", "consumed_samples") if name in progress}
    if optimizer.get("step") is not None:
        facts["step"] = int(optimizer["step"])
    return {**facts, "metadata": metadata}


def _write_states(folder: Path, shards: Mapping[str, Shard], facts: Mapping[str, Any]) -> None:
    """The files that DeepSpeed's loader reads beside the tensors: its counters, and the optimizer's groups.

    The groups are without hyperparameters: those of the resuming run stay.
    """
    import deepspeed

    step = facts.get("step", facts.get("iteration", 0))
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(PARAMETER_GROUPS)]
    inner = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": groups}
    _save(
        {"ds_version": deepspeed.__version__, "param_groups": groups, "optimizer_state_dict": inner},
        folder / "zero" / "optimizer_state.pt",
    )
    client = {
        "module": None,
        "optimizer": None,
        "lr_scheduler": None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": facts.get("iteration", 0),
        "global_samples": facts.get("consumed_samples", 0),
        "skipped_steps": 0,
        "ds_version": deepspeed.__version__,
        "iteration": facts.get("iteration", 0),
        "consumed_samples": facts.get("consumed_samples", 0),
        "universal_checkpoint_info": universal_info(shards, 1),
    }
    if "metadata" in facts:
        client["metadata"] = json.dumps(facts["metadata"])
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # the second for ZeRO-3
        _save(client, folder / name)


def _save(content: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        sync_file(file)


def _flush_folders(folder: Path) -> None:
    for place, _, _ in os.walk(folder):
        sync_folder(Path(place))
