"""Measured rates: the form of their file, and look-ups in its tables.

Sizes rise along each axis; a grid's seconds stand in one list, the last axis fastest. `tables` are by the threads of a
rank: ranks that share the cores of a host have fewer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from megatron.options.types import STRICT, DeviceName, NonNegativeFloat, Positive, PositiveFloat
from megatron.plan.rates.exchanges import MeasuredExchange
from megatron.plan.rates.grids import Grid, Line, axis_faults
from megatron.plan.rates.rates import Collective, Direction, Pointwise, Precision, Rates, RatesError, Role, Span, Starts

K = TypeVar("K", bound=str)
T = TypeVar("T")


def _words(value: Any) -> Any:
    """Return the numbers of a list that stands in the file as words: YAML takes long for a thousand values."""
    return value.split() if isinstance(value, str) else value


Sizes = Annotated[tuple[Positive, ...], BeforeValidator(_words)]
Seconds = Annotated[tuple[PositiveFloat, ...], BeforeValidator(_words)]


# ---------------------------------------------------------------------------------------------------------------------
# File


@dataclass(frozen=True, config=STRICT)
class ProductTable:
    """Products of linear layers."""

    tokens: Sizes
    outputs: Sizes
    inputs: Sizes
    forward: Seconds
    input: Seconds
    weight: Seconds

    @functools.cached_property
    def grids(self) -> dict[str, Grid]:
        axes = (self.tokens, self.outputs, self.inputs)
        return {name: Grid(axes, getattr(self, name)) for name in ("forward", "input", "weight")}


@dataclass(frozen=True, config=STRICT)
class AttentionTable:
    """Cores of attentions."""

    heads: Sizes
    """Query heads of all rows."""
    row_tokens: Sizes
    head_size: Sizes
    group: Sizes
    """Query heads of a key/value head."""
    forward: Seconds
    backward: Seconds

    @functools.cached_property
    def grids(self) -> dict[str, Grid]:
        axes = (self.heads, self.row_tokens, self.head_size, self.group)
        # scores are the square of a row; the heads of a group share keys and values, and cost alike
        powers = (1.0, 2.0, 1.0, 0.0)
        return {name: Grid(axes, getattr(self, name), powers) for name in ("forward", "backward")}


@dataclass(frozen=True, config=STRICT)
class PointwiseTable:
    """An operation on each number of a tensor."""

    numbers: Sizes
    forward: Seconds
    backward: Seconds

    @functools.cached_property
    def lines(self) -> dict[str, Line]:
        return {name: Line(self.numbers, getattr(self, name)) for name in ("forward", "backward")}


@dataclass(frozen=True, config=STRICT)
class UpdateTable:
    """Steps of an optimizer."""

    numbers: Sizes
    seconds: Seconds

    @functools.cached_property
    def line(self) -> Line:
        return Line(self.numbers, self.seconds)


@dataclass(frozen=True, config=STRICT)
class BytesTable:
    """Seconds by bytes: of copies, and of collectives in one group."""

    bytes: Sizes
    seconds: Seconds

    @functools.cached_property
    def line(self) -> Line:
        return Line(self.bytes, self.seconds)


@dataclass(frozen=True, config=STRICT)
class CollectiveTable(BytesTable):
    """A collective in one group; bytes of the whole tensor."""

    size: Positive
    per_node: Positive
    sharing: Positive = 1


@dataclass(frozen=True, config=STRICT)
class RankTables:
    """Seconds of a rank's own operations."""

    threads: Positive
    products: Mapping[Precision, ProductTable]
    attention: Mapping[str, Mapping[Precision, AttentionTable]]
    """By kind, such as `causal`, `alibi` and `window`, and precision."""
    pointwise: Mapping[Pointwise, Mapping[Precision, PointwiseTable]]
    update: Mapping[str, Mapping[Precision, UpdateTable]]
    """By optimizer and precision."""
    copy: BytesTable
    starts: Starts
    host_copy: BytesTable | None = None


