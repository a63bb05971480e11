"""Starts of kernels by what Triton has compiled, with a stand-in for Triton."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.parallel.operators import triton_launcher
from megatron.parallel.operators.triton_launcher import Launcher


@pytest.fixture(autouse=True)
def of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launcher, "starts_compiled", lambda: True)


class Kernel:
    """Compiles at each start that is not by a compiled variant, and notes all starts."""

    def __init__(self, *arg_names: str) -> None:
        self.arg_names = arg_names
        self.compiled: list[Any] = []
        self.started: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def compile_and_start(*arguments: Any, num_warps: int, **constants: Any) -> Any:
            self.compiled.append((arguments, num_warps, constants))
            return Variant(self, len(self.compiled))

        return compile_and_start


class Variant:
    def __init__(self, kernel: Kernel, number: int) -> None:
        self._kernel, self._number = kernel, number

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        assert len(grid) == 3
        return lambda *arguments: self._kernel.started.append((self._number, grid, arguments))


def test_a_second_start_is_that_of_the_compiled_variant() -> None:
    kernel, x = Kernel("x", "rows", "other", "BLOCK", "WRITE"), torch.zeros(64)
    start = Launcher(kernel)
    for rows in (48, 32, 160):
        start((rows,), x, rows, None, BLOCK=8, WRITE=True, num_warps=2)
    assert [each[1:] for each in kernel.compiled] == [(2, {"BLOCK": 8, "WRITE": True})]
    assert kernel.started == [(1, (rows, 1, 1), (x, rows, None, 8, True)) for rows in (32, 160)]


def test_a_variant_is_of_one_kind_of_each_argument() -> None:
    """What Triton compiles for: types, alignment, numbers that are 1 or multiples of 16, none, constants, warps."""
    x, kernel = torch.zeros(64), Kernel("x", "rows", "y", "BLOCK")
    start = Launcher(kernel)
    kinds: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, 16, x), {"BLOCK": 8}),
        ((x.half(), 16, x), {"BLOCK": 8}),
        ((x[1:], 16, x), {"BLOCK": 8}),  # 4 bytes behind an address of 16
        ((x, 17, x), {"BLOCK": 8}),
        ((x, 1, x), {"BLOCK": 8}),
        ((x, 2**31, x), {"BLOCK": 8}),
        ((x, 16, None), {"BLOCK": 8}),
        ((x, 16, x), {"BLOCK": 16}),
        ((x, 16, x), {"BLOCK": 8, "num_warps": 8}),
    ]
    for _ in range(2):
        for arguments, options in kinds:
            start((4, 2), *arguments, **options)
    assert len(kernel.compiled) == len(kinds)
    assert [number for number, _, _ in kernel.started] == list(range(1, len(kinds) + 1))


def test_constants_in_another_order_are_refused() -> None:
    """A compiled kernel would take one for the other."""
    start = Launcher(Kernel("x", "ROWS", "COLUMNS"))
    with pytest.raises(TypeError, match="the constants COLUMNS, ROWS are not the last parameters, ROWS, COLUMNS"):
        start((1,), 3, COLUMNS=8, ROWS=4)


def test_an_interpreter_that_compiles_nothing_is_called_each_time() -> None:
    calls: list[Any] = []

    class Interpreted:
        arg_names = ("x",)

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **options: calls.append(arguments)

    start = Launcher(Interpreted())
    start((1,), 3)
    start((1,), 3)
    assert calls == [(3,), (3,)]


@pytest.mark.parametrize(
    ("version", "hip", "expected"),
    [
        ("3.1.0", None, False),
        ("3.2.1", None, False),
        ("3.3.0", None, True),
        ("3.10.0+git", None, True),
        ("3.6.0", "6.4", False),
    ],
)
def test_where_a_compiled_kernel_is_started(
    monkeypatch: pytest.MonkeyPatch, version: str, hip: str | None, expected: bool
) -> None:
    """Older ones take fewer arguments, and AMD's are compiled for more kinds."""
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert triton_launcher.starts_compiled.__wrapped__() is expected


def test_without_that_each_start_is_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launcher, "starts_compiled", lambda: False)
    kernel = Kernel("rows")
    start = Launcher(kernel)
    start((1,), 3)
    start((1,), 3)
    assert (len(kernel.compiled), kernel.started) == (2, [])
