"""A plan in fp8: bytes of what is kept of the weights, as they are allocated, and the time of the products."""

from __future__ import annotations

import pytest
import torch

from megatron.models.registry import family_of
from megatron.options.config import Config
from megatron.parallel.layout import Layout
from megatron.parallel.linear import ParallelLinear
from megatron.parallel.operators.fp8_linear import ScaledMethod
from megatron.parallel.operators.fp8_weights import kept_bytes
from megatron.plan.memory import memory_by_stage
from megatron.plan.rates.files import load_rates
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import step_time
from megatron.settings.command_line import read_command_line
from tests.models import outputs

LLAMA = (
    "--architecture llama --position-embedding-type rope --num-query-groups 2 --ffn-hidden-size 96 --bf16 "
    "--fp8-format e4m3 --fp8-emulate"
)


def planned(config: Config) -> int:
    layout = Layout.of(config.parallel)
    return sum(kept_bytes(layer, config, layout) for layer in family_of(config).layers(config))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("options", ["", "--cache-fp8-weight false", "--cache-fp8-weight-fwd false"])
def test_the_bytes_that_are_kept_are_those_of_the_plan(recipe: str, options: str) -> None:
    config = outputs.config_of(f"{LLAMA} --fp8-recipe {recipe} --fp8-mlp-row-parallel false {options}")
    ctx = outputs.context_of(config)
    model = outputs.build_model(config, ctx)
    ctx.state.fp8.is_on = True
    tokens = torch.zeros(1, 24, dtype=torch.int64)
    model(tokens, project=outputs.mean_loss(tokens, ctx)).backward()
    kept = 0
    for layer in model.modules():
        if isinstance(layer, ParallelLinear) and isinstance(layer.base, ScaledMethod) and layer.base.kept is not None:
            operands = (layer.base.kept.forward_NK, layer.base.kept.backward_KN)
            kept += sum(each.values.nbytes for each in operands if each is not None)
    assert kept == planned(config)
    assert (kept == 0) == ("fwd" in options)


def of_llama(options: str) -> Config:
    return read_command_line(
        f"--config llama32_1b --device cuda --data-path x --seq-length 4096 {options}".split()
    ).config


def test_the_plan_of_a_run_counts_them_and_the_faster_products() -> None:
    plain, fp8 = of_llama(""), of_llama("--fp8-format hybrid")
    (without,), (with_fp8,) = (memory_by_stage(each, Layout.of(each.parallel)) for each in (plain, fp8))
    # attention and MLP of 16 layers: 973,078,528 numbers
    assert with_fp8.memory.weights - without.memory.weights == 2 * 973_078_528
    rates = load_rates("h100")
    cluster = Cluster.of(1, 1)
    slow, fast, by_row, some, without_wgrad = (
        step_time(each, cluster, rates).seconds
        for each in (
            plain,
            fp8,
            of_llama("--fp8-format e4m3 --fp8-recipe rowwise"),
            of_llama("--fp8-format hybrid --fp8-first-last-layers-bf16 4"),
            of_llama("--fp8-format hybrid --fp8-wgrad false"),
        )
    )
    assert 1.05 < slow / fast < 1.6
    # 12 bytes a number of the inputs and 8 of the outputs, not 8 and 6, and the weights' gradients twice
    assert 1.01 < by_row / fast < slow / fast
    # eight of sixteen layers
    assert some == pytest.approx((slow + fast) / 2, rel=1e-3)
    # one product of three in 16 bits; the others gain less, since they convert the inputs and the outputs' gradients
    assert 1 / 3 < (without_wgrad - fast) / (slow - fast) < 2 / 3
