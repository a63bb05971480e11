"""The presets are what was published, and run."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.options.config import Config, options
from megatron.options.stored import PRESETS_DIR, from_dict, read_preset
from megatron.options.training import ParallelConfig
from megatron.plan.flops import count_parameters
from megatron.settings.command_line import load_config
from megatron.settings.validation import check

RECIPES = {"sft_llama": ("sft", 3, 2e-5), "lora_llama": ("sft", 3, 2e-4), "dpo_llama": ("preference", 1, 2e-5)}
"""Presets of no model, and their task, epochs and learning rate."""
PRESETS = sorted(path.stem for path in PRESETS_DIR.glob("*.yaml") if path.stem not in RECIPES)

# Sources: the checkpoints' own counts on the model hub; bloom_13b: 50304 padded tokens and 2048 positions of 5120,
# 40 layers of 12 h^2 + 13 h, and the last LayerNorm. Llama 2 34B was published as Code Llama's base.
PUBLISHED_PARAMETERS = {
    "bloom_13b": 12_853_626_880,
    "bloom_560m": 559_214_592,
    "bloom_1b1": 1_065_314_304,
    "bloom_1b7": 1_722_408_960,
    "bloom_3b": 3_002_557_440,
    "bloom_7b1": 7_069_016_064,
    "bloom_176b": 176_247_271_424,
    "llama1_7b": 6_738_415_616,
    "llama1_13b": 13_015_864_320,
    "llama1_65b": 65_285_660_672,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_34b": 33_743_970_304,
    "llama2_70b": 68_976_648_192,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "mistral03_7b": 7_248_023_552,
    "qwen25_0b5": 494_032_768,
    "qwen25_1b5": 1_543_714_304,
    "qwen25_7b": 7_615_616_512,
    "qwen25_72b": 72_706_203_648,
    "qwen3_0b6": 596_049_920,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "granite31_2b": 2_533_531_648,
    "granite31_8b": 8_170_848_256,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "phi3_mini": 3_821_079_552,
    "phi3_mini_128k": 3_821_079_552,
    "phi4_mini": 3_836_021_760,
    "phi4_14b": 14_659_507_200,
    "falcon_7b": 6_921_720_704,
    "falcon_40b": 41_303_293_952,
    "falcon_180b": 178_557_088_768,
    "falcon2_11b": 11_102_822_400,
    "starcoder2_3b": 3_030_371_328,
    "starcoder2_7b": 7_173_923_840,
    "pythia_160m": 162_322_944,
    "pythia_1b4": 1_414_647_808,
    "pythia_6b9": 6_857_302_016,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "granite30_1b_a400m": 1_334_628_352,
    "granite30_3b_a800m": 3_298_793_472,
    "olmoe_1b_7b": 6_919_161_856,
}

# tensor x pipeline x data, each a layout that somebody would start
LAYOUTS = {
    "bloom_13b": [(4, 1, 2), (4, 2, 4), (2, 2, 16), (8, 5, 1)],
    "bloom_560m": [(1, 1, 8), (2, 2, 2)],
    "bloom_1b1": [(1, 2, 4)],
    "bloom_1b7": [(2, 2, 2)],
    "bloom_3b": [(4, 2, 1), (4, 4, 8)],
    "bloom_7b1": [(4, 2, 4)],
    "bloom_176b": [(4, 12, 8), (8, 10, 8)],
    "llama1_7b": [(2, 2, 2)],
    "llama1_13b": [(2, 2, 16)],
    "llama1_65b": [(8, 8, 8)],
    "llama2_7b": [(2, 2, 2)],
    "llama2_13b": [(2, 2, 16)],
    "llama2_34b": [(8, 4, 2)],
    "llama2_70b": [(8, 4, 1), (16, 5, 4)],
    "llama31_8b": [(2, 2, 2), (1, 1, 8)],
    "llama31_70b": [(8, 8, 4)],
    "llama31_405b": [(8, 9, 8)],
    "llama32_1b": [(1, 1, 8), (2, 1, 4)],
    "llama32_3b": [(2, 2, 2)],
    "mistral_7b": [(2, 2, 2)],
    "mistral03_7b": [(2, 2, 2)],
    "qwen25_0b5": [(2, 2, 2)],
    "qwen25_1b5": [(2, 2, 2)],
    "qwen25_7b": [(2, 2, 2)],
    "qwen25_72b": [(8, 8, 1)],
    "qwen3_0b6": [(2, 2, 2)],
    "qwen3_4b": [(2, 2, 2)],
    "qwen3_8b": [(2, 2, 2)],
    "qwen3_32b": [(8, 4, 1)],
    "granite31_2b": [(2, 2, 2)],
    "granite31_8b": [(2, 2, 2)],
    "olmo2_1b": [(2, 2, 2)],
    "olmo2_7b": [(2, 2, 2)],
    "olmo2_13b": [(2, 2, 2)],
    "gemma2_2b": [(2, 2, 2)],
    "gemma2_9b": [(4, 2, 1)],
    "gemma3_270m": [(2, 2, 2)],
    "gemma3_1b": [(2, 2, 2)],
    "phi3_mini": [(2, 2, 2)],
    "phi3_mini_128k": [(2, 2, 2)],
    "phi4_mini": [(4, 2, 1)],
    "phi4_14b": [(2, 4, 1)],
    "falcon_7b": [(1, 4, 2)],
    "falcon_40b": [(8, 4, 1), (16, 2, 2)],
    "falcon_180b": [(8, 8, 8)],
    "falcon2_11b": [(2, 4, 1)],
    "starcoder2_3b": [(2, 2, 2)],
    "starcoder2_7b": [(2, 2, 2)],
    "pythia_160m": [(2, 2, 2)],
    "pythia_1b4": [(2, 2, 2)],
    "pythia_6b9": [(4, 2, 1)],
    "mixtral_8x7b": [(8, 4, 1), (2, 4, 8)],
    "mixtral_8x22b": [(8, 8, 1)],
    "qwen3_30b_a3b": [(4, 4, 2)],
    "qwen3_235b_a22b": [(4, 2, 16)],
    "granite30_1b_a400m": [(2, 2, 2)],
    "granite30_3b_a800m": [(2, 2, 2)],
    "olmoe_1b_7b": [(2, 2, 2)],
    "tiny_bloom": [(1, 1, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1), (1, 4, 1)],
    "tiny_llama": [(1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1)],
    "tiny_mixtral": [(1, 1, 1), (1, 2, 2), (2, 2, 1)],
}


def preset(name: str) -> Config:
    return from_dict(read_preset(name))


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_are_the_published_count(name: str) -> None:
    config = preset(name)
    config = dataclasses.replace(config, parallel=ParallelConfig())  # the vocabulary padded for one rank
    if name != "bloom_13b":  # published with the padding
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, make_vocab_size_divisible_by=1))
    assert count_parameters(config) == PUBLISHED_PARAMETERS[name]


def test_every_preset_has_a_published_count_or_is_tiny() -> None:
    assert {name for name in PRESETS if not name.startswith("tiny_")} == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_preset_is_valid_at_sensible_layouts(name: str, sequence_parallel: bool) -> None:
    for tensor, pipeline, data in LAYOUTS[name]:
        config = load_config(
            [
                *("--config", name, "--data-path", "corpus"),
                *("--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline)),
                *("--sequence-parallel", str(sequence_parallel)),
            ],
            world_size=tensor * pipeline * data,
        )
        assert config.parallel.pipeline_model_parallel_size == pipeline
        assert config.parallel.sequence_parallel == sequence_parallel


@pytest.mark.parametrize("name", PRESETS)
def test_preset_lacks_nothing_but_data(name: str) -> None:
    faults = check(preset(name), world_size=1)
    assert len(faults) == 1
    assert faults[0].startswith("data_path is not given")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("below", ["llama32_1b", "llama2_7b", "tiny_llama"])
def test_a_recipe_lacks_nothing_but_a_model_and_data(name: str, below: str) -> None:
    config = load_config(["--config", below, "--config", name, "--data-path", "chats"], world_size=8)
    assert config.model == preset(below).model
    assert (config.training.task, config.training.num_epochs, config.optimizer.lr) == RECIPES[name]
    assert "model" not in read_preset(name)


@pytest.mark.parametrize("name", [*PRESETS, *RECIPES])
def test_preset_sets_nothing_twice_and_is_headed_by_its_source(name: str) -> None:
    text = (PRESETS_DIR / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert all(option in options() for section in read_preset(name).values() for option in section)


def test_bloom_13b_is_trained_as_by_habanas_script() -> None:
    config = preset("bloom_13b")
    model, training, optimizer, data = config.model, config.training, config.optimizer, config.data
    assert (model.num_layers, model.hidden_size, model.ffn_size, model.num_attention_heads) == (40, 5120, 20480, 32)
    assert (model.position_embedding_type, model.embed_layernorm) == ("learned", False)
    assert (model.vocab_size, [model.padded_vocab_size(tp) for tp in (1, 2, 4, 8)]) == (
        50257,
        [50304, 50432, 50688, 51200],
    )
    assert not model.untie_embeddings_and_output_weights
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.1)
    assert (training.micro_batch_size, training.global_batch_size, training.seq_length) == (1, 1024, 2048)
    assert (training.train_samples, training.seed, training.precision) == (300_000_000, 42, "bf16")
    assert (optimizer.optimizer, optimizer.lr, optimizer.min_lr, optimizer.lr_decay_style) == (
        "adamw",
        1e-4,
        1e-5,
        "cosine",
    )
    assert (optimizer.lr_decay_samples, optimizer.lr_warmup_samples) == (126_953_125, 216_320)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_grad, optimizer.zero_stage) == (0.1, 1.0, 0)
    assert (data.split, data.eval_iters, data.eval_interval) == ("949,50,1", 5, 100)


def test_bloom_13b_takes_the_scripts_ramp_up_on_at_most_16_data_parallel_ranks() -> None:
    arguments = "--config bloom_13b --data-path corpus --rampup-batch-size 16 16 5000000".split()
    assert load_config(arguments, world_size=16).training.rampup_batch_size == (16, 16, 5_000_000)
    with pytest.raises(ValueError, match="a data-parallel size of 1, 2, 4, 8 or 16"):
        load_config(arguments, world_size=32)


def test_bloom_13b_can_take_alibi_and_the_embedding_layernorm() -> None:
    arguments = "--config bloom_13b --data-path corpus --position-embedding-type alibi --embed-layernorm".split()
    config = load_config(arguments, world_size=1)
    # no table of 2048 positions, but a weight and a bias
    assert count_parameters(config) == PUBLISHED_PARAMETERS["bloom_13b"] - 2048 * 5120 + 2 * 5120
