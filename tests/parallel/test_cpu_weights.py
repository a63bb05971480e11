"""Weights laid out for inference on a CPU: the same products, and weights of a run under way left as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.generation.generator import attention_layers
from megatron.generation.model import InferenceModel, build_stage, training_model
from megatron.models.attention.kv_cache import DecodeStep, KVCache
from megatron.models.transformer import TransformerLayer
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import ParallelLinear
from megatron.parallel.operators import cpu_weights
from megatron.parallel.shards import named_parameters
from megatron.runtime.accelerator import Processor
from tests.models.outputs import config_of

CTX = ParallelContext.single()
TIED = (
    "--architecture llama --position-embedding-type rope --num-query-groups 2 --no-untie-embeddings-and-output-weights"
)
BLOOM = "--architecture bloom --position-embedding-type alibi"
ADAPTED = "--lora-rank 4 --lora-alpha 8 --lora-target-modules all-linear"


def logits_of(model: InferenceModel, tokens_BS: Tensor) -> Tensor:
    return model.logits(model.forward_stage(tokens_BS)).float()


@pytest.mark.parametrize("width", [1, 20])
@pytest.mark.parametrize("flags", ["", "--bf16", ADAPTED, f"{ADAPTED} --bf16"])
@pytest.mark.parametrize("family", [TIED, BLOOM])
def test_the_layout_changes_no_logits(family: str, flags: str, width: int) -> None:
    config = config_of(f"{family} {flags}")
    layers, modules = build_stage(config, CTX, CTX.device)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in named_parameters(modules):
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    tokens = torch.randint(123, (1, width), generator=generator)
    expected = logits_of(InferenceModel(config, CTX, layers, modules, is_trained=True), tokens)
    names = [name for name, _ in named_parameters(modules)]
    assert all(parameter.is_contiguous() for _, parameter in named_parameters(modules))

    model = InferenceModel(config, CTX, layers, modules)
    packs = "--bf16" in flags and cpu_weights._packs_bfloat16()
    linear = [each for each in modules.modules() if isinstance(each, ParallelLinear)]
    assert len(linear) == 8
    if "lora" not in flags:
        laid_out = [hasattr(each, "packed") if packs else each.weight.t().is_contiguous() for each in linear]
        assert all(laid_out) or ("--bf16" in flags and not packs)
    else:
        assert [name for name, _ in named_parameters(modules)] == names
    tolerance = 0.1 if "--bf16" in flags else 1e-5
    assert expected.std() > 0.3
    torch.testing.assert_close(logits_of(model, tokens), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("channels", "num_threads", "parts"), [(48, 1, 1), (48, 4, 4), (48, 64, 16), (33, 2, 1)])
def test_the_product_of_one_row_is_cut_into_equal_parts(
    channels: int, num_threads: int, parts: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    assert cpu_weights._parts(channels, num_threads) == parts
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(channels, 20, generator=generator).t()
    x, bias = torch.randn(1, 1, channels, generator=generator), torch.randn(20, generator=generator)
    expected = (x.double() * weight.double()).sum(-1).view(1, 1, 20) + (bias.double() if with_bias else 0)
    found = cpu_weights.transposed_product(x, weight, bias if with_bias else None)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("instructions", "by_onednn"), [("AVX2", False), ("AVX512", True)])
@pytest.mark.parametrize("rows", [1, 2, 200])
def test_several_rows_are_multiplied_by_the_faster_library(
    rows: int, instructions: str, by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_weights, "processor", lambda: Processor(instructions, frozenset()))
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 20, generator=generator).t()
    x, bias = torch.randn(rows, 48, generator=generator), torch.randn(20, generator=generator)
    expected = x.double() @ weight.double().t() + bias.double()
    with torch.no_grad(), _Count() as count:
        found = cpu_weights.transposed_product(x, weight, bias)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    has_onednn = any("mkldnn" in name for name in count.names)
    assert has_onednn == (by_onednn and rows > 1 and cpu_weights._has_onednn())


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", [TIED, BLOOM])
def test_a_layer_of_a_tokens_pass_takes_few_operators(family: str) -> None:
    config = config_of(f"{family} --bf16")
    layers, modules = build_stage(config, CTX, CTX.device)
    model = InferenceModel(config, CTX, layers, modules)
    cache = KVCache(attention_layers(modules), 1, 64, model.dtype, CTX.device)
    (layer, *_) = (each for each in layers if isinstance(each, TransformerLayer))
    hidden = torch.zeros(1, 1, config.model.hidden_size, dtype=model.dtype)
    with torch.no_grad():
        step = DecodeStep(cache, 0, torch.tensor([5]), 64)
        layer((hidden, step))  # makes what the layers of a pass share
        with _Count() as count:
            layer((hidden, step))
    # four products, two norms and two sums, a product being one operator where weights are packed
    assert len(count.names) <= (12 if cpu_weights._packs_bfloat16() else 24), count.names


def test_a_packed_weight_gives_its_values_back() -> None:
    config = config_of(f"{BLOOM} --bf16")
    layers, modules = build_stage(config, CTX, CTX.device)
    with torch.no_grad():
        for _, parameter in named_parameters(modules):
            parameter.normal_()
    linear = [each for each in modules.modules() if isinstance(each, ParallelLinear)]
    before, size = [each.weight.detach().clone() for each in linear], sum(p.nbytes for p in modules.parameters())
    model = InferenceModel(config, CTX, layers, modules)
    for each, weight in zip(linear, before, strict=True):
        assert torch.equal(each.dense_weight(torch.bfloat16), weight)
    word = next(p for name, p in named_parameters(modules) if name == "embedding.word.weight")
    assert model.weight_bytes == size + (word.nbytes if cpu_weights._packs_bfloat16() else 0)


def test_weights_of_a_run_under_way_stay_as_they_are() -> None:
    config = config_of(BLOOM)
    _, modules = build_stage(config, CTX, CTX.device)
    with training_model(modules, config, CTX):
        assert all(parameter.is_contiguous() for parameter in modules.parameters())
    assert all(hasattr(each, "weight") for each in modules.modules() if isinstance(each, ParallelLinear))
