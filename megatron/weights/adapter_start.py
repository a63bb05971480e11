"""Start of a run with adapters: the base model, and what is trained beside it.

A checkpoint of such a run holds what is trained, and says which base that belongs to: its folder and its identity
(interop/base_identity.py), which does not depend on layout, precision or file format.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.model_options import check_model_options
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.models.registry import family_of
from megatron.options.config import Config
from megatron.options.model import LoraConfig, differing
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Shard, declared_shards
from megatron.resilience.errors import raise_on_all_ranks
from megatron.resilience.host_consistency import check_same_start
from megatron.weights.base_identity import BaseIdentity, BaseSums, check_identity, joined, parts_of_model, read_identity
from megatron.weights.huggingface_config import find_base
from megatron.weights.huggingface_start import HuggingFaceStart, is_huggingface
from megatron.weights.peft.start import PeftStart

if TYPE_CHECKING:
    from megatron.weights.deepspeed.deepspeed_checkpoint import DeepSpeedCheckpoint

Trained = Checkpoint | PeftStart
Base = Union[Checkpoint, "DeepSpeedCheckpoint", HuggingFaceStart]
SHOWN = 4
"""Tensors that a message names."""


def base_config(config: Config) -> Config:
    """Return the config of the base model alone."""
    return dataclasses.replace(config, lora=LoraConfig())


def holds_adapters(checkpoint: object) -> bool:
    return isinstance(checkpoint, Checkpoint) and checkpoint.metadata.get("base") is not None


class AdapterStart:
    """The weights of a base model, and the trained part of a checkpoint or a new one: `state.Readable`."""

    def __init__(self, config: Config, base: Base | None, trained: Trained | None, record: Mapping[str, Any]) -> None:
        """`base`: None for one drawn from the seed in `record`. `trained`: None for a new start of the adapters."""
        self.base, self.trained, self.record = base, trained, dict(record)
        self.base_names = frozenset(declared_shards(family_of(config).declare(config)))
        self._seed, self._allow_other_base = config.training.seed, config.lora.allow_other_base
        self._base_config = base_config(config)

    @property
    def folder(self) -> Path:
        source = self.trained or self.base
        return Path() if source is None else source.folder

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("weight",) if self.trained is None else self.trained.kinds

    @property
    def metadata(self) -> Mapping[str, Any]:
        """That of the trained part; of a new one the Hugging Face model that the base comes from."""
        if isinstance(self.trained, Checkpoint):
            return self.trained.metadata
        return {} if self.base is None else {"source": self.base.metadata.get("source")}

    def read(
        self, name: str, kind: str, shard: Shard, tensor_rank: int, tensor_size: int, start: int, numel: int
    ) -> Tensor:
        """Flat float32 [numel] of a local tensor, as `reader.Checkpoint.read` gives it."""
        source: Any = None
        if self.trained is not None and name in self.trained.parameters:
            source = self.trained
        elif name in self.base_names:
            source = self.base
        if source is not None:
            return source.read(name, kind, shard, tensor_rank, tensor_size, start, numel)  # type: ignore[no-any-return]
        seed = self.record.get("seed", self._seed) if name in self.base_names else self._seed
        return shard.initial(name, seed, tensor_rank, tensor_size).flatten()[start : start + numel]

    def lines(self) -> list[str]:
        """Return what is said of the base."""
        where = f"drawn with seed={self.record['seed']}" if self.base is None else self.base_place
        return [f"base model: {where}; its weights are frozen"]

    @property
    def base_place(self) -> str:
        """The base's folder, for messages."""
        return "this seed" if self.base is None else str(self.base.folder)

    def new_sums(self) -> BaseSums:
        """Return sums of the base, to which whoever reads frozen weights adds these; see `identity`."""
        if isinstance(self.base, HuggingFaceStart):
            return BaseSums(self.base.parts, rounded=self.base.config.training.precision == "fp32")
        return BaseSums(parts_of_model(self._base_config))

    def identity(self, totals: list[dict[str, list[int]]]) -> BaseIdentity:
        """Return the identity of the base, by the sums of all ranks; of quantised weights as they were read."""
        folder = None if self.base is None else self.base.folder
        return BaseIdentity.of_base(folder, joined(totals)).named_as(self._expected())

    def check_base(self, found: BaseIdentity) -> list[str]:
        """Return lines about the base. Raises CheckpointError unless it is the one of the trained part, or allowed."""
        if self.trained is None:
            return []
        option, place = "--lora-base", self.base_place
        return check_identity(
            self.trained.folder, self._expected(), place, found, option=option, allowed=self._allow_other_base
        )

    def _expected(self) -> BaseIdentity | None:
        """Return the identity of the base that the trained part belongs to, if it is known."""
        if isinstance(self.trained, Checkpoint):
            return BaseIdentity.from_json(self.trained.metadata["base"].get("identity"), self.trained.folder)
        return None if self.trained is None else read_identity(self.trained.folder)