@dataclass(frozen=True, config=STRICT)
class MeasuredFile:
    """A file of measured rates."""

    version: Literal[1]
    origin: Literal["measured"]
    title: str
    device: DeviceName
    source: str
    tables: tuple[RankTables, ...]
    peak_flops: Mapping[Precision, PositiveFloat]
    collectives: Mapping[Collective, tuple[CollectiveTable, ...]] = field(default_factory=dict)
    cores: Positive | None = None
    """Cores that the ranks of a host share; only where the device is the host."""
    slowdown: Mapping[Positive, PositiveFloat] = field(default_factory=dict)
    """Factor by which a pass takes longer while so many ranks of a host compute."""
    disk_bytes_per_s: PositiveFloat | None = None
    spread: NonNegativeFloat | None = None
    """Largest middle half of repeats of a measurement, over its median, among most measurements."""


def file_faults(file: MeasuredFile) -> Iterator[str]:
    """Yield what is wrong between the values of a file."""
    if not file.tables:
        yield "tables is empty; measure again"
    for tables in file.tables:
        at = f"tables of {tables.threads} threads"
        for name, table, axes in _grid_tables(tables):
            yield from _table_faults(f"{at}: {name}", table, axes)
        for name, table, sizes in _line_tables(tables):
            yield from _table_faults(f"{at}: {name}", table, sizes)
    for kind, groups in file.collectives.items():
        for group in groups:
            yield from _table_faults(f"{kind} of {group.size}", group, {"bytes": group.bytes})
            if group.size < 2 or group.per_node > group.size:
                yield f"{kind}: a group of {group.size} with {group.per_node} on a node is none; measure again"


Axes = Mapping[str, tuple[int, ...]]


def _grid_tables(tables: RankTables) -> Iterator[tuple[str, object, Axes]]:
    """Yield the tables over several sizes, with their names and axes."""
    for precision, product in tables.products.items():
        axes = {"tokens": product.tokens, "outputs": product.outputs, "inputs": product.inputs}
        yield f"{precision} products", product, axes
    for kind, of_kind in tables.attention.items():
        for precision, attention in of_kind.items():
            axes = {name: getattr(attention, name) for name in ("heads", "row_tokens", "head_size", "group")}
            yield f"{precision} attention {kind}", attention, axes


def _line_tables(tables: RankTables) -> Iterator[tuple[str, object, Axes]]:
    """Yield the tables over one size, with their names and axes."""
    for operation, by_precision in tables.pointwise.items():
        for precision, table in by_precision.items():
            yield f"{precision} {operation}", table, {"numbers": table.numbers}
    for optimizer, of_optimizer in tables.update.items():
        for precision, steps in of_optimizer.items():
            yield f"{precision} {optimizer}", steps, {"numbers": steps.numbers}
    for name, copies in (("copy", tables.copy), ("host_copy", tables.host_copy)):
        if copies is not None:
            yield name, copies, {"bytes": copies.bytes}


def _table_faults(name: str, table: object, axes: Axes) -> Iterator[str]:
    for axis, sizes in axes.items():
        yield from axis_faults(f"{name}: {axis}", sizes)
    points = math.prod(len(sizes) for sizes in axes.values())
    for column in ("forward", "backward", "input", "weight", "seconds"):
        seconds = getattr(table, column, None)
        if seconds is not None and len(seconds) != points:
            yield f"{name}: {column} has {len(seconds)} values; its axes have {points} points"


