"""Shared parts of the checkpoint benchmarks: gloo ranks in their own processes, a Llama to save, a folder on a disk.

Linux only: memory and file systems are looked up in /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.alternating import free_port

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.engine import Engine

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
FOLDER_HELP = "where to make a temporary folder, on the disk to be measured (default: the system's temporary folder)"


def llama(hidden_size: int, num_layers: int, vocab_size: int) -> str:
    """Flags of a Llama in float32, with heads of 64 and the usual width of its MLP."""
    return (
        f"--architecture llama --position-embedding-type rope --untie-embeddings-and-output-weights "
        f"--hidden-size {hidden_size} --ffn-hidden-size {ffn_hidden_size(hidden_size)} --num-layers {num_layers} "
        f"--num-attention-heads {max(1, hidden_size // 64)} --vocab-size {vocab_size} --seq-length 16 "
        "--micro-batch-size 1 --train-iters 1000 --data-path none --device cpu --lr 1e-3 --lr-decay-style constant"
    )


def ffn_hidden_size(hidden_size: int) -> int:
    """8/3 of the hidden size, in multiples of 256 (of 16 for the smallest)."""
    multiple = 256 if hidden_size >= 512 else 16
    return -(-8 * hidden_size // (3 * multiple)) * multiple


def num_parameters(hidden_size: int, num_layers: int, vocab_size: int) -> int:
    """Number of parameters of `llama`, without its norms."""
    per_layer = 4 * hidden_size**2 + 3 * hidden_size * ffn_hidden_size(hidden_size)
    return num_layers * per_layer + 2 * vocab_size * hidden_size


def build(
    arguments: str, ctx: ParallelContext | None = None, *, will_restore: bool = False
) -> tuple[Engine, PretrainTask]:
    """The run's engine on this rank. Collective."""
    from megatron.parallel.context import ParallelContext
    from megatron.settings.command_line import parse_arguments
    from megatron.settings.validation import check
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine

    config, _ = parse_arguments(arguments.split())
    ctx = ctx or ParallelContext.build(config.parallel, "cpu")
    if faults := check(config, ctx.world_size):
        raise SystemExit("\n".join(faults))
    task = PretrainTask(config)
    return build_engine(config, ctx, task, will_restore=will_restore), task


def train_step(engine: Engine, task: PretrainTask) -> float:
    """The loss of a step on random tokens, the same on every layout. Gives the optimizer its moments. Collective."""
    import numpy as np

    config, ctx = engine.config, engine.ctx
    training = config.training
    shape = (training.global_batch_size, training.seq_length + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int64)
    own = tokens[ctx.batch_rank :: ctx.num_batch_ranks]
    batches = [task.data.collate(row[None]) for row in own] if engine.reads_data else []
    return float(engine.train_step(batches, consumed_samples=0, lr=config.optimizer.lr).loss)


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(*arguments) in each of `world_size` new processes, one thread each -> what they returned, by rank.

    Raises torch's ProcessException with the traceback of the first that failed; the others are ended.
    """
    from torch.multiprocessing import spawn

    port = free_port()
    answers: Any = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(_run_rank, (world_size, port, answers, function, arguments), nprocs=world_size)
    by_rank = dict(answers.get() for _ in range(world_size))
    return [by_rank[rank] for rank in range(world_size)]


def _run_rank(
    rank: int, world_size: int, port: int, answers: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    import torch

    torch.set_num_threads(1)
    answers.put((rank, function(*arguments)))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def add_folder_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", metavar="PATH", default=tempfile.gettempdir(), help=FOLDER_HELP)


@contextlib.contextmanager
def work_folder(parent: str, needed_bytes: int) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end. Exits if that is not on a disk, or has too little space."""
    kind = file_system(Path(parent))
    if kind in MEMORY_FILE_SYSTEMS:
        raise SystemExit(f"error: --folder {parent} is on {kind}, in memory; give a folder on a disk")
    if (free := shutil.disk_usage(parent).free) < needed_bytes:
        raise SystemExit(
            f"error: --folder {parent} has {free / 1e9:.1f} GB free, but {needed_bytes / 1e9:.1f} GB are needed; give "
            "another one, or measure less"
        )
    with tempfile.TemporaryDirectory(dir=parent, prefix="checkpoints-") as folder:
        yield Path(folder)


def file_system(folder: Path) -> str:
    """Its type, as /proc/mounts has it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    resolved = folder.resolve(strict=True)
    _, kind = max((len(place), kind) for place, kind in mounts if resolved.is_relative_to(place))
    return kind


def fsync(path: Path) -> None:
    """Wait until a file, or the list of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))
