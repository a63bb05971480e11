"""Checkpoints of DeepSpeed (universal or sharded) and Megatron-DeepSpeed as a source of weights in our names."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.checkpoint.foreign import deepspeed_folder, not_deepspeed
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.model_options import check_known_options, check_model_options
from megatron.checkpoint.source import Slice, WeightSource
from megatron.models.registry import family_of
from megatron.options.config import Config, ConfigError
from megatron.options.stored import from_dict
from megatron.parallel.shards import declared_shards
from megatron.runtime.files import parse_json
from megatron.weights.deepspeed.files import (
    FILE_OF_KIND,
    OPTIMIZER_FILE,
    ModelFiles,
    RankTensors,
    UniversalFolder,
    ZeroShards,
    numbered,
)
from megatron.weights.deepspeed.origins import Origin, is_megatron, megatron_origins, our_origins
from megatron.weights.foreign_files import as_damage
from megatron.weights.megatron_args import model_options, plain_arguments
from megatron.weights.model import check_parameters

log = logging.getLogger(__name__)

Layout = Literal["universal", "deepspeed", "megatron-deepspeed"]

TITLES: dict[Layout, str] = {
    "universal": "DeepSpeed universal",
    "deepspeed": "DeepSpeed",
    "megatron-deepspeed": "Megatron-DeepSpeed",
}
MAX_DRIFT = 2**-6
"""Largest distance of a Megatron rank's copy from the mean of all, as a fraction of the tensor's largest value.

