"""Parser of raw documents into texts."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, repeat
from typing import TYPE_CHECKING, Any, Literal

import orjson

from megatron.data.index.indexed import DataError
from megatron.data.read.archives import read_blocks
from megatron.data.read.document_blocks import Block, Fault, ReadingRules, cuts_at_dots
from megatron.data.read.sources import SourceFile

if TYPE_CHECKING:
    import pyarrow

OnBadLine = Literal["fail", "skip"]

LONGEST_INTEGER = 4000
"""Digits of an integer that is read exactly; Python refuses more than 4,300."""
_LONG_INTEGER = b"0" * 20
"""An integer that may exceed 64 bits, as `_AS_ZEROS` makes each."""
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_SPACED_NAME = re.compile(rb'"\s+:')
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

    def add(self, number: int, texts: Sequence[str]) -> None:
        """Add a document, with a text for each key."""
        self.numbers.append(number)
        for column, text in zip(self.columns, texts, strict=True):
            column.append(text)


def parse(block: Block, keys: tuple[str, ...]) -> Parsed:
    """Return the texts under `keys` of each document of a block. A text file has the same text under every key."""
    if block.fault is not None:
        return Parsed(columns=_empty_columns(keys), faults=[block.fault])
    if block.rows is not None:
        return _parse_rows(block, block.rows, keys)
    if block.end.documents == block.begin.documents:
        return Parsed(columns=_empty_columns(keys))
    # in a thread of the encoder, not of the reader: parsing takes longer than reading
    raw_documents = [block.raw]
    if block.delimiter:
        raw_documents = block.raw.split(block.delimiter)
    if block.source.kind == "jsonl" and len(keys) == 1:
        texts = _texts_of_clean_lines(raw_documents, keys[0])
        if texts is not None:
            return Parsed(list(range(len(texts))), [texts])
    return _parse_each(block, raw_documents, keys)


def _empty_columns(keys: Sequence[str]) -> list[list[str]]:
    return [[] for _ in keys]


def _parse_each(block: Block, raw_documents: Sequence[bytes], keys: tuple[str, ...]) -> Parsed:
    parsed = Parsed(columns=_empty_columns(keys))
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
            parsed.add(number, texts)
    return parsed


# nearly all lines are clean, and a look at each of their parts would take several times as long as reading them
def _texts_of_clean_lines(lines: Sequence[bytes], key: str) -> list[str] | None:
    """Return the texts of lines without a fault, fast; None if there may be one."""
    loads = orjson.loads
    try:
        if "." in key:
            texts = [value_at(loads(line), key) for line in lines]
        else:
            # orjson checks UTF-8 and surrogates as it parses
            texts = [loads(line)[key] for line in lines]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError):
        return None
    # the types of all at once: faster than one by one
    if set(map(type, texts)) != {str}:
        return None
    for name in _quoted_names((key,)):
        # it may stand in the text itself, or twice in the object, of which orjson keeps the last
        if max(map(bytes.count, lines, repeat(name))) > 1:
            return None
    return texts


def _texts_of_line(line: bytes, keys: tuple[str, ...]) -> list[str]:
    # slow, but it names the fault of a line
    row = object_of_line(line, f'{{"{keys[0]}": ...}}', keys)
    if any(line.count(name) > 1 for name in _quoted_names(keys)):
        row = _parse_exactly(line)
    texts = []
    for key in keys:
        try:
            text = value_at(row, key)
        except KeyError:
            names = ", ".join(map(repr, _names_near(row, key))) or "none"
            raise DataError(f"no key {key!r}; the line has {names} (see --json-keys)") from None
        if not isinstance(text, str):
            raise DataError(f"the value of {key!r} is a JSON {_json_type(text)}, not a string")
        texts.append(text)
    return texts


def value_at(row: dict[str, Any], key: str) -> Any:
    """Return the value under a key. Each dot steps into an object, unless the object has a name with that dot in it.

    Raises KeyError, or DataError if a name on the way occurs twice.
    """
    if key in row:
        if isinstance(row, _Repeating):
            row.check_once(key)
        return row[key]
    for name, rest in cuts_at_dots(key):
        if not isinstance(row.get(name), dict):
            continue
        with contextlib.suppress(KeyError):
            return value_at(value_at(row, name), rest)
    raise KeyError(key)


@lru_cache(maxsize=16)
def _quoted_names(keys: tuple[str, ...]) -> list[bytes]:
    """Return the names, as writers of JSON write them, that may lead to a value: of `a.b` these are a.b, a and b."""
    names = set()
    for key in keys:
        parts = key.split(".")
        for start, end in combinations(range(len(parts) + 1), 2):
            name = ".".join(parts[start:end])
            # Python's writer escapes what is not ASCII, others do not
            names |= {b'"%s"' % name.encode(), json.dumps(name).encode()}
    return sorted(names)


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
        # orjson refuses a line for NaN in a value that is not read
        row = _parse_exactly(line, error)
        if isinstance(row, dict):
            _check_usable(row, keys)
    else:
        # orjson rounds such an integer; a pattern for digits would take ten times as long to look for one
        if _LONG_INTEGER in line.translate(_AS_ZEROS):
            row = _parse_exactly(line)
    if not isinstance(row, dict):
        raise DataError(f"the line is a JSON {_json_type(row)}, not an object such as {example}")
    return row


def check_unrepeated(row: dict[str, Any], line: bytes, keys: Sequence[str]) -> None:
    """Raise DataError for a name that occurs twice in a row, or in an object under `keys`: one value would be lost."""
    if _has_all_names(row, line):
        return
    exact = _parse_exactly(line)
    for part in (exact, *parts_of([exact[key] for key in keys if key in exact])):
        if isinstance(part, _Repeating):
            part.check_once(next(iter(part.repeated)))


def value_of_text(text: str) -> Any:
    """Return the value of JSON text that stands in a row, integers exact.

    Raises orjson.JSONDecodeError, or DataError for a name that occurs twice in an object and a number of too many
    digits: "the text" is its subject.
    """
    content = text.encode(errors="surrogatepass")
    value = orjson.loads(content)
    if _has_all_names(value, content) and _LONG_INTEGER not in content.translate(_AS_ZEROS):
        return value
    exact = _parse_exactly(content)
    for part in parts_of(exact):
        if isinstance(part, _Repeating):
            part.check_once(next(iter(part.repeated)), "the text")
        fault = _fault_of(part)
        if fault is not None:
            raise DataError(f"the text holds {fault}")
    return exact


def _has_all_names(value: Any, content: bytes) -> bool:
    """Return true if the objects of a JSON value have as many names as its content: none occurs twice."""
    # a count that missed one name would hide that another is there twice: of white space behind it, or at whose end a
    # backslash stands
    if _SPACED_NAME.search(content) or b'\\\\":' in content:
        return False
    # a quote before a colon ends a name unless it is escaped
    return _num_names(value) == content.count(b'":') - content.count(b'\\":')


def _num_names(value: Any) -> int:
    """Return the number of names in all objects of a JSON value."""
    count, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            count += len(part)
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return count


def _check_usable(row: dict[str, Any], keys: Sequence[str]) -> None:
    """Raise DataError if _parse_exactly read something under a key that no text can hold."""
    for key in keys:
        try:
            value = value_at(row, key)
        except KeyError:
            continue
        for part in parts_of(value):
            fault = _fault_of(part)
            if fault is not None:
                raise DataError(f"the value of {key!r} holds {fault}")


def parts_of(value: Any) -> Iterator[Any]:
    """Yield a JSON value, and all names and values in it; a queue, since a recursion's depth would be the line's."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, dict):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list):
            waiting += part


