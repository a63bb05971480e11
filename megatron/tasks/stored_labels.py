"""Log-probabilities of a dataset's labels, or of a teacher's likeliest tokens at them, computed once into a file.

Forward passes of the model at the start write them; a user's loss function is then given them with each microbatch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron.data.blend import sets_of
from megatron.data.gpt import SPLITS
from megatron.data.index.indexed import DataError
from megatron.data.label_file import LabelFile, StoredLabels, create_label_file, label_path
from megatron.options.data import parse_data_path
from megatron.parallel.chosen_log_probs import top_log_probs
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import token_log_probs
from megatron.tasks.data import SampleLabels
from megatron.tasks.objective import Forward
from megatron.tasks.task import Task
from megatron.tasks.user_loss import UserLoss

LABELS_AT_A_TIME = 1 << 16
"""Labels between two writes, over all ranks."""


@dataclasses.dataclass(frozen=True)
class LabelJob:
    """A dataset, and the file that its numbers belong in."""

    task: Task
    dataset: Any
    labels: SampleLabels
    top_k: int
    """Likeliest tokens of each label; 0: the label itself."""
    path: Path
    facts: dict[str, str]


def label_jobs(task: Task, datasets: Sequence[Any], weights: str) -> list[LabelJob]:
    """Return what a run is to store: for a reference or, with teacher_top_k, of a teacher with this fingerprint."""
    config, jobs = task.config, []
    top_k = config.training.teacher_top_k or 0
    for split, words in enumerate(words for _, words in config.data.paths):
        for dataset in sets_of(datasets[split]):
            labels = task.data.labels.of(dataset, split)
            # all that the numbers depend on: another value is another file
            facts = {
                "data": labels.fingerprint,
                "samples": str(len(labels.lengths)),
                "weights": weights,
                "vocab_size": str(config.model.vocab_size),
                "top_k": str(top_k),
                "precision": config.training.precision,
                "quantize_base": str(config.model.quantize_base),
            }
            path = label_path(parse_data_path(words)[0][0], "teacher" if top_k else "labels", facts)
            jobs.append(LabelJob(task, dataset, labels, top_k, path, facts))
    return jobs


def open_stored(job: LabelJob) -> None:
    """Give the loss function the numbers of a job that is complete. Raises DataError."""
    assert isinstance(job.task.objective, UserLoss)
    try:
        file = LabelFile(job.path)
    except FileNotFoundError:
        raise DataError(f"{job.path}, which rank 0 wrote, is not found here; put the data on a shared disk") from None
    job.task.objective.stored_reference[job.labels.fingerprint] = StoredLabels(file, _firsts(job.labels))


def open_teacher(task: Task, datasets: Sequence[Any]) -> None:
    """Give the loss function the teacher's files of these datasets.

    Raises DataError for one that is missing, and for files of several teachers.
    """
    objective = task.objective
    if not isinstance(objective, UserLoss) or not objective.needs_teacher:
        return
    files = [_teacher_file(name) for name in task.config.training.teacher]
    path_of_teacher: dict[str, Path] = {}
    for split, each in enumerate(datasets):
        for dataset in sets_of(each):
            labels = task.data.labels.of(dataset, split)
            fitting = _files_of(labels, files, SPLITS[split])
            # by teacher: its files of training and validation data have these in common
            path_of_teacher |= {_facts_of_teacher(file): file.path for file in fitting}
            if len(path_of_teacher) > 1:
                paths = " and ".join(map(str, path_of_teacher.values()))
                raise DataError(f"teacher has files of different teachers, {paths}; give those of one")
            # one of more samples holds the others' too, since samples have one order
            fullest = max(fitting, key=lambda file: len(file.done))
            _check_teacher(fullest, labels, task.config.model.vocab_size)
            objective.stored_teacher[labels.fingerprint] = StoredLabels(fullest, _firsts(labels))


def _files_of(labels: SampleLabels, files: Sequence[LabelFile], split: str) -> list[LabelFile]:
    """Return the files of these labels. Raises DataError where there is none."""
    fitting = [file for file in files if file.facts.get("data") == labels.fingerprint and file.ids is not None]
    if not fitting:
        known = ", ".join(f"{file.path} of {file.facts.get('data')}" for file in files)
        raise DataError(
            f"teacher has no file of the {split} data {labels.fingerprint} ({known}); write it with the data, split, "
            "seq_length, seed and number of samples of this run"
        )
    return fitting


def _check_teacher(file: LabelFile, labels: SampleLabels, vocab_size: int) -> None:
    """Raise DataError for a file of another vocabulary, or one that lacks samples."""
    # ids of another tokenizer would be read as other tokens, in silence
    if (size := file.facts.get("vocab_size")) != str(vocab_size):
        raise DataError(
            f"{file.path} is of a teacher with vocab_size={size}, but this model has {vocab_size}; teacher and student "
            "need the same tokenizer and vocab_size"
        )
    check_file(file, labels)
    if missing := int((file.done[: len(labels.lengths)] == 0).sum()):
        raise DataError(f"{file.path} lacks {missing} samples; let the run that writes it end")


def _teacher_file(name: str) -> LabelFile:
    try:
        return LabelFile(Path(name))
    except DataError as error:
        raise DataError(
            f"teacher={name} is not a file that a run with teacher_top_k wrote, or it is damaged; give another"
        ) from error


def _facts_of_teacher(file: LabelFile) -> str:
    """Return what the files of one teacher have in common."""
    return json.dumps({name: value for name, value in file.facts.items() if name not in ("data", "samples")})


def _firsts(labels: SampleLabels) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(labels.lengths)])


def complete(job: LabelJob, forward: Forward, ctx: ParallelContext, *, may_compute: bool) -> str:
    """Compute the samples that the file lacks; return what was done. Rank 0 alone writes. Collective.

    Raises DataError, also if samples are missing and `may_compute` is false: the model is not that of the facts.
    """
    lengths, firsts = job.labels.lengths, _firsts(job.labels)
    done = np.zeros(len(lengths), np.uint8)
    files: list[LabelFile] = []

    def open_file() -> None:
        if not job.path.exists():
            num_tokens = job.task.config.model.vocab_size
            create_label_file(job.path, job.facts, len(done), int(firsts[-1]), job.top_k, num_tokens)
        files.append(LabelFile(job.path, writes=True))
        check_file(files[0], job.labels)
        done[:] = files[0].done

    on_rank_0(ctx, open_file)
    # rank 0 alone has read the file
    if ctx.world_size > 1:
        dist.broadcast(torch.from_numpy(done), src=0, group=ctx.control_group)
    missing = np.flatnonzero(done == 0)
    if len(missing) and not may_compute:
        raise DataError(
            f"{job.path} lacks {len(missing)} of {len(done)} samples, and this run has trained the model since; put "
            "the file back, or start again from the model that it is of"
        )
    # cut where the running number of labels passes a multiple, so that a write is of bounded size
    steps = np.split(missing, np.flatnonzero(np.diff(np.cumsum(lengths[missing]) // LABELS_AT_A_TIME)) + 1)
    for samples in steps if len(missing) else []:
        labels = np.concatenate([np.arange(firsts[sample], firsts[sample + 1]) for sample in samples])
        found = _compute(job, samples, forward, ctx)
        on_rank_0(ctx, partial(_write, files[0] if files else None, samples, labels, found))
    return f"{len(done):,} samples, {len(missing):,} of them computed now: {job.path}"


def _write(
    file: LabelFile | None, samples: NDArray[np.int64], labels: NDArray[np.int64], found: NDArray[np.float32]
) -> None:
    assert file is not None
    if not np.isfinite(found).all():
        raise DataError(
            "the model gives log-probabilities that are not finite; start from another model, or in float32"
        )
    file.write(samples, labels, found)


def _compute(job: LabelJob, samples: NDArray[np.int64], forward: Forward, ctx: ParallelContext) -> NDArray[np.float32]:
    """Return the numbers of these samples, one row a label, on every rank: see `LabelFile.write`."""
    task, width, lengths = job.task, 2 * job.top_k or 1, job.labels.lengths
    keys = task.data.labels.keys(job.dataset, samples, ctx.num_batch_ranks)
    own = keys[ctx.batch_rank :: ctx.num_batch_ranks]
    reads = ctx.is_first_stage or ctx.is_last_stage

    def of_outputs(outputs: tuple[Tensor, Tensor], targets: Any) -> Tensor:
        if not job.top_k:
            return token_log_probs(*outputs, targets[0], ctx).unsqueeze(-1)
        log_probs, ids = top_log_probs(*outputs, job.top_k, ctx)
        # ids as floats, exact below 2^24: one tensor travels and is summed
        return torch.cat([log_probs, ids.to(log_probs.dtype)], -1)

    microbatches = [task.read(job.dataset, key) for key in own] if reads else []
    results = forward(microbatches, of_outputs, adapters=bool(job.top_k), num_microbatches=len(own))
    begins = dict(zip(samples.tolist(), np.cumsum([0, *lengths[samples]]).tolist(), strict=False))
    # each number is set by one rank and 0 elsewhere, so that the sum over all ranks is exact
    found = torch.zeros(int(lengths[samples].sum()), width, device=ctx.device)
    for number, key in enumerate(keys):
        for sample, row, places in task.data.labels.places(job.dataset, key):
            # a sample that comes twice, to fill a microbatch, is taken once
            begin = begins.pop(sample, None)
            owner, turn = number % ctx.num_batch_ranks, number // ctx.num_batch_ranks
            if begin is not None and owner == ctx.batch_rank and ctx.is_last_stage and ctx.leads_rows:
                found[begin : begin + int(lengths[sample])] = results[turn][row, places].float()
    if ctx.world_size > 1:
        dist.all_reduce(found)
    return found.cpu().numpy()  # type: ignore[no-any-return]


def check_file(file: LabelFile, labels: SampleLabels) -> None:
    """Raise DataError if a file holds other samples than these. It may hold more."""
    count, num_labels = len(labels.lengths), int(labels.lengths.sum())
    if len(file.done) < count or len(file.log_probs) < num_labels:
        raise DataError(
            f"{file.path} has {len(file.done)} samples with {len(file.log_probs)} labels, this run needs {count} with "
            f"{num_labels}; write it again for as many"
        )


def on_rank_0(ctx: ParallelContext, work: Callable[[], None]) -> None:
    """Run on rank 0, and raise its error on every rank. Collective. Raises DataError."""
    # raised on rank 0 alone it would leave the others waiting in the next collective
    error: str | None = None
    if ctx.rank == 0:
        try:
            work()
        except (DataError, OSError) as problem:
            error = str(problem)
    if (error := ctx.broadcast_object(error)) is not None:
        raise DataError(error)