Four steps of bfloat16 (2**-8): ranks that made the same updates and rounded them apart stay below, ranks that trained
apart do not.
"""


class DeepSpeedCheckpoint(WeightSource):
    """Checkpoint of DeepSpeed or Megatron-DeepSpeed, in our names and row order.

    `kinds` are `weight` and the optimizer's `exp_avg`, `exp_avg_sq` or `momentum_buffer`; every parameter has all of
    them, but those in `frozen` may lack moments. `facts` are, each where the checkpoint has it: `iteration`,
    `consumed_samples`, `step` (the optimizer's), `args` (Megatron's arguments), `metadata` (ours).
    """

    format = "deepspeed"
    reads_slices = False

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        source: RankTensors,
        origins: Mapping[str, Origin],
        facts: dict[str, Any],
        config: Config | None,
        frozen: Collection[str],
        max_drift: float,
    ) -> None:
        self.layout, self.facts = layout, facts
        self.title = TITLES[layout]
        self._source, self._origins, self._max_drift = source, origins, max_drift
        self._kinds = {ours: source.kinds(origin.theirs[0]) for ours, origin in origins.items()}
        parameters = {ours: origin.shard for ours, origin in origins.items()}
        kinds = [kind for kind in FILE_OF_KIND if any(kind in kinds for kinds in self._kinds.values())]
        super().__init__(folder, parameters, kinds=kinds, metadata=_metadata(facts), config=config)
        self._check_kinds(frozen)

    def _check_kinds(self, frozen: Collection[str]) -> None:
        for ours, kinds in self._kinds.items():
            # frozen parameters have no moments, so their files hold weights alone
            if kinds != self.kinds and not (ours in frozen and kinds == ("weight",)):
                lacking = next(kind for kind in self.kinds if kind not in kinds)
                raise CheckpointError(
                    f"{self.folder} lacks {lacking} of {ours}, which its other parameters have; copy the whole "
                    "checkpoint, or freeze the parameter if it was frozen"
                )

    def kinds_of(self, name: str) -> tuple[str, ...]:
        return self._kinds[name]

    def read_full(self, name: str, kind: str = "weight") -> Tensor:
        """Return the full tensor in float32, without padding; a view of the mapped file where nothing is converted.

        Raises CheckpointError if the parameter or kind is missing, or its copies differ.
        """
        if name not in self._origins or kind not in self._kinds[name]:
            has = f"kinds {', '.join(self.kinds)} of {len(self._origins)} parameters"
            raise CheckpointError(f"{self.folder} has no {kind} of {name}, only {has}; give the model's own config")
        origin = self._origins[name]
        local = [self._checked_local(origin, name, kind, theirs) for theirs in origin.theirs]
        # each stage that holds a tied weight has a copy of its own, which DeepSpeed keeps equal
        for theirs, copy in zip(origin.theirs[1:], local[1:], strict=True):
            if not all(map(torch.equal, copy, local[0])):
                raise CheckpointError(
                    f"{self._source.path(theirs, kind)}: {theirs} differs from {origin.theirs[0]}, the same tied "
                    "weight; its copies had drifted apart, so load an earlier checkpoint"
                )
        return self._assembled(origin, name, kind, local[0]).float()

    def _checked_local(self, origin: Origin, name: str, kind: str, theirs: str) -> list[Tensor]:
        local = self._source.local(theirs, kind)
        expected = origin.cut.local_shape(self._source.tensor_size)
        for tensor in local:
            if tuple(tensor.shape) != expected:
                raise CheckpointError(
                    f"{self._source.path(theirs, kind)} holds {kind} of {theirs} as {tuple(tensor.shape)}; {name} has "
                    f"{expected} on one of {self._source.tensor_size} tensor-parallel ranks"
                )
        return local

    def _assembled(self, origin: Origin, name: str, kind: str, local: Sequence[Tensor]) -> Tensor:
        if origin.cut.dim is None:
            where = f"{self._source.path(origin.theirs[0], kind)}: {kind} of {name}"
            return agreed_copy(local, where, self._max_drift if origin.is_megatron else 0.0)
        # with one rank not assembled: that copies, and the tensor may be a mapped file
        full = local[0] if len(local) == 1 else origin.cut.assemble(local)
        length = origin.shard.shape[origin.cut.dim]
        # ours is zero there; Megatron's is trained like the other rows, and means nothing
        if not origin.is_megatron and full.narrow(origin.cut.dim, length, full.shape[origin.cut.dim] - length).any():
            raise CheckpointError(
                f"{self._source.path(origin.theirs[0], kind)}: {kind} of {name} holds numbers in its padding, "
                f"behind the {length} of this model; it is a checkpoint of a larger vocabulary"
            )
        full = full.narrow(origin.cut.dim, 0, length)
        return origin.reordered(full)

    def read(self, at: Slice, kind: str = "weight") -> Tensor:
        """Reads the full tensor for it."""
        local = at.shard.take(self.read_full(at.name, kind), at.tensor_rank, at.tensor_size)
        return local.view(-1)[at.start : at.start + at.numel]

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        return self._source.files.verify(self.folder.rglob("*.pt"), share)


def agreed_copy(local: Sequence[Tensor], where: str, max_drift: float) -> Tensor:
    """Return the tensor of which each tensor-parallel rank holds a copy: Megatron's may have drifted a little.

    `max_drift`: as MAX_DRIFT; 0: the copies must be equal. Raises CheckpointError, beginning with `where`.
    """
    if len(local) == 1:
        return local[0]
    for rank, tensor in enumerate(local):
        if not tensor.isfinite().all():
            raise CheckpointError(f"{where} is not finite on tensor-parallel rank {rank}; load an earlier checkpoint")
    if all(torch.equal(tensor, local[0]) for tensor in local[1:]):
        return local[0]
    if not max_drift:
        raise CheckpointError(
            f"{where} differs between tensor-parallel ranks, which must hold equal copies; load an earlier checkpoint"
        )
    copies = torch.stack([tensor.float() for tensor in local])
    mean = copies.mean(dim=0)
    drift = float((copies - mean).abs().max() / copies.abs().max())
    if not drift <= max_drift:
        raise CheckpointError(
            f"{where} differs between tensor-parallel ranks by {drift:.2g} of its largest value, above the limit of "
            f"{max_drift:.2g}: the ranks trained apart. Load an earlier checkpoint, or convert with --max-drift to "
            "take the mean all the same"
        )
    # BLOOM's norms drifted apart in training; its own conversion averages them too
    log.warning(
        "%s differs between tensor-parallel ranks by %.2g of its largest value; taking their mean", where, drift
    )
    return mean


def _metadata(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a resuming run, as far as the checkpoint has it: see training/checkpoints.py."""
    ours = facts.get("metadata") or {}
    iteration = int(facts.get("iteration") or 0)
    return {
        **ours,
        "progress": {
            **ours.get("progress", {}),
            "iteration": iteration,
            "consumed_samples": int(facts.get("consumed_samples") or 0),
        },
        # a bare ZeRO-3 folder lacks the optimizer's steps; there was one per iteration
        "optimizer": {**(ours.get("optimizer") or {}), "step": facts.get("step", iteration)},
    }


