"""Saves of a run: when a checkpoint is begun, and the report on it when it is written.

The format is in checkpoint/format.py; training/state.py knows what a rank owns.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import platform
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata as packages
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.checkpoint.copies import copied_bytes
from megatron.checkpoint.folders import MANIFEST, Run
from megatron.checkpoint.format import SaveError
from megatron.checkpoint.saver import Saver
from megatron.options.config import Config
from megatron.options.optimizer import STATES
from megatron.options.progress import Progress
from megatron.options.schedule import ParamSchedule
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import is_lost_peer, raise_on_all_ranks
from megatron.resilience.host_consistency import check_shared
from megatron.resilience.peer_copies import PeerCopies
from megatron.resilience.replica_check import ReplicaCheck
from megatron.training.engine import Engine
from megatron.training.exports import BEST, Exports, export_name, is_due
from megatron.weights.loader import TAG

logger = logging.getLogger(__name__)

VERSIONS = ("torch", "deepspeed", "numpy")
POLL_S = 1.0
"""Longest wait for a save between two collectives."""
RANK_TIMEOUT_S = 1800.0
"""Longest wait of a save for a rank that writes nothing."""


@dataclass(frozen=True)
class Kept:
    """A copy in memory, and the saves around it: a restart from it makes up for those that were cut short."""

    iteration: int
    """Iteration of the copy."""
    save_is_due: bool = False
    """A save is begun at the same iteration."""
    export_is_due: bool = False
    saved_at: int = 0
    """Iteration of the save before it, which may be under way; 0: none."""
    is_needed: bool = False
    """That save is to be exported, or kept as the best: no later one takes its place."""


class Checkpoints:
    """Saves the checkpoints of a run into its folder. Collective in construction and use.

    A context manager: the folder is locked against other runs inside.
    """

    def __init__(
        self,
        config: Config,
        ctx: ParallelContext,
        beat: Callable[[], None] = lambda: None,
        source: Mapping[str, Any] | None = None,
        run: Run = Run(),  # noqa: B008 - frozen
        kept: Kept | None = None,
    ):
        """`beat` is called, also by a thread, whenever a save under way has made progress. `source`: description of the
        Hugging Face model that the run once started from. `run`: its identity. `kept`: the copy in memory that the run
        begins at.
        """
        options = config.checkpoint
        assert options.save is not None
        self._config, self._ctx, self._source, self.run = config, ctx, source, run
        self._exports: Exports | None = None
        self.on_saved: Callable[[Path], None] = lambda folder: None
        """Called with the folder of each checkpoint and each export that is complete."""
        self.on_complete: Callable[[int], None] = lambda iteration: None
        """Called with the iteration of each checkpoint that is complete."""
        self.on_copied: Callable[[int], None] = lambda iteration: None
        """Called with the iteration of each copy in memory that is complete on all ranks."""
        self.on_failed: Callable[[str], None] = lambda line: None
        """Called with the line on a failed save, the first since a good one."""
        self._last_error: SaveError | None = None
        self._failing_since_s: float | None = None
        self.fault: str | None = None
        """Saves have failed for too long, as this rank saw: the run is to end."""
        self._failed_tags: set[str] = set()
        # equal on all ranks, and no other run's
        self._token = f"{ctx.broadcast(random.SystemRandom().getrandbits(62)):x}"
        self._count = 0
        self._saved_tag: str | None = None
        self._saver = raise_on_all_ranks(
            ctx,
            lambda: Saver(
                Path(options.save),  # type: ignore[arg-type]
                rank=ctx.rank,
                world_size=ctx.world_size,
                asynchronous=options.async_save,
                keep_last=options.keep_last,
                retain_interval=options.save_retain_interval,
                timeout_s=RANK_TIMEOUT_S,
                beat=beat,
                attend=self._attend,
            ),
        )
        self.kept = kept
        self._copies: PeerCopies | None = None
        try:
            # on hosts that see different folders a save would wait for files that never come
            check_shared(ctx, self._saver.folder, self._token)
            if options.save_hf is not None:
                self._exports = raise_on_all_ranks(ctx, lambda: Exports(config, ctx.rank, run, source))
            if options.peer_copy_interval is not None:
                self._copies = self._open_copies()
        except BaseException:
            self._saver.close()
            raise

    def _open_copies(self) -> PeerCopies:
        at = None
        if self.kept is not None:
            at = self.kept.iteration
        return PeerCopies(self._ctx, self._token, at, lambda iteration: self.on_copied(iteration))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the save under way, and release the folders for other processes.

        After an error it fails instead where a rank that it needs has ended.
        """
        if error is None:
            self._saver.close()
        else:
            self._saver.leave(lost=is_lost_peer(error))
        if self._exports is not None:
            self._exports.close()
        if self._copies is not None:
            self._copies.close()

    def _attend(self, has_ended: Callable[[float | None], bool]) -> None:
        """Wait for the save of every rank, in short collectives, in which the loss of a rank shows at once."""
        while self._ctx.largest(not has_ended(POLL_S)):
            pass

    def reserve(self, engine: Engine) -> None:
        """Allocate the host memory of an asynchronous save, and find that of copies, so that a lack fails at once."""
        self._saver.reserve(engine.state.fragments(with_optimizer=not engine.config.checkpoint.no_save_optim))
        if self._copies is not None:
            fragments = engine.state.fragments(with_optimizer=True)
            num_bytes = copied_bytes(fragments)
            optimizer = engine.config.optimizer
            # before the first step makes the moments; at most so many of each weight
            if all(fragment.kind not in STATES for fragment in fragments):
                most = max(len(optimizer.states), len(optimizer.matrix_states))
                num_bytes += most * copied_bytes([one for one in fragments if one.kind == "weight"])
            self._copies.reserve(num_bytes)

    @property
    def is_saving(self) -> bool:
        """This rank writes a checkpoint in the background."""
        return self._saver.is_writing

    def save(
        self,
        engine: Engine,
        progress: Progress,
        fingerprint: str,
        *,
        schedule: ParamSchedule | None = None,
        to_export: bool = False,
        expert_loads: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a save, or run it. Every rank calls it. `report` and `finish` return its errors.

        `to_export`: `export` comes next; noted in the checkpoint, for the run that resumes if this one is killed.
        `expert_loads`: tokens of each expert since the previous save, of `LoadWatch.record`.
        Raises TrainingAborted if verify_checkpoint finds copies that differ.
        """
        self._verify(engine, progress)
        options = engine.config.checkpoint
        with_optimizer = not options.no_save_optim
        content = self._content(engine, progress, fingerprint, schedule, with_optimizer=with_optimizer)
        content["export"] = to_export and self._exports is not None
        if expert_loads is not None:
            content["expert_loads"] = expert_loads
        self._count += 1
        self._saved_tag = f"{TAG}{progress.iteration}"
        self._saver.save(
            self._saved_tag,
            f"{self._token}{self._count:06d}",
            engine.state.fragments(with_optimizer=with_optimizer),
            content,
            keep=f"{TAG}{progress.best.iteration}" if options.keep_best else "",
        )

    def _verify(self, engine: Engine, progress: Progress) -> None:
        # each rank saves a share: of copies that differ the checkpoint would hold a mixture
        if engine.config.checkpoint.verify_checkpoint:
            ReplicaCheck(engine.ctx, engine.state.held()).check(progress.iteration)

    def _content(
        self,
        engine: Engine,
        progress: Progress,
        fingerprint: str,
        schedule: ParamSchedule | None,
        *,
        with_optimizer: bool,
    ) -> dict[str, Any]:
        """Return the metadata of a checkpoint."""
        return {
            "run": self.run.to_json(),
            "progress": dataclasses.asdict(progress),
            "data_fingerprint": fingerprint,
            "config": engine.config.to_dict(),
            "layout": layout_of(engine.config, engine.ctx),
            "versions": _versions(),
            "schedule": None if schedule is None else schedule.to_dict(),
            "optimizer": engine.state.scalars() if with_optimizer else None,
            "ema": None if engine.state.average is None else engine.state.average.record(),
            "rng": {"seed": engine.dropout_seed},
            "source": self._source,
            "base": engine.base,
            "start_fingerprint": engine.start_fingerprint,
        }

    def copy_is_due(self, iteration: int) -> bool:
        interval = self._config.checkpoint.peer_copy_interval
        return interval is not None and iteration % interval == 0

    def keep_copy(
        self, engine: Engine, progress: Progress, fingerprint: str, *, schedule: ParamSchedule | None, kept: Kept
    ) -> None:
        """Copy the state into the agents' memory, optimizer included. `kept`: the saves around it. Collective.

        Raises TrainingAborted as `save` does.
        """
        assert self._copies is not None
        self._verify(engine, progress)

        def metadata() -> str:
            content = self._content(engine, progress, fingerprint, schedule, with_optimizer=True)
            return json.dumps(content | {"kept": dataclasses.asdict(kept)}, allow_nan=False)

        self._copies.keep(progress.iteration, engine.state.fragments(with_optimizer=True), metadata)

    def discard_copies(self) -> None:
        """Give up the copies in memory, after a rollback: a restart is not to go back to before it."""
        if self._copies is not None:
            self._copies.discard()

    def report(self) -> list[str]:
        """Return a line on each save that ended since the last call."""
        lines = []
        for outcome in self._saver.finished():
            self._last_error = outcome.error
            # the run goes on without this checkpoint, until saves have failed for too long
            if outcome.error is not None:
                self._failed_tags.add(outcome.tag)
                line = f"WARNING: {outcome.tag} was not saved, older checkpoints are as they were: {outcome.error}"
                is_first = self._failing_since_s is None
                self._limit_failures()
                if self.fault is not None:
                    line += f". The run ends: {self.fault}"
                if is_first:
                    self.on_failed(line)
                lines.append(line)
                continue
            folder = self._saver.folder / outcome.tag
            line = f"saved {folder} in {outcome.seconds:.1f} s"
            if outcome.retried:
                line += f", at the second try: {outcome.retried}"
            lines.append(line)
            self._failed_tags.discard(outcome.tag)
            self._failing_since_s = None
            self.on_saved(folder)
            self.on_complete(int(outcome.tag.removeprefix(TAG)))
        return lines

    def _limit_failures(self) -> None:
        """Set `fault` once saves have failed for too long."""
        now_s, limit_mins = time.monotonic(), self._config.checkpoint.save_failure_limit_in_mins
        # the first failure starts the clock, the next good save stops it: a short outage ends no run
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        elif now_s - self._failing_since_s >= 60 * limit_mins:
            self.fault = (
                f"saves have failed for {(now_s - self._failing_since_s) / 60:.3g} minutes, "
                f"save_failure_limit_in_mins={limit_mins:g}"
            )

    def is_lost(self, iteration: int) -> bool:
        """Return True if the save of an iteration failed, or left no checkpoint in the run's own folder."""
        tag = f"{TAG}{iteration}"
        # one that a thread still writes is not lost
        is_there = tag == self._saved_tag or (self._saver.folder / tag / MANIFEST).is_file()
        return tag in self._failed_tags or not is_there

    def can_export(self, progress: Progress) -> bool:
        """Return True if the run's own folder has a checkpoint of now, or none is needed. Collective.

        Waits for the save under way, which may be the one of now.
        """
        if self._exports is None or progress.iteration == 0:
            return True
        self._saver.join()
        # rank 0's file system decides: another host may not see the commit yet
        return bool(self._ctx.broadcast_object((self._folder_of(progress) / MANIFEST).is_file()))

    def export(self, progress: Progress, say: Callable[[str], None], beat: Callable[[], None]) -> None:
        """Export the checkpoint just saved as a Hugging Face folder, if `save_hf` is given. Collective.

        Waits for the save under way, and calls `beat` meanwhile. An error is logged, and raised by `finish_exports`.
        """
        folder = self._folder_of(progress)
        # where the save of now fails, an earlier one of this iteration may lie there: its token is another
        token = f"{self._token}{self._count:06d}" if self._saved_tag == folder.name else None
        self._export(folder, token, export_name(self._config, progress.consumed_samples), say, beat)

    def export_best(self, progress: Progress, say: Callable[[str], None], beat: Callable[[], None]) -> None:
        """Export the checkpoint of the best validation to `best`, as `export` does. Collective."""
        if progress.best.value is not None:
            self._export(self._saver.folder / f"{TAG}{progress.best.iteration}", None, BEST, say, beat)

    def _export(
        self, checkpoint: Path, token: str | None, name: str, say: Callable[[str], None], beat: Callable[[], None]
    ) -> None:
        if self._exports is None or checkpoint.name == f"{TAG}0":  # before the first step there is nothing of the run
            return
        # an export reads the files of all ranks
        self._saver.join()
        for line in self.report():
            say(line)
        line, folder = self._exports.export(checkpoint, token, name, self._ctx, beat)
        if line:
            say(line)
        if folder is not None:
            self.on_saved(folder)

    def export_what_is_due(self, progress: Progress, say: Callable[[str], None], beat: Callable[[], None]) -> None:
        """Run the export that was to follow the checkpoint resumed from, if the run was killed before it.

        Collective.
        """
        folder = self._folder_of(progress)
        if self._exports is not None and self._ctx.broadcast_object(self._ctx.rank == 0 and is_due(folder)):
            self.export(progress, say, beat)

    def finish_exports(self) -> None:
        """Raise SaveError if exports are missing at the end. On all ranks alike."""
        if self._exports is not None:
            self._exports.check()

    def _folder_of(self, progress: Progress) -> Path:
        return self._saver.folder / f"{TAG}{progress.iteration}"

    def settle(self) -> list[str]:
        """Wait for the save under way, and return the report on it. Collective."""

        def wait() -> list[str]:
            self._saver.wait()
            return self.report()

        self._saver.join()
        return raise_on_all_ranks(self._ctx, wait)

    def finish(self, say: Callable[[str], None]) -> None:
        """Wait for the save under way, and log the report on it. Collective.

        Raises SaveError if the last save failed: the end of the run is then not saved.
        """
        self._saver.join()
        # a rank whose save failed must not leave the others waiting
        for line in raise_on_all_ranks(self._ctx, self._end):
            say(line)

    def _end(self) -> list[str]:
        self._saver.wait()
        lines = self.report()
        if self._last_error is not None:
            raise self._last_error
        return lines


def layout_of(config: Config, ctx: ParallelContext) -> dict[str, Any]:
    return {
        "pipeline_model_parallel_size": ctx.num_stages,
        "tensor_model_parallel_size": ctx.tensor_size,
        "context_parallel_size": ctx.context_size,
        "data_parallel_size": ctx.num_batch_ranks,
        "zero_stage": config.effective_zero_stage,
        "precision": config.training.precision,
    }


@functools.cache  # reads the packages' metadata, while training waits
def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: packages.version(name) for name in VERSIONS}}
