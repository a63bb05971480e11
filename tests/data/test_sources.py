"""Documents are read whole, in order and with their place, for any blocks, compression and damage."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.index.indexed import DataError
from megatron.data.read import contents, document_blocks
from megatron.data.read.archives import read_blocks
from megatron.data.read.document_blocks import Block, Position, ReadingRules
from megatron.data.read.document_parser import parse
from megatron.data.read.search import find_sources
from megatron.data.read.tables import check_columns

KEY = ("text",)


def read(path: Path | list[Path], **options: Any) -> list[Block]:
    paths = path if isinstance(path, list) else [path]
    start = options.pop("start", None)
    rules = ReadingRules(**{"keys": KEY, **options})
    return list(read_blocks(find_sources([str(p) for p in paths]).sources, rules, start=start))


def texts(blocks: list[Block]) -> list[str]:
    return [text for block in blocks for text in parse(block, KEY).columns[0]]


def faults(blocks: list[Block]) -> list[str]:
    return [str(fault) for block in blocks for fault in parse(block, KEY).faults]


def places(blocks: list[Block]) -> list[str]:
    return [block.place(number) for block in blocks for number in parse(block, KEY).numbers]


def lines(*values: str) -> bytes:
    return b"".join(json.dumps({"text": value}).encode() + b"\n" for value in values)


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    # as the zstd command does; without a checksum damage can pass for text
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


@given(
    content=st.lists(st.text(alphabet="ab ", max_size=12), max_size=12),
    separator=st.sampled_from(["|", "||", "ab", "\n\n\n", "aba"]),
    block_bytes=st.integers(1, 9),
    ends=st.booleans(),
)
def test_blocks_hold_the_documents_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, content: list[str], separator: str, block_bytes: int, ends: bool
) -> None:
    whole = separator.join(content) + (separator if ends else "")
    path = tmp_path_factory.mktemp("blocks") / "in.txt"
    path.write_text(whole, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_blocks, "BLOCK_BYTES", block_bytes)
        blocks = read(path, separator=separator)
    assert texts(blocks) == [text for text in whole.split(separator) if text.strip()]
    assert sum(block.num_input_bytes for block in blocks) == len(whole)


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
def test_jsonl_is_read_through_any_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, block_bytes: int
) -> None:
    monkeypatch.setattr(document_blocks, "BLOCK_BYTES", block_bytes)
    values = [f"text {i} äöü 漢字" * (i % 5) + "." for i in range(200)]
    path = tmp_path / f"in.jsonl{packing}"
    path.write_bytes(PACKED[packing](lines(*values)))
    blocks = read(path)
    assert texts(blocks) == values
    assert places(blocks) == [f"{path}:{i + 1}" for i in range(200)]
    assert sum(block.num_input_bytes for block in blocks) == path.stat().st_size


@pytest.mark.parametrize("form", ["parquet", "arrow file", "arrow stream"])
def test_a_dot_steps_into_a_struct_unless_a_name_has_it(tmp_path: Path, form: str) -> None:
    """The same rows as JSON are the reference."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"meta": {"text": "a", "deep": {"er": "b", "e.r": "c"}, "n": 1}, "meta.own": "d", "dotted.name": {"x": "e"}},
        {"meta": {"text": None, "deep": None, "n": 2}, "meta.own": "f", "dotted.name": {"x": "g"}},
        {"meta": None, "meta.own": "h", "dotted.name": {"x": "i"}},
        {"meta": {"text": "j", "deep": {"er": "k", "e.r": "l"}, "n": 3}, "meta.own": "m", "dotted.name": {"x": "n"}},
    ]
    path = tmp_path / ("in.parquet" if form == "parquet" else "in.arrow")
    table = pyarrow.Table.from_pylist(rows)
    if form == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:
        new = pyarrow.ipc.new_stream if form == "arrow stream" else pyarrow.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for keys in [("meta.text",), ("meta.deep.er",), ("meta.deep.e.r",), ("meta.own",), ("dotted.name.x", "meta.own")]:
        found, expected = ([parse(b, keys) for b in read(p, keys=keys)] for p in (path, tmp_path / "in.jsonl"))
        columns = [[text for one in found for text in one.columns[k]] for k in range(len(keys))]
        assert columns == expected[0].columns
        assert columns[0]
        assert sum(len(one.faults) for one in found) == len(expected[0].faults)


