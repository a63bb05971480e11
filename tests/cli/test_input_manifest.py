"""Every file of an input is read, passed over or refused, and the manifest beside the dataset lists it.

The same documents from a folder, in shards, through standard input and from remote file systems give the same bytes.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import tarfile
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from megatron.cli.data import inspect_dataset, merge_datasets, preprocess_chat, preprocess_data
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.data.index.verification import Findings, verify_manifest
from megatron.data.prepare.manifest import read_manifest
from megatron.data.read import archives as source_reader
from megatron.data.read.input_shards import InputShard, shard_of
from megatron.data.read.search import find_sources
from megatron.data.read.sources import InputListing, SourceFile
from tests.data.chat.test_preprocessing import chat, rows_of
from tests.data.chat.test_preprocessing import tokenizer as tokenizer  # the fixture

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--workers", "2")


def lines(first: int, count: int = 3) -> bytes:
    return b"".join(b'{"text": "%d %d"}\n' % (i, i % 7) for i in range(first, first + count))


def tar(members: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writer:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            writer.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def run(tool: Any, *arguments: str | Path) -> int:
    status: int = tool.main([str(argument) for argument in arguments])
    return status


def preprocess(source: str | Path, prefix: Path, *more: str | Path) -> int:
    return run(preprocess_data, "--input", source, "--output-prefix", prefix, *NULL, *more)


def data_of(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def listed(prefix: Path | str) -> dict[str, dict[str, Any]]:
    """Entries of the manifest, by name."""
    manifest = read_manifest(prefix)
    assert manifest is not None
    found = {line["name"]: line for line in manifest.files}
    assert len(found) == len(manifest.files)
    return found


READ = {
    "a.jsonl": lines(0),
    "B.JSONL": lines(10),
    "c.jsonl.gz": gzip.compress(lines(20)),
    "d.jsonl.GZ": gzip.compress(lines(30)),
    "e.jsonl.xz": lzma.compress(lines(40)),
    "f.json.bz2": bz2.compress(lines(50)),
    "g.jsonl.zst": zstandard.compress(lines(60)),
    "h.jsonl.zstd": zstandard.compress(lines(70)),
    "i.jl": lines(80),
    "j.ndjson": lines(90),
    "k.json": lines(100),
    "l.txt": b"110 5",
    "m.TXT.gz": gzip.compress(b"111 6"),
    "n.tar": tar({"x/1.jsonl": lines(120), "x/2.txt.gz": gzip.compress(b"130 1")}),
    "o.tar.gz": gzip.compress(tar({"1.jsonl": lines(140)})),
    "p.tgz": gzip.compress(tar({"1.jsonl": lines(150)})),
    "q.tar.zst": zstandard.compress(tar({"1.jsonl": lines(160)})),
    "empty.jsonl": b"",
    "blank.jsonl": b"\n\n",
    "BOM.jsonl": b"\xef\xbb\xbf" + lines(170),
    "gzip of nothing.jsonl.gz": gzip.compress(b""),
    "two members.jsonl.gz": gzip.compress(lines(180)) + gzip.compress(lines(190)),
    "no end.jsonl": lines(200).rstrip(b"\n"),
    "deep/er/a.jsonl": lines(210),
    "a name with spaces and ü.jsonl": lines(220),
    **{f"many/{i:02}.jsonl": lines(300 + 10 * i, 1 + i % 4) for i in range(15)},
}
PASSED_OVER = {
    ".hidden.jsonl": "hidden",
    ".git/config": "hidden",
    "deep/.DS_Store": "hidden",
    "README.md": "documentation",
    "LICENSE": "documentation",
    "a.jsonl.sha256": "a checksum",
    "_SUCCESS": "a mark of another program",
}
REFUSED = {
    "x.pdf": "has an unknown ending",
    "x.csv": "has an unknown ending",
    "noending": "has an unknown ending",
    "failed.jsonl.gz": "has 0 bytes",
    "failed.jsonl.xz": "has 0 bytes",
    "failed.parquet": "has 0 bytes",
    "x.jsonl.part": "has an unknown ending",
    "x.parquet.gz": "has an unknown ending",
    "broken.jsonl": "is a broken link to nowhere",
}


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of some 60 files and links, of which each kind of trouble has one."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("odd") / "in"
    for name, content in {**READ, **dict.fromkeys(PASSED_OVER, b"no")}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["240 1", "241 2"]}), folder / "r.parquet")
    for name in REFUSED:
        if name != "broken.jsonl":
            (folder / name).write_bytes(b"" if name.startswith("failed") else b"no")
    os.symlink("nowhere", folder / "broken.jsonl")
    other = folder.parent / "elsewhere"
    other.mkdir()
    (other / "linked.jsonl").write_bytes(lines(250))
    os.symlink(other, folder / "link to a folder")
    os.symlink(other / "linked.jsonl", folder / "link to a file.jsonl")
    os.symlink("a.jsonl", folder / "second name.jsonl")
    os.symlink("..", folder / "deep" / "loop")
    return folder


def exclusions() -> list[str]:
    return ["--exclude", "*.pdf", "*.csv", "noending", "failed.*", "*.part", "x.parquet.gz", "broken.jsonl"]


def entries_of(folder: Path) -> set[str]:
    """All there is in a folder: files and links to them, hidden folders and links to folders."""
    found: set[str] = set()
    for parent, folders, files in os.walk(folder):
        found.update(os.path.join(parent, name) for name in files)
        for name in [name for name in folders if name.startswith(".") or name == "loop"]:
            found.add(os.path.join(parent, name, ""))
            folders.remove(name)
    found.add(str(folder / "link to a folder" / "linked.jsonl"))
    return found


@pytest.fixture(scope="module")
def whole(odd_folder: Path) -> Path:
    prefix = odd_folder.parent / "whole"
    assert preprocess(odd_folder, prefix, *exclusions()) == 0
    return prefix


def test_a_file_that_cannot_be_read_is_refused_by_name(odd_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess(odd_folder, odd_folder.parent / "refused") == 1
    said = capsys.readouterr().err
    assert f"error: {len(REFUSED)} files of --input cannot be read:" in said
    for name, reason in REFUSED.items():
        assert f"{odd_folder / name} {reason}" in said
    assert "--exclude '*.pdf'" in said


def test_files_named_one_by_one_can_be_excluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a pattern that the shell has expanded."""
    (tmp_path / "a.jsonl").write_bytes(lines(0))
    (tmp_path / "x.pdf").write_bytes(b"no")
    assert run(preprocess_data, "--input", *sorted(tmp_path.iterdir()), "--output-prefix", tmp_path / "out", *NULL) == 1
    assert "or leave it out with --exclude '*.pdf'" in capsys.readouterr().err
    assert preprocess(tmp_path / "a.jsonl", tmp_path / "out", "--exclude", "*.jsonl") == 1
    assert "(passed over: 1 --exclude)" in capsys.readouterr().err
    inputs = sorted(tmp_path.iterdir())
    arguments = ("--exclude", "*.pdf", "--output-prefix", tmp_path / "out", *NULL)
    assert run(preprocess_data, "--input", *inputs, *arguments) == 0
    assert listed(tmp_path / "out_text_document")[str(tmp_path / "x.pdf")]["passed_over"] == "--exclude"