def _fault_of(part: Any) -> str | None:
    if isinstance(part, _NoNumber):
        return f"{part.text[:20]}, which is not a number in JSON; write null"
    if not isinstance(part, str):
        return None
    surrogate = _SURROGATE.search(part)
    if surrogate is None:
        return None
    return (
        f"the unpaired surrogate U+{ord(surrogate[0]):04X}, which is half a character; correct the text, or leave it "
        "out"
    )


class _Repeating(dict[str, Any]):
    """A JSON object in which a name occurs more than once."""

    repeated: Mapping[str, int]
    """Such names, and how often each occurs."""

    def check_once(self, name: str, where: str = "the line") -> None:
        """Raise DataError for a name of which one value is lost."""
        if name in self.repeated:
            raise DataError(
                f"the key {name!r} occurs {self.repeated[name]} times in {where}; one of them would be lost"
            )


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
            # json.loads would guess UTF-16 of bytes
            line.decode("utf-8"),
            object_pairs_hook=_object_of,
            parse_float=_float_of,
            parse_int=_int_of,
            # NaN and Infinity, which the json module accepts and JSON does not have
            parse_constant=_NoNumber,
        )
    except (json.JSONDecodeError, RecursionError):
        fault = "nested too deeply"
        if error is not None:
            fault = _json_fault(line, error)
        raise DataError(f"the line is not JSON ({fault}); every line must be one JSON object") from None


