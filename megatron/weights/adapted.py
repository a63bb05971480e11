"""A base model, and what is trained beside it, as one source of weights.

A checkpoint of adapters says which base they belong to: its folder and its identity (base_identity.py), which does not
depend on layout, precision or file format.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.source import Slice, WeightSource
from megatron.hub.download import find
from megatron.hub.names import HubName
from megatron.models.registry import family_of
from megatron.options.config import Config
from megatron.options.extension import EXTENDED, position_changes
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import declared_shards
from megatron.resilience.errors import raise_on_all_ranks
from megatron.resilience.host_consistency import check_same_start
from megatron.weights.base_identity import BaseIdentity, BaseSums, check_identity, parts_of_model, recorded_identity
from megatron.weights.formats import Given, open_base
from megatron.weights.huggingface import parameters_of
from megatron.weights.huggingface_source import HuggingFaceSource
from megatron.weights.model import base_config, config_of_source, holds_adapters
from megatron.weights.model_folder import find_base
from megatron.weights.peft.source import PeftSource

log = logging.getLogger(__name__)

WEIGHTS = ("weight",)


class AdaptedSource(WeightSource):
    """The weights of a base model, and the trained part of a checkpoint or a new one."""

    format, title = "adapters", "adapters"

    def __init__(
        self, config: Config, base: WeightSource | None, trained: WeightSource | None, record: Mapping[str, Any]
    ) -> None:
        """`base`: None for one drawn from the seed in `record`. `trained`: None for a new start of the adapters."""
        metadata: dict[str, Any] = {}
        if isinstance(trained, Checkpoint):
            metadata = trained.metadata
        elif base is not None:
            metadata = {"source": base.metadata.get("source")}
        self.base, self.trained = base, trained
        folder = self.parts[0].folder if self.parts else Path()
        kinds = WEIGHTS if trained is None else trained.kinds
        super().__init__(folder, parameters_of(config), kinds=kinds, metadata=metadata, config=config)
        self.holds_run = trained is not None and trained.holds_run
        self.record: dict[str, Any] = dict(record)
        """Description of the base that a checkpoint of the adapters keeps; with its identity after `identify`."""
        declared = declared_shards(family_of(config).layers(config))
        # what is trained changes from run to run, so it cannot identify the base
        self._frozen = {name for name, shard in declared.items() if not (shard.added or shard.trained)}
        # as the family declares them: adapters are added to the layers, and belong to no base
        self._base_names = frozenset(declared_shards(family_of(config).declare(config)))
        self._seed, self._allow_other_base = config.training.seed, config.lora.allow_other_base
        self._base_config = base_config(config)
        self._sums = self._new_sums()

    @property
    def parts(self) -> Sequence[WeightSource]:
        return [part for part in (self.trained, self.base) if part is not None]

    def read(self, at: Slice, kind: str = "weight") -> Tensor:
        """Draws from the seed what neither has. Frozen weights of the base that are counted identify it."""
        values = self._read(at, kind)
        # as they were read, before any rank quantises or rounds them
        if at.is_counted and at.name in self._frozen:
            self._sums.add(at, values)
        return values

    def _read(self, at: Slice, kind: str) -> Tensor:
        if self.trained is not None and at.name in self.trained.parameters:
            return self.trained.read(at, kind)
        seed = self._seed
        if at.name in self._base_names:
            if self.base is not None:
                return self.base.read(at, kind)
            seed = self.record.get("seed", seed)  # that of the run that drew the base, which this one may not have
        drawn = at.shard.initial(at.name, seed, at.tensor_rank, at.tensor_size)
        return drawn.flatten()[at.start : at.start + at.numel]

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        return "; ".join(part.verify(share, kinds) for part in self.parts)

    def lines(self) -> list[str]:
        """Return what is said of the base."""
        origin = f"drawn with seed={self.record['seed']}" if self.base is None else str(self.base.folder)
        return [f"base model: {origin}; its weights are frozen"]

    @property
    def base_place(self) -> str:
        """The base's folder, for messages."""
        return "this seed" if self.base is None else str(self.base.folder)

    def _new_sums(self) -> BaseSums:
        if isinstance(self.base, HuggingFaceSource):
            # numbers of 16 bits are what every copy of them holds: no rounded ones to know them by
            return BaseSums(self.base.map.parts, rounded=self.base.config.training.precision == "fp32")
        return BaseSums(parts_of_model(self._base_config))

    def identify(self, ctx: ParallelContext) -> list[str]:
        """Quantised weights count as they were read."""
        expected = self._expected()
        folder = None if self.base is None else self.base.folder
        # `named_as`: a copy of the base elsewhere keeps the name on the hub by which the adapters know it
        identity = BaseIdentity.of_base(folder, ctx.gather_objects(self._sums.totals)).named_as(expected)
        # from zero again: a tensor that is read a second time would be counted twice
        self._sums = self._new_sums()
        self.record = {**self.record, "identity": identity.to_json()}
        if self.trained is None:
            return []
        return check_identity(
            self.trained.folder,
            expected,
            self.base_place,
            identity,
            option="--lora-base",
            allowed=self._allow_other_base,
        )

    def check_counted(self) -> None:
        """Raise CheckpointError unless the tensors of the base that one process has counted are those trained on."""
        expected = self._expected()
        if expected is None:
            return
        changed = expected.changed_in(self._sums.totals)
        if changed:
            raise CheckpointError(
                f"{self.base_place} has another {changed[0]} than when the adapters were trained; restore the folder "
                "of their base"
            )

    def _expected(self) -> BaseIdentity | None:
        """Return the identity of the base that the trained part belongs to, if it is known."""
        return None if self.trained is None else recorded_identity(self.trained)