def read(path: Path, config: Config | None = None, max_drift: float = MAX_DRIFT) -> DeepSpeedCheckpoint:
    """Open a universal, DeepSpeed or Megatron-DeepSpeed folder, or the one its `latest_universal` or `latest` names.

    `config` is the model's, for checkpoints without one: shapes are checked against it, and Megatron's number of heads
    and vocabulary size come from it. `max_drift` replaces MAX_DRIFT. Raises CheckpointError that names the file.
    """
    folder = deepspeed_folder(path)
    if folder is None:
        raise CheckpointError(not_deepspeed(path))
    with as_damage(folder, "a DeepSpeed checkpoint"):
        source = _source_of(folder)
        facts = _facts(folder, source)
        uncompared = []
        if config is None:
            config = _saved_config(folder, facts)
        else:
            uncompared = _compare(folder, facts, config)
        layout: Layout = "deepspeed"
        if is_megatron(source.names):
            layout = "megatron-deepspeed"
            origins = megatron_origins(source, config, folder)
        else:
            origins = our_origins(source, config, folder)
        if isinstance(source, UniversalFolder):
            layout = "universal"
        frozen: set[str] = set()
        if config is not None:
            # a config that the checkpoint stores comes last, and counts
            facts["metadata"] = {"config": config.to_dict(), **facts.get("metadata", {})}
            check_parameters(folder, config, {name: origin.shard for name, origin in origins.items()})
            declared = declared_shards(family_of(config).layers(config))
            frozen = {name for name, shard in declared.items() if not shard.trained}
        checkpoint = DeepSpeedCheckpoint(folder, layout, source, origins, facts, config, frozen, max_drift)
        checkpoint.uncompared = uncompared
        return checkpoint


def _source_of(folder: Path) -> RankTensors:
    source: RankTensors
    if any((folder / "zero").glob("*/fp32.pt")):
        source = UniversalFolder(folder)
    # optimizer files hold float32 weights and moments by name; model files only weights
    elif numbered(folder, OPTIMIZER_FILE):
        source = ZeroShards(folder)
    else:
        source = ModelFiles(folder)
    if not source.names:
        raise CheckpointError(f"{folder} has DeepSpeed files without weights; copy the whole checkpoint")
    return source


def _compare(folder: Path, facts: Mapping[str, Any], config: Config) -> list[str]:
    """Raise CheckpointError if the config is of another model. Return the options that could not be compared."""
    saved = _saved_tree(folder, facts)
    # ours: every option of the model is stored; Megatron's arguments state a few of them
    if isinstance(saved, dict) and "model" in saved:
        check_model_options(folder, saved["model"], saved.get("training", {}).get("seq_length"), config)
        return []
    return check_known_options(folder, model_options(facts.get("args") or {}), config)


def _saved_config(folder: Path, facts: Mapping[str, Any]) -> Config | None:
    saved = _saved_tree(folder, facts)
    if not isinstance(saved, dict):
        return None
    try:
        return from_dict(saved)
    except ConfigError as error:
        raise CheckpointError(f"{folder} was saved with a config that is not valid any more: {error}") from None


def _saved_tree(folder: Path, facts: Mapping[str, Any]) -> Any:
    """Return a run's config as stored: in our metadata, or in progress.json beside our first DeepSpeed checkpoints."""
    return (facts.get("metadata") or {}).get("config") or _progress(folder).get("config")


def _progress(folder: Path) -> dict[str, Any]:
    path = folder / "progress.json"
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy it again from its source") from None
    return content if isinstance(content, dict) else {}


def _facts(folder: Path, source: RankTensors) -> dict[str, Any]:
    client = source.client
    args = plain_arguments(client.get("args"))
    progress = _progress(folder).get("progress") or {}
    # our counters first, then Megatron's, then those of DeepSpeed's engine
    candidates: dict[str, list[Any]] = {
        "iteration": [progress.get("iteration"), client.get("iteration"), client.get("global_steps")],
        "consumed_samples": [
            progress.get("consumed_samples"),
            client.get("consumed_samples"),
            args.get("consumed_train_samples"),
            client.get("global_samples"),
        ],
        "step": [source.step()],
        "args": [args or None],
        "metadata": [_client_metadata(folder, client.get("metadata"))],
    }
    facts = {}
    for name, values in candidates.items():
        given = [value for value in values if value is not None]
        if given:
            facts[name] = given[0]
    return facts


def _client_metadata(folder: Path, text: Any) -> dict[str, Any] | None:
    """Return our metadata, which a universal folder of ours has as JSON in its model states."""
    if not isinstance(text, str):
        return None
    try:
        metadata = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{folder}: the metadata in its model states are damaged ({error})") from None
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{folder}: the metadata in its model states are not a JSON object; copy it again")
    return metadata
