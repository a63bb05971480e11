"""Parameters and FLOPs of a plan are those of the model, of published sizes and of PaLM's formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.models.registry import FAMILIES
from megatron.options.config import Config
from megatron.options.stored import PRESETS_DIR, from_dict, read_preset
from megatron.parallel.layout import Layout
from megatron.parallel.shards import declared_shards
from megatron.plan.flops import count_parameters, declared_layers, flops_per_token, parameters_of_layer
from megatron.settings.command_line import load_config
from tests.plan.configs import BLOOM_13B, LLAMA_8B, config


def test_bloom_13b_has_the_parameters_that_habana_trains() -> None:
    assert count_parameters(config(BLOOM_13B)) == 12_853_626_880


@pytest.mark.parametrize(("tensor_size", "rows"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_parameters_grow_by_the_padding_alone(tensor_size: int, rows: int) -> None:
    run = config(BLOOM_13B, parallel={"tensor_model_parallel_size": tensor_size})
    assert count_parameters(run) == count_parameters(config(BLOOM_13B)) + (rows - 50304) * 5120


def test_flops_per_token_of_llama_8b_follow_palm() -> None:
    run = config(LLAMA_8B, training={"seq_length": 8192})
    # 8,030,261,248 parameters less the embedding look-up and 65 norms
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert flops_per_token(run) == 6 * weights + 12 * 32 * 4096 * 8192


@pytest.mark.parametrize("more", ["", "--recompute-granularity full"])
def test_flops_leave_out_the_gradients_of_a_frozen_base(more: str) -> None:
    flags = "--config llama31_8b --data-path none --lora-rank 8 --lora-target-modules down_proj"
    run = load_config([*flags.split(), *more.split()])
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert flops_per_token(run) == 4 * weights + 12 * 32 * 4096 * 8192


def presets_with_a_model() -> list[Any]:
    """All but the one of 94 layers of 128 experts; one of its family has half the layers."""
    names = sorted(path.stem for path in PRESETS_DIR.glob("*.yaml") if "model" in read_preset(path.stem))
    return [pytest.param(name, marks=pytest.mark.slow if name == "qwen3_235b_a22b" else ()) for name in names]


@pytest.mark.parametrize("tensor_size", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("preset", presets_with_a_model())
def test_the_plans_parameters_are_the_models_own(preset: str, tensor_size: int) -> None:
    tree = read_preset(preset)
    parallel = {**tree.get("parallel", {}), "tensor_model_parallel_size": tensor_size}
    assert_planned_is_allocated(from_dict({**tree, "parallel": parallel}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("tensor_size", [1, 2, 4, 8])
def test_few_key_value_heads_are_cut_not_copied(family: str, kv_heads: int, tensor_size: int) -> None:
    model = {"architecture": family, "hidden_size": 128, "num_attention_heads": 8, "num_query_groups": kv_heads}
    assert_planned_is_allocated(config(model, parallel={"tensor_model_parallel_size": tensor_size}))


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"position_embedding_type": "alibi", "embed_layernorm": True, "num_query_groups": 2},
        {"architecture": "llama", "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
        {"architecture": "llama", "position_embedding_type": "learned", "num_query_groups": 1, "ffn_hidden_size": 96},
        {"kv_channels": 32, "untie_embeddings_and_output_weights": True},
        {"freeze": ("embedding.*", "layers.1.*")},
    ],
)
def test_options_that_change_shapes_change_the_plan_alike(model: dict[str, Any]) -> None:
    assert_planned_is_allocated(config(model))


@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"lora_target_modules": ("q_proj", "down_proj"), "lora_rank_pattern": ("down_proj=2",)},
        {"lora_modules_to_save": ("lm_head", "embed_tokens"), "lora_bias": "all"},
    ],
)
def test_of_a_run_with_adapters_the_plan_trains_what_the_run_does(tensor_size: int, lora: dict[str, Any]) -> None:
    llama = {"architecture": "llama", "position_embedding_type": "rope", "num_query_groups": 2}
    model = {**llama, "untie_embeddings_and_output_weights": True}
    parallel = {"tensor_model_parallel_size": tensor_size}
    assert_planned_is_allocated(config(model, parallel=parallel, lora={"lora_rank": 4, **lora}))


def assert_planned_is_allocated(run: Config) -> None:
    """Compare name by name, and layer by layer, with the modules that one tensor-parallel rank builds."""
    from megatron.models.sequential import build_layers
    from megatron.parallel.context import ParallelContext
    from megatron.parallel.shards import named_parameters

    size = run.parallel.tensor_model_parallel_size
    layers, layout = declared_layers(run), Layout.of(run.parallel)
    with torch.device("meta"):
        specs = build_layers(run, ParallelContext(tensor_size=size, rank=size - 1))
        built = [dict(named_parameters(spec.build())) for spec in specs]
    for layer, parameters in zip(layers, built, strict=True):
        shapes = {layer.full_name(name): shard.local_shape(size) for name, shard in layer.shards.items()}
        assert {name: tuple(parameter.shape) for name, parameter in parameters.items()} == shapes
        assert parameters_of_layer(layer, layout) == sum(p.numel() for p in parameters.values())
        trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
        assert parameters_of_layer(layer, layout, trained_only=True) == trained
    every = declared_shards(layers)
    merged = {name: parameter for parameters in built for name, parameter in parameters.items()}
    cut = sum(p.numel() * (1 if every[name].dim is None else size) for name, p in merged.items())
    assert count_parameters(run) == cut
