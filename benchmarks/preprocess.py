"""From JSONL to a dataset, the whole command: tools/preprocess_data.py against the usual way.

    MEGATRON_TEST_DATA=... python benchmarks/preprocess.py --peer-python peer/bin/python
        [--tokenizer gpt2|bloom|sentencepiece] [--megabytes 1000] [--peer-megabytes 100] [--rounds 5] [--corpus PATH]

The corpus is mixed-script JSONL made from corpus_en.jsonl and corpus_multi.jsonl (83 languages) of MEGATRON_TEST_DATA:
each document again and again, every time with its text begun elsewhere, shortened, and one word in forty made new
(numbers inserted, halves of two words joined); text without spaces is cut into pieces of 5 to 40 characters and
neighbours swapped. No two documents are equal, and words that no cache has seen keep coming: 2,300 of GPT-2's pieces a
megabyte, some 2.5 million in a gigabyte, as many as the originals' own growth promises (121,000 in their first 8 MB,
197,000 in 16). The corpus depends on its size alone; `--corpus PATH` keeps it there for the next run.

Ours is `tools/preprocess_data.py --append-eod --workers 2`. The usual way (benchmarks/peers/preprocess_data.py) is a
Pool of 2 workers with the tokenizers library, or sentencepiece, that feeds megatron-core's IndexedDatasetBuilder. Both
are timed as commands, from start to exit, in turn; their files must be equal byte for byte. With `--peer-megabytes`
the peer, which takes minutes for a gigabyte, gets the beginning of the corpus only: its time for the whole is estimated
from the rate at which it took that, with its start, timed on a single line, counted once; and the bytes are compared on
the beginning. Peak memory is that of all processes of the command together, sampled 20 times a second.

`bloom` is a vocabulary of 32,000 with BLOOM's pre-tokenizer, trained on the two corpora.

Exit status 1 if the median ratio is below 25 (gpt2), 5 (bloom) or 8 (sentencepiece), if ours takes more than 1 GiB, or
if a file differs. benchmarks/alternating.py says how to make the environment of `--peer-python`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from benchmarks.alternating import PEER_HELP, alternate, peer_command, peer_environment, positive, quotients, spread

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"gpt2": 25.0, "bloom": 5.0, "sentencepiece": 8.0}
MEMORY_LIMIT_GIB = 1.0
WORKERS = 2
SAMPLING_S = 0.05
BLOCK_BYTES = 1 << 24

# ---------------------------------------------------------------------------------------------------------------------
# Corpus


def varied(text: str, generator: random.Random) -> str:
    """Other text of the same words: begun elsewhere, shortened, and one word in forty made new."""
    words = text.split(" ")
    if len(text) > 20 * len(words):
        words = swapped_pieces(text, generator)
        space = ""
    else:
        space = " "
    start = int(generator.random() * len(words))
    words = words[start:] + words[: int(start * generator.random())]
    for _ in range(1 + len(words) // 40):
        place = int(generator.random() * len(words))
        if generator.random() < 0.3:
            words[place] += space + str(int(10 ** (9 * generator.random())))
        else:
            other = words[int(generator.random() * len(words))]
            words[place] = words[place][: 1 + len(words[place]) // 2] + other[len(other) // 2 :]
    return space.join(words)


def swapped_pieces(text: str, generator: random.Random) -> list[str]:
    """Text of a script without spaces, cut at random places, each two neighbours swapped."""
    pieces: list[str] = []
    at = 0
    while at < len(text):
        first, second = at + 5 + int(35 * generator.random()), at + 45 + int(35 * generator.random())
        pieces += [text[first:second], text[at:first]]
        at = second
    return pieces


def documents(data: Path, generator: random.Random) -> Iterator[str]:
    """Without end."""
    texts = [
        json.loads(line)["text"]
        for name in ("corpus_en.jsonl", "corpus_multi.jsonl")
        for line in (data / name).read_text(encoding="utf-8").splitlines()
    ]
    while True:
        generator.shuffle(texts)
        for text in texts:
            yield varied(text, generator)


def write_corpus(path: Path, data: Path, size: int) -> None:
    """Lines up to `size` bytes, not beyond."""
    began_s, left = time.perf_counter(), size
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for text in documents(data, random.Random(0)):
            line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
            if len(line) > left:
                break
            left -= len(line)
            file.write(line)
    partial.replace(path)
    print(f"made a corpus of {size - left} bytes in {time.perf_counter() - began_s:.0f} s", flush=True)


def check_corpus(path: Path, size: int) -> None:
    """A file that is there already is used, and never written over. Raises SystemExit if it is of another size."""
    found = path.stat().st_size
    if not 0.9 * size < found <= size:
        raise SystemExit(f"error: --corpus {path} holds {found} bytes, not about {size}; delete it, or name another")


def write_beginning(path: Path, corpus: Path, size: int) -> None:
    """The first lines, up to `size` bytes, and one in any case."""
    with corpus.open("rb") as lines, path.open("wb") as file:
        file.write(next(lines))
        for line in lines:
            if file.tell() + len(line) > size:
                break
            file.write(line)


# ---------------------------------------------------------------------------------------------------------------------
# Commands


@dataclass(frozen=True)
class Run:
    """A command that has ended well."""

    seconds: float
    peak_gib: float
    digests: tuple[str, str]
    """sha256 of .bin and .idx, which are removed."""


def run(command: list[str], environment: dict[str, str], prefix: Path) -> Run:
    """Start to exit. Raises SystemExit with the command's words if it fails."""
    began_s = time.perf_counter()
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(command, cwd=prefix.parent, env=environment, stdout=output, stderr=output) as process,
    ):
        peak = [0]
        ended = threading.Event()
        sampler = threading.Thread(target=sample_memory, args=(process.pid, ended, peak))
        sampler.start()
        status = process.wait()
        elapsed_s = time.perf_counter() - began_s
        ended.set()
        sampler.join()
        if status:
            output.seek(0)
            tail = output.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"error: {' '.join(command)}\nended with status {status}:\n{tail}")
    files = [Path(f"{prefix}_text_document{suffix}") for suffix in (".bin", ".idx")]
    bin_digest, idx_digest = map(sha256, files)
    for file in prefix.parent.glob(f"{prefix.name}_*"):
        file.unlink()
    return Run(elapsed_s, peak[0] / 2**30, (bin_digest, idx_digest))


