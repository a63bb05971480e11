"""Forward passes of evaluations, replayed as graphs of the device, one for each shape of a microbatch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from megatron.generation.graphs import PassGraphs
from megatron.parallel.context import ParallelContext

MOST_GRAPHS = 64
"""Largest number of graphs of a stage, more than the lengths of rows of a fine-tuning run."""


class EvaluationGraphs:
    """The forward pass of a stage: within `on` by a graph, which reads the weights where training updates them."""

    def __init__(self, module: nn.Module, ctx: ParallelContext) -> None:
        """Take the place of the module's forward pass. Raises ConfigError where the device has no graphs."""
        self._graphs = PassGraphs(ctx, "eval_graphs", MOST_GRAPHS)
        self._is_last = ctx.is_last_stage
        self._forward: Callable[[Any], Any] = module.forward
        self._is_on = False
        module.forward = self._run  # type: ignore[method-assign]

    @property
    def count(self) -> int:
        """Number of graphs captured."""
        return self._graphs.count

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _run(self, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        if not self._is_on:
            return self._forward(inputs)
        is_one = isinstance(inputs, Tensor)
        tensors: tuple[Tensor, ...] = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        outputs = self._graphs.run(key, lambda *given: self._forward(given[0] if is_one else given), tensors)
        return self._taken(outputs) if isinstance(outputs, Tensor) else tuple(map(self._taken, outputs))

    def _taken(self, output: Tensor) -> Tensor:
        """Return an output; a copy where it is yet to be sent when a graph overwrites it.

        A weight is among those of the last stage. Autograd would refuse its view of an earlier evaluation.
        """
        if not self._is_last:
            return output.clone()
        taken = output.detach()
        vars(taken).update(vars(output))
        return taken
