"""Parser of raw documents into texts."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

from megatron.data.index.indexed import DataError
from megatron.data.read.archives import read_blocks
from megatron.data.read.document_blocks import Block, Fault, ReadingRules
from megatron.data.read.sources import SourceFile

if TYPE_CHECKING:
    import pyarrow

OnBadLine = Literal["fail", "skip"]

LONGEST_INTEGER = 4000
"""Digits of an integer that is read exactly; Python refuses more than 4,300."""
_LONG_INTEGER = re.compile(rb"\d{20}")
_SURROGATE = re.compile("[\ud800-\udfff]")


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
    if block.end.documents == block.begin.documents:
        return Parsed(columns=[[] for _ in keys])
    raw_documents = [block.raw]
    if block.delimiter:
        raw_documents = block.raw.split(block.delimiter)
    if block.source.kind == "jsonl" and len(keys) == 1:
        texts = _texts_of_clean_lines(raw_documents, keys[0])
        if texts is not None:
            return Parsed(list(range(len(texts))), [texts])
    return _parse_each(block, raw_documents, keys)


def _parse_each(block: Block, raw_documents: Sequence[bytes], keys: Sequence[str]) -> Parsed:
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
    names = [b'"%s"' % name.encode() for name in _names_of(key)]
    loads = orjson.loads
    try:
        if "." in key:
            texts = [value_at(loads(line), key) for line in lines]
        else:
            texts = [loads(line)[key] for line in lines]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError):
        return None
    # a name may occur in the text itself, or twice in the object
    if set(map(type, texts)) != {str} or any(line.count(name) > 1 for name in names for line in lines):
        return None
    return texts


def _texts_of_line(line: bytes, keys: Sequence[str]) -> list[str]:
    row = object_of_line(line, f'{{"{keys[0]}": ...}}', keys)
    if any(line.count(b'"%s"' % name.encode()) > 1 for key in keys for name in _names_of(key)):
        row = _parse_exactly(line)
    texts = []
    for key in keys:
        try:
            text = value_at(row, key)
        except KeyError:
            found = ", ".join(map(repr, _names_near(row, key))) or "none"
            raise DataError(f"no key {key!r}; the line has {found} (see --json-keys)") from None
        if not isinstance(text, str):
            raise DataError(f"the value of {key!r} is a JSON {_json_type(text)}, not a string")
        texts.append(text)
    return texts


def value_at(row: dict[str, Any], key: str) -> Any:
    """Return the value under a key. Each dot steps into an object, unless the object has a name with that dot in it.

    Raises KeyError, or DataError if a name on the way occurs twice.
    """
    if key in row:
        if isinstance(row, _Repeating) and key in row.repeated:
            raise DataError(f"the key {key!r} occurs {row.repeated[key]} times in the line; one of them would be lost")
        return row[key]
    for dot in (i for i, character in enumerate(key) if character == "."):
        name, rest = key[:dot], key[dot + 1 :]
        if isinstance(row.get(name), dict):
            try:
                return value_at(value_at(row, name), rest)
            except KeyError:
                continue
    raise KeyError(key)


def _names_of(key: str) -> list[str]:
    """Return the names that may lead to a value: of `a.b` these are a.b, a and b."""
    parts = key.split(".")
    return [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]


def _names_near(row: dict[str, Any], key: str) -> Iterator[str]:
    """Yield the keys of a row, those of an object that `key` steps into by their path."""
    for name, value in row.items():
        if isinstance(value, dict) and key.startswith(f"{name}."):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def object_of_line(line: bytes, example: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object in a line. Raises DataError, which shows `example`, or UnicodeDecodeError.

    Values that are not under `keys` may hold NaN, numbers of any size and unpaired surrogates.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        row = _parse_exactly(line, error)
        for key in keys if isinstance(row, dict) else ():
            with contextlib.suppress(KeyError):
                _check_usable(value_at(row, key), key)
    else:
        if _LONG_INTEGER.search(line):  # orjson rounds it
            row = _parse_exactly(line)
    if not isinstance(row, dict):
        raise DataError(f"the line is a JSON {_json_type(row)}, not an object such as {example}")
    return row


def check_unrepeated(row: dict[str, Any], line: bytes) -> None:
    """Raise DataError for a row in which a name occurs more than once, of whose values all but one would be lost."""
    if all(line.count(b'"%s"' % name.encode()) == 1 for name in row if name.isalnum()):
        return
    exact = _parse_exactly(line)  # a name may occur in an inner object too
    if isinstance(exact, _Repeating):
        name, count = next(iter(exact.repeated.items()))
        raise DataError(f"the key {name!r} occurs {count} times in the line; one of them would be lost")


def _check_usable(value: Any, key: str) -> None:
    """Raise DataError for a value of _parse_exactly with something in it that no text can hold."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, _NoNumber):
            raise DataError(f"the value of {key!r} holds {value.text[:20]}, which is not a number in JSON; write null")
        elif isinstance(value, str) and (place := _SURROGATE.search(value)):
            raise DataError(
                f"the value of {key!r} holds the unpaired surrogate U+{ord(place[0]):04X}, which is half a character; "
                "correct the text, or leave it out"
            )


class _Repeating(dict[str, Any]):
    """A JSON object in which a name occurs more than once."""

    repeated: Mapping[str, int]


@dataclass(frozen=True)
class _NoNumber:
    """A number without a value: NaN, an infinity, or one beyond the range of floats."""

    text: str


def _parse_exactly(line: bytes, error: orjson.JSONDecodeError | None = None) -> Any:
    """Return the JSON value in a line: integers exact, repeated names as _Repeating, odd numbers as _NoNumber.

    Raises DataError, with the words of orjson's error, or UnicodeDecodeError.
    """
    try:
        return json.loads(
            line.decode("utf-8"),
            object_pairs_hook=_object_of,
            parse_float=_float_of,
            parse_int=lambda digits: int(digits) if len(digits) <= LONGEST_INTEGER else _NoNumber(digits),
            parse_constant=_NoNumber,
        )
    except (json.JSONDecodeError, RecursionError):
        fault = _json_fault(line, error) if error else "nested too deeply"
        raise DataError(f"the line is not JSON ({fault}); every line must be one JSON object") from None


def _float_of(digits: str) -> float | _NoNumber:
    value = float(digits)
    return value if math.isfinite(value) else _NoNumber(digits)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeating = _Repeating(found)
    repeating.repeated = {name: count for name, count in Counter(name for name, _ in pairs).items() if count > 1}
    return repeating


def _json_fault(line: bytes, error: orjson.JSONDecodeError) -> str:
    if line.strip(b"\0 \r") == b"":
        return "it is all NUL bytes, as after a crash while it was written"
    if line.lstrip().startswith(b"[") and error.pos >= len(line.rstrip()):
        return "it begins a JSON array over several lines; convert it with `jq -c '.[]'`"
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


def read_texts(sources: Sequence[SourceFile], rules: ReadingRules, on_bad_line: OnBadLine) -> Iterator[str]:
    """Yield every text of every document. Raises DataError at the first bad one unless they are skipped."""
    for block in read_blocks(sources, rules):
        parsed = parse(block, rules.keys)
        if parsed.faults and on_bad_line == "fail":
            raise bad_line_error(parsed.faults[0])
        # a text file has one text, however many keys
        columns = parsed.columns[:1] if block.source.kind == "text" else parsed.columns
        for texts in zip(*columns, strict=True):
            yield from texts


def bad_line_error(fault: Fault) -> DataError:
    return DataError(f"{fault} (or pass --on-bad-line skip to leave such documents out)")
