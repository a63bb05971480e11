"""Each form of a layer's operators on this device: its error against float64, and its time beside the plain form's.

    python benchmarks/kernels.py [--sections operators attention layers] [--models llama bloom] [--device cuda]

On CUDA: the shapes of Llama 3.2 1B and of Bloom 1.7B at sequence 4,096 in bfloat16, timed by events of the device, in
some minutes, most of which torch.compile takes. On CPU: hidden 512 at sequence 512. `operators` compares the
pointwise operators of megatron/parallel/operators/fused.py, and liger-kernel's where it is installed. `attention`
compares kernels for causal rows with grouped heads, ALiBi and documents. `layers` trains two transformer layers with
each choice of `--kernels` and `--torch-compile`. All run forward and backward; times are medians of alternating rounds.
An error is the norm of the difference to float64, relative, the larger of values and gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, positive

if TYPE_CHECKING:
    from torch import Tensor

SECTIONS = ("operators", "attention", "layers")
Case = tuple[Callable[..., Any], "list[Tensor]"]

LLAMA = "--architecture llama --position-embedding-type rope --untie-embeddings-and-output-weights"
BLOOM = "--architecture bloom --position-embedding-type alibi --embed-layernorm"
SHAPES = {
    # name: (cpu, cuda): hidden, query heads, key/value heads, width of the MLP
    "llama": ((512, 8, 2, 1408), (2048, 32, 8, 8192)),
    "bloom": ((512, 8, 8, 2048), (2048, 16, 16, 8192)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Errors and times of a layer's kernels.", allow_abbrev=False)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all")
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES), help="of the layers")
    parser.add_argument("--rounds", type=positive, default=10, help="timed rounds (default: 10)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: cuda where it is")
    options = parser.parse_args()

    import torch

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    os.environ["DS_ACCELERATOR"] = device
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"{name}; torch {torch.__version__}; {options.rounds} rounds; forward and backward", flush=True)
    bench = Bench(device, options.rounds, options.models)
    for section in options.sections:
        {"operators": operators, "attention": attention, "layers": layers}[section](bench)
    return 0


class Bench:
    """Device, sizes, and the measurement of one row of the table."""

    def __init__(self, device: str, rounds: int, models: list[str]) -> None:
        import torch

        self.device, self.rounds, self.models = torch.device(device), rounds, models
        self.dtype = torch.bfloat16
        self.seq_length, self.batch = (4096, 2) if device == "cuda" else (512, 4)
        self.generator = torch.Generator(device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def shape(self, model: str) -> tuple[int, int, int, int]:
        return SHAPES[model][self.device.type == "cuda"]

    def compare(
        self,
        title: str,
        forms: Mapping[str, Callable[..., Any]],
        inputs: list[Tensor],
        reference: Callable[[], list[Tensor]] | None = None,
        flops: float = 0.0,
        weights: Mapping[str, list[Tensor]] | None = None,
    ) -> None:
        """Print a row for each form of an operator; the first form is what the others are compared with.

        `weights`: parameters of a form, whose gradients are computed too.
        """
        print(f"\n{title}", flush=True)
        exact = None if reference is None else reference()
        steps, errors = {}, {}
        for name, form in forms.items():
            try:
                step = self.step(form, inputs, [] if weights is None else weights[name])
                found = step()
                steps[name], errors[name] = step, "" if exact is None else f"error {relative_error(found, exact):.1e}"
            except Exception as error:  # a library that this machine lacks, or an operator that this torch lacks
                print(f"  {name:26s} does not run: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        times = alternate({name: partial(self.milliseconds, step) for name, step in steps.items()}, self.rounds)
        if not times:
            return
        first = statistics.median(next(iter(times.values())))
        for name, milliseconds in times.items():
            median = statistics.median(milliseconds)
            rate = f"{flops / median / 1e9:7.1f} TFLOP/s" if flops else ""
            print(f"  {name:26s} {median:9.3f} ms  {first / median:6.2f}x  {rate} {errors[name]}".rstrip(), flush=True)

    def step(self, form: Callable[..., Any], inputs: list[Tensor], weights: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Return what runs a form forward and backward, and returns its outputs and the gradients of the inputs."""
        import torch

        leaves = [x.detach().requires_grad_() for x in inputs]
        grads: list[Tensor] = []

        def run() -> list[Tensor]:
            outputs = form(*leaves)
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            if not grads:
                grads.extend(gradient_of(y) for y in outputs)
            found = torch.autograd.grad(outputs, [*leaves, *weights], grads)
            return [*(y.detach() for y in outputs), *found[: len(leaves)]]

        return run

    def milliseconds(self, step: Callable[[], Any]) -> float:
        import torch

        if self.device.type != "cuda":
            began_s = time.perf_counter()
            step()
            return 1000 * (time.perf_counter() - began_s)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # the device waits while the host launches the step: its own time is measured, not the host's
        torch.cuda._sleep(40_000_000)
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def gradient_of(y: Tensor) -> Tensor:
    """Return the same pseudo-random gradient for every form, whatever its dtype and layout."""
    import torch

    generator = torch.Generator(y.device).manual_seed(y.dim())
    return torch.randn(y.shape, generator=generator, device=y.device, dtype=torch.float32).to(y.dtype)


