"""The pointwise operators of a layer, in three forms: plain, eager in few passes, and compiled.

Shapes: S sequence, B batch, n query heads, k key/value heads, d head size, F intermediate width of the MLP. The plain
form is the reference. The eager form has fewer passes over memory, and keeps inputs instead of intermediate results.
The compiled form is the plain one through torch.compile, but for RMSNorm and SwiGLU's backward pass on CUDA. All
compute rotations and norms in float32. What is one kernel of torch's on every device (GELU, LayerNorm) or no faster
when compiled alone (dropout with residual) stands where it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.options.config import Config, ConfigError
from megatron.parallel.operators import token_kernels
from megatron.runtime.device import Device
from megatron.runtime.devices import device_of

log = logging.getLogger(__name__)

MAX_NORM_WIDTH = 8192
"""Most channels of an RMSNorm by Triton: a program holds all of them."""


# ---------------------------------------------------------------------------------------------------------------------
# Plain


def rotate(q_SBnd: Tensor, k_SBkd: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the channel pairs (i, i + d/2) of queries and keys by the angles of each token.

    q_SBnd: [S, B, n, d]. k_SBkd: [S, B, k, d]. cos, sin: float32 [S, 1 or B, 1, d/2].
    """
    return _rotated(q_SBnd, cos, sin), _rotated(k_SBkd, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # in float32: bfloat16 cannot hold the angles' cosines of long contexts apart
    first, second = _exact(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _exact(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return x
    return x.float()


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 F] -> [..., F]. Source: Shazeer 2020 (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, by the tanh approximation: [..., 2 F] -> [..., F]. Source: as of SwiGLU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean square in float32."""
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


# ---------------------------------------------------------------------------------------------------------------------
# Eager, in few passes


class _Rotate(torch.autograd.Function):
    """Keeps the angles alone; the backward pass turns the gradients back."""

    @staticmethod
    def forward(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        function.save_for_backward(cos, sin)
        return _turned(q, cos, sin, 1), _turned(k, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad_q: Tensor, grad_k: Tensor) -> Any:
        cos, sin = function.saved_tensors
        return _turned(grad_q, cos, sin, -1), _turned(grad_k, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Turn the channel pairs of x by the angles, or back (direction -1)."""
    exact = _exact(x)
    result = torch.empty(exact.shape, dtype=exact.dtype, device=x.device)
    (first, second), (to_first, to_second) = exact.chunk(2, dim=-1), result.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=direction)
    return result.to(x.dtype)


class _Swiglu(torch.autograd.Function):
    """Keeps [gate; up] alone for the backward pass."""

    @staticmethod
    def forward(function: Any, gate_up: Tensor) -> Tensor:
        function.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Tensor:
        (gate_up,) = function.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        whole = torch.empty_like(gate_up)
        to_gate, to_up = whole.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=to_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
        return whole


class _Geglu(torch.autograd.Function):
    """Keeps [gate; up] alone for the backward pass."""

    @staticmethod
    def forward(function: Any, gate_up: Tensor) -> Tensor:
        function.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Tensor:
        (gate_up,) = function.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        whole = torch.empty_like(gate_up)
        to_gate, to_up = whole.chunk(2, dim=-1)
        torch.mul(F.gelu(gate, approximate="tanh"), grad, out=to_up)
        torch.ops.aten.gelu_backward.grad_input(grad * up, gate, approximate="tanh", grad_input=to_gate)
        return whole


class _CompiledSwiglu(torch.autograd.Function):
    """The compiled forward pass, and a backward pass in Triton, for CUDA. Keeps [gate; up] alone."""

    @staticmethod
    def forward(function: Any, gate_up: Tensor, compiled_swiglu: Callable[[Tensor], Tensor]) -> Tensor:
        function.save_for_backward(gate_up)
        return compiled_swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> tuple[Tensor, None]:
        from megatron.parallel.operators import triton_kernels

        (gate_up,) = function.saved_tensors
        return triton_kernels.swiglu_backward(grad, gate_up), None


class _TritonNorm(torch.autograd.Function):
    """The stream, x + branch, and its norm, for CUDA. Keeps the stream and one float32 number a row.

    The gradient that comes down the stream is added where the norm's is computed.
    """

    @staticmethod
    def forward(
        function: Any, x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        from megatron.parallel.operators import norm_kernels

        stream, normed, scales = norm_kernels.forward(x, branch, weight, epsilon)
        function.save_for_backward(stream, weight, scales)
        function.set_materialize_grads(False)
        return stream, normed

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad_stream: Tensor | None, grad_normed: Tensor | None) -> Any:
        from megatron.parallel.operators import norm_kernels

        grad, grad_weight = grad_stream, None
        if grad_normed is not None:
            grad, grad_weight = norm_kernels.backward(
                grad_normed, grad_stream, *function.saved_tensors, of_weight=function.needs_input_grad[2]
            )
        return grad, grad if function.needs_input_grad[1] else None, grad_weight, None


class _RMSNorm(torch.autograd.Function):
    """Keeps the input and one float32 number a row for the backward pass."""

    @staticmethod
    def forward(function: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        exact = _exact(x)
        norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        function.save_for_backward(x, weight, scale)
        return (exact * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = function.saved_tensors
        grad, normed, exact_weight = _exact(grad), _exact(x) * scale, _exact(weight)
        product = (grad * normed).flatten(0, -2)
        grad_weight = None
        if function.needs_input_grad[1]:
            grad_weight = product.sum(0).to(weight.dtype)
        along = (product @ exact_weight).view(scale.shape).div_(-x.shape[-1])
        # into the memory of the product, which nothing reads after its sums
        grad_x = torch.mul(grad, exact_weight, out=product.view(grad.shape)).addcmul_(normed, along).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


# ---------------------------------------------------------------------------------------------------------------------
# Choice


@dataclass(frozen=True)
class Kernels:
    """The pointwise operators of a model's layers; the functions above say what each computes."""

    form: str
    """`plain`, `eager`, `compiled` or `habana`."""
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate
    swiglu: Callable[[Tensor], Tensor] = swiglu
    geglu: Callable[[Tensor], Tensor] = geglu
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    fused_add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]] | None = None
    """`add_norm` in one pass, None where it is two operators."""
    attend: Callable[..., Tensor | None] | None = None
    """`attend` of token_kernels.py, None where a token's attention is made of the device's operators."""

    def add_norm(self, x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Return the stream, x + branch or x without one, and its RMSNorm. Both are read, and give gradients."""
        if self.fused_add_norm is not None:
            return self.fused_add_norm(x, branch, weight, epsilon)
        stream = x if branch is None else x + branch
        return stream, self.rms_norm(stream, weight, epsilon)


PLAIN = Kernels("plain")


def _for_tokens(eager: Callable[..., Any], plain: Callable[..., Any], token: Callable[..., Any]) -> Callable[..., Any]:
    """Return `token`, which leaves some inputs to the eager operator, or few numbers to the plain one: fewer calls."""

    def chosen(x: Tensor, *others: Any) -> Any:
        result = token(x, *others)
        if result is not None:
            return result
        if x.numel() <= token_kernels.FEW_NUMBERS:
            return plain(x, *others)
        return eager(x, *others)

    return chosen


EAGER = Kernels("eager", rotate=_Rotate.apply, swiglu=_Swiglu.apply, geglu=_Geglu.apply, rms_norm=_RMSNorm.apply)
EAGER_WITHOUT_GRADIENTS = Kernels(
    "eager",
    rotate=_for_tokens(_Rotate.apply, rotate, token_kernels.rotate),
    swiglu=_for_tokens(_Swiglu.apply, swiglu, token_kernels.swiglu),
    rms_norm=_for_tokens(_RMSNorm.apply, rms_norm, token_kernels.rms_norm),
    attend=token_kernels.attend,
)


@functools.cache
def compiled(backend: str, device: Device, *, trains: bool = True) -> Kernels:
    """Return the plain operators compiled by a backend of torch.compile, each at its first call."""
    rotate_, swiglu_, geglu_, rms_norm_ = (
        cast("Any", torch.compile(function, backend=backend)) for function in (rotate, swiglu, geglu, rms_norm)
    )
    if not device.compiles_by_triton:
        return Kernels("compiled", rotate=rotate_, swiglu=swiglu_, geglu=geglu_, rms_norm=rms_norm_)

    # its backward pass is a kernel of ours, which reads less than the compiled one
    def swiglu_by_triton(gate_up: Tensor) -> Tensor:
        if gate_up.dtype == torch.float64:  # the kernel computes in float32
            return swiglu_(gate_up)  # type: ignore[no-any-return]
        return _CompiledSwiglu.apply(gate_up, swiglu_)

    # one kernel of torch's since 2.8: on an H100 0.39 ms forward and backward, compiled alone 0.88 ms
    if hasattr(torch.ops.aten, "_fused_rms_norm"):
        rms_norm_ = rms_norm
    kernels = Kernels("compiled", rotate=rotate_, swiglu=swiglu_by_triton, geglu=geglu_, rms_norm=rms_norm_)
    if not trains:
        return kernels  # few tokens, and no gradients: a kernel of torch's is launched sooner

    # torch's backward pass reads x and the gradient once for each of its results
    def add_norm_by_triton(x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        if x.dtype == torch.float64 or x.shape[-1] > MAX_NORM_WIDTH:
            return kernels.add_norm(x, branch, weight, epsilon)
        return _TritonNorm.apply(x, branch, weight, epsilon)  # type: ignore[no-any-return]

    def rms_norm_by_triton(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return add_norm_by_triton(x, None, weight, epsilon)[1]

    return dataclasses.replace(kernels, rms_norm=rms_norm_by_triton, fused_add_norm=add_norm_by_triton)


def habana(*, fused_norm: bool) -> Kernels:
    """Return Habana's fused rotary embedding, and its FusedRMSNorm; Gaudi's graph compiler fuses what is plain."""
    from habana_frameworks.torch.hpex.kernels import RotaryPosEmbeddingHelperV1
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    def rotate_fused(q_SBnd: Tensor, k_SBkd: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # Habana's Megatron-LM gives it the angles of all samples; those of each (packed documents) are not documented
        if cos.shape[1] != 1:
            return rotate(q_SBnd, k_SBkd, cos, sin)
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        # with float32 angles it computes in float32, and returns that
        q, k = (RotaryPosEmbeddingHelperV1.apply(x, cos, sin, 0).to(x.dtype) for x in (q_SBnd, k_SBkd))
        return q, k

    if fused_norm:
        return Kernels("habana", rotate=rotate_fused, rms_norm=FusedRMSNorm.apply)
    return Kernels("habana", rotate=rotate_fused)


def missing_compiler(device: Device) -> str:
    """Return what torch.compile lacks for a device ('': nothing)."""
    if not any(map(shutil.which, ("cc", "gcc", "g++", "clang", "clang++"))):
        return "no C compiler is on the PATH; install one, such as gcc"
    if device.compiles_by_triton:
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton is not installed or does not support this GPU; pip install triton"
    return ""


def choose_kernels(config: Config, device: torch.device, *, trains: bool = True) -> Kernels:
    """Return the operators that the option `kernels` means on a device; docs/reference/kernels.md has the table.

    A model that trains computes alike with and without gradients: layers are recomputed, and references compared.

    Raises ConfigError if `kernels=fused` cannot be compiled here.
    """
    choice, eager = config.model.kernels, EAGER_WITHOUT_GRADIENTS
    if trains:
        eager = EAGER
    record = device_of(device.type)
    if choice != "plain" and record.pointwise == "habana":
        return habana(fused_norm=config.model.use_fused_rmsnorm)
    # torch.compile of whole layers fuses the plain operators with their neighbours
    if choice == "plain" or config.training.torch_compile:
        return PLAIN
    if choice == "auto" and record.pointwise == "eager":
        if token_kernels.missing and not trains:
            log.warning(
                "text is generated more slowly: %s; build the C++ extensions with `pip install -e .`",
                token_kernels.missing,
            )
        return eager  # to compile takes seconds at each start
    missing = missing_compiler(record)
    if not missing:
        from deepspeed.accelerator import get_accelerator

        return compiled(get_accelerator().get_compile_backend(), record, trains=trains)
    if choice == "fused":
        raise ConfigError([f"kernels=fused compiles operators, but {missing}; or use kernels=auto"])
    log.warning("kernels=auto takes eager operators: %s", missing)
    return eager
