"""Weights laid out for inference on a CPU: the same products, and weights of a run under way left as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.generation.model import InferenceModel, build_stage, training_model
from megatron.parallel import cpu_weights
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import ParallelLinear
from megatron.parallel.shards import named_parameters
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
