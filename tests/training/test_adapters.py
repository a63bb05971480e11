"""LoRA on every layout: one process is the reference, itself compared with PEFT in tests/models/test_adapters.py."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.options.model import LoraConfig
from megatron.settings.command_line import parse_arguments
from megatron.settings.validation import check, idle
from megatron.training.optimizers.groups import treatment_of
from megatron.weights.huggingface import export_huggingface, parameters_of
from megatron.weights.peft.export import AdaptedModel, adapter_config
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_layouts import (
    LAYOUTS,
    RECOMPUTE,
    WITH_SEQUENCE,
    arguments,
    assert_equals_reference,
    reference_of,
)

STEPS = 2
"""Each compares the gradients and the update; of one process twenty show that it learns."""
CHEAP = {(0, "221s"), (1, "122s"), (0, "112")}
"""Model and layout of the cases that are not slow."""
LORA = "--lora-rank 4 --lora-alpha 16 --lr 1e-2"
CASES = {
    "llama_gqa": f"{LORA} --lora-target-modules q_proj v_proj down_proj embed_tokens lm_head --use-dora",
    "bloom_learned": f"{LORA} --lora-target-modules all-linear wte lm_head",
}


@pytest.fixture(scope="module")
def reference(ranks: RankPools) -> Any:
    return functools.cache(lambda model: reference_of(ranks, f"{layouts.MODELS[model]} {CASES[model]}", STEPS, 20))


@pytest.mark.parametrize(
    ("model", "layout", "recompute", "zero"),
    [
        pytest.param(
            model,
            layout,
            RECOMPUTE[(place + index) % 3],
            (place + index) % 4 if layout[0] == "1" else (place + index) % 2,
            marks=() if (index, layout) in CHEAP else pytest.mark.slow,
        )
        for index, model in enumerate(CASES)
        for place, layout in enumerate(LAYOUTS + WITH_SEQUENCE)
    ],
)
def test_adapters_learn_on_every_layout_as_on_one_process(
    ranks: RankPools, reference: Any, model: str, layout: str, recompute: str, zero: int
) -> None:
    world_size, flags = arguments(layout, recompute, zero)
    results = ranks(world_size)(layouts.train, f"{layouts.MODELS[model]} {CASES[model]} {flags}", STEPS)
    assert all(result == results[0] for result in results), "ranks disagree"
    assert_equals_reference(results[0], reference(model))


ONE_LAYER = "--lora-target-modules layers.0.attention.qkv"


@pytest.mark.parametrize(
    ("schedule", "targets"),
    [
        ("--pipeline-schedule zero-bubble", ""),
        ("--num-virtual-stages-per-pipeline-rank 2", ONE_LAYER),
        ("--pipeline-schedule zero-bubble", ONE_LAYER),
        ("--zero-stage 1 --loraplus-lr-ratio 4", f"{ONE_LAYER} --lora-bias lora_only"),
    ],
)
def test_adapters_learn_under_every_schedule_also_on_the_first_stage_alone(
    ranks: RankPools, schedule: str, targets: str
) -> None:
    flags = f"{layouts.MODELS['bloom_learned']} {LORA} {targets} --micro-batch-size 4"
    plus = "--loraplus-lr-ratio 4" if "loraplus" in schedule else ""
    (expected,) = ranks(1)(layouts.train, f"{flags} {plus}", 4)
    for result in ranks(2)(layouts.train, f"{flags} {schedule} --pipeline-model-parallel-size 2", 4):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert expected["losses"][-1] != expected["losses"][0]


def test_faults_of_the_options_are_in_one_message() -> None:
    arguments = f"{layouts.COMMON} {layouts.MODELS['llama_gqa']}".split()
    config, _ = parse_arguments([*arguments, *"--lora-rank 500 --lora-target-modules query --freeze output.*".split()])
    faults = "\n".join(check(config, 1))
    assert "leave freeze out" in faults
    assert "lora_target_modules=query matches no linear layer" in faults
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in faults
    config, _ = parse_arguments([*arguments, *"--lora-rank 33 --lora-target-modules q_proj v_proj Wqkv".split()])
    (fault,) = check(config, 1)
    assert "rank 33 of the adapter of v_proj, which is [32, 64], is above 32" in fault
    assert any(line.startswith("lora_target_modules=Wqkv matches no linear layer") for line in idle(config))


@pytest.mark.parametrize(
    "options", ["--lora-bias all", "--lora-bias lora_only", "--use-dora --lora-modules-to-save ln_f"]
)
def test_learning_rates_of_lora_plus_are_those_of_peft(tmp_path: Path, options: str) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    words = (
        f"{layouts.COMMON} {layouts.MODELS['bloom_learned'].replace('learned', 'alibi')} --embed-layernorm --lr 1e-2"
    )
    words += " --lora-rank 4 --lora-target-modules word_embeddings query_key_value dense --loraplus-lr-ratio 4"
    config, _ = parse_arguments(f"{words} {options}".split())
    base = dataclasses.replace(config, lora=LoraConfig())
    export_huggingface(tmp_path, base, ((name, torch.zeros(s.shape)) for name, s in parameters_of(base).items()))
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)} - {"peft_type", "auto_mapping"}
    content = {name: value for name, value in adapter_config(config, None).items() if name in known}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model = peft.get_peft_model(model, peft.LoraConfig(**content | {"inference_mode": False}))
    plus = importlib.import_module("peft.optimizers")
    optimizer = plus.create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=4)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    theirs = {_plain(name): rates[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    adapted = AdaptedModel(config)
    ours = {
        _plain(part.name): 1e-2 * treatment_of(SimpleNamespace(shard=shard, full_name=name), config).lr_mult
        for name, shard in adapted.shards.items()
        for part in adapted.map.parts[name]
    }
    assert ours == pytest.approx(theirs)
    assert len(set(ours.values())) == 3


def _plain(name: str) -> str:
    for word in (".default", ".modules_to_save", ".base_layer"):
        name = name.replace(word, "")
    return name.removesuffix(".weight")