def check_lora_options(checkpoint: Checkpoint, config: Config) -> None:
    """Raise CheckpointError unless checkpoint and config both have adapters, of the same options, or neither has."""
    saved, lora = (checkpoint.metadata.get("config") or {}).get("lora") or {}, config.lora
    if not holds_adapters(checkpoint):
        return
    if lora.lora_rank is None:
        raise CheckpointError(
            f"{checkpoint.folder} holds adapters (lora_rank={saved.get('lora_rank')}), not a whole model; give the "
            "lora options of their run"
        )
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    there = LoraConfig(**{name: value for name, value in saved.items() if name in known})
    if differing(lora.computed(), there.computed()):  # a rank alone differs in shapes, or nowhere
        here, saved = ({"lora_rank": each.lora_rank, **each.computed()} for each in (lora, there))
        found = differing(here, saved)
        raise CheckpointError(
            f"{checkpoint.folder} holds adapters with other options: {'; '.join(found)}. Give the options of their run"
        )
    declared = declared_shards(family_of(config).layers(config))
    if surplus := [name for name in checkpoint.parameters if name not in declared]:
        more = f" and {len(surplus) - SHOWN} more" if len(surplus) > SHOWN else ""
        raise CheckpointError(
            f"{checkpoint.folder} holds {', '.join(surplus[:SHOWN])}{more}, which these options do not adapt. Give the "
            "lora options of their run"
        )


def check_quantization(trained: Checkpoint, config: Config, *, resumes: bool) -> list[str]:
    """Return a warning if the base is quantised otherwise than when the adapters were trained.

    Raises CheckpointError if the run `resumes`: it would go on with another function.
    """
    there = ((trained.metadata.get("config") or {}).get("model") or {}).get("quantize_base", "none")
    here = config.model.quantize_base
    if there == here:
        return []
    held = f"{trained.folder} holds adapters trained with quantize_base={there}"
    if resumes:
        raise CheckpointError(
            f"{held}; with quantize_base={here} the base computes something else. Give --quantize-base {there}, or "
            "--finetune to start a new run from these adapters"
        )
    return [f"WARNING: {held}; with quantize_base={here} the base computes something else"]


def open_adapters(found: Base | PeftStart | None, config: Config, ctx: ParallelContext) -> AdapterStart:
    """Return the start of a run with adapters from what `load` or `save` holds: a base, or adapters. Collective.

    Raises CheckpointError if the base is missing or is another model.
    """
    given = config.lora.lora_base
    if isinstance(found, PeftStart):
        return _open_peft(found, config, ctx)
    if found is not None and not holds_adapters(found):
        if given is not None:
            raise CheckpointError(
                f"lora_base={given} and load={config.checkpoint.load} are both base models; leave lora_base out, which "
                "is for the base of a checkpoint of adapters"
            )
        return AdapterStart(config, found, None, _record(found))
    trained = found if isinstance(found, Checkpoint) else None
    record: Mapping[str, Any] = {} if trained is None else trained.metadata["base"]
    folder = given or record.get("folder")
    if folder is None:
        return AdapterStart(config, None, trained, {"seed": record.get("seed", config.training.seed)})
    is_given = given is not None
    base = _verified(ctx, folder, lambda: open_base(Path(folder), record, config, trained, is_given=is_given))
    return AdapterStart(config, base, trained, _record(base))


def _open_peft(trained: PeftStart, config: Config, ctx: ParallelContext) -> AdapterStart:
    """Return the start from adapters of PEFT, whose config names their base. Collective."""
    folder = raise_on_all_ranks(
        ctx, lambda: find_base(trained.folder, trained.base.name, trained.base.revision, config.lora.lora_base)
    )

    def opened() -> Base:
        base = open_base(folder, {}, config, None, is_given=True)
        if ctx.rank == 0:
            trained.check_base(base)
        return base

    base = _verified(ctx, str(folder), opened)
    return AdapterStart(config, base, trained, _record(base))


def _verified(ctx: ParallelContext, folder: str, opened: Callable[[], Base]) -> Base:
    """Open a base, which must be the same on all hosts, and compare its checksums. Collective."""
    base = raise_on_all_ranks(ctx, opened)
    check_same_start(ctx, Path(folder), base.folder)
    share = (ctx.rank, ctx.world_size)
    # of a base, weights alone are read
    verify = partial(base.verify, kinds=("weight",)) if isinstance(base, Checkpoint) else base.verify
    raise_on_all_ranks(ctx, lambda: verify(share))
    return base


def _record(base: Base) -> dict[str, Any]:
    kind = {Checkpoint: "native", HuggingFaceStart: "huggingface"}.get(type(base), "deepspeed")
    return {"format": kind, "folder": os.path.realpath(base.folder)}


def open_base(
    folder: Path, record: Mapping[str, Any], config: Config, trained: Checkpoint | None, *, is_given: bool = False
) -> Base:
    """Open the base of adapters, whose format is in `record` unless the user has given its folder.

    Raises CheckpointError.
    """
    own = base_config(config)
    if not folder.exists():
        if is_given or trained is None:
            raise CheckpointError(f"lora_base={folder} is not there; give the folder of the base model")
        raise CheckpointError(
            f"{trained.folder} holds adapters of the base model in {folder}, which is not there; give its folder as "
            "--lora-base"
        )
    if record.get("format") == "deepspeed" and not is_given:
        from megatron.weights.deepspeed.deepspeed_checkpoint import read  # late: few runs need it

        return read(folder, own)
    if is_huggingface(folder):
        return HuggingFaceStart(folder, own)
    base = open_checkpoint(folder)
    if base is None or holds_adapters(base):
        held = "nothing" if base is None else "adapters"
        raise CheckpointError(f"lora_base={folder} holds {held}; give the folder of a whole model")
    saved = base.metadata.get("config") or {}
    check_model_options(base.folder, saved.get("model") or {}, (saved.get("training") or {}).get("seq_length"), own)
    return base
