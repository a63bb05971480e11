"""The stand-in of Habana's packages against their published source, a checkout that MEGATRON_GAUDI_BRIDGE names."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.habana import stand_in_packages

CHECKOUT = os.environ.get("MEGATRON_GAUDI_BRIDGE")
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_GAUDI_BRIDGE names no checkout")
SOURCES = Path(CHECKOUT or "") / "python_packages" / "habana_frameworks" / "torch"

SIGNATURES = [  # (published file, name there, module of the stand-in, name there)
    ("hpex/kernels/FusedSDPA.py", "FusedSDPA.forward", "hpex.kernels", "FusedSDPA.apply"),
    ("hpex/kernels/RotaryPosEmbeddingHelper.py", "apply_rotary_pos_emb", "hpex.kernels", "apply_rotary_pos_emb"),
    (
        "hpex/kernels/RotaryPosEmbeddingHelper.py",
        "RotaryPosEmbeddingHelperV1.forward",
        "hpex.kernels",
        "RotaryPosEmbeddingHelperV1.apply",
    ),
    ("hpex/normalization/FusedRMSNorm.py", "FusedRMSNorm.forward", "hpex.normalization", "FusedRMSNorm.apply"),
    ("hpex/normalization/FusedClipNorm.py", "FusedClipNorm.__init__", "hpex.normalization", "FusedClipNorm.__init__"),
    ("hpex/normalization/FusedClipNorm.py", "FusedClipNorm.clip_norm", "hpex.normalization", "FusedClipNorm.clip_norm"),
    ("hpex/optimizers/FusedAdamW.py", "FusedAdamW.__init__", "hpex.optimizers", "FusedAdamW.__init__"),
    ("hpex/optimizers/FusedAdamW.py", "FusedAdamW.step", "hpex.optimizers", "FusedAdamW.step"),
    ("core/step_closure.py", "mark_step", "core", "mark_step"),
    ("hpu/metrics/metrics.py", "metric_global", "hpu.metrics", "metric_global"),
    ("utils/internal.py", "is_lazy", "utils.internal", "is_lazy"),
    *(
        ("distributed/hccl/__init__.py", name, "distributed.hccl", name)
        for name in ("_setup_module_id", "_create_process_group_hccl", "initialize_distributed_hpu")
    ),
    *(
        ("hpu/graphs.py", f"{cls}.{name}", "hpu.graphs", f"{cls}.{name}")
        for cls, name in (
            *(("HPUGraph", "capture_begin"), ("HPUGraph", "capture_end"), ("HPUGraph", "replay")),
            *(("HPUGraph", "reset"), ("graph", "__init__"), ("graph", "__exit__")),
        )
    ),
    *(
        ("hpu/memory.py", name, "hpu", name)
        for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "mem_get_info")
    ),
    *(
        ("hpu/__init__.py", name, "hpu", name)
        for name in (
            *("is_available", "device_count", "get_device_name", "current_device", "synchronize"),
            *("enable_recompute_sdp", "recompute_sdp_enabled", "sdp_kernel"),
        )
    ),
]


@pytest.fixture(autouse=True)
def habana(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with stand_in_packages(monkeypatch) as stand_in:
        yield stand_in


def published_arguments(file: str, name: str) -> list[tuple[str, str]]:
    """(name, default) of each argument, without `ctx` of an autograd function."""
    nodes: list[ast.stmt] = ast.parse((SOURCES / file).read_text()).body
    for part in name.split("."):
        found = next(n for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part)
        nodes = found.body
    assert isinstance(found, ast.FunctionDef)
    arguments = [a.arg for a in found.args.args]
    defaults = [ast.unparse(d) for d in found.args.defaults]
    pairs = list(zip(arguments, [""] * (len(arguments) - len(defaults)) + defaults, strict=True))
    pairs += [(f"*{found.args.vararg.arg}", "")] if found.args.vararg else []
    return [pair for pair in pairs if pair[0] != "ctx"]


@pytest.mark.parametrize(("file", "theirs", "module", "ours"), SIGNATURES, ids=lambda value: str(value))
def test_arguments_are_the_published_ones(file: str, theirs: str, module: str, ours: str) -> None:
    found: Any = importlib.import_module(f"habana_frameworks.torch.{module}")
    for part in ours.split("."):
        found = getattr(found, part)
    named = [
        (f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name, "" if p.default is p.empty else repr(p.default))
        for p in inspect.signature(found).parameters.values()
    ]
    assert [(name, default.replace('"', "'")) for name, default in named] == [
        (name, repr(ast.literal_eval(default)) if default else "")
        for name, default in published_arguments(file, theirs)
    ]


@pytest.mark.parametrize("name", ["new_group", "init_process_group"])
def test_groups_take_the_published_arguments(name: str) -> None:
    importlib.import_module("habana_frameworks.torch.core")
    published = published_arguments("core/torch_overwrites.py", f"overwrite_torch_functions.wrap_{name}")
    ours = inspect.signature(getattr(torch.distributed, name), follow_wrapped=False).parameters
    assert list(ours) == [argument for argument, _ in published]


def published(file: str) -> ModuleType:
    """The published source, run over the stand-in of what it imports."""
    module = ModuleType(Path(file).stem)
    exec(compile((SOURCES / file).read_text(), file, "exec"), module.__dict__)  # noqa: S102
    return module


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if mask is None else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v


def recomputing_forward(q: Any, k: Any, v: Any, mask: Any, dropout: Any, scale: Any, causal: Any, *_: Any) -> Any:
    return sdpa(q, k, v, mask, scale, causal), *(torch.zeros(1) for _ in range(3))


def recomputing_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    m: Any,
    linv: Any,
    seed: Any,
    causal: Any,
    dropout: Any,
    scale: Any,
    *_: Any,
) -> Any:
    with torch.enable_grad():
        q, k, v = inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(sdpa(q, k, v, mask, scale, causal), inputs, grad)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_the_published_attention_computes_and_refuses_alike(
    monkeypatch: pytest.MonkeyPatch, groups: int, masked: bool
) -> None:
    operators = SimpleNamespace(sdpa_recomp_fwd=recomputing_forward, sdpa_recomp_bwd=recomputing_backward)
    monkeypatch.setattr(torch.ops, "hpu", operators, raising=False)
    theirs = published("hpex/kernels/FusedSDPA.py").FusedSDPA
    ours = importlib.import_module("habana_frameworks.torch.hpex.kernels").FusedSDPA
    mask = torch.randn(2, 1, 6, 6) if masked else None
    shapes = ((2, 4, 6, 8), (2, groups, 6, 8), (2, groups, 6, 8))
    inputs = [[torch.randn(shape).requires_grad_() for shape in shapes]]
    inputs.append([x.detach().clone().requires_grad_() for x in inputs[0]])
    outputs = [
        kernel.apply(*x, mask, 0.0, not masked, None, "None", True)
        for kernel, x in zip((theirs, ours), inputs, strict=True)
    ]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for a, b in zip(*inputs, strict=True):
        torch.testing.assert_close(a.grad.sum_to_size(b.shape), b.grad)
    if masked:
        for kernel in (theirs, ours):
            with pytest.raises(AssertionError, match="only in causal"):
                kernel.apply(*inputs[0], mask, 0.0, False, None, "fast", True)


def update(
    grads: Any, weights: Any, means: Any, squares: Any, size: Any, beta1: Any, beta2: Any, eps: Any, wd: Any, *_: Any
) -> None:
    for g, w, m, s in zip(grads, weights, means, squares, strict=True):
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        s.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        w.mul_(wd).add_(m / (s.sqrt() + eps) * size)


def test_the_published_optimizer_updates_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "hpu", SimpleNamespace(optimizer_adamw=update), raising=False)
    theirs = published("hpex/optimizers/FusedAdamW.py").FusedAdamW
    ours = importlib.import_module("habana_frameworks.torch.hpex.optimizers").FusedAdamW
    start, weights = torch.randn(4, 3), []
    for cls in (theirs, ours):
        weight = torch.nn.Parameter(start.clone())
        optimizer = cls([weight], lr=0.1, weight_decay=0.3)
        for step in range(3):
            weight.grad = torch.sin(start + step)
            optimizer.step()
        weights.append(weight.detach())
        assert optimizer.param_groups[0]["step"] == 3
        assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
    torch.testing.assert_close(*weights)


def turn(p: Any, sin: Any, cos: Any, position_ids: Any, offset: Any, mode: Any) -> Tensor:
    first, second = p.chunk(2, -1)
    return p * cos + torch.cat([-second, first], -1) * sin


def turn_back(grad: Any, sin: Any, cos: Any, *others: Any) -> Tensor:
    return turn(grad, -sin, cos, *others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_published_rotary_embedding_computes_alike(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    operators = SimpleNamespace(rotary_pos_embedding=turn, rotary_pos_embedding_backward=turn_back)
    monkeypatch.setattr(torch.ops, "hpu", operators, raising=False)
    theirs = published("hpex/kernels/RotaryPosEmbeddingHelper.py").RotaryPosEmbeddingHelperV1
    ours = importlib.import_module("habana_frameworks.torch.hpex.kernels").RotaryPosEmbeddingHelperV1
    angles, start = torch.rand(5, 1, 1, 4).repeat(1, 1, 1, 2), torch.randn(5, 2, 3, 8).to(dtype)
    results = []
    for helper in (theirs, ours):
        p = start.clone().requires_grad_()
        turned = helper.apply(p, angles.cos(), angles.sin(), 0)
        turned.square().cumsum(-1).sum().backward()
        results.append((turned, p.grad))
    for a, b in zip(*results, strict=True):
        assert a.dtype == (torch.float32 if a is results[0][0] else dtype)
        torch.testing.assert_close(a.to(b.dtype), b)
