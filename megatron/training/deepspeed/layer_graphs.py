"""Transformer layers of a stage whose passes in training are replayed as graphs of the device.

A graph starts all kernels of a pass at once, where the host takes longer to start each than a fast device to compute
it. Each layer has a graph of its forward and one of its backward pass, which read the results of the one before where
they lie; the first input and the last gradient are copied in. Graphs of one microbatch keep its activations from its
forward to its backward pass, so a pipeline has as many sets of them as it has microbatches on their way.

A replay runs no Python. What layers do beside their operators is done around it: the optimizer's sums are opened and
closed, and operands of weights in fp8 computed once a step, by a graph of their own.
Source: torch.cuda.make_graphed_callables; Megatron-LM, core/transformer/cuda_graphs.py (cuda_graph_impl=local).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from megatron.generation.graphs import captured, what_is_read
from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import ParallelLinear
from megatron.parallel.operators.fp8_linear import ScaledMethod
from megatron.parallel.operators.weight_gradient import GradientSum


class LayerGraphs:
    """Consecutive transformer layers in the place of one: [rows, B, H] -> [rows, B, H].

    Without a backward pass, as in an evaluation, and while a step is checked again, the layers run as they are.
    """

    def __init__(self, layers: Sequence[nn.Module], ctx: ParallelContext) -> None:
        self._layers, self._ctx = layers, ctx
        self._free: list[_Slot] = []
        self._addresses: list[int] = []
        self._weights: _Weights | None = None
        self.num_slots = 0
        """Sets of graphs that were captured."""

    def __call__(self, hidden: Tensor) -> Tensor:
        trained = [p for layer in self._layers for p in _trained(layer)]
        has_gradient = torch.is_grad_enabled() and (hidden.requires_grad or bool(trained))
        # the first step compiles kernels, and makes what there is from then on; steps are counted without fp8 too
        is_first = self._ctx.state.fp8.step < 2
        if not has_gradient or is_first or self._ctx.state.is_recheck:
            for layer in self._layers:
                hidden = layer(hidden)
            return hidden
        self._forget_if_moved()
        try:
            self._capture(hidden)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as a layer of one's own that reads a number on the host
            reason = str(error).partition("\n")[0]
            raise ConfigError([f"cuda_graph_impl=local cannot capture a layer: {reason}; leave it out"]) from error
        output: Tensor = _Replay.apply(hidden, self._free.pop(), self._free, *trained)
        return output

    def _capture(self, hidden: Tensor) -> None:
        """Have a free slot, and the step's operands of weights."""
        if self._weights is None:
            self._weights = _Weights(self._layers, hidden.dtype)
        self._weights.compute(self._ctx.state.fp8.step)
        if not self._free:
            self._free.append(_Slot(self._layers, hidden))
            self.num_slots += 1

    def _forget_if_moved(self) -> None:
        # a graph reads the addresses that were there when it was captured
        addresses = [parameter.data_ptr() for layer in self._layers for parameter in layer.parameters()]
        if addresses != self._addresses:
            self._addresses, self._weights = addresses, None
            self._free = []  # those on their way are not put back into this list