def open_adapters(loaded: WeightSource | None, config: Config, ctx: ParallelContext) -> AdaptedSource:
    """Return the start of a run with adapters from what `load` or `save` holds: a base, or adapters. Collective.

    Raises CheckpointError if the base is missing or is another model.
    """
    given = config.lora.lora_base
    if isinstance(loaded, PeftSource):
        return _open_peft(loaded, config, ctx)
    if loaded is not None and not holds_adapters(loaded):
        if given is not None:
            raise CheckpointError(
                f"lora_base={given} and load={config.checkpoint.load} are both base models; leave lora_base out, which "
                "is for the base of a checkpoint of adapters"
            )
        return AdaptedSource(config, loaded, None, _record(loaded, config))
    record: Mapping[str, Any] = {} if loaded is None else loaded.metadata["base"]
    folder = given or record.get("folder")
    if folder is None:  # the same seed draws the same base on any layout
        if loaded is None and ctx.rank == 0:
            log.warning("nothing was loaded: adapters train over random weights; give the model in load (HL_LOAD_DIR)")
        return AdaptedSource(config, None, loaded, {"seed": record.get("seed", config.training.seed)})

    def opened() -> WeightSource:
        # a given folder may be of another format than the recorded one
        if loaded is None or given is not None:
            return open_base(Path(folder), Given(_extending(config, record)))
        return base_of(loaded, config)

    base = _verified(ctx, Path(folder), opened)
    return AdaptedSource(config, base, loaded, _record(base, config))


def _open_peft(trained: PeftSource, config: Config, ctx: ParallelContext) -> AdaptedSource:
    """Return the start from adapters of PEFT, whose config names their base. Collective."""
    named, given = trained.base, config.lora.lora_base
    folder = raise_on_all_ranks(
        ctx, lambda: find_base(trained.folder, named.name, named.revision, given, download=False)
    )

    def opened() -> WeightSource:
        base = open_base(folder, Given(config))
        if ctx.rank == 0:  # it reads whole embeddings
            trained.check_base(base)
        return base

    base = _verified(ctx, folder, opened)
    return AdaptedSource(config, base, trained, _record(base, config))


def _verified(ctx: ParallelContext, folder: Path, opened: Callable[[], WeightSource]) -> WeightSource:
    """Open a base, which must be the same on all hosts, and compare its checksums. Collective."""
    base = raise_on_all_ranks(ctx, opened)
    check_same_start(ctx, folder, base.folder)
    # a base that was trained here has moments too, of which none is read
    raise_on_all_ranks(ctx, lambda: base.verify((ctx.rank, ctx.world_size), WEIGHTS))
    return base


def _record(base: WeightSource, config: Config) -> dict[str, Any]:
    # without links: a later run may start in another folder, or find the link changed
    record: dict[str, Any] = {"format": base.format, "folder": os.path.realpath(base.folder)}
    # a foreign checkpoint states no whole model, so what it states was compared when it was opened
    is_described = base.config is not None or "config" in base.metadata
    if is_described and position_changes(config.model, config_of_source(base).model):
        record[EXTENDED] = True
    return record


def _extending(config: Config, record: Mapping[str, Any]) -> Config:
    """Return the config by which to open the base of a record: adapters keep the positions that they began with."""
    if not record.get(EXTENDED):
        return config
    return replace(config, checkpoint=replace(config.checkpoint, extend_context=True))


def check_exports(config: Config, source: AdaptedSource) -> None:
    """Raise CheckpointError where the run is to export adapters that PEFT would load onto a base of other positions."""
    options = config.checkpoint
    if source.record.get(EXTENDED) and options.save_hf is not None and not options.save_hf_merged:
        raise CheckpointError(
            f"save_hf={options.save_hf} cannot export adapters of an extended context: PEFT would load them onto the "
            f"base with the positions of {source.base_place}. Pass --save-hf-merged"
        )


def base_of(trained: WeightSource, config: Config) -> WeightSource:
    """Open the base that a checkpoint of adapters records. Raises CheckpointError."""
    record = trained.metadata["base"]
    folder = Path(record["folder"])
    if not folder.exists():
        folder = _base_in_cache(trained, folder)
    return open_base(folder, Given(_extending(config, record)), record.get("format"))


def _base_in_cache(trained: WeightSource, folder: Path) -> Path:
    """Return the folder in the hub's cache of a base whose recorded folder has gone. Raises CheckpointError."""
    identity, remedy = recorded_identity(trained), ""
    if identity is not None and identity.name is not None:
        name = HubName(identity.name, identity.revision)
        found = find(name)
        if found is not None:
            return found
        remedy = f", or run `{name.download_command}`"
    raise CheckpointError(
        f"{trained.folder} holds adapters of the base model in {folder}, which is not there; give its folder as "
        f"--lora-base{remedy}"
    )