def _int_of(digits: str) -> int | _NoNumber:
    if len(digits) > LONGEST_INTEGER:
        return _NoNumber(digits)
    return int(digits)


def _float_of(digits: str) -> float | _NoNumber:
    value = float(digits)
    if math.isfinite(value):
        return value
    return _NoNumber(digits)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) == len(pairs):
        return row
    repeating = _Repeating(row)
    occurrences = Counter(name for name, _ in pairs)
    repeating.repeated = {name: count for name, count in occurrences.items() if count > 1}
    return repeating


def _json_fault(line: bytes, error: orjson.JSONDecodeError) -> str:
    # the two commonest faults have words of their own
    if line.strip(b"\0 \r") == b"":
        return "it is all NUL bytes, as after a crash while it was written"
    if line.lstrip().startswith(b"[") and error.pos >= len(line.rstrip()):
        return "it begins a JSON array over several lines; convert it with `jq -c '.[]'`"
    return str(error)


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _parse_rows(block: Block, rows: pyarrow.RecordBatch, keys: Sequence[str]) -> Parsed:
    try:
        columns = [rows.column(key).to_pylist() for key in keys]
    except UnicodeDecodeError:
        # pyarrow does not check UTF-8 when it reads, and stops at the first fault of a column
        columns = [[_text_of_cell(cell) for cell in rows.column(key)] for key in keys]
    if all(map(all, columns)):  # neither null, nor empty, nor the mark of a cell that is not UTF-8
        return Parsed(list(range(len(rows))), columns)
    parsed = Parsed(columns=_empty_columns(keys))
    for number, texts in enumerate(zip(*columns, strict=True)):
        fault = _cell_fault(texts, keys)
        if fault is not None:
            parsed.faults.append(Fault(block.place(number), fault))
        elif not any(texts):
            parsed.num_blank += 1
        else:
            parsed.add(number, texts)
    return parsed


def _cell_fault(texts: Sequence[str | bytes | None], keys: Sequence[str]) -> str | None:
    for key, text in zip(keys, texts, strict=True):
        if text is None:
            return f"the value of {key!r} is null"
        if isinstance(text, bytes):
            return f"the value of {key!r} is not UTF-8"
    return None


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
        columns = parsed.columns
        if block.source.kind == "text":  # one text, however many keys
            columns = columns[:1]
        for texts in zip(*columns, strict=True):
            yield from texts


def bad_line_error(fault: Fault) -> DataError:
    return DataError(f"{fault} (or pass --on-bad-line skip to leave such documents out)")
