"""Starts of Triton's kernels that take the host little time. Without Triton, which is imported on CUDA only."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

FIRST_VERSION = (3, 3)
"""The version of Triton from which a compiled kernel takes its constants by their place, as `JITFunction.run` does."""


@functools.cache
def starts_compiled() -> bool:
    """Return True if a compiled kernel may be started by itself.

    AMD's are compiled for the sizes of tensors too, which `_kind` does not look at.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return torch.version.hip is None and version >= FIRST_VERSION


class Launcher:
    """Starts a kernel, from the second time on without Triton's own look at each argument.

    That takes the host some 40 us, longer than a small kernel takes the device: a step in fp8 waited for it. Source:
    Triton's tutorial of a fused softmax, which starts what it has compiled by `compiled[grid](...)`.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._variants: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
        """Start it. `constants`: its last parameters, in their order."""
        if not starts_compiled():
            self._kernel[grid](*arguments, num_warps=num_warps, **constants)
            return
        variant = (num_warps, *constants.values(), *map(_kind, arguments))
        compiled = self._variants.get(variant)
        if compiled is None:  # as always in Triton's interpreter, which compiles nothing
            last = tuple(self._kernel.arg_names[len(arguments) :])
            if last != tuple(constants):  # a compiled kernel takes them by their place
                raise TypeError(f"the constants {', '.join(constants)} are not the last parameters, {', '.join(last)}")
            self._variants[variant] = self._kernel[grid](*arguments, num_warps=num_warps, **constants)
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants.values())


def _kind(argument: Any) -> Any:
    """Return the properties of an argument for which Triton compiles a kernel of its own for NVIDIA's devices.

    Source: `native_specialize_impl` of Triton 3.6, and `get_tensor_specialization` of its backends.
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.get_device(), argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return argument is None