def test_a_nested_column_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"meta": [{"body": "x", "n": 1}], "id": ["y"]})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    twice = pyarrow.StructArray.from_arrays([pyarrow.array(["x"])] * 2, names=["a", "a"])
    with pyarrow.ipc.new_file(str(tmp_path / "in.arrow"), pyarrow.schema([("meta", twice.type)])) as writer:
        writer.write_table(pyarrow.Table.from_arrays([twice], names=["meta"]))
    for name, key, reason in [
        ("in.parquet", "meta.text", "has no column 'meta.text', but meta.body, meta.n, id"),
        ("in.parquet", "meta.n", "column 'meta.n' holds int64, not strings"),
        ("in.parquet", "meta", "column 'meta' holds struct"),
        ("in.parquet", "id.x", "has no column 'id.x', but meta, id"),
        ("in.arrow", "meta.a", "has several columns 'a'; one of them would be lost"),
    ]:
        with pytest.raises(DataError, match=reason):
            check_columns(find_sources([str(tmp_path / name)]).sources, ReadingRules((key,)))


@pytest.mark.parametrize("packing", [".gz", ".zst", ".xz", ".bz2"])
def test_separately_compressed_parts_are_one_file(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"in.jsonl{packing}"
    path.write_bytes(PACKED[packing](lines("a", "b")) + PACKED[packing](lines("c")))
    assert texts(read(path)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz", ".txt", ".parquet", ".arrow", ".tar", ".tar.bz2"]
)
def test_reading_resumes_after_any_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(document_blocks, "BLOCK_BYTES", 64)
    paths = []
    for part in range(3):
        values = [f"{part} {i} " + "x" * (i % 7) for i in range(40)]
        path = tmp_path / f"{part}{suffix}"
        if suffix == ".parquet":
            parquet(path, values)
        elif suffix == ".arrow":
            arrow(path, values)
        elif ".tar" in suffix:
            content = lines(*values)
            middle = len(content) // 2
            middle = content.index(b"\n", middle) + 1
            members = {
                "x/1.jsonl": content[:middle],
                "x/.hidden.jsonl": b"no",
                "2.jsonl.gz": gzip.compress(content[middle:]),
            }
            path.write_bytes(PACKED[suffix.removeprefix(".tar")](tar(members)))
        elif suffix == ".txt":
            path.write_text("|".join(values))
        else:
            path.write_bytes(b"\xef\xbb\xbf" * (suffix == ".jsonl"))
            path.write_bytes(path.read_bytes() + PACKED[suffix.removeprefix(".jsonl")](lines(*values)))
        paths.append(path)
    blocks = read(paths, separator="|")
    whole = list(zip(places(blocks), texts(blocks), strict=True))
    assert len(whole) == 120
    assert len(blocks) >= 3
    done = 0
    for block in blocks:
        done += len(texts([block]))
        rest = read(paths, separator="|", start=block.end)
        assert list(zip(places(rest), texts(rest), strict=True)) == whole[done:]
        assert all(b.begin.documents == done for b in rest[:1])


def arrow(path: Path, values: Sequence[str], *, is_stream: bool = True) -> Path:
    import pyarrow as pa

    table = pa.table({"id": list(range(len(values))), "text": values})
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    return path


def tar(members: dict[str, bytes], *, links: dict[str, str] | None = None) -> bytes:
    """An archive of these members, and of links to other names."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writer:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            writer.addfile(entry, io.BytesIO(content))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            writer.addfile(entry)
    return archive.getvalue()


def parquet(path: Path, values: Sequence[str | None], **options: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": list(range(len(values))), "text": values}), path, row_group_size=16, **options)
    return path


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    values = [f"row {i} äöü" for i in range(50)]
    blocks = read(parquet(tmp_path / "in.parquet", values, compression="zstd"))
    assert texts(blocks) == values
    assert places(blocks)[-1] == f"{tmp_path / 'in.parquet'}, row 50"
    assert sum(block.num_input_bytes for block in blocks) == (tmp_path / "in.parquet").stat().st_size


def test_parquet_null_is_a_fault_of_its_row(tmp_path: Path) -> None:
    blocks = read(parquet(tmp_path / "in.parquet", ["a", None, "c"]))
    assert texts(blocks) == ["a", "c"]
    assert faults(blocks) == [f"{tmp_path / 'in.parquet'}, row 2: the value of 'text' is null"]


def test_dictionary_columns_are_strings_too(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "in.parquet")
    assert texts(read(tmp_path / "in.parquet")) == ["a", "b", "a"]


@pytest.mark.parametrize("packing", [".gz", ".zst", ".xz", ".bz2"])
def test_a_truncated_compressed_file_is_a_fault(tmp_path: Path, packing: str) -> None:
    whole = PACKED[packing](lines(*(f"{i} {hash(i)}" for i in range(100_000))))
    path = tmp_path / f"in.jsonl{packing}"
    path.write_bytes(whole[: len(whole) // 2])
    after = tmp_path / "z.jsonl"
    after.write_bytes(lines("next"))
    blocks = read([path, after])
    found = texts(blocks)
    assert found[-1] == "next"
    assert 1000 < len(found) < 99_000
    assert found[:-1] == [f"{i} {hash(i)}" for i in range(len(found) - 1)]
    (fault,) = faults(blocks)
    assert fault.startswith(f"{path}:{len(found)}: the ")
    assert "cut off after" in fault


@pytest.mark.parametrize("packing", [".gz", ".zst", ".xz", ".bz2"])
def test_a_damaged_compressed_file_is_a_fault(tmp_path: Path, packing: str) -> None:
    whole = bytearray(PACKED[packing](lines(*(f"{i} {hash(i)}" for i in range(20_000)))))
    whole[len(whole) // 2 : len(whole) // 2 + 64] = bytes(range(64))
    path = tmp_path / f"in.jsonl{packing}"
    path.write_bytes(whole)
    (fault,) = [f for f in faults(read(path)) if "not JSON" not in f]
    assert "damaged" in fault or "cannot be decompressed" in fault


@pytest.mark.parametrize("packing", [".gz", ".zst", ".xz", ".bz2"])
def test_a_file_without_the_compression_of_its_name_is_a_fault(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"in.jsonl{packing}"
    path.write_bytes(lines("a"))
    (fault,) = faults(read(path))
    assert "damaged" in fault or "cannot be decompressed" in fault


@pytest.mark.parametrize("packing", [".gz", ".zst", ".xz", ".bz2"])
@pytest.mark.parametrize("content", [b"\n", b" ", b'{"text": ""}\n'])
def test_a_decompression_bomb_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, content: bytes
) -> None:
    monkeypatch.setattr(contents, "EXPANSION_COUNTS_FROM_BYTES", 4 << 20)
    path = tmp_path / f"in.jsonl{packing}"
    path.write_bytes(PACKED[packing](content * ((12 << 20) // len(content))))
    found = faults(read(path, largest_document_bytes=1 << 20))
    assert len(found) == 1
    # spaces without an end are first of all a line that is too long
    assert "bomb" in found[0]


def test_what_expands_to_less_than_64_mib_is_no_bomb(tmp_path: Path) -> None:
    path, line = tmp_path / "in.jsonl.zst", lines("x" * ((512 << 10) - 13))
    assert len(line) == 512 << 10
    path.write_bytes(PACKED[".zst"](line * 128))
    assert faults(read(path)) == []
    path.write_bytes(PACKED[".zst"](line * 129))
    (found,) = faults(read(path))
    assert f"expand to more than {64 << 20}" in found


def test_a_document_that_is_too_long_is_a_fault_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines("a") + b'{"text": "' + b"x" * (5 << 20) + b'"}\n' + lines("b", "c"))
    blocks = read(path, largest_document_bytes=2 << 20)
    assert texts(blocks) == ["a", "b", "c"]
    assert places(blocks)[-1] == f"{path}:4"
    assert faults(blocks) == [
        f"{path}:2: longer than {2 << 20} bytes; cut it into several documents, or raise --max-document-mb"
    ]
    path.write_bytes(lines("a") + b"x" * (5 << 20))
    assert faults(read(path, largest_document_bytes=2 << 20))[0].startswith(f"{path}:2: longer")
    text = tmp_path / "in.txt"
    text.write_bytes(b"x" * (5 << 20))
    assert faults(read(text, largest_document_bytes=2 << 20))[0].startswith(f"{text}: longer")


def test_after_damage_reading_resumes_with_the_next_file(tmp_path: Path) -> None:
    broken, after = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"
    broken.write_bytes(gzip.compress(lines("a"))[:-6])
    after.write_bytes(lines("next"))
    (damage,) = [block for block in read([broken, after]) if block.fault]
    assert damage.end == Position(source=1, documents=damage.begin.documents)
    assert texts(read([broken, after], start=damage.end)) == ["next"]


FAULTY_LINES = {
    "broken": (b'{"text": "1"', "not JSON"),
    "cut off in the middle": (b'{"text": "1', "not JSON"),
    "no object": (b'["1"]', "JSON array, not an object"),
    "a string": (b'"1"', "JSON string, not an object"),
    "another key": (b'{"body": "1"}', "no key 'text'; the line has 'body'"),
    "no key at all": (b"{}", "no key 'text'; the line has none"),
    "null": (b'{"text": null}', "the value of 'text' is a JSON null"),
    "number": (b'{"text": 1}', "the value of 'text' is a JSON number"),
    "boolean": (b'{"text": true}', "the value of 'text' is a JSON boolean"),
    "list": (b'{"text": ["1"]}', "the value of 'text' is a JSON array"),
    "object": (b'{"text": {"text": "1"}}', "the value of 'text' is a JSON object"),
    "huge integer as text": (b'{"text": ' + b"9" * 30 + b"}", "JSON number"),
    "bad UTF-8": (b'{"text": "\xff"}', "byte 10 is not UTF-8"),
    "Latin-1": ('{"text": "Käse"}'.encode("latin-1"), "byte 11 is not UTF-8"),
    "UTF-8 of a surrogate": (b'{"text": "\xed\xa0\x80"}', "byte 10 is not UTF-8"),
    "unpaired surrogate": (b'{"text": "\\ud800"}', "the value of 'text' holds the unpaired surrogate U+D800"),
    "NaN": (b'{"text": NaN}', "the value of 'text' holds NaN, which is not a number in JSON; write null"),
    "a number out of range": (b'{"text": 1e999}', "the value of 'text' holds 1e999, which is not a number"),
    "an odd number and no end": (b'{"score": 1e999, "text": "1"', "not JSON"),
    "an odd number and two texts": (b'{"score": NaN, "text": "1", "text": "2"}', "the key 'text' occurs 2 times"),
    "deep nesting": (b'{"text": ' + b"[" * 5000, "not JSON"),
    "deep and whole": (b'{"text": "1", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "not JSON"),
    "NUL character": (b'{"text": "1\x00"}', "not JSON"),
    "NUL bytes": (b"\x00" * 100, "all NUL bytes, as after a crash"),
    "duplicate key": (b'{"text": "1", "text": "2"}', "the key 'text' occurs 2 times"),
    "trailing comma": (b'{"text": "1",}', "not JSON"),
    "two objects": (b'{"text": "1"}{"text": "2"}', "not JSON"),
    "single quotes": (b"{'text': '1'}", "not JSON"),
    "array over lines": (b"[", "JSON array over several lines"),
}


@pytest.mark.parametrize("name", FAULTY_LINES)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, name: str) -> None:
    line, reason = FAULTY_LINES[name]
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines("before") + line + b"\n" + lines("behind"))
    blocks = read(path)
    assert texts(blocks) == ["before", "behind"]
    (fault,) = faults(blocks)
    assert fault.startswith(f"{path}:2: ")
    assert reason in fault


USABLE_LINES = {
    "CRLF": (b'{"text": "1"}\r', "1"),
    "spaces around": (b'  {"text": "1"}  ', "1"),
    "huge integer beside": (b'{"text": "1", "id": ' + b"9" * 100 + b"}", "1"),
    "escaped NUL": (b'{"text": "1\\u0000"}', "1\0"),
    "an integer beyond any float": (b'{"text": "1", "id": ' + b"9" * 5000 + b"}", "1"),
    "a float beyond any float": (b'{"id": [-1e999], "text": "1"}', "1"),
    "NaN and infinities": (b'{"a": NaN, "b": [Infinity, -Infinity], "text": "1"}', "1"),
    "an unpaired surrogate beside": (b'{"text": "1", "\\ud800": {"x": "\\udfff"}}', "1"),
    "an odd number, the key's name further in": (b'{"text": "1", "meta": {"text": NaN}}', "1"),
    "surrogate pair": (b'{"text": "\\ud83d\\ude00"}', "\N{GRINNING FACE}"),
    "the key's name in the text": (b'{"text": "a \\"text\\" b", "x": "\\"text\\""}', 'a "text" b'),
    "the key's name further in": (b'{"text": "1", "meta": {"text": 5, "more": [{"text": null}]}}', "1"),
    "byte-order mark within": ('{"text": "\ufeff1"}'.encode(), "\ufeff1"),
}


@pytest.mark.parametrize("name", USABLE_LINES)
def test_an_unusual_but_valid_line_is_read(tmp_path: Path, name: str) -> None:
    line, expected = USABLE_LINES[name]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\n\n" + lines("behind"))
    blocks = read(path)
    assert texts(blocks) == [expected, "behind"]
    assert faults(blocks) == []


def test_utf16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes('{"text": "1"}\n'.encode("utf-16"))
    assert faults(read(path)) == [f"{path}:1: the file is UTF-16; convert it to UTF-8"]


def test_a_missing_or_unknown_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "empty").mkdir()
    for given_path, reason in {
        "absent.jsonl": "does not exist, and as a pattern matches no file",
        "*.jsonl": "does not exist, and as a pattern matches no file",
        "notes.md": r"has an unknown ending",
        "empty": r"holds no \*\.jsonl",
        "notes.md/in.jsonl": "does not exist",
        "nul\0.jsonl": "does not exist",
    }.items():
        with pytest.raises(DataError, match=reason):
            find_sources([str(tmp_path / given_path)])


@pytest.mark.parametrize(
    ("columns", "reason"),
    [({"body": ["x"]}, "has no column 'text', but body"), ({"text": [1]}, "column 'text' holds int64, not strings")],
)
def test_parquet_columns_are_checked_before_anything_is_read(
    tmp_path: Path, columns: dict[str, list[Any]], reason: str
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    with pytest.raises(DataError, match=reason):
        check_columns(find_sources([str(tmp_path)]).sources, ReadingRules(KEY))


def test_damaged_parquet_is_refused_or_a_fault(tmp_path: Path) -> None:
    path = parquet(tmp_path / "in.parquet", [f"{i} {hash(str(i))}" for i in range(200)], compression="gzip")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        check_columns(find_sources([str(path)]).sources, ReadingRules(KEY))
    damaged = bytearray(whole)
    damaged[len(whole) // 3 : len(whole) // 3 + 200] = b"\0" * 200
    path.write_bytes(damaged)
    (fault,) = faults(read(path))
    assert "the file is damaged from here on" in fault


@pytest.mark.parametrize("is_stream", [True, False])
def test_arrow_rows_are_documents(tmp_path: Path, is_stream: bool) -> None:
    values = [f"row {i} äöü" for i in range(50)]
    blocks = read(arrow(tmp_path / "in.arrow", values, is_stream=is_stream))
    assert texts(blocks) == values
    assert places(blocks)[-1] == f"{tmp_path / 'in.arrow'}, row 50"


@pytest.mark.parametrize("packing", [".gz", ".zst", ".xz", ".bz2"])
@pytest.mark.parametrize("after", ["garbage", "damaged stream", "half a stream"])
def test_what_follows_a_stream_is_never_lost_in_silence(tmp_path: Path, packing: str, after: str) -> None:
    """Python's own readers of xz and bzip2 end there as if the file were whole."""
    second = bytearray(PACKED[packing](lines(*(f"{i} {hash(str(i))}" for i in range(2000)))))
    if after == "damaged stream":
        second[len(second) // 2 : len(second) // 2 + 64] = bytes(range(64))
    ends = {
        "garbage": b"<html>404</html>" * 9,
        "damaged stream": bytes(second),
        "half a stream": bytes(second[: len(second) // 2]),
    }
    path = tmp_path / f"in.jsonl{packing}"
    path.write_bytes(PACKED[packing](lines("a", "b")) + ends[after])
    blocks = read(path)
    assert texts(blocks)[:2] == ["a", "b"]
    assert [fault for fault in faults(blocks) if "file cannot be decompressed" in fault or "is cut off" in fault]


@pytest.mark.parametrize("packing", [".gz", ".xz"])
def test_zeros_after_a_stream_are_padding(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"in.jsonl{packing}"
    path.write_bytes(PACKED[packing](lines("a")) + bytes(512) + PACKED[packing](lines("b")) + bytes(512))
    blocks = read(path)
    assert (texts(blocks), faults(blocks)) == (["a", "b"], [])


DAMAGED_ARCHIVES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in a member": (lambda raw: raw[:1600], "damaged (unexpected end of data)"),
    "cut between members": (lambda raw: raw[:1024], "damaged (cut off, or a damaged header"),
    "cut before the end mark": (lambda raw: raw[:2048], "damaged (cut off, or a damaged header"),
    "damaged header": (lambda raw: raw[:1100] + b"####" + raw[1104:], "damaged (cut off, or a damaged header"),
    "two joined": (lambda raw: raw + raw, "something follows the end of the archive"),
    "something else": (lambda raw: b"<html>404</html>" * 100, "damaged (cut off, or a damaged header"),
}


@pytest.mark.parametrize("damage", DAMAGED_ARCHIVES)
@pytest.mark.parametrize("packing", ["", ".gz"])
def test_a_damaged_archive_is_a_fault_and_the_next_file_is_read(tmp_path: Path, damage: str, packing: str) -> None:
    """Python's tarfile ends at most of these as if the archive were whole."""
    change, reason = DAMAGED_ARCHIVES[damage]
    content = b"".join(lines(f"{i}") for i in range(20))
    path, after = tmp_path / f"in.tar{packing}", tmp_path / "z.jsonl"
    path.write_bytes(PACKED[packing](change(tar({"a.jsonl": content, "b.jsonl": content}))))
    after.write_bytes(lines("next"))
    blocks = read([path, after])
    assert texts(blocks)[-1] == "next"
    (fault,) = faults(blocks)
    assert fault.startswith(f"{path}: ")
    assert reason in fault


def test_members_of_an_archive_are_read_passed_over_or_refused(tmp_path: Path) -> None:
    members = {
        "./a.jsonl": lines("a"),
        "b.JSONL.gz": gzip.compress(lines("b")),
        "../c.txt": b"c",
        "/d/.git/e.jsonl": b"no",
        "README.md": b"no",
        "empty.jsonl": b"",
        "empty.jsonl.gz": b"",
        "f.pdf": b"no",
        "g.parquet": b"no",
        "h.jsonl.gz": b"no gzip file at all",
        "z.jsonl": lines("z"),
    }
    path = tmp_path / "in.tar"
    path.write_bytes(tar(members, links={"link.jsonl": "a.jsonl"}))
    blocks = read(path)
    assert texts(blocks) == ["a", "b", "c", "z"]
    assert places(blocks)[:2] == [f"{path}!./a.jsonl:1", f"{path}!b.JSONL.gz:1"]
    passed_over = {block.source.name.split("!")[1]: block.passed_over for block in blocks if block.passed_over}
    assert passed_over == {
        "/d/.git/e.jsonl": "hidden",
        "README.md": "documentation",
        "link.jsonl": "a link in an archive",
    }
    found = faults(blocks)
    for fault, reason in zip(
        found, ("0 bytes", "unknown ending", "cannot be read as a stream", "cannot be decompressed"), strict=True
    ):
        assert reason in fault
    assert {block.source.name for block in blocks} == {f"{path}!{name}" for name in (*members, "link.jsonl")}