# ---------------------------------------------------------------------------------------------------------------------
# Look-ups


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MeasuredRates(Rates):
    """Look-ups in the tables of a file, for ranks of so many threads."""

    is_measured = True

    file: MeasuredFile
    tables: RankTables

    @classmethod
    def of(cls, file: MeasuredFile, origin: str) -> MeasuredRates:
        """Return the rates of a rank that has a host for itself, or as much of one as was measured."""
        tables = max(file.tables, key=lambda each: each.threads)
        return cls(
            title=file.title,
            device=file.device,
            source=file.source,
            origin=origin,
            starts=tables.starts,
            peak_flops=file.peak_flops,
            disk_bytes_per_s=file.disk_bytes_per_s,
            file=file,
            tables=tables,
        )

    def for_ranks(self, ranks: int) -> MeasuredRates:
        """Return the rates of one of so many ranks of a host. Raises RatesError if these have other threads."""
        if self.file.cores is None:
            return self
        # as the launcher sets OMP_NUM_THREADS
        threads = max(1, self.file.cores // ranks)
        for tables in self.file.tables:
            if tables.threads == threads:
                return dataclasses.replace(self, tables=tables, starts=tables.starts)
        have = ", ".join(str(tables.threads) for tables in self.file.tables)
        raise RatesError(
            f"{ranks} ranks on {self.file.cores} cores have {threads} threads each, but {self.origin} has rates of "
            f"{have}; measure with megatron-plan --measure and --num-devices {ranks}"
        )

    def product(self, precision: str, role: Role, tokens: float, outputs: float, inputs: float) -> float:
        return self._of_precision(self.tables.products, precision, "products").grids[role].at(tokens, outputs, inputs)

    def attention(
        self,
        precision: str,
        direction: Direction,
        *,
        rows: float,
        row_tokens: float,
        heads: float,
        kv_heads: float,
        head_size: float,
        kind: str = "causal",
        seen_share: float = 1.0,
    ) -> float:
        of_kind = self._of_kind(self.tables.attention, kind, "attention")
        table = self._of_precision(of_kind, precision, f"attention {kind!r}")
        whole = table.grids[direction].at(rows * heads, row_tokens, head_size, heads / kv_heads)
        return whole * seen_share

    def pointwise(self, kind: str, direction: Direction, precision: str, numbers: float) -> float:
        of_kind = self._of_kind(self.tables.pointwise, kind, "operation")
        return self._of_precision(of_kind, precision, kind).lines[direction].at(numbers)

    def collective(self, kind: Collective, size_bytes: float, span: Span) -> float:
        if span.size == 1:
            return 0.0
        tables = self._of_kind(self.file.collectives, kind, "collective")
        groups = [MeasuredExchange(kind, Span(each.size, each.per_node, each.sharing), each.line) for each in tables]
        alike = [group for group in groups if group.span.crosses_nodes == span.crosses_nodes]
        if not alike:
            where = "across nodes" if span.crosses_nodes else "within a node"
            raise RatesError(
                f"no {kind} {where} in {self.origin}; measure it with megatron-plan --measure on "
                + ("the nodes of a --hostsfile" if span.crosses_nodes else "more devices of a node")
            )
        return min(alike, key=lambda group: group.distance_to(span)).at(size_bytes, span)

    def update(self, optimizer: str, precision: str, numbers: float) -> float:
        of_kind = self._of_kind(self.tables.update, optimizer, "optimizer")
        return self._of_precision(of_kind, precision, f"steps of {optimizer}").line.at(numbers)

    def copy(self, size_bytes: float) -> float:
        return self.tables.copy.line.at(size_bytes)

    def host_copy(self, size_bytes: float) -> float:
        # a device that is the host copies within its memory
        return (self.tables.host_copy or self.tables.copy).line.at(size_bytes)

    def slowdown(self, busy_ranks: int) -> float:
        if not self.file.slowdown or busy_ranks <= 1:
            return 1.0
        line = Line(*zip(*sorted({1: 1.0, **self.file.slowdown}.items()), strict=True))
        return line.at(busy_ranks)

    def _of_kind(self, tables: Mapping[K, T], kind: str, name: str) -> T:
        return self._table(tables, kind, f"{name} {kind!r}")

    def _of_precision(self, tables: Mapping[K, T], precision: str, name: str) -> T:
        return self._table(tables, precision, f"{precision} {name}")

    def _table(self, tables: Mapping[K, T], key: str, name: str) -> T:
        for known, table in tables.items():
            if known == key:
                return table
        raise self.missing(name, tables)
