"""Hugging Face exports of a run's checkpoints, each complete or absent: models, or adapters in PEFT's format."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.folders import LEFTOVER, UNRECORDED, Run
from megatron.checkpoint.format import ITEM_BYTES, CheckpointError, SaveError, hidden_path
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.save_folder import take_lock
from megatron.checkpoint.writer import make_folder, remove_checkpoint
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.runtime.commands import command_name
from megatron.runtime.files import appearing, write_durably
from megatron.weights.folder_files import EXPORT_RECORD, check_space, read_json
from megatron.weights.huggingface import export_huggingface, name_map
from megatron.weights.huggingface_files import DTYPES
from megatron.weights.loader import tokenizer_of
from megatron.weights.merging.adapters import merged_config, merged_model
from megatron.weights.model import count, whole_model
from megatron.weights.peft.export import check_exportable, export_adapter, native_adapter
from megatron.weights.tokenizer_files import check_tokenizer

#     SAVE_HF/samples_4096/                   the model or adapters after so many samples; or
#     SAVE_HF/last_epoch/                     the newest one alone
#     SAVE_HF/best/                           that of the best validation, at the end of a run with keep_best
#     SAVE_HF/samples_4096/export.json        the checkpoint it was made of, and what was checked of it
#     SAVE_HF/.samples_4096.partial-TOKEN/    one that is being written: renamed when it is complete
#     SAVE_HF/.last_epoch.replaced-TOKEN/     the previous one, while the new one is renamed
#     SAVE_HF/.lock                           held by the run that exports there
#
# Rank 0 alone works, from the files that all ranks have saved, a tensor at a time and in a thread; the others wait in
# short collectives, so that neither the watchdog nor a collective's time limit ends a run whose export takes long.

LAST, BEST = "last_epoch", "best"
SAMPLES = "samples_"
POLL_S = 2.0
"""Longest wait of the other ranks in one collective."""
STILL, MOVED, DONE = 0, 1, 2


@dataclasses.dataclass
class _Work:
    """One export, as the thread that makes it and rank 0's main thread see it."""

    parameters_done: int = 0
    """Read so far, to be verified or written."""
    line: str = ""
    """Its log line. Empty: it was there already."""
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class _Content:
    """Content of one export."""

    num_bytes: int
    tensors: Iterator[tuple[str, Tensor]]
    write: Callable[..., list[str]]
    """(folder, tensors=...) -> names of the tokenizer files."""