def relative_error(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


# ---------------------------------------------------------------------------------------------------------------------


def operators(bench: Bench) -> None:
    import torch

    from megatron.models.positions import RotaryEmbedding
    from megatron.parallel.context import ParallelContext
    from megatron.parallel.operators.fused import EAGER, PLAIN, compiled
    from megatron.runtime.device_cpu import CPU

    sets = [PLAIN, EAGER, compiled("inductor", CPU)]  # as on the CPU: RMSNorm compiled too
    hidden, queries, keys, width = bench.shape("llama")
    tokens = (bench.seq_length, bench.batch)
    config = parse(bench, "llama", "")
    cos, sin = RotaryEmbedding(config.model).angles(bench.seq_length, bench.device, None, ParallelContext.single())
    liger = liger_operators(cos, sin)

    def forms(name: str, *rest: Any) -> dict[str, Callable[..., Any]]:
        own = {s.form: lambda *inputs, s=s: getattr(s, name)(*inputs, *rest) for s in sets}
        return own | ({"liger-kernel": liger[name]} if name in liger else {})

    def exactly(name: str, inputs: list[Tensor], *rest: Any) -> Callable[[], list[Tensor]]:
        # the plain form in float64 is the reference; its gradient is that of bfloat16's outputs, widened
        def run() -> list[Tensor]:
            leaves = [x.detach().double().requires_grad_() for x in inputs]
            outputs = getattr(PLAIN, name)(*leaves, *rest)
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            grads = [gradient_of(y.to(bench.dtype)).double() for y in outputs]
            return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads)]

        return run

    rows: list[tuple[str, str, list[Tensor], tuple[Any, ...]]] = [
        (
            f"rotary embedding, {queries} + {keys} heads of {hidden // queries}",
            "rotate",
            [bench.random(*tokens, queries, hidden // queries), bench.random(*tokens, keys, hidden // queries)],
            (cos, sin),
        ),
        (f"SwiGLU, 2 x {width}", "swiglu", [bench.random(*tokens, 2 * width)], ()),
        (f"RMSNorm, {hidden}", "rms_norm", [bench.random(*tokens, hidden), bench.random(hidden)], (1e-5,)),
    ]
    for title, name, inputs, rest in rows:
        bench.compare(title, forms(name, *rest), inputs, exactly(name, inputs, *rest))


def liger_operators(cos: Tensor, sin: Tensor) -> dict[str, Callable[..., Any]]:
    """Return liger-kernel's operators with the arguments of ours; {} where it is not installed."""
    import importlib
    import importlib.util

    import torch

    if importlib.util.find_spec("liger_kernel") is None:
        return {}

    def operator(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        whole = [torch.cat([part, part], dim=-1).flatten(1, -2)[None] for part in (cos, sin)]  # [1, S, d]
        turned = operator("rope", "LigerRopeFunction").apply(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), *whole)
        return turned[0].permute(2, 0, 1, 3), turned[1].permute(2, 0, 1, 3)

    return {
        "rotate": rotate,
        "swiglu": lambda x: operator("swiglu", "LigerSiLUMulFunction").apply(*x.chunk(2, dim=-1)),
        "rms_norm": lambda x, w: operator("rms_norm", "LigerRMSNormFunction").apply(x, w, 1e-5, 0.0, "llama", False),
    }


# ---------------------------------------------------------------------------------------------------------------------


def attention(bench: Bench) -> None:
    import torch

    from megatron.models.attention.flex import FlexAttention
    from megatron.models.attention.kernels import SDPAttention
    from megatron.models.attention.scores import Scores
    from megatron.models.positions import Packing, alibi_slopes

    S, B, cuda = bench.seq_length, bench.batch, bench.device.type == "cuda"
    lengths = [S // 16, S // 4, S // 8, S // 16, S // 2]
    starts = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)]).to(bench.device)
    packing = Packing(torch.arange(S, device=bench.device) - starts, starts.expand(B, S).contiguous())

    def attend(kernel: Any, packing: Packing | None = None) -> Callable[..., Tensor]:
        return lambda *qkv: kernel(*(x.permute(1, 2, 0, 3) for x in qkv), packing, 0.0).permute(2, 0, 1, 3)

    for model, slopes, documents in (("llama", None, None), ("bloom", True, None), ("llama", None, packing)):
        hidden, queries, keys, _ = bench.shape(model)
        bias = alibi_slopes(queries) if slopes else None
        inputs = [bench.random(S, B, heads, hidden // queries) for heads in (queries, keys, keys)]
        forms = {
            "SDPA, heads repeated": attend(SDPAttention(Scores(bias), repeats=True), documents),
            "SDPA": attend(SDPAttention(Scores(bias), by_document=not cuda), documents),
        }
        if cuda and not (bias is None and documents is None):
            forms["flex_attention"] = attend(FlexAttention(Scores(bias)), documents)
        if cuda:
            forms |= {name: attend(kernel, documents) for name, kernel in further_kernels(bias, documents, lengths)}
        seen = S * S / 2 if documents is None else sum(n * n / 2 for n in lengths)
        # 2 products forward, 5 backward with the scores computed again
        flops = 7 * 2 * seen * hidden * B
        what = "causal" if bias is None and documents is None else "ALiBi" if documents is None else "documents"
        title = f"attention, {what}: {queries} heads of {hidden // queries}, {keys} for keys, {S} x {B} tokens"
        bench.compare(title, forms, inputs, reference_attention(bench, inputs, bias, documents), flops)


def further_kernels(bias: Tensor | None, documents: Any, lengths: list[int]) -> Iterator[tuple[str, Any]]:
    """Yield kernels of torch that this project does not use, to see whether it should."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def causal(backend: Any) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

        return run

    def channels(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        # slope x position as further channels of the dot product, in parts that bfloat16 holds exactly
        assert bias is not None
        slope, parts = bias.to(q.device) * q.shape[-1] ** 0.5, []
        for _part in range(3):
            parts.append(slope.to(torch.bfloat16))
            slope = slope - parts[-1].float()
        position = torch.arange(q.shape[2], device=q.device)
        places = torch.stack([position // 256 * 256, position % 256], dim=-1).to(q.dtype)
        keys = F.pad(places.repeat(1, 3), (0, 2)).expand(*k.shape[:3], 8)
        queries = F.pad(torch.stack(parts, -1).repeat_interleave(2, -1), (0, 2))[None, :, None].expand(*q.shape[:3], 8)
        q, k = torch.cat([q, queries.to(q.dtype)], -1), torch.cat([k, keys], -1)
        size = v.shape[-1]
        return F.scaled_dot_product_attention(q, k, F.pad(v, (0, 8)), is_causal=True, scale=size**-0.5)[..., :size]

    def varlen(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        import torch.nn.attention.varlen as module  # since torch 2.10

        group = q.shape[1] // k.shape[1]
        ends = torch.tensor(lengths * q.shape[0], device=q.device).cumsum(0, dtype=torch.int32)
        ends = F.pad(ends, (1, 0))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        kernel: Any = module.varlen_attn
        found: Tensor = kernel(*rows, ends, ends, max(lengths), max(lengths), window_size=(-1, 0))
        return found.unflatten(0, (q.shape[0], -1)).transpose(1, 2)

    if bias is not None:
        yield "SDPA, ALiBi as channels", channels
    elif documents is not None:
        yield "varlen_attn, heads repeated", varlen
    else:
        yield "SDPA, flash", causal(SDPBackend.FLASH_ATTENTION)
        yield "SDPA, cuDNN", causal(SDPBackend.CUDNN_ATTENTION)


def reference_attention(bench: Bench, inputs: list[Tensor], bias: Tensor | None, documents: Any) -> Any:
    """Return the computation of attention in float64, one head at a time."""
    import torch

    from megatron.models.attention.kernels import AttentionMask

    def run() -> list[Tensor]:
        q, k, v = (x.permute(1, 2, 0, 3).double() for x in inputs)
        group, scale, length = q.shape[1] // k.shape[1], q.shape[3] ** -0.5, q.shape[2]
        grad = gradient_of(inputs[0]).permute(1, 2, 0, 3).double()
        results = [torch.zeros_like(x) for x in (q, q, k, v)]
        place = torch.arange(length, device=bench.device)
        seen = (place <= place[:, None])[None]
        if documents is not None:
            seen = AttentionMask().get(documents, length, length, bench.dtype, bench.device)[:, 0]  # type: ignore[index]
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].transpose(1, 2) * scale
            if bias is not None:
                scores += bias[head].double().to(bench.device) * (place - place[:, None])
            p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            g = grad[:, head]
            results[0][:, head] = p @ v[:, head // group]
            results[3][:, head // group] += p.transpose(1, 2) @ g
            dp = g @ v[:, head // group].transpose(1, 2)
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
            results[1][:, head] = ds @ k[:, head // group]
            results[2][:, head // group] += ds.transpose(1, 2) @ q[:, head]
        return [x.permute(2, 0, 1, 3) for x in results]

    return run


# ---------------------------------------------------------------------------------------------------------------------


def parse(bench: Bench, model: str, flags: str) -> Any:
    from megatron.settings.command_line import parse_arguments

    hidden, queries, keys, width = bench.shape(model)
    groups = f"--num-query-groups {keys}" if keys != queries else ""
    arguments = (
        f"{LLAMA if model == 'llama' else BLOOM} --num-layers 2 --hidden-size {hidden} --num-attention-heads {queries} "
        f"{groups} --ffn-hidden-size {width} --seq-length {bench.seq_length} --hidden-dropout 0 --attention-dropout 0 "
        f"--vocab-size 128 --bf16 --train-iters 1 --data-path none --device {bench.device.type} {flags}"
    )
    return parse_arguments(arguments.split())[0]


def layers(bench: Bench) -> None:
    from megatron.models.sequential import SequentialModel, build_layers
    from megatron.models.transformer import TransformerLayer
    from megatron.parallel.context import ParallelContext
    from megatron.parallel.shards import initialise, named_parameters

    choices = ["--kernels plain", "--kernels fused", "--torch-compile"]
    choices += [] if bench.device.type == "cuda" else ["--kernels auto"]  # there fused
    for model in bench.models:
        hidden, _queries, _keys, _width = bench.shape(model)
        x = bench.random(bench.seq_length, bench.batch, hidden)
        forms: dict[str, Callable[..., Any]] = {}
        weights: dict[str, list[Tensor]] = {}
        for flags in choices:
            whole = SequentialModel(build_layers(parse(bench, model, flags), ParallelContext(device=bench.device)))
            initialise(named_parameters(whole), 1, ParallelContext())
            two = [m.to(bench.device, bench.dtype) for m in whole.children() if isinstance(m, TransformerLayer)]
            weights[flags] = [weight for layer in two for weight in layer.parameters()]
            forms[flags] = lambda hidden_SBH, two=two: two[1](two[0](hidden_SBH))
        count = sum(w.numel() for w in weights[choices[0]])
        tokens = bench.seq_length * bench.batch
        # causal attention: half of the scores
        flops = tokens * (6 * count + 2 * 6 * hidden * bench.seq_length)
        title = f"2 layers, {model}: {count / 1e6:.0f} M parameters, {tokens} tokens"
        bench.compare(title, forms, [x], None, flops, weights)


if __name__ == "__main__":
    sys.exit(main())