def sample_memory(pid: int, ended: threading.Event, peak: list[int]) -> None:
    """The largest sum of the resident memory of a process and all its descendants, in bytes, into `peak`."""
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    while not ended.wait(SAMPLING_S):
        total = 0
        try:
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            break  # it ended
        for member in family:
            try:
                total += member.memory_info().rss
            except psutil.Error:
                continue
        peak[0] = max(peak[0], total)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def our_command(source: Path, prefix: Path, tokenizer: str, files: list[str]) -> list[str]:
    flags = {
        "gpt2": ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", files[0], "--merge-file", files[-1]],
        "bloom": ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", files[0]],
        "sentencepiece": ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", files[0]],
    }[tokenizer]
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py")]
    places = ["--input", str(source), "--output-prefix", str(prefix)]
    return [*tool, *places, *flags, "--append-eod", "--workers", str(WORKERS)]


def their_command(python: str, source: Path, prefix: Path, tokenizer: str, files: list[str]) -> list[str]:
    places = ["--input", str(source), "--output-prefix", str(prefix)]
    flags = ["--tokenizer", tokenizer, "--files", *files, "--workers", str(WORKERS)]
    return [*peer_command(python, "preprocess_data.py"), *places, *flags]


def tokenizer_files(data: Path, tokenizer: str) -> list[str]:
    names = {
        "gpt2": ("gpt2/vocab.json", "gpt2/merges.txt"),
        "bloom": ("bloom_format_trained/tokenizer.json",),
        "sentencepiece": ("mistral/tokenizer.model.v1",),
    }
    return [str(data / "tokenizers" / name) for name in names[tokenizer]]