class Exports:
    """Exports of one run. Collective; rank 0 keeps other runs out of the folder until `close`.

    Raises CheckpointError if no export is possible: a model without Hugging Face form, a tokenizer of another
    vocabulary, a folder that cannot be written to.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        run: Run = Run(),  # noqa: B008 - frozen
        source: Mapping[str, Any] | None = None,
    ) -> None:
        """`source`: description of the Hugging Face model that the run once started from."""
        options = config.checkpoint
        assert options.save_hf is not None
        self._config, self._folder, self._keep_last = config, Path(options.save_hf), options.save_hf_keep_last
        self._holds_adapters = config.lora.lora_rank is not None and not options.save_hf_merged
        self._whole = config
        """Config of the model without adapters."""
        if config.lora.lora_rank is not None:
            self._whole = merged_config(config)
        self._run = run
        self._failed: dict[str, str] = {}
        self._lock: int | None = None
        self._tokenizer: Path | None = None
        # the others neither read nor write here
        if rank == 0:
            self._check_form(source)
            # all that can be refused is refused now, not at the first export hours later
            self._tokenizer = tokenizer_of(config)
            if self._tokenizer is not None:
                check_tokenizer(self._tokenizer, config.model.vocab_size)
            make_folder(self._folder)
            self._lock, is_alone = take_lock(self._folder)
            # without locks the leftovers may be another run's export that is being written
            if is_alone:
                self._remove_leftovers()
            if not options.allow_used_save:
                self._check_unused()

    def _check_form(self, source: Mapping[str, Any] | None) -> None:
        if self._holds_adapters:
            check_exportable(self._config, source)
        else:
            name_map(self._whole)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def export(
        self, checkpoint: Path, token: str | None, name: str, ctx: ParallelContext, beat: Callable[[], None]
    ) -> tuple[str, Path | None]:
        """Export the checkpoint in that folder by this name, unless it is there. Collective.

        Return a log line, and the folder of what was exported. `token`: that of the save which made the checkpoint,
        where it is known. An error is a WARNING; see `check`.
        """
        work = _Work()
        thread, seen, state = None, 0, STILL
        if ctx.rank == 0:
            thread = threading.Thread(target=self._make, args=(name, checkpoint, token, work), name=f"export {name}")
            thread.start()
        # without a beat the watchdog's time runs: an export that makes no progress is a hang
        while state != DONE:
            if thread is not None:
                thread.join(POLL_S)
                state = STILL
                if not thread.is_alive():
                    state = DONE
                elif work.parameters_done > seen:
                    state = MOVED
                seen = work.parameters_done
            state = ctx.broadcast(state)
            if state != STILL:
                beat()
        # `check` raises on all ranks, or on none
        line, fault = ctx.broadcast_object((work.line, work.fault))
        # an export of the same name that succeeds later makes up for it
        self._failed.pop(name, None)
        folder = self._folder / name
        if fault:
            self._failed[name] = fault
            return f"WARNING: {folder} was not exported, older exports are as they were: {fault}", None
        if not line:
            return "", None
        return str(line), folder

    def check(self) -> None:
        """Raise SaveError if exports are missing at the end of the run."""
        if self._failed:
            missing = "; ".join(f"{self._folder / name}: {fault}" for name, fault in self._failed.items())
            to = "peft" if self._holds_adapters else "hf"
            raise SaveError(
                f"not exported: {missing}. Make room and restart the run, or export a checkpoint that still exists: "
                f"{command_name('convert_checkpoint')} --to {to} --load {self._config.checkpoint.save} --save FOLDER"
            )

    # In rank 0's thread

    def _make(self, name: str, checkpoint: Path, token: str | None, work: _Work) -> None:
        began_s = time.monotonic()
        try:
            opened = Checkpoint(checkpoint)
            if token not in (None, opened.token):
                raise CheckpointError(f"{checkpoint} is of an earlier save, the last one failed")
            # exported before the restart
            if self._made_of(name) == opened.token:
                return
            copied = self._write(name, opened, work)
            self._prune()
            with_them = "" if copied else ", without tokenizer files (tokenizer_model names their folder)"
            work.line = f"exported {self._folder / name} in {time.monotonic() - began_s:.1f} s{with_them}"
        except OSError as error:
            work.fault = f"{error.filename or self._folder}: {error.strerror}"
        except CheckpointError as error:
            work.fault = str(error)
        except Exception as error:  # of whatever kind: the thread would take it along
            work.fault = f"{type(error).__name__}: {error}"

    def _write(self, name: str, checkpoint: Checkpoint, work: _Work) -> list[str]:
        token, place = uuid.uuid4().hex[:12], self._folder / name
        content = self._content(checkpoint)
        check_space(self._folder, content.num_bytes, "save_hf")

        def alive(num_bytes: int) -> None:
            work.parameters_done += num_bytes // ITEM_BYTES

        # before anything is written: the exported files have no checksums to find damage by later
        checked = checkpoint.verify(progress=alive, kinds=("weight",))
        new, replaced = (hidden_path(self._folder, name, state, token) for state in ("partial", "replaced"))
        progress = checkpoint.metadata["progress"]
        mark = {
            "checkpoint": checkpoint.tag,
            "token": checkpoint.token,
            "run": self._run.id,
            "iteration": progress["iteration"],
            "consumed_samples": progress["consumed_samples"],
            "checked": f"of the checkpoint, {checked}; the exported files carry no checksum",
        }

        def counted() -> Iterator[tuple[str, Tensor]]:
            for parameter, tensor in content.tensors:
                yield parameter, tensor
                work.parameters_done += tensor.numel()

        with appearing(place, new, replaced=replaced):
            copied = content.write(new, tensors=counted())
            write_durably(new / EXPORT_RECORD, (json.dumps(mark, indent=2) + "\n").encode())
        return copied

    def _content(self, checkpoint: Checkpoint) -> _Content:
        """Return what the export of a checkpoint holds. Raises CheckpointError if it is not this run's."""
        config, tokenizer = self._config, self._tokenizer
        if self._holds_adapters:
            adapter = native_adapter(checkpoint)
            write = partial(
                export_adapter,
                config=config,
                base_name=adapter.base_name,
                identity=adapter.identity,
                tokenizer=tokenizer,
            )
            return _Content(count(adapter.shards) * ITEM_BYTES, adapter.tensors(), write)
        read_model = whole_model if config.lora.lora_rank is None else merged_model
        model = read_model(checkpoint)
        precision = config.training.precision
        whole = partial(
            export_huggingface,
            config=self._whole,
            precision=precision,
            source=model.huggingface,
            tokenizer=tokenizer,
        )
        return _Content(model.num_parameters * DTYPES[precision].itemsize, model.tensors(), whole)

    def _exports(self) -> dict[Path, str]:
        """Return the folders of exports, and the identity of the run that made each."""
        exports = {}
        for mark in self._folder.glob(f"*/{EXPORT_RECORD}"):
            folder = mark.parent
            if not (folder.is_symlink() or folder.name.startswith(".")):
                exports[folder] = str(read_json(mark).get("run", UNRECORDED))
        return exports

    def _check_unused(self) -> None:
        exports = self._exports()
        if exports and self._run.id not in exports.values():
            names = sorted(folder.name for folder in exports)
            raise CheckpointError(
                f"save_hf={self._folder} holds exports of another run ({', '.join(names)}); "
                "give another folder, or pass --allow-used-save"
            )

    def _made_of(self, name: str) -> str | None:
        """Return the token of the checkpoint that the export of this name was made of; None: there is none.

        Raises CheckpointError if something else has that name: it is not ours to replace.
        """
        place = self._folder / name
        if not os.path.lexists(place):
            return None
        # without the record it may be a model that someone has put there
        if place.is_symlink() or not (place / EXPORT_RECORD).is_file():
            raise CheckpointError(f"{place} is there, but is not an export of a run; move it away")
        return str(read_json(place / EXPORT_RECORD).get("token"))

    def _prune(self) -> None:
        """Remove all but the `save_hf_keep_last` exports after the most samples."""
        if self._keep_last is None:
            return
        own: list[tuple[int, Path]] = []
        for path, run in self._exports().items():
            samples = path.name.removeprefix(SAMPLES)
            # another run's exports are not ours to remove, nor are `best` and `last_epoch`
            if samples.isdigit() and run == self._run.id:
                own.append((int(samples), path))
        for _, path in sorted(own, reverse=True)[self._keep_last :]:
            remove_checkpoint(path, hidden_path(self._folder, path.name, "deleted", uuid.uuid4().hex[:12]))

    def _remove_leftovers(self) -> None:
        """Remove the leftovers of a killed run. An export that was being replaced gets its name back."""
        for path in self._folder.iterdir():
            left = LEFTOVER.fullmatch(path.name)
            if not left or not path.is_dir() or path.is_symlink():
                continue
            # killed between the two renames
            if left["state"] == "replaced" and not os.path.lexists(self._folder / left["tag"]):
                os.rename(path, self._folder / left["tag"])
            else:
                shutil.rmtree(path)


def export_name(config: Config, samples: int) -> str:
    """Return the name of the export after so many samples."""
    if config.checkpoint.save_hf_last_only:
        return LAST
    return f"{SAMPLES}{samples}"


def is_due(checkpoint: Path) -> bool:
    """Return True if the checkpoint in that folder was saved to be exported."""
    try:
        return Checkpoint(checkpoint).metadata.get("export") is True
    except CheckpointError:
        return False
