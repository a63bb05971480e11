"""Reader of Parquet and Arrow files, a document a row.

Not by pyarrow.dataset, which refuses Arrow streams, the form of Hugging Face's datasets, and whose batches have neither
a row from which reading could resume nor a size in bytes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet

from megatron.data.index.indexed import DataError
from megatron.data.read.contents import open_source
from megatron.data.read.document_blocks import Block, Position, ReadingRules, cuts_at_dots, rest_is_lost
from megatron.data.read.remote import lost_connection
from megatron.data.read.sources import SourceFile

DAMAGE = (pyarrow.ArrowException, OSError, ValueError)
ARROW_FILE_MAGIC = b"ARROW1"
"""Beginning of an Arrow file. Arrow also has streams, which Hugging Face's datasets are, with the same ending."""


def check_columns(sources: Sequence[SourceFile], rules: ReadingRules) -> None:
    """Raise DataError for a table without the columns, before hours are spent on others.

    These are a string column for each key or, with `as_rows`, at least one column of any type.
    """
    for source in sources:
        if source.kind == "parquet":
            # opening reads the schema, at the end of the file
            _open_parquet(source, rules)
        elif source.kind == "arrow":
            _open_arrow(source, rules)[1].close()


def table_blocks(source: SourceFile, rules: ReadingRules, start: Position) -> Iterator[Block]:
    """Yield the rows from `start`, in blocks of about `block_bytes`. Raises DataError if the file cannot be opened."""
    at = start
    row = 0
    try:
        batches = _parquet_rows(source, rules, start.offset) if source.kind == "parquet" else _arrow_rows(source, rules)
        for rows, num_input_bytes in batches:
            row += len(rows)
            if row <= at.offset:
                continue
            # batches begin where the writer has made them, so a resumed run cuts the first
            rows = rows.slice(max(0, at.offset - (row - len(rows))))
            begin, at = at, at.after_rows(len(rows))
            yield Block(source, begin, at, num_input_bytes, rows=rows)
    except DataError:
        raise
    except Exception as error:
        # what a connection may raise depends on its library
        if source.transport == "url":
            raise lost_connection(source.name, error) from error
        if not isinstance(error, DAMAGE):
            raise
        yield rest_is_lost(source, at, 0, f"the file is damaged from here on ({error})")