class _Replay(torch.autograd.Function):
    """The layers' passes by the graphs of a slot, which is free again after the backward pass."""

    @staticmethod
    def forward(function: Any, hidden: Tensor, slot: _Slot, free: list[_Slot], *trained: Tensor) -> Tensor:
        function.slot, function.free = slot, free
        return slot.forward(hidden)

    @staticmethod
    @once_differentiable
    def backward(function: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        slot: _Slot = function.slot
        slot.backward(gradient)
        function.free.append(slot)
        return slot.input_gradient, None, None, *slot.gradients


@dataclass
class _Passes:
    """The graphs of one layer, and what they were captured with."""

    layer: nn.Module
    aliases: list[Any]
    """The parameters that autograd sees."""
    forward: Any
    input: Tensor
    output: Tensor
    backward: Any = None
    """None: the layer has nothing to train, nor have those before it."""
    sums: Sequence[GradientSum] = ()
    """Sums to which the backward pass adds."""


class _Slot:
    """Graphs of one microbatch's passes, and the memory that they read and write."""

    def __init__(self, layers: Sequence[nn.Module], hidden: Tensor) -> None:
        self._pool: Any = None
        self._input = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        self._held = [what_is_read(layer, (self._input,)) for layer in layers]
        self._passes: list[_Passes] = []
        given = self._input
        for layer in layers:
            aliases = _aliases(layer)
            graph, output = self._captured(partial(functional_call, layer, aliases, given))
            self._passes.append(_Passes(layer, list(aliases.values()), graph, given, output))
            given = output.detach().requires_grad_(output.requires_grad)
        self._output = given.detach()
        self._output_gradient = torch.zeros_like(self._output)
        self.gradients: list[Tensor | None] = []
        """Gradients of the layers' trained parameters, in their order; None: added to the parameter's sum."""
        self.input_gradient = self._capture_backward()

    def _capture_backward(self) -> Tensor | None:
        """Capture the backward passes, the last layer's first. Return the gradient of the first input."""
        gradient: Tensor | None = self._output_gradient
        for each in reversed(self._passes):
            trained = [alias for alias in each.aliases if alias.requires_grad]
            if gradient is None or not each.output.requires_grad:
                self.gradients = [*([None] * len(trained)), *self.gradients]
                continue
            wanted = [each.input, *trained] if each.input.requires_grad else trained
            compute = partial(torch.autograd.grad, each.output, wanted, gradient, allow_unused=True)
            each.backward, found = self._captured(compute)
            own = [p for p, alias in zip(_trained(each.layer), trained, strict=True) if _is_added_by_layer(alias)]
            each.sums = [parameter.gradient_sum for parameter in own]
            gradient, of_trained = None, list(found)
            if each.input.requires_grad:
                gradient, *of_trained = found
            self.gradients = [*of_trained, *self.gradients]
            # what autograd holds of the passes: their memory is free for the graphs that follow
            each.output, each.aliases = each.output.detach(), []
        return gradient

    def _captured(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        """Return a graph of the function's operators, and its results, which a replay computes."""
        graph, results, self._pool = captured(get_accelerator(), function, self._pool)
        return graph, results

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.shape != self._input.shape:  # copy_ would repeat it
            raise ValueError(
                f"cuda_graph_impl=local has captured layers for {tuple(self._input.shape)}, not {tuple(hidden.shape)}"
            )
        self._input.detach().copy_(hidden)
        for each in self._passes:
            get_accelerator().replay_graph(each.forward)
        return self._output.detach()

    def backward(self, gradient: Tensor) -> None:
        """Compute `input_gradient` and `gradients`, and add to the sums."""
        self._output_gradient.copy_(gradient)
        for each in reversed(self._passes):
            if each.backward is None:
                continue
            for own in each.sums:
                total, has_gradient = own.open()
                if not has_gradient:  # the graph adds, whatever is there
                    total.zero_()
            get_accelerator().replay_graph(each.backward)
            for own in each.sums:  # which may start to reduce them, behind the layers that follow
                own.close()


class _Weights:
    """Operands in fp8 that linear layers keep of their weights, computed where graphs read them."""

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._methods: list[ScaledMethod] = []
        linears = [part for layer in layers for part in layer.modules() if isinstance(part, ParallelLinear)]
        kept = [part for part in linears if isinstance(part.base, ScaledMethod) and part.base.keeps_weight]
        if not kept:
            return

        def compute() -> None:
            for linear in kept:
                linear.base.keep_weight(linear, dtype)  # type: ignore[attr-defined]

        self._graph, *_ = captured(get_accelerator(), torch.no_grad()(compute))
        self._methods = [linear.base for linear in kept]  # type: ignore[misc]
        self._operands = [linear.base.kept for linear in kept]  # type: ignore[attr-defined]
        self._step = -1
        """The step whose weights they are of."""

    def compute(self, step: int) -> None:
        """Compute them, once a step."""
        if not self._methods or self._step == step:
            return
        get_accelerator().replay_graph(self._graph)
        for method, operands in zip(self._methods, self._operands, strict=True):
            method.kept = operands._replace(step=step)
        self._step = step


def _trained(layer: nn.Module) -> list[Any]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


class _Memory(GradientSum):
    """Memory of a parameter's sum, to which a captured pass adds, and nothing is counted."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.is_opened = False
        """The layer adds to it itself, rather than give autograd the gradient."""

    def open(self) -> tuple[Tensor, bool]:
        self.is_opened = True
        return self._memory, True

    def close(self) -> None: ...


def _is_added_by_layer(alias: Any) -> bool:
    return hasattr(alias, "gradient_sum") and alias.gradient_sum.is_opened


# DeepSpeed keeps autograd's nodes of the parameters, which belong to the stream on which they were made. A capture
# would make that one wait for it, which CUDA refuses.
def _aliases(layer: nn.Module) -> dict[str, Any]:
    """Return parameters in the layer's memory, by name, with nodes of their own."""
    aliases: dict[str, Any] = {}
    for name, parameter in layer.named_parameters():
        alias: Any = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        vars(alias).update(vars(parameter))
        if hasattr(alias, "gradient_sum"):
            alias.gradient_sum = _Memory(alias.gradient_sum.memory)
        aliases[name] = alias
    return aliases
