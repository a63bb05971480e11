"""Parser of raw documents into texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

from megatron.data.document_blocks import Block, Fault, read_blocks
from megatron.data.indexed import DataError
from megatron.data.sources import SourceFile

if TYPE_CHECKING:
    import pyarrow

OnBadLine = Literal["fail", "skip"]


@dataclass
class Parsed:
    """The documents of a block."""

    numbers: list[int] = field(default_factory=list)
    """Number of each document in its block."""
    columns: list[list[str]] = field(default_factory=list)
    """The text of every document, for each key."""
    faults: list[Fault] = field(default_factory=list)
    num_blank: int = 0
    """Empty documents."""


def parse(block: Block, keys: Sequence[str]) -> Parsed:
    """Return the texts under `keys` of each document of a block. A text file has the same text under every key."""
    if block.fault is not None:
        return Parsed(columns=[[] for _ in keys], faults=[block.fault])
    if block.rows is not None:
        return _parse_rows(block, block.rows, keys)
    raw_documents = block.raw.split(block.delimiter) if block.delimiter else [block.raw]
    if block.source.kind == "jsonl" and len(keys) == 1:
        texts = _texts_of_clean_lines(raw_documents, keys[0])
        if texts is not None:
            return Parsed(list(range(len(texts))), [texts])
    parsed = Parsed(columns=[[] for _ in keys])
    for number, raw in enumerate(raw_documents):
        if not raw.strip():
            parsed.num_blank += 1
            continue
        try:
            if block.source.kind == "text":
                texts = [raw.decode("utf-8")] * len(keys)
            else:
                texts = _texts_of_line(raw, keys)
        except UnicodeDecodeError as error:
            parsed.faults.append(Fault(block.place(number), f"byte {error.start} is not UTF-8; convert the file"))
        except DataError as error:
            parsed.faults.append(Fault(block.place(number), str(error)))
        else:
            parsed.numbers.append(number)
            for column, text in zip(parsed.columns, texts, strict=True):
                column.append(text)
    return parsed


def _texts_of_clean_lines(lines: Sequence[bytes], key: str) -> list[str] | None:
    """Return the texts of lines without a fault, fast; None if there may be one."""
    quoted = b'"%s"' % key.encode()
    loads = orjson.loads
    try:
        texts = [loads(line)[key] for line in lines]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return None
    # the key's name may occur in the text itself, or twice in the object
    if set(map(type, texts)) != {str} or any(line.count(quoted) > 1 for line in lines):
        return None
    return texts


def _texts_of_line(line: bytes, keys: Sequence[str]) -> list[str]:
    row = object_of_line(line, f'{{"{keys[0]}": ...}}')
    for key in keys:
        if key not in row:
            raise DataError(f"no key {key!r}; the line has {', '.join(map(repr, row)) or 'none'} (see --json-keys)")
        if not isinstance(row[key], str):
            raise DataError(f"the value of {key!r} is a JSON {_json_type(row[key])}, not a string")
    if any(line.count(b'"%s"' % key.encode()) > 1 for key in keys):
        _check_keys_are_unique(line, keys)
    return [row[key] for key in keys]


def object_of_line(line: bytes, example: str) -> dict[str, Any]:
    """Return the JSON object in a line. Raises DataError, which shows `example`, or UnicodeDecodeError."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        line.decode("utf-8")
        raise DataError(
            f"the line is not JSON ({_json_fault(line, error)}); every line must be one JSON object"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"the line is a JSON {_json_type(row)}, not an object such as {example}")
    return row


def _check_keys_are_unique(line: bytes, keys: Sequence[str]) -> None:
    objects: list[list[tuple[str, Any]]] = []
    json.loads(line, object_pairs_hook=objects.append)
    outermost = [name for name, _ in objects[-1]]  # an object is reported after those inside it
    for key in keys:
        if outermost.count(key) > 1:
            raise DataError(
                f"the key {key!r} occurs {outermost.count(key)} times in the line; one of them would be lost"
            )


def _json_fault(line: bytes, error: orjson.JSONDecodeError) -> str:
    if line.strip(b"\0 \r") == b"":
        return "it is all NUL bytes, as after a crash while it was written"
    if line.lstrip().startswith(b"[") and error.pos >= len(line.rstrip()):
        return "it begins a JSON array over several lines; convert it with `jq -c '.[]'`"
    for word in (b"NaN", b"Infinity"):
        if line[error.pos :].lstrip(b"-").startswith(word) or line[max(0, error.pos - 1) :].startswith(word):
            return f"{word.decode()} is not a JSON number, write null"
    return str(error)


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _parse_rows(block: Block, rows: pyarrow.RecordBatch, keys: Sequence[str]) -> Parsed:
    parsed = Parsed(columns=[[] for _ in keys])
    try:
        columns = [rows.column(key).to_pylist() for key in keys]
    except UnicodeDecodeError:
        columns = [[_text_of_cell(cell) for cell in rows.column(key)] for key in keys]
    for number, texts in enumerate(zip(*columns, strict=True)):
        wrong = [key for key, text in zip(keys, texts, strict=True) if not isinstance(text, str)]
        if wrong:
            reason = "is null" if texts[keys.index(wrong[0])] is None else "is not UTF-8"
            parsed.faults.append(Fault(block.place(number), f"the value of {wrong[0]!r} {reason}"))
        elif not any(texts):
            parsed.num_blank += 1
        else:
            parsed.numbers.append(number)
            for column, text in zip(parsed.columns, texts, strict=True):
                column.append(text)
    return parsed


def _text_of_cell(cell: Any) -> str | bytes | None:
    """Return the text of a cell; bytes if it is not UTF-8."""
    try:
        text: str | None = cell.as_py()
        return text
    except UnicodeDecodeError:
        return b""


def read_texts(
    sources: Sequence[SourceFile], keys: Sequence[str], on_bad_line: OnBadLine, separator: str | None = None
) -> Iterator[str]:
    """Yield every text of every document. Raises DataError at the first bad one unless they are skipped."""
    for block in read_blocks(sources, keys, separator=separator):
        parsed = parse(block, keys)
        if parsed.faults and on_bad_line == "fail":
            raise bad_line_error(parsed.faults[0])
        # a text file has one text, however many keys
        columns = parsed.columns[:1] if block.source.kind == "text" else parsed.columns
        for texts in zip(*columns, strict=True):
            yield from texts


def bad_line_error(fault: Fault) -> DataError:
    return DataError(f"{fault} (or pass --on-bad-line skip to leave such documents out)")