@dataclass
class Comparison:
    """The two sides, and what came of their runs."""

    tokenizer: str
    tokenizer_files: list[str]
    peer_python: str
    folder: Path
    corpus: Path
    beginning: Path
    """The peer's part of the corpus, or all of it."""
    our_runs: list[Run] = field(default_factory=list)
    their_runs: list[Run] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return self.beginning == self.corpus

    def ours(self, source: Path) -> Run:
        prefix = self.folder / "ours"
        return run(our_command(source, prefix, self.tokenizer, self.tokenizer_files), dict(os.environ), prefix)

    def theirs(self, source: Path) -> Run:
        prefix = self.folder / "theirs"
        command = their_command(self.peer_python, source, prefix, self.tokenizer, self.tokenizer_files)
        return run(command, peer_environment(), prefix)

    def our_turn(self) -> float:
        self.our_runs.append(self.ours(self.corpus))
        return self.our_runs[-1].seconds

    def their_turn(self) -> float:
        """Seconds for the whole corpus, estimated where the peer gets its beginning."""
        self.their_runs.append(self.theirs(self.beginning))
        seconds = self.their_runs[-1].seconds
        if self.whole:
            return seconds
        one_line = self.folder / "one_line.jsonl"
        write_beginning(one_line, self.corpus, 0)
        start_s = self.theirs(one_line).seconds
        return start_s + (seconds - start_s) * self.corpus.stat().st_size / self.beginning.stat().st_size

    def identical(self) -> bool:
        """Return True if every run wrote the same files."""
        compared = self.our_runs if self.whole else [self.ours(self.beginning)]
        same = len({one.digests for one in self.our_runs}) == 1
        return same and len({one.digests for one in (*compared, *self.their_runs)}) == 1


def report(name: str, seconds: list[float], runs: list[Run], megabytes: float) -> None:
    rates = [megabytes / value for value in seconds]
    peak_gib = max(one.peak_gib for one in runs)
    print(f"  {name:14s} {spread(seconds, 2)} s, {spread(rates, 1)} MB/s, peak {peak_gib:.2f} GiB")


def main() -> int:
    parser = argparse.ArgumentParser(description="Whole preprocessing, against the usual way.", allow_abbrev=False)
    parser.add_argument("--peer-python", required=True, metavar="PATH", help=PEER_HELP)
    parser.add_argument("--tokenizer", choices=tuple(LIMITS), default="gpt2", help="default: gpt2")
    parser.add_argument("--megabytes", type=positive, default=1000, metavar="N", help="of the corpus (default: 1000)")
    parser.add_argument(
        "--peer-megabytes", type=positive, metavar="N", help="the peer gets the first N only, and the rest is estimated"
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="alternations (default: 5)")
    parser.add_argument("--corpus", type=Path, metavar="PATH", help="keep the corpus there, or find it there")
    options = parser.parse_args()
    if "MEGATRON_TEST_DATA" not in os.environ:
        parser.error("MEGATRON_TEST_DATA must name the folder of corpus_en.jsonl, corpus_multi.jsonl and tokenizers/")
    data = Path(os.environ["MEGATRON_TEST_DATA"]).resolve()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus = options.corpus.resolve() if options.corpus else folder / "corpus.jsonl"
        if corpus.exists():
            check_corpus(corpus, options.megabytes * 1_000_000)
        else:
            write_corpus(corpus, data, options.megabytes * 1_000_000)
        beginning = corpus
        if options.peer_megabytes and options.peer_megabytes < options.megabytes:
            beginning = folder / "beginning.jsonl"
            write_beginning(beginning, corpus, options.peer_megabytes * 1_000_000)
        files = tokenizer_files(data, options.tokenizer)
        comparison = Comparison(options.tokenizer, files, options.peer_python, folder, corpus, beginning)
        # no round to warm up: the tokenizers and the corpus are in the page cache, and commands start cold
        seconds = alternate(
            {"ours": comparison.our_turn, "the usual way": comparison.their_turn}, options.rounds, warm_up=False
        )
        identical = comparison.identical()
        megabytes, their_megabytes = (path.stat().st_size / 1e6 for path in (corpus, beginning))

    print(f"{options.tokenizer}, {WORKERS} workers, {megabytes:.0f} MB, {options.rounds} rounds: median (from to)")
    report("ours", seconds["ours"], comparison.our_runs, megabytes)
    report("the usual way", seconds["the usual way"], comparison.their_runs, megabytes)
    if not comparison.whole:
        measured = spread([one.seconds for one in comparison.their_runs], 2)
        print(f"    estimated from {measured} s for the first {their_megabytes:.0f} MB")
    ratios = quotients(seconds["the usual way"], seconds["ours"])
    limit = LIMITS[options.tokenizer]
    print(f"  ratio          {spread(ratios, 1)}, at least {limit:g} wanted")
    print(f"  .bin and .idx  {'identical' if identical else 'DIFFERENT'}, on {their_megabytes:.0f} MB")
    peak_gib = max(one.peak_gib for one in comparison.our_runs)
    return 0 if identical and statistics.median(ratios) >= limit and peak_gib <= MEMORY_LIMIT_GIB else 1


if __name__ == "__main__":
    sys.exit(main())
