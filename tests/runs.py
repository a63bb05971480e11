"""Whole runs of megatron.train inside the ranks of tests/ranks.py."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson

from megatron.data.index.indexed import DataError
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.options.config import ConfigError, ParallelConfig, on_device
from megatron.parallel.context import ParallelContext
from megatron.resilience import host_consistency as sharing
from megatron.resilience.errors import raise_on_all_ranks
from megatron.settings.command_line import load_config
from megatron.training.configure import check_deepspeed
from megatron.training.engine import Engine, StepResult
from megatron.training.run import run

SHORT = (
    "--make-vocab-size-divisible-by 8 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 "
    "--lr-decay-style cosine --device cpu --split 8,1,1 --eval-interval 4 --eval-iters 2 --log-interval 1"
)
"""A short run of the model that it loads."""
TINY = f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 128 {SHORT}"


def write_dataset(prefix: Path, documents: int = 60, vocabulary: int = 128, seed: int = 0) -> Path:
    """An indexed dataset of counting sequences, with EOD = 0 at the end of each document."""
    generator = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            tokens = 1 + (generator.integers(0, vocabulary) + np.arange(generator.integers(5, 90))) % (vocabulary - 1)
            builder.add_document(np.append(tokens, 0).astype(np.uint16))
        builder.finalize()
    return prefix


def train(arguments: str, device: str = "cpu", *, lazy: bool = True, below: str = TINY) -> str:
    """One run; the fault that ended it, or ''. `lazy`: the mode of an HPU. `below`: what `arguments` add to."""
    try:
        config = load_config([*below.split(), *arguments.split()])
        check_deepspeed(config)
        run(on_device(config, device, lazy=lazy), ParallelContext.build(config.parallel, device))
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train_loaded(arguments: str) -> str:
    """One run of the model in the folder that it loads."""
    return train(arguments, below=SHORT)


def announced(arguments: str) -> list[str]:
    """What rank 0 announces of a run that ends well."""
    said: list[str] = []
    with patch("megatron.training.run.announce", lambda ctx, text: said.append(text)):
        assert train(arguments) == ""
    return said


def warned_of_data(arguments: str) -> list[str]:
    """What a rank warns of the data of a run that ends well."""
    said: list[str] = []
    log = logging.getLogger("megatron.data")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        assert train(arguments) == ""
    finally:
        log.removeHandler(handler)
    return said


def rates_of_steps(arguments: str) -> list[tuple[int, float, float]]:
    """(samples before it, learning rate, weight decay) of each step of a run."""
    rates, train_step = [], Engine.train_step

    def noted(engine: Engine, *batches: Any, **options: Any) -> StepResult:
        rates.append((options["consumed_samples"], options["lr"], options["weight_decay"]))
        return train_step(engine, *batches, **options)

    with patch.object(Engine, "train_step", noted):
        assert train(arguments) == ""
    return rates


def evaluate_only(arguments: str) -> str:
    """One run that must not build an optimizer."""
    with patch("megatron.training.build.build_optimizer", side_effect=AssertionError("an optimizer")):
        return train(f"{arguments} --skip-train")


def train_apart(folders: list[str], arguments: str) -> str:
    """One run whose relative paths lead each rank into a folder of its own, as on disks that are not shared."""
    here = os.getcwd()
    os.chdir(folders[int(os.environ["RANK"])])
    try:
        with patch.object(sharing, "SEEN_TIMEOUT_S", 0.3):
            return train(arguments)
    finally:
        os.chdir(here)


def share_a_folder_that_rank_one_may_not_write_to(folder: str) -> str:
    """What each rank is told."""
    ctx = ParallelContext.build(ParallelConfig(), "cpu")
    touch = Path.touch

    def refuse(path: Path) -> None:
        if ctx.rank == 1:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        touch(path)

    with patch.object(Path, "touch", refuse):
        try:
            sharing.check_shared(ctx, Path(folder), "token")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def fail_on_rank_one() -> str:
    """What each rank is told of a fault that only rank 1 meets."""
    ctx = ParallelContext.build(ParallelConfig(), "cpu")

    def action() -> None:
        if ctx.rank == 1:
            raise DataError("gone")

    try:
        raise_on_all_ranks(ctx, action)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rows(results: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The rows of one kind in a run's metrics.jsonl."""
    lines = (results / "metrics.jsonl").read_bytes().splitlines()
    return [row for row in map(orjson.loads, lines) if row["kind"] == kind]
