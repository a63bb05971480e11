"""Build the index arrays of a run before it starts: `python tools/prepare_cache.py --config PRESET --FLAGS`.

Takes the flags of megatron.train and builds what that run would build, on this machine, without devices and without
other ranks that wait. The run then finds every array in the cache. Exit status: 0 everything is built, 2 the flags or
the data are wrong (message on stderr).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.cli.command import command, command_parser
from megatron.data.blend import BlendedDataset, sets_of
from megatron.data.gpt import SPLITS, build_datasets, cache_folder, open_datasets, samples_needed
from megatron.data.index.indexed import DataError
from megatron.options.config import Config, ConfigError
from megatron.parallel.layout import Layout
from megatron.runtime.commands import train_name
from megatron.settings.command_line import load_config, read_command_line

COLUMNS = "{:<6} {:>14} {:>18} {:>7} {:>14} {:>20} {:>8}"


def read_config(flags: Sequence[str]) -> Config:
    """Return the run's config, validated for one data-parallel rank, which changes nothing. Raises ConfigError."""
    return load_config(flags, Layout.of(read_command_line(flags).config.parallel).world_size)


def describe(split: str, dataset: Any, found_before: set[Path], seconds: float) -> str:
    """Return a row of the table."""
    members: list[Any] = _blended(dataset) or sets_of(dataset)
    paths = cache_files(dataset)
    epochs = {member.num_epochs for member in members}
    found = len(paths & found_before)
    return COLUMNS.format(
        split,
        f"{sum(member.num_documents for member in members):,}",
        f"{sum(member.tokens_per_epoch for member in members):,}",
        "-".join(map(str, sorted({min(epochs), max(epochs)}))),
        f"{len(dataset):,}",
        f"{len(paths) - found} built, {found} found",
        f"{seconds:.1f}",
    )


def cache_files(dataset: Any) -> set[Path]:
    """Return every file of a dataset and of its members."""
    return {path for each in (*sets_of(dataset), *_blended(dataset)) for path in each.cache_paths}


def _blended(dataset: Any) -> list[Any]:
    """Return the members of a blend; of another dataset none."""
    if isinstance(dataset, BlendedDataset):
        return list(dataset.datasets)
    return []


def prepare(config: Config) -> None:
    """Build each split, and print a row for it. Raises DataError, also where an array could not be stored."""
    folders = {cache_folder(config.data, prefix) for prefix in config.data.prefixes}
    # before anything is built, so that the table can say which arrays were there
    found_before = {path for folder in folders for path in folder.glob("*.npy")}
    sys.stdout.write(COLUMNS.format("split", "documents", "tokens", "epochs", "samples", "files", "seconds") + "\n")
    train, valid, test = samples_needed(config)
    for number, split in enumerate(SPLITS):
        start = time.perf_counter()
        dataset = build_datasets(
            config.data,
            seq_length=config.training.seq_length,
            seed=config.training.seed,
            # one split at a time, so that each has its own row and time
            num_samples=((train, 0, 0), (0, valid, 0), (0, 0, test))[number],
            vocab_size=config.model.vocab_size,
        )[number]
        if dataset is None:
            sys.stdout.write(f"{split:<6} none\n")
            continue
        sys.stdout.write(describe(split, dataset, found_before, time.perf_counter() - start) + "\n")
        sys.stdout.flush()
        # the cache is all that is wanted here
        missing = sorted(path for path in cache_files(dataset) if not path.exists())
        if missing:
            raise DataError(f"{missing[0]} could not be written; free the disk, or pass another --data-cache-path")
    open_datasets(config)  # the other checks that a run makes of its data


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    parser = command_parser(
        "prepare_cache",
        "Build the index arrays of a run before it starts. Takes the flags of megatron.train; "
        f"`{train_name()} --help` lists them.",
        usage="%(prog)s --config PRESET [--flag VALUE ...]",
    )
    _, flags = parser.parse_known_args(arguments)
    try:
        prepare(read_config(flags))
    except (ConfigError, DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
