"""Shows that datasets and their samples are megatron-core's, byte for byte.

    python benchmarks/compare_megatron_core.py --peer-python peer/bin/python [--configurations 200]

Files: megatron-core reads what our builder writes, writes the same bytes from the same documents, and merges to the
same bytes; we read what it writes. Datasets: random configurations (seeds, splits, sequence lengths, epochs, document
lengths down to one token and none) and blends of them (by weight, by size up to a number of samples, exhaustive, a
blend for each split) go through our `build_datasets` and its `BlendedMegatronDatasetBuilder`; all arrays of all splits
must agree in shape, type and bytes, and so must some samples. benchmarks/alternating.py says how to make the
environment of `--peer-python`.

Prints a table and every difference. Exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from benchmarks.alternating import PEER_HELP, MegatronCore, PeerError, positive
from megatron.data.blend import BlendedDataset
from megatron.data.gpt import GPTDataset, build_datasets
from megatron.data.index.indexed import IndexedDataset
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.options.config import DataConfig
from megatron.options.data import parse_split

ROOT = Path(__file__).resolve().parent.parent
SPLITS = ("train", "valid", "test")
DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "int64", "float32", "float64")
VOCAB_SIZE = 1000
LARGEST_SAMPLE_COUNT = 200_000
SMALLEST_SHARE = 0.02
"""Share of a split in a blend, chosen so that every member has samples for it without being large."""
WHOLE = 10**9
"""More samples than any blend has: all of them, once."""
KINDS = ("single", "weighted", "by size", "single", "per split", "exhaustive")
"""Kinds of configurations, in turn."""


@dataclass
class Findings:
    """Number of comparisons by kind, and their differences."""

    compared: Counter[str] = field(default_factory=Counter)
    differing: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    covered: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def check(self, what: str, where: str, equal: bool, detail: str = "") -> None:
        self.compared[what] += 1
        if not equal:
            self.differing[what] += 1
            self.differences.append(f"{what}: {where} {detail}".rstrip())

    def check_arrays(self, what: str, where: str, ours: NDArray[Any], theirs: NDArray[Any]) -> None:
        same_kind = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        detail = f"ours {ours.dtype} {ours.shape}, megatron-core's {theirs.dtype} {theirs.shape}"
        if same_kind and (unequal := np.argwhere(ours != theirs)).size:
            at = tuple(unequal[0].tolist())
            detail = f"{len(unequal)} of {ours.size} differ, first at {at}: ours {ours[at]}, theirs {theirs[at]}"
        self.check(what, where, same_kind and ours.tobytes() == theirs.tobytes(), detail)

    def check_files(self, what: str, ours: str, theirs: str) -> None:
        for suffix in (".bin", ".idx"):
            same = Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()
            self.check(what, f"{ours}{suffix}, {theirs}{suffix}", same)

    def print_table(self) -> None:
        print(f"{'':44s} {'compared':>9s} {'different':>9s}")
        for what, count in self.compared.items():
            print(f"{what:44s} {count:9d} {self.differing[what]:9d}")
        print("among them " + ", ".join(f"{count} {what}" for what, count in sorted(self.covered.items())))
        for reason, count in self.refused.items():
            print(f"{count} configurations refused by megatron-core and not compared: {reason}")
        for difference in self.differences:
            print(f"DIFFERENT {difference}")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def compare_files(peer: MegatronCore, folder: Path, generator: np.random.Generator, findings: Findings) -> None:
    parts: dict[str, list[str]] = {"uint16": [], "int32": []}
    for number, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in ("one-token", "mixed", "sentences")):
        # of one, some, and many sequences: as preprocess_data.py writes them, and as sentence splitting does
        sequences = np.ones(generator.integers(1, 300), dtype=np.int64)
        if shape == "sentences":
            sequences = generator.integers(1, 9, len(sequences))
        count = int(sequences.sum())
        lengths = np.ones(count, np.int64) if shape == "one-token" else generator.integers(0, 200, count)
        lengths[-1] += 1
        tokens = random_tokens(generator, dtype, int(lengths.sum()))
        ours, theirs = str(folder / f"ours-{number}"), str(folder / f"theirs-{number}")
        write_ours(ours, tokens, lengths.tolist(), sequences.tolist())
        documents = str(folder / f"documents-{number}.npz")
        np.savez(documents, tokens=tokens, lengths=lengths, sequences=sequences)
        peer.ask("write_files", {"documents": documents, "prefix": theirs})
        findings.check_files("files written by both", ours, theirs)

        peer.ask("read_files", {"prefix": ours, "out": str(folder / f"read-{number}.npz")})
        with np.load(folder / f"read-{number}.npz") as read:
            findings.check_arrays("megatron-core reads ours: tokens", ours, tokens, read["tokens"])
            findings.check_arrays("megatron-core reads ours: lengths", ours, lengths.astype(np.int32), read["lengths"])
            document_index = np.concatenate(([0], np.cumsum(sequences)))
            findings.check_arrays("megatron-core reads ours: documents", ours, document_index, read["document_index"])
        opened = IndexedDataset(theirs)
        our_reading = np.concatenate([opened.read(i) for i in range(len(opened))])
        findings.check_arrays("we read megatron-core's: tokens", theirs, our_reading, tokens)
        findings.check_arrays("we read megatron-core's: lengths", theirs, opened.lengths, lengths.astype(np.int32))
        findings.check_arrays("we read megatron-core's: documents", theirs, opened.document_index, document_index)
        if dtype in parts:
            parts[dtype].append(ours)
    for dtype, prefixes in parts.items():
        compare_merged(peer, folder / f"merge-{dtype}", prefixes, findings)


def compare_merged(peer: MegatronCore, folder: Path, prefixes: list[str], findings: Findings) -> None:
    """Our merging tool joins a folder in natural order: part 2 before part 10."""
    source = folder / "parts"
    source.mkdir(parents=True)
    linked = [str(source / f"part-{number}") for number in (1, 2, 10)[: len(prefixes)]]
    for prefix, link in zip(prefixes, linked, strict=True):
        for suffix in (".bin", ".idx"):
            Path(link + suffix).hardlink_to(prefix + suffix)
    ours, theirs = str(folder / "ours"), str(folder / "theirs")
    tool = [sys.executable, str(ROOT / "tools" / "merge_datasets.py")]
    run = subprocess.run([*tool, "--input", str(source), "--output-prefix", ours], capture_output=True, text=True)
    if run.returncode:
        findings.check("files merged by both", str(source), False, run.stderr.strip())
        return
    peer.ask("merge_files", {"prefixes": linked, "prefix": theirs})
    findings.check_files("files merged by both", ours, theirs)


def random_tokens(generator: np.random.Generator, dtype: str, count: int) -> NDArray[Any]:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return generator.standard_normal(count).astype(kind)
    limits = np.iinfo(kind)
    return generator.integers(limits.min, limits.max, count, dtype=kind, endpoint=True)


def write_ours(prefix: str, tokens: NDArray[Any], lengths: Sequence[int], sequences: Sequence[int]) -> None:
    """Documents of `sequences[d]` sequences each."""
    with IndexedDatasetBuilder(prefix, tokens.dtype) as builder:
        sequence = token = 0
        for count in sequences:
            own = lengths[sequence : sequence + count]
            builder.add_document(tokens[token : token + sum(own)], own)
            sequence, token = sequence + count, token + sum(own)
        builder.finalize()


# ---------------------------------------------------------------------------------------------------------------------
# Datasets


@dataclass(frozen=True)
class Blend:
    """Prefixes that one or all splits come from. No weights: by their sizes, or a single one."""

    prefixes: list[str]
    weights: list[float] | None

    def data_path(self) -> tuple[str, ...]:
        if self.weights is None:
            return tuple(self.prefixes)
        return tuple(word for pair in zip(map(repr, self.weights), self.prefixes, strict=True) for word in pair)

    def for_peer(self) -> tuple[list[str], list[float] | None]:
        return self.prefixes, self.weights


@dataclass(frozen=True)
class Configuration:
    """A random dataset: one blend cut by `split`, or a blend for each split."""

    kind: str
    seed: int
    seq_length: int
    split: str | None
    blends: list[Blend]
    num_samples: tuple[int, int, int]

    def describe(self) -> str:
        return f"{self.kind}, seed {self.seed}, seq_length {self.seq_length}, split {self.split}, {self.num_samples}"


def random_lengths(generator: np.random.Generator, seq_length: int) -> NDArray[np.int64]:
    """Tokens in each document: all ones, short, of all sizes, a few long ones, or some empty."""
    most = min(LARGEST_SAMPLE_COUNT, LARGEST_SAMPLE_COUNT // 4 * seq_length)
    count = int(generator.integers(3, 3000))
    choice = generator.integers(5)
    if choice == 0:
        lengths = np.ones(max(count, 3 * seq_length + 3), dtype=np.int64)
    elif choice == 1:
        lengths = generator.integers(1, 20, count)
    elif choice == 2:
        lengths = np.ceil(generator.lognormal(4, 1.5, count // 4 + 3)).astype(np.int64)
    elif choice == 3:
        lengths = generator.integers(1, 5 * seq_length + 2, generator.integers(3, 20))
    else:
        lengths = generator.integers(0, 6, count)
        lengths[generator.integers(len(lengths))] = 1 + seq_length
    kept = int(np.searchsorted(np.cumsum(lengths), most)) + 3
    return lengths[:kept]


def random_split(generator: np.random.Generator) -> str:
    choice = generator.integers(4)
    if choice == 0:
        return str(generator.choice(["969,30,1", "949,50,1", "98,2,0", "1,1,1", "100,0,0", "1", "0.8,0.1,0.1"]))
    if choice == 1:
        return ",".join(str(part) for part in generator.integers(1, 1000, 3))
    if choice == 2:
        return ",".join(f"{part:.6f}" for part in generator.random(3))
    return ",".join(str(part) for part in (generator.integers(1, 100), generator.integers(2), generator.integers(9)))


def split_tokens(lengths: NDArray[np.int64], split: str) -> list[int | None]:
    """Tokens in each split; None where the split leaves it out."""
    parts = parse_split(split)
    bounds = [round(sum(parts[:n]) * len(lengths)) for n in range(4)]
    return [int(lengths[bounds[n] : bounds[n + 1]].sum()) if parts[n] else None for n in range(3)]


class Generator:
    """Makes random configurations, their files included, that megatron-core is able to build.

    It loops for ever on a split that holds documents by its share and none by rounding, and fails on an unweighted
    blend with a member shorter than a sample: those are drawn again.
    """

    def __init__(self, folder: Path, random: np.random.Generator):
        self._folder, self._random = folder, random

    def make(self, number: int) -> Configuration:
        random, kind = self._random, KINDS[number % len(KINDS)]
        seq_length = int(random.choice([1, 2, 3, 5, 8, 17, 64, 128, 512, 1024, 2048]))
        seed = int(random.integers(0, 2**32))
        if kind == "per split":
            made = [
                self._blend(f"{number}-{part}", seq_length, "1,0,0", bool(random.integers(2)), fewest=1)
                for part in SPLITS
            ]
            tokens = [held[0] for _, held in made]
            return Configuration(
                kind, seed, seq_length, None, [blend for blend, _ in made], self._samples(tokens, seq_length)
            )
        if kind == "single":
            while True:
                split, lengths = random_split(random), random_lengths(random, seq_length)
                held = split_tokens(lengths, split)
                if 0 not in held and (held[0] is None or held[0] > seq_length):
                    break
            prefix = self._write(f"{number}", lengths)
            blend = Blend([prefix], None)
            return Configuration(kind, seed, seq_length, split, [blend], self._samples(held, seq_length))
        split = random_split(random)
        while any(0 < part < SMALLEST_SHARE for part in parse_split(split)):
            split = random_split(random)
        weighted = kind == "weighted"
        blend, held = self._blend(f"{number}", seq_length, split, weighted, fewest=1 if weighted else 2)
        num_samples = (WHOLE,) * 3 if kind == "exhaustive" else self._samples(held, seq_length)
        return Configuration(kind, seed, seq_length, split, [blend], num_samples)

    def _blend(
        self, name: str, seq_length: int, split: str, weighted: bool, fewest: int
    ) -> tuple[Blend, list[int | None]]:
        """`fewest` or more datasets; and the tokens of all of them in each split."""
        random = self._random
        members = int(random.choice([fewest, 2, 3, 5, 20]))
        prefixes: list[str] = []
        sums: list[int | None] = [None] * 3
        while len(prefixes) < members:
            lengths = random_lengths(random, seq_length)
            held = split_tokens(lengths, split)
            needed = [1 if weighted and n else seq_length + 1 for n in range(3)]
            if any(have is not None and have < need for have, need in zip(held, needed, strict=True)):
                continue
            prefixes.append(self._write(f"{name}-{len(prefixes)}", lengths))
            sums = [None if have is None else (total or 0) + have for have, total in zip(held, sums, strict=True)]
        weights = [float(weight) for weight in random.choice([random.random(members) + 1e-3, np.ones(members)])]
        return Blend(prefixes, weights if weighted else None), sums

    def _samples(self, tokens: Sequence[int | None], seq_length: int) -> tuple[int, int, int]:
        """From a few to some epochs, and as many as end an epoch exactly, or one more."""

        def of(held: int | None) -> int:
            epochs = self._random.choice([0.01, 0.5, 0.99, 1, 1.1, 1.79, 1.81, 2, 3.5, 5])
            if held is None:
                return 1
            fitting = max(1, (int(epochs * held) - 1) // seq_length)
            return min(fitting + int(self._random.integers(2)), LARGEST_SAMPLE_COUNT)

        train, valid, test = map(of, tokens)
        return train, min(valid, 2000), min(test, 2000)

    def _write(self, name: str, lengths: NDArray[np.int64]) -> str:
        """Documents of one sequence, or in every third dataset, of several."""
        prefix = str(self._folder / name)
        sequences = np.ones(len(lengths), np.int64)
        if self._random.integers(3) == 0:
            ends = np.flatnonzero(self._random.random(len(lengths)) < 0.3) + 1
            sequences = np.diff(np.unique(np.concatenate(([0], ends, [len(lengths)]))))
        tokens = self._random.integers(0, VOCAB_SIZE, int(lengths.sum())).astype(
            self._random.choice(["uint16", "int32"])
        )
        write_ours(prefix, tokens, lengths.tolist(), sequences.tolist())
        return prefix


def our_splits(configuration: Configuration, cache: Path) -> tuple[Any, ...]:
    if configuration.split is not None:
        data = DataConfig(
            data_path=configuration.blends[0].data_path(), split=configuration.split, data_cache_path=str(cache)
        )
    else:
        train, valid, test = (blend.data_path() for blend in configuration.blends)
        data = DataConfig(train_data_path=train, valid_data_path=valid, test_data_path=test, data_cache_path=str(cache))
    return build_datasets(
        data,
        seq_length=configuration.seq_length,
        seed=configuration.seed,
        num_samples=configuration.num_samples,
        vocab_size=VOCAB_SIZE,
    )


def compare_datasets(peer: MegatronCore, configuration: Configuration, folder: Path, findings: Findings) -> None:
    out = folder / "theirs.npz"
    blends = [blend.for_peer() for blend in configuration.blends]
    asked = {
        "blend": blends[0] if configuration.split else None,
        "blend_per_split": None if configuration.split else blends,
        "split": configuration.split,
        "sizes": [None if size == WHOLE else size for size in configuration.num_samples],
        "seq_length": configuration.seq_length,
        "seed": configuration.seed,
        "out": str(out),
    }
    try:
        described = peer.ask("build_datasets", asked)
    except PeerError as error:
        if "oversamples" not in str(error):
            raise PeerError(f"{configuration.describe()}: {error}") from error
        # many small weights outrun its surplus of half a percent; ours builds more
        findings.refused["the blend oversamples a member"] += 1
        return
    ours = our_splits(configuration, folder / "cache")
    with np.load(out) as arrays:
        for name, dataset, theirs in zip(SPLITS, ours, described, strict=True):
            where = f"{name} of {configuration.describe()}"
            findings.check("splits that exist", where, (dataset is None) == (theirs is None))
            if dataset is not None and theirs is not None:
                compare_split(name, where, dataset, theirs, arrays, findings)


def compare_split(name: str, where: str, dataset: Any, theirs: Any, arrays: Any, findings: Findings) -> None:
    members: list[GPTDataset] = [dataset]
    if isinstance(dataset, BlendedDataset):
        members = dataset.datasets  # type: ignore[assignment]
    findings.check("blends, or single datasets", where, isinstance(dataset, BlendedDataset) == theirs["blended"])
    findings.check(
        "members and numbers of samples",
        where,
        (len(members), len(dataset)) == (theirs["members"], theirs["samples"]),
        f"ours {len(members)}, {len(dataset)}; theirs {theirs}",
    )
    if f"{name}.dataset_index" in arrays and isinstance(dataset, BlendedDataset):
        for array in ("dataset_index", "dataset_sample_index"):
            findings.check_arrays(array, where, getattr(dataset, array), arrays[f"{name}.{array}"])
    for number, member in enumerate(members[: theirs["members"]]):
        findings.covered["single datasets and members"] += 1
        findings.covered["repeated for several epochs"] += member.num_epochs > 1
        for array in ("document_index", "sample_index", "shuffle_index"):
            expected = arrays[f"{name}.{number}.{array}"]
            findings.check_arrays(array, f"member {number} of {where}", getattr(member, array), expected)
    chosen = np.linspace(0, theirs["samples"] - 1, min(3, theirs["samples"])).astype(int).tolist()
    if len(dataset) == theirs["samples"]:
        samples = np.stack([dataset[index] for index in chosen])
        findings.check_arrays("samples read", where, samples, arrays[f"{name}.samples"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Files and arrays against megatron-core's.", allow_abbrev=False)
    parser.add_argument("--peer-python", required=True, metavar="PATH", help=PEER_HELP)
    parser.add_argument("--configurations", type=positive, default=200, metavar="N", help="default: 200")
    parser.add_argument("--seed", type=int, default=0, help="of the configurations (default: 0)")
    options = parser.parse_args()
    logging.disable(logging.WARNING)

    findings = Findings()
    random = np.random.default_rng(options.seed)
    kinds: Counter[str] = Counter()
    try:
        with MegatronCore(options.peer_python) as peer, tempfile.TemporaryDirectory() as temporary:
            print(peer.versions)
            compare_files(peer, Path(temporary), random, findings)
            for number in range(options.configurations):
                with tempfile.TemporaryDirectory() as folder:
                    configuration = Generator(Path(folder), random).make(number)
                    kinds[configuration.kind] += 1
                    compare_datasets(peer, configuration, Path(folder), findings)
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{sum(kinds.values())} configurations: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    findings.print_table()
    print("all equal" if not findings.differences else f"{len(findings.differences)} differences")
    return 1 if findings.differences else 0


if __name__ == "__main__":
    sys.exit(main())
