"""Reader of Parquet and Arrow files, a document a row.

Not by pyarrow.dataset, which refuses Arrow streams, the form of Hugging Face's datasets, and whose batches have neither
a row from which reading could resume nor a size in bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet

from megatron.data.index.indexed import DataError
from megatron.data.read.contents import open_source
from megatron.data.read.document_blocks import Block, Position, ReadingRules, after_rows, rest_is_lost
from megatron.data.read.remote import lost_connection
from megatron.data.read.sources import SourceFile

DAMAGE = (pyarrow.ArrowException, OSError, ValueError)
ARROW_FILE_MAGIC = b"ARROW1"
"""Beginning of an Arrow file. Arrow also has streams, which Hugging Face's datasets are, with the same ending."""


def check_columns(sources: Sequence[SourceFile], keys: Sequence[str], *, as_rows: bool = False) -> None:
    """Raise DataError for a table without the columns, before hours are spent on others.

    These are a string column for each key or, `as_rows`, at least one column of any type.
    """
    for source in sources:
        if source.kind == "parquet":
            _open_parquet(source, keys, as_rows)
        elif source.kind == "arrow":
            _open_arrow(source, keys, as_rows)[1].close()


def table_blocks(source: SourceFile, rules: ReadingRules, start: Position) -> Iterator[Block]:
    """Yield the rows from `start`, in blocks of about `block_bytes`. Raises DataError if the file cannot be opened."""
    keys, block_bytes, as_rows = rules.keys, rules.content_bytes, rules.as_rows
    at = start
    row = 0
    try:
        read = _parquet_rows if source.kind == "parquet" else _arrow_rows
        for rows, num_input_bytes in read(source, keys, start.offset, block_bytes, as_rows):
            row += len(rows)
            if row <= at.offset:
                continue
            rows = rows.slice(max(0, at.offset - (row - len(rows))))
            begin, at = at, after_rows(at, len(rows))
            yield Block(source, begin, at, num_input_bytes, rows=rows)
    except DataError:
        raise
    except Exception as error:
        if source.transport == "url":
            raise lost_connection(source.name, error) from error
        if not isinstance(error, DAMAGE):
            raise
        yield rest_is_lost(source, at, 0, f"the file is damaged from here on ({error})")