def _parquet_rows(source: SourceFile, rules: ReadingRules, skip_rows: int) -> Iterator[tuple[Any, int]]:
    """Yield rows and the bytes of the file that they stand for. Rows to be skipped may come without columns."""
    file = _open_parquet(source, rules)
    names = list(rules.keys)
    if rules.as_rows:
        names = file.schema_arrow.names
    num_rows, file_bytes = max(1, file.metadata.num_rows), source.num_bytes or 0
    row = 0
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        # a whole group is skipped without being read
        if row + group.num_rows <= skip_rows:
            row += group.num_rows
            yield range(group.num_rows), 0
            continue
        # rows of one block, if all rows of the group are of one size
        batch_size = max(1, group.num_rows * rules.content_bytes // max(1, _bytes_to_read(group, rules)))
        for rows in file.iter_batches(batch_size=batch_size, row_groups=[number], columns=names):
            before = max(row, min(skip_rows, row + len(rows)))
            row += len(rows)
            yield _columns(rows, rules), file_bytes * row // num_rows - file_bytes * before // num_rows


def _bytes_to_read(group: Any, rules: ReadingRules) -> int:
    """Return the uncompressed size of the columns of a row group that are read."""
    columns = [group.column(number) for number in range(group.num_columns)]
    if not rules.as_rows:
        columns = [column for column in columns if column.path_in_schema in rules.keys]
    return sum(column.total_uncompressed_size for column in columns)


def _arrow_rows(source: SourceFile, rules: ReadingRules) -> Iterator[tuple[Any, int]]:
    reader, file = _open_arrow(source, rules)
    with contextlib.closing(file):
        batches = reader
        # a file has a table of its batches, a stream only the next one
        if isinstance(reader, pyarrow.ipc.RecordBatchFileReader):
            batches = map(reader.get_batch, range(reader.num_record_batches))
        counted = 0
        for batch in batches:
            position = file.tell()
            rows = _columns(batch, rules)
            at_once = max(1, len(rows) * rules.content_bytes // max(1, rows.nbytes))
            # the first slice of a batch stands for all bytes read since the one before
            num_input_bytes = max(0, position - counted)
            for start in range(0, len(rows), at_once):
                yield rows.slice(start, at_once), num_input_bytes
                num_input_bytes = 0
            counted = max(counted, position)


def _open_parquet(source: SourceFile, rules: ReadingRules) -> Any:
    try:
        file = pyarrow.parquet.ParquetFile(source.name if source.transport == "file" else open_source(source))
    except DAMAGE as error:
        raise _not_readable(source, "Parquet", error) from error
    _check_schema(source, file.schema_arrow, rules)
    return file


def _open_arrow(source: SourceFile, rules: ReadingRules) -> tuple[Any, Any]:
    """Return the reader of the record batches, and its file."""
    file = pyarrow.OSFile(source.name) if source.transport == "file" else open_source(source)
    try:
        magic = file.read(len(ARROW_FILE_MAGIC))
        file.seek(0)
        reader = pyarrow.ipc.open_file(file) if magic == ARROW_FILE_MAGIC else pyarrow.ipc.open_stream(file)
    except DAMAGE as error:
        raise _not_readable(source, "Arrow", error) from error
    _check_schema(source, reader.schema, rules)
    return reader, file


def _not_readable(source: SourceFile, kind: str, error: Exception) -> DataError:
    return DataError(f"{source.name} is not a readable {kind} file ({error}); copy it again, or leave it out")


def _columns(rows: Any, rules: ReadingRules) -> Any:
    """Return a record batch of the columns that are read."""
    if rules.as_rows:
        return rows
    columns = []
    for key in rules.keys:
        first, *inner = _path(rows.schema, key) or ()
        column = rows.column(first)
        if inner:
            column = pyarrow.compute.struct_field(column, inner)
        columns.append(column)
    return pyarrow.RecordBatch.from_arrays(columns, names=list(rules.keys))


def _path(fields: Any, key: str) -> tuple[int, ...] | None:
    """Return the index of a column, and those of the fields within it; None if there is none.

    As in JSON (document_parser.value_at), each dot steps into a struct, unless a name has that dot in it. `fields` is a
    schema or a struct. Raises ValueError if a name on the way occurs twice.
    """
    indices = fields.get_all_field_indices(key)
    if len(indices) > 1:
        raise ValueError(key)
    if indices:
        return (indices[0],)
    for name, rest in cuts_at_dots(key):
        indices = fields.get_all_field_indices(name)
        if not any(pyarrow.types.is_struct(fields.field(index).type) for index in indices):
            continue
        if len(indices) > 1:
            raise ValueError(name)
        inner = _path(fields.field(indices[0]).type, rest)
        if inner is not None:
            return (indices[0], *inner)
    return None


def _names_near(schema: Any, key: str) -> Iterator[str]:
    """Yield the columns of a table, those of a struct that `key` steps into by their path."""
    for field in schema:
        if pyarrow.types.is_struct(field.type) and key.startswith(f"{field.name}."):
            yield from (f"{field.name}.{inner.name}" for inner in field.type)
        else:
            yield field.name


def _check_schema(source: SourceFile, schema: Any, rules: ReadingRules) -> None:
    """Raise DataError for a table without the columns that are needed."""
    if rules.as_rows:
        _check_names(source, schema.names, rules.keys)
        return
    for key in rules.keys:
        _check_strings(source, schema, key)


def _check_names(source: SourceFile, names: Sequence[str], keys: Sequence[str]) -> None:
    if not set(names) & set(keys):
        raise DataError(
            f"{source.name} has the columns {', '.join(names)}, and none of {', '.join(keys)}; rename them, or see "
            "--prompt-template"
        )
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise _several_columns(source, min(repeated))


def _check_strings(source: SourceFile, schema: Any, key: str) -> None:
    try:
        path = _path(schema, key)
    except ValueError as error:
        raise _several_columns(source, str(error)) from None
    if path is None:
        names = ", ".join(_names_near(schema, key))
        raise DataError(f"{source.name} has no column {key!r}, but {names} (see --json-keys)")
    field = schema.field(path[0])
    for index in path[1:]:
        field = field.type.field(index)
    kind = field.type
    # repeated texts are often stored as numbers of a dictionary
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not pyarrow.types.is_string(kind) and not pyarrow.types.is_large_string(kind):
        raise DataError(f"{source.name}: column {key!r} holds {field.type}, not strings (see --json-keys)")


def _several_columns(source: SourceFile, name: str) -> DataError:
    return DataError(f"{source.name} has several columns {name!r}; one of them would be lost: rename it")