def test_a_recursive_glob_follows_links_once(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.jsonl").write_bytes(lines(0))
    (tmp_path / "in" / "sub" / "b.jsonl").write_bytes(lines(3))
    (tmp_path / "in" / "sub" / "c.txt").write_bytes(b"7")
    for number in range(3):  # Python's glob would take days
        (tmp_path / "in" / f"loop{number}").symlink_to(".")
    found = find_sources([f"{tmp_path}/i*/**/*.jsonl"])
    assert [source.relative_name for source in found.sources] == ["a.jsonl", "sub/b.jsonl"]
    assert len(find_sources([f"{tmp_path}/in/**"]).sources) == 3
    with pytest.raises(DataError, match=r"nothing is left of --input .*3 a loop of links"):
        find_sources([f"{tmp_path}/in/**/*.parquet"])
    with pytest.raises(DataError, match="sub is named twice by --input"):
        find_sources([f"{tmp_path}/in", f"{tmp_path}/in/sub"])


def test_the_manifest_lists_every_file(odd_folder: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = f"{whole}_text_document"
    found = listed(prefix)
    in_archives = {name for name in found if "!" in name}
    archives = {name.split("!")[0] for name in in_archives}
    assert set(found) - in_archives | archives == entries_of(odd_folder)
    assert len(entries_of(odd_folder)) >= 60
    reasons = {name: line["passed_over"].split(": ")[0] for name, line in found.items() if "passed_over" in line}
    expected = {str(odd_folder / name): reason for name, reason in PASSED_OVER.items() if not name.startswith(".git")}
    expected |= {str(odd_folder / name): "--exclude" for name in REFUSED}
    expected[str(odd_folder / ".git") + "/"] = "hidden"
    expected[str(odd_folder / "second name.jsonl")] = "a second name of a file"
    expected[str(odd_folder / "link to a folder" / "linked.jsonl")] = "a second name of a file"
    expected[str(odd_folder / "deep" / "loop") + "/"] = "a loop of links"
    assert reasons == expected
    assert found[str(odd_folder / "two members.jsonl.gz")]["documents"] == 6
    assert found[str(odd_folder / "blank.jsonl")]["blank"] == 2
    assert found[str(odd_folder / "n.tar!x/1.jsonl")] == {
        "name": str(odd_folder / "n.tar!x/1.jsonl"),
        "bytes": len(lines(120)),
        "documents": 3,
        "crc32": f"{zlib.crc32(lines(120)):08x}",
    }
    data = IndexedDataset(prefix)
    assert sum(line.get("documents", 0) for line in found.values()) == data.num_documents
    assert {int(i) for i in data.tokens} >= {0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 111, 240, 250}
    capsys.readouterr()
    assert run(inspect_dataset, prefix, "--verify") == 0
    assert f"{data.num_documents:,} documents of" in capsys.readouterr().out


@pytest.mark.parametrize("count", [2, 5])
def test_shards_merged_in_order_equal_the_whole(odd_folder: Path, whole: Path, tmp_path: Path, count: int) -> None:
    for number in range(1, count + 1):
        prefix = tmp_path / "shards" / f"{number}-of-{count}"
        assert preprocess(odd_folder, prefix, *exclusions(), "--shard", f"{number}/{count}") == 0
    assert run(merge_datasets, "--input", tmp_path / "shards", "--output-prefix", tmp_path / "out_text_document") == 0
    assert data_of(tmp_path / "out") == data_of(whole)
    assert {name: line.get("documents") for name, line in listed(tmp_path / "out_text_document").items()} == {
        name: line.get("documents") for name, line in listed(f"{whole}_text_document").items()
    }
    assert run(inspect_dataset, tmp_path / "out_text_document", "--verify") == 0


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(lines(0, 900))
    return path


@pytest.fixture
def shards(corpus: Path, tmp_path: Path) -> list[Path]:
    """Three shards of one file, which is cut between lines."""
    prefixes = []
    for number in (1, 2, 3):
        assert preprocess(corpus, tmp_path / f"s{number}", "--shard", f"{number}/3") == 0
        prefixes.append(tmp_path / f"s{number}_text_document")
    return prefixes


def test_one_file_is_cut_into_shards_of_equal_bytes(corpus: Path, shards: list[Path], tmp_path: Path) -> None:
    assert preprocess(corpus, tmp_path / "whole") == 0
    assert run(merge_datasets, "--input", *shards, "--output-prefix", tmp_path / "out_text_document") == 0
    assert data_of(tmp_path / "out") == data_of(tmp_path / "whole")
    counts = [IndexedDataset(prefix).num_documents for prefix in shards]
    assert max(counts) - min(counts) < 20
    manifest = read_manifest(tmp_path / "out_text_document")
    assert manifest is not None
    assert (manifest.counts["files_read"], manifest.shard) == (1, None)


def test_shards_that_are_not_all_there_once_and_in_order_are_refused(
    corpus: Path, shards: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = shards
    corpus.write_bytes(lines(0, 90))
    assert preprocess(corpus, tmp_path / "other", "--shard", "2/3") == 0
    assert preprocess(corpus, tmp_path / "plain") == 0
    for inputs, said in {
        (one, three): "shard 2 of 3 is missing",
        (two,): "shard 1, 3 of 3 is missing",
        (one, three, two): f"the shards are not in order; give --input {one} {two} {three}",
        (one, tmp_path / "other_text_document", three): "of another; merge the shards of each input by themselves",
        (one, two, three, tmp_path / "plain_text_document"): "merge the shards first",
    }.items():
        assert run(merge_datasets, "--input", *inputs, "--output-prefix", tmp_path / "out") == 1
        assert said in capsys.readouterr().err


def test_impossible_shards_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(0)))
    assert preprocess(tmp_path, tmp_path / "out", "--shard", "1/2") == 1
    assert "1 files give work for 1 of 2 shards" in capsys.readouterr().err
    (tmp_path / "b.jsonl").write_text('{"text": "1 2"}\n{"text": "' + "3 " * 500 + '"}\n')  # the rest is one document
    assert preprocess(tmp_path / "b.jsonl", tmp_path / "out", "--shard", "3/3") == 1
    assert "shard 3/3 of 1 files: 0 empty, 0 blank, 0 bad; divide the input into fewer" in capsys.readouterr().err
    for wrong in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(SystemExit):
            preprocess(tmp_path, tmp_path / "out", "--shard", wrong)
        assert "is not a shard; give NUMBER/COUNT, from 1/COUNT to COUNT/COUNT" in capsys.readouterr().err


def test_shards_are_balanced_and_cover_everything_once() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        sizes = generator.integers(0, 100, generator.integers(1, 12))
        kinds = generator.integers(0, 2, len(sizes))
        sources = [
            SourceFile(str(i), "jsonl" if kind else "text", num_bytes=int(size))
            for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
        ]
        count = int(generator.integers(1, 5))
        try:
            found = [shard_of(InputListing(sources), InputShard(n, count)).sources for n in range(1, count + 1)]
        except DataError:
            assert np.count_nonzero(sizes) < count
            continue
        assert all(any(source.size for source in shard) for shard in found)
        joined: list[tuple[str, Any]] = []
        for source in (source for shard in found for source in shard):
            begin, end = source.part or (0, source.num_bytes)
            if joined and joined[-1][0] == source.name:
                assert joined[-1][1][1] == begin
                joined[-1] = (source.name, (joined[-1][1][0], end))
            else:
                joined.append((source.name, (begin, end)))
        assert joined == [(source.name, (0, source.num_bytes)) for source in sources]
        loads = [sum(source.size or 0 for source in shard) for shard in found]
        if kinds.all():
            assert max(loads) - min(loads) <= 1


# ---------------------------------------------------------------------------------------------------------------------
# Standard input and remote files


@contextlib.contextmanager
def stdin(content: bytes) -> Iterator[None]:
    """Standard input of this process, from a pipe."""
    reader, writer = os.pipe()
    saved = os.dup(0)
    os.dup2(reader, 0)
    os.close(reader)

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb") as pipe:
            pipe.write(content)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        yield
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        feeder.join()


@pytest.mark.parametrize("filename", ["stdin.jsonl", "x.jsonl.gz", "x.tar", "x.tar.xz"])
def test_standard_input_gives_the_same_bytes(corpus: Path, tmp_path: Path, filename: str) -> None:
    content = corpus.read_bytes()
    assert preprocess(corpus, tmp_path / "whole") == 0
    half = content.index(b"\n", len(content) // 2) + 1
    if ".tar" in filename:
        content = tar({"a.jsonl": content[:half], "b.jsonl": content[half:]})
    suffix = Path(filename).suffix
    packed = gzip.compress(content) if suffix == ".gz" else lzma.compress(content) if suffix == ".xz" else content
    with stdin(packed):
        assert preprocess("-", tmp_path / "out", "--stdin-filename", filename) == 0
    assert data_of(tmp_path / "out") == data_of(tmp_path / "whole")
    found = listed(tmp_path / "out_text_document")
    if filename == "stdin.jsonl":
        assert found["standard input"]["bytes"] == corpus.stat().st_size
    assert sum(line["documents"] for line in found.values()) == 900


def test_standard_input_is_read_with_an_accelerated_tokenizer(tmp_path: Path, test_data: Path) -> None:
    """Its ids are compared on the beginning of the input before the work starts, which then reads that again."""
    source = test_data / "corpus_en.jsonl"
    gpt2 = test_data / "tokenizers" / "gpt2"
    content = b"".join(source.read_bytes().splitlines(keepends=True)[:200])
    (tmp_path / "in.jsonl").write_bytes(content)
    files = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", gpt2 / "vocab.json", "--merge-file")
    arguments = (*files, gpt2 / "merges.txt")
    assert (
        run(preprocess_data, "--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "whole", *arguments) == 0
    )
    with stdin(content):
        assert run(preprocess_data, "--input", "-", "--output-prefix", tmp_path / "out", *arguments) == 0
    assert data_of(tmp_path / "out") == data_of(tmp_path / "whole")


def test_what_cannot_be_done_with_standard_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, said in {
        ("--resume",): "--resume: standard input cannot be read again from where an earlier run stopped",
        ("--shard", "1/2"): "the size of standard input is unknown, so it cannot be divided",
        ("--stdin-filename", "x.parquet"): "--stdin-filename x.parquet: a pipe can be read as .jsonl",
    }.items():
        with stdin(lines(0)):
            assert preprocess("-", tmp_path / "out", *more) == 1
        assert said in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


def test_a_bad_line_of_standard_input_keeps_no_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stdin(lines(0) + b"no\n"):
        assert preprocess("-", tmp_path / "out", "--resume-interval", "0") == 1
    assert "error: standard input:4: the line is not JSON" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A URL on loopback, and the folder that it serves. What a name forbids or denies is listed, but not given."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def send_head(self) -> Any:
            for name, status in (("forbidden", 403), ("denied", 404)):
                if name in self.path:
                    return self.send_error(status)
            return super().send_head()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", folder
        finally:
            server.shutdown()
            thread.join()


def test_remote_files_give_the_same_bytes(odd_folder: Path, tmp_path: Path, server: tuple[str, Path]) -> None:
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    names = ["a.jsonl", "c.jsonl.gz", "l.txt", "n.tar", "r.parquet", "deep/er/a.jsonl"]
    url, folder = server
    memory = fsspec.filesystem("memory")
    for name in names:
        content = (odd_folder / name).read_bytes()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        memory.pipe(f"/corpus/{name}", content)
        memory.pipe(f"/corpus/.hidden/{name}", content)
    memory.pipe("/corpus/README.md", b"no")
    links = ["?C=N;O=D", *names[:-1], "deep/"]  # Apache's page also links to itself, in other orders
    (folder / "index.html").write_text("".join(f"<a href={name!r}>" for name in links))
    assert (
        run(preprocess_data, "--input", *[odd_folder / n for n in names], "--output-prefix", tmp_path / "l", *NULL) == 0
    )
    web = [f"{url}/{name}" for name in names]
    assert run(preprocess_data, "--input", *web, "--output-prefix", tmp_path / "web", *NULL) == 0
    assert preprocess("memory://corpus", tmp_path / "memory") == 0
    assert data_of(tmp_path / "l") == data_of(tmp_path / "web") == data_of(tmp_path / "memory")
    for prefix, found_by in {"page": f"{url}/", "folders": "memory://corp*", "any": "memory://corpus/**"}.items():
        assert preprocess(found_by, tmp_path / prefix) == 0
        assert data_of(tmp_path / prefix) == data_of(tmp_path / "memory")
    found = listed(tmp_path / "memory_text_document")
    assert found["memory:///corpus/README.md"]["passed_over"] == "documentation"
    assert sum("hidden" in line.get("passed_over", "") for line in found.values()) == len(names)
    for number in (1, 2):
        assert preprocess("memory://corpus/*.jsonl", tmp_path / f"m{number}", "--shard", f"{number}/2") == 0
    assert {line["documents"] for line in listed(tmp_path / "m1_text_document").values()} < {1, 2}
    assert set(listed(tmp_path / "web_text_document")) >= {f"{url}/a.jsonl", f"{url}/n.tar!x/1.jsonl"}
    memory.rm("/corpus", recursive=True)


def test_a_server_without_ranges_is_read_as_a_stream(tmp_path: Path, server: tuple[str, Path]) -> None:
    """The file is longer than what is read ahead. The password and signature of its URL are not in the manifest."""
    pytest.importorskip("aiohttp")
    url, folder = server
    rows = [{"text": str(i), "padding": "x" * 100_000} for i in range(70)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert preprocess(f"{url.replace('//', '//user:word@')}/a.jsonl?signature=secret", tmp_path / "out") == 0
    assert IndexedDataset(tmp_path / "out_text_document").tokens.tolist() == list(range(70))
    assert set(listed(tmp_path / "out_text_document")) == {f"{url}/a.jsonl"}


def test_remote_faults_are_one_sentence(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aiohttp")
    web, folder = server
    (folder / "corpus" / "denied").mkdir(parents=True)
    (folder / "corpus" / "a.jsonl").write_bytes(lines(0))
    for url, said in {
        f"{web}/none.jsonl": "does not exist; correct --input",
        f"{web}/forbidden.jsonl": "cannot be opened (ClientResponseError: 403",
        "http://127.0.0.1:1/a.jsonl": "cannot be opened (ClientConnectorError: Cannot connect to host 127.0.0.1:1",
        f"{web}/corpus/": f"{web}/corpus/denied/ does not exist",
        "http://127.0.0.1:1/": "cannot be opened (ClientConnectorError: Cannot connect to host 127.0.0.1:1",
        "nosuch://a/b.jsonl": "cannot be opened (ValueError: Protocol not known: nosuch)",
        "memory://none/": "does not exist; correct --input",
    }.items():
        assert preprocess(url, tmp_path / "out") == 1
        error = capsys.readouterr().err
        assert f"{url} {said}" in error or f"error: {said}" in error
        assert len(error.splitlines()) == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert preprocess("s3://bucket/a.jsonl", tmp_path / "out") == 1
    assert "fsspec, which is not installed: pip install 'megatron-3d[remote]'" in capsys.readouterr().err


def test_a_link_in_a_remote_folder_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fsspec's local files stand for sftp's."""
    pytest.importorskip("fsspec")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(0))
    (folder / "b.jsonl").symlink_to("a.jsonl")
    for url in (f"file://{folder}", f"file://{folder}/*", f"file://{tmp_path}/i*", f"file://{tmp_path}/**/*.jsonl"):
        assert preprocess(url, tmp_path / "out") == 1
        assert f"file://{folder}/b.jsonl is a link, pipe or device" in capsys.readouterr().err
        assert preprocess(url, tmp_path / "out", "--exclude", "b.jsonl", "--overwrite") == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 3


# ---------------------------------------------------------------------------------------------------------------------
# Datasets that exist, empty documents, damage


def test_a_file_that_changes_while_it_is_read_is_a_fault(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def grow(*arguments: Any) -> Any:
        corpus.write_bytes(lines(0, 950))
        return open_source(*arguments)

    open_source = source_reader.open_source
    monkeypatch.setattr(source_reader, "open_source", grow)
    size = corpus.stat().st_size
    assert preprocess(corpus, tmp_path / "out") == 1
    assert f"the file had {size} bytes when it was found" in capsys.readouterr().err


def test_documents_of_several_keys_stay_aligned(tmp_path: Path) -> None:
    """A document without text is a document without a sequence, as Megatron writes it."""
    rows = [{"a": "1", "b": "2 3"}, {"a": "", "b": "4"}, {"a": "5", "b": ""}, {"a": "6", "b": "7"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert preprocess(tmp_path / "in.jsonl", tmp_path / "out", "--json-keys", "a", "b", "--append-eod") == 0
    found = []
    for key in "ab":
        data = IndexedDataset(tmp_path / f"out_{key}_document")
        bounds = data.document_index.tolist()
        found.append([[data.read(s).tolist() for s in range(*pair)] for pair in pairwise(bounds)])
        assert run(inspect_dataset, tmp_path / f"out_{key}_document", "--verify") == 0
    assert found == [[[[1, 1000]], [], [[5, 1000]], [[6, 1000]]], [[[2, 3, 1000]], [[4, 1000]], [], [[7, 1000]]]]


def test_a_finished_dataset_is_replaced_on_request_only(
    corpus: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = rows_of(tmp_path / "chats.jsonl", chat("a", "b"))
    flags = ("--tokenizer-model", tokenizer, "--chat-template", "chatml")
    one = tmp_path / "out_text_document"
    commands: list[tuple[Any, list[str | Path], Path]] = [
        (preprocess_data, ["--input", corpus, "--output-prefix", tmp_path / "out", *NULL], one),
        (preprocess_chat, ["--input", chats, "--output-prefix", tmp_path / "c", *flags], tmp_path / "c"),
        (merge_datasets, ["--input", one, "--output-prefix", tmp_path / "merged"], tmp_path / "merged"),
    ]
    for tool, arguments, prefix in commands:
        assert run(tool, *arguments) == 0
        before = Path(f"{prefix}.bin").stat().st_mtime_ns
        assert run(tool, *arguments) == 1
        assert f"{prefix}.idx exists already; pass --overwrite" in capsys.readouterr().err
        assert Path(f"{prefix}.bin").stat().st_mtime_ns == before
        assert run(tool, *arguments, "--overwrite") == 0
        assert Path(f"{prefix}.bin").stat().st_mtime_ns > before
        assert run(inspect_dataset, prefix, "--verify") == 0
    assert not list(tmp_path.glob("*.unfinished"))


def test_chats_have_a_manifest_and_shards_too(tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(6):
        rows_of(folder / f"{i}.jsonl", *[chat(f"{i} {j}", "b" * (j + 1)) for j in range(4)])
    (folder / "LICENSE").write_text("no")
    arguments: list[str | Path] = [
        "--input",
        folder,
        "--tokenizer-model",
        tokenizer,
        "--chat-template",
        "chatml",
        "--output-prefix",
    ]
    assert run(preprocess_chat, *arguments, tmp_path / "whole") == 0
    found = listed(tmp_path / "whole")
    assert found[str(folder / "LICENSE")]["passed_over"] == "documentation"
    assert [line["documents"] for line in found.values() if "documents" in line] == [4] * 6
    for number in (1, 2):
        assert run(preprocess_chat, *arguments, tmp_path / "shards" / str(number), "--shard", f"{number}/2") == 0
    for suffix in ("", "_loss_mask"):
        inputs = [tmp_path / "shards" / f"{number}{suffix}" for number in (1, 2)]
        assert run(merge_datasets, "--input", *inputs, "--output-prefix", tmp_path / f"merged{suffix}") == 0
        for ending in (".bin", ".idx"):
            merged, whole = (Path(f"{tmp_path / name}{suffix}{ending}") for name in ("merged", "whole"))
            assert merged.read_bytes() == whole.read_bytes()


MANIFEST_DAMAGE = {
    "other documents": ('"documents":900', '"documents":899', "its files have"),
    "other tokens": ('"tokens": 1800', '"tokens": 1801', "says 1801 tokens, but the dataset has 1800"),
    "another dataset": ('".bin": "', '".bin": "0', "is of another .bin than"),
    "no JSON": ("{", "", "is damaged"),
    "a later version": ('"version": 1', '"version": 2', "manifest.json has version 2, this program reads 1"),
    "other counts": ('"files_read": 1', '"files_read": 2', "add up to 1 files_read, but its counts say 2"),
}


@pytest.mark.parametrize("damage", MANIFEST_DAMAGE)
def test_verification_compares_the_manifest_with_the_dataset(
    corpus: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preprocess(corpus, tmp_path / "out") == 0
    path = tmp_path / "out_text_document.manifest.json"
    right, wrong, said = MANIFEST_DAMAGE[damage]
    text = path.read_text()
    assert right in text
    place = text.index(right)
    path.write_text(text[:place] + wrong + text[place + len(right) :])
    capsys.readouterr()
    assert run(inspect_dataset, tmp_path / "out_text_document", "--verify") == 1
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value within JSON."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def test_a_manifest_of_a_wrong_form_is_damaged_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(0))
    (tmp_path / ".hidden").touch()
    assert preprocess(tmp_path, tmp_path / "out", "--shard", "1/1") == 0
    prefix = tmp_path / "out_text_document"
    path = Path(f"{prefix}.manifest.json")
    text = path.read_text()
    num_damaged = 0
    for place in places(json.loads(text)):
        for wrong in (None, -1, "x", [3], {"y": 4}, float("inf"), ...):
            content = {"root": json.loads(text)}
            *way, last = ("root", *place)
            within: Any = content
            for key in way:
                within = within[key]
            if wrong is not ...:
                within[last] = wrong
            elif way:
                del within[last]
            path.write_text(json.dumps(content["root"]))
            findings = Findings()
            verify_manifest(IndexedDataset(prefix), {}, findings)
            num_damaged += "is damaged (" in str(findings.shown)
            assert str(findings.shown).count("manifest.json") == sum(findings.counts.values())
    assert num_damaged > 100


def test_the_output_of_an_earlier_run_in_the_input_folder_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(0))
    for number in (1, 2):
        assert preprocess(tmp_path, tmp_path / f"out{number}") == 0
    found = listed(tmp_path / "out2_text_document")
    assert sum(line.get("passed_over") == "an indexed dataset" for line in found.values()) == 4
    assert data_of(tmp_path / "out1") == data_of(tmp_path / "out2")