def _parquet_rows(
    source: SourceFile, keys: Sequence[str], skip_rows: int, block_bytes: int, as_rows: bool
) -> Iterator[tuple[Any, int]]:
    """Yield rows and the bytes of the file that they stand for. Rows to be skipped may come without columns."""
    file = _open_parquet(source, keys, as_rows)
    names = file.schema_arrow.names if as_rows else list(keys)
    num_rows, file_bytes = max(1, file.metadata.num_rows), source.num_bytes or 0
    row = 0
    for group in range(file.metadata.num_row_groups):
        found = file.metadata.row_group(group)
        if row + found.num_rows <= skip_rows:
            row += found.num_rows
            yield range(found.num_rows), 0
            continue
        # rows of one block, if all rows of the group are of one size
        group_bytes = sum(
            found.column(c).total_uncompressed_size
            for c in range(file.metadata.num_columns)
            if (path := found.column(c).path_in_schema) in keys or (as_rows and path.split(".")[0] in names)
        )
        batch_size = max(1, found.num_rows * block_bytes // max(1, group_bytes))
        for rows in file.iter_batches(batch_size=batch_size, row_groups=[group], columns=names):
            before, row = row, row + len(rows)
            num_input_bytes = file_bytes * row // num_rows - file_bytes * max(before, min(skip_rows, row)) // num_rows
            yield rows if as_rows else _columns(rows, keys), num_input_bytes


def _arrow_rows(
    source: SourceFile, keys: Sequence[str], _: int, block_bytes: int, as_rows: bool
) -> Iterator[tuple[Any, int]]:
    reader, file = _open_arrow(source, keys, as_rows)
    with contextlib.closing(file):
        if isinstance(reader, pyarrow.ipc.RecordBatchFileReader):
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            batches = iter(reader)
        counted = 0
        for batch in batches:
            position = file.tell()
            rows = batch if as_rows else _columns(batch, keys)
            at_once = max(1, len(rows) * block_bytes // max(1, rows.nbytes))
            for start in range(0, len(rows), at_once):
                yield rows.slice(start, at_once), max(0, position - counted) if start == 0 else 0
            counted = max(counted, position)


def _open_parquet(source: SourceFile, keys: Sequence[str], as_rows: bool) -> Any:
    try:
        file = pyarrow.parquet.ParquetFile(source.name if source.transport == "file" else open_source(source))
    except DAMAGE as error:
        raise _not_readable(source, "Parquet", error) from error
    _check_schema(source, file.schema_arrow, keys, as_rows)
    return file


def _open_arrow(source: SourceFile, keys: Sequence[str], as_rows: bool) -> tuple[Any, Any]:
    """Return the reader of the record batches, and its file."""
    file = pyarrow.OSFile(source.name) if source.transport == "file" else open_source(source)
    try:
        magic = file.read(len(ARROW_FILE_MAGIC))
        file.seek(0)
        reader = pyarrow.ipc.open_file(file) if magic == ARROW_FILE_MAGIC else pyarrow.ipc.open_stream(file)
    except DAMAGE as error:
        raise _not_readable(source, "Arrow", error) from error
    _check_schema(source, reader.schema, keys, as_rows)
    return reader, file


def _not_readable(source: SourceFile, kind: str, error: Exception) -> DataError:
    return DataError(f"{source.name} is not a readable {kind} file ({error}); copy it again, or leave it out")


def _columns(rows: Any, keys: Sequence[str]) -> Any:
    """Return a record batch of the columns of strings under `keys`."""
    columns = []
    for key in keys:
        first, *inner = _path(rows.schema, key) or ()
        column = rows.column(first)
        columns.append(pyarrow.compute.struct_field(column, inner) if inner else column)
    return pyarrow.RecordBatch.from_arrays(columns, names=list(keys))


def _path(fields: Any, key: str) -> tuple[int, ...] | None:
    """Return the place of a column, and those of the fields within it; None if there is none.

    As in JSON (document_parser.value_at), each dot steps into a struct, unless a name has that dot in it. `fields` is a
    schema or a struct. Raises ValueError if a name on the way occurs twice.
    """
    if places := fields.get_all_field_indices(key):
        if len(places) > 1:
            raise ValueError(key)
        return (places[0],)
    for dot in (i for i, character in enumerate(key) if character == "."):
        places = fields.get_all_field_indices(key[:dot])
        if not any(pyarrow.types.is_struct(fields.field(place).type) for place in places):
            continue
        if len(places) > 1:
            raise ValueError(key[:dot])
        if (rest := _path(fields.field(places[0]).type, key[dot + 1 :])) is not None:
            return (places[0], *rest)
    return None


def _names_near(schema: Any, key: str) -> Iterator[str]:
    """Yield the columns of a table, those of a struct that `key` steps into by their path."""
    for field in schema:
        if pyarrow.types.is_struct(field.type) and key.startswith(f"{field.name}."):
            yield from (f"{field.name}.{inner.name}" for inner in field.type)
        else:
            yield field.name


def _check_schema(source: SourceFile, schema: Any, keys: Sequence[str], as_rows: bool) -> None:
    if as_rows:
        if not set(schema.names) & set(keys):
            raise DataError(
                f"{source.name} has the columns {', '.join(schema.names)}, and none of {', '.join(keys)}; rename them, "
                "or see --prompt-template"
            )
        if repeated := sorted({name for name in schema.names if schema.names.count(name) > 1}):
            raise DataError(f"{source.name} has several columns {repeated[0]!r}; one of them would be lost: rename it")
        return
    for key in keys:
        try:
            path = _path(schema, key)
        except ValueError as error:
            raise DataError(
                f"{source.name} has several columns {str(error)!r}; one of them would be lost: rename it"
            ) from None
        if path is None:
            names = ", ".join(_names_near(schema, key))
            raise DataError(f"{source.name} has no column {key!r}, but {names} (see --json-keys)")
        field = schema.field(path[0])
        for place in path[1:]:
            field = field.type.field(place)
        kind = field.type
        value_kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(value_kind) or pyarrow.types.is_large_string(value_kind)):
            raise DataError(f"{source.name}: column {key!r} holds {kind}, not strings (see --json-keys)")
