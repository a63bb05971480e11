"""Exported adapters: names, shapes and config as PEFT writes them, and the logits that they give.

The logits are those of transformers' model with scale * B A in its weights (tests/models/test_adapters.py). They are
computed from the exported files twice: by hand here, and by PEFT where it is there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.weights.folder_files import Precision
from megatron.weights.peft.export import AdaptedModel, export_adapter
from tests.models.outputs import config_of, in_float64, run_in_float64
from tests.models.test_adapters import ALPHA, RANK, Reference, lora, reference, sample, their_model

PREFIX, MAGNITUDE = "base_model.model.", "magnitude_vector"


@dataclass(frozen=True)
class Case:
    model: str
    targets: str
    more: str = ""
    rank: int | None = None
    """Of the last target, where it has another."""
    alpha: float | None = None

    @property
    def arguments(self) -> str:
        last = self.targets.split()[-1]
        patterns = f" --lora-rank-pattern {last}={self.rank}" if self.rank else ""
        patterns += f" --lora-alpha-pattern {last}={self.alpha}" if self.alpha else ""
        return f"{lora(self.model, self.targets)} {self.more}{patterns}"

    def scales(self) -> dict[str, float]:
        root = 0.5 if "rslora" in self.more else 1.0
        scales = dict.fromkeys(self.targets.split(), ALPHA / RANK**root)
        last = self.targets.split()[-1]
        return scales | {last: (self.alpha or ALPHA) / (self.rank or RANK) ** root}


CASES = {
    "llama": Case("llama_gqa", "q_proj up_proj down_proj", "--use-rslora", rank=6, alpha=5.5),
    "llama_whole": Case("llama_gqa", "v_proj o_proj", "--lora-modules-to-save lm_head model.norm"),
    "llama_tied": Case("llama_gqa_tied_wide_heads", "k_proj", "--lora-modules-to-save embed_tokens"),
    "llama_ends": Case("llama_gqa_tied_wide_heads", "o_proj embed_tokens lm_head", rank=2),
    "bloom": Case("bloom_8_heads", "word_embeddings query_key_value dense", "--lora-bias all"),
    "bloom_dora": Case("bloom_8_heads", "word_embeddings query_key_value dense", "--use-dora"),
    "llama_dora": Case("llama_gqa", "k_proj down_proj lm_head", "--use-dora", rank=2),
    "bloom_only": Case("bloom_8_heads", "dense_h_to_4h query_key_value", "--lora-bias lora_only", rank=2),
    "gpt2": Case("gpt2", "c_fc c_attn", "--lora-modules-to-save wpe attn.c_proj", alpha=3),
}


@cache
def expected(name: str) -> Reference:
    case = CASES[name]
    ranks = {case.targets.split()[-1]: case.rank} if case.rank else {}
    found = reference(case.model, case.targets, ranks, case.scales())
    if "dora" not in case.more:
        return found
    generator, shards = torch.Generator().manual_seed(2), AdaptedModel(config_of(case.arguments)).shards
    magnitudes = {
        n: torch.rand(s.shape, generator=generator).double().numpy() for n, s in shards.items() if MAGNITUDE in n
    }
    assert magnitudes
    weights = found.weights | magnitudes
    outputs = run_in_float64(case.arguments, weights, found.tokens, found.labels)  # tests/models/test_dora.py
    return replace(found, weights=weights, outputs=outputs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An export of each case."""
    found = {}
    for name, case in CASES.items():
        config, folder = config_of(case.arguments), tmp_path_factory.mktemp(name)
        weights = {n: torch.from_numpy(array).float() for n, array in expected(name).weights.items()}
        tensors = ((n, weights[n]) for n in AdaptedModel(config).shards)
        assert export_adapter(folder, config, tensors, base_name="org/base") == []
        found[name] = folder
    return found


def base_of(name: str, tensors: dict[str, Tensor]) -> Any:
    """transformers' model of a case, float32, with other values in what the adapter trains whole."""
    with in_float64():
        model = their_model(CASES[name].model)
    model = model.float()
    with torch.no_grad():
        for key in tensors:
            if "lora_" not in key:
                model.get_parameter(key.removeprefix(PREFIX).replace(".base_layer", "")).add_(1.0)
    return model.eval()


def assert_logits(model: Any, theirs: Reference) -> None:
    with torch.no_grad():
        found = model(sample()[0], use_cache=False).logits.transpose(0, 1).numpy()
    scale = np.abs(theirs.outputs.logits).max()
    np.testing.assert_allclose(found, theirs.outputs.logits, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", CASES)
def test_an_export_has_the_logits_of_the_adapters(folders: dict[str, Path], name: str) -> None:
    """scale * B A of the files, and what they hold whole, in transformers' model."""
    tensors, scales = load_file(folders[name] / "adapter_model.safetensors"), CASES[name].scales()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    model = base_of(name, tensors)
    if any(re.search("lora_embedding|lm_head.lora", key) and model.config.tie_word_embeddings for key in tensors):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # what the adapters add is not tied
    with torch.no_grad():
        for key, tensor in tensors.items():
            theirs = key.removeprefix(PREFIX).replace(".base_layer", "")
            if "lora_" not in theirs:
                model.get_parameter(theirs).copy_(tensor)
            elif match := re.fullmatch(r"(.*)\.lora_(embedding_)?A(\.weight)?", theirs):
                module, of_embedding, _ = match.groups()
                other = tensors[re.sub(r"(lora_|embedding_)A", r"\1B", key)]
                update = scales[module.split(".")[-1]] * other @ tensor
                weight = model.get_parameter(f"{module}.weight")
                weight += update.t() if of_embedding or CASES[name].model == "gpt2" else update
                if (magnitude := tensors.get(f"{PREFIX}{module}.lora_{MAGNITUDE}")) is not None:
                    dim = 0 if of_embedding else 1
                    weight *= (magnitude / weight.norm(dim=dim)).unsqueeze(dim)
    assert_logits(model, expected(name))


@pytest.mark.parametrize("name", CASES)
def test_peft_loads_an_export(folders: dict[str, Path], name: str) -> None:
    peft: Any = pytest.importorskip("peft")
    tensors = load_file(folders[name] / "adapter_model.safetensors")
    model, loaded = base_of(name, tensors), []
    load = peft.PeftModel.load_adapter

    def noted(*given: Any, **more: Any) -> Any:
        loaded.append(load(*given, **more))
        return loaded[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.PeftModel, "load_adapter", noted)
        adapted = peft.PeftModel.from_pretrained(model, folders[name])
    assert loaded[0].unexpected_keys == []
    assert not [key for key in loaded[0].missing_keys if "lora_" in key or "modules_to_save" in key]
    found = {key.replace(".default", "") for key, _ in adapted.named_parameters() if "lora_" in key}
    assert {key.removesuffix(".weight") for key in found} == {
        key.removesuffix(".weight") for key in tensors if "lora_" in key
    }
    assert_logits(adapted, expected(name))


GOLDEN: dict[str, dict[str, Any]] = {
    "llama": {
        "r": 4, "lora_alpha": 12, "bias": "none", "fan_in_fan_out": False, "use_rslora": True, "modules_to_save": None,
        "target_modules": ["q_proj", "up_proj", "down_proj"], "rank_pattern": {"down_proj": 6},
        "alpha_pattern": {"down_proj": 5.5},
    },
    "llama_whole": {"modules_to_save": ["model.norm", "lm_head"], "target_modules": ["v_proj", "o_proj"]},
    "llama_tied": {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "llama_ends": {
        "target_modules": ["embed_tokens", "o_proj", "lm_head"], "modules_to_save": None,
        "rank_pattern": {"lm_head": 2},
    },
    "bloom": {"bias": "all", "target_modules": ["word_embeddings", "query_key_value", "dense"]},
    "bloom_only": {"bias": "lora_only", "rank_pattern": {"query_key_value": 2}, "alpha_pattern": {}},
    "gpt2": {
        "fan_in_fan_out": True, "modules_to_save": ["wpe", "attn.c_proj"], "target_modules": ["c_attn", "c_fc"],
        "alpha_pattern": {"c_attn": 3},
    },
}  # fmt: skip
PEFT_KEYS = {
    "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r",
    "rank_pattern", "alpha_pattern", "revision", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""Those of PEFT 0.10 and later."""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_pissa_is_not_rounded_as_that_loses_a_part_of_what_was_trained(tmp_path: Path, precision: Precision) -> None:
    config = config_of(f"{lora('llama_gqa', 'q_proj')} --lora-init pissa")
    tensors = ((name, torch.ones(shard.shape)) for name, shard in AdaptedModel(config).shards.items())
    with pytest.raises(CheckpointError, match="a small run lost 12 to 15 % of it; write float32"):
        export_adapter(tmp_path, config, tensors, base_name="org/base", precision=precision)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CASES)
def test_the_config_is_that_of_peft(folders: dict[str, Path], name: str) -> None:
    config = json.loads((folders[name] / "adapter_config.json").read_text())
    assert set(config) == PEFT_KEYS | ({"ensure_weight_tying"} if name == "llama_tied" else set())
    assert (config["peft_type"], config["task_type"], config["use_dora"]) == ("LORA", "CAUSAL_LM", "dora" in name)
    assert config["base_model_name_or_path"] == "org/base"
    golden = GOLDEN.get(name, {})
    assert {key: config[key] for key in golden} == golden


def test_names_and_shapes_are_those_of_peft(folders: dict[str, Path]) -> None:
    """As PEFT 0.21.2 saves these adapters."""
    found = {
        name: {
            key.removeprefix(PREFIX): list(t.shape) for key, t in load_file(path / "adapter_model.safetensors").items()
        }
        for name, path in folders.items()
    }
    layer = "model.layers.1.{}.weight".format
    assert found["llama"][layer("self_attn.q_proj.lora_A")] == [4, 64]
    assert found["llama"][layer("mlp.down_proj.lora_A")] == [6, 96]
    assert found["llama"][layer("mlp.down_proj.lora_B")] == [64, 6]
    assert found["llama_ends"]["model.embed_tokens.lora_embedding_A"] == [4, 123]
    assert found["llama_ends"]["lm_head.lora_B.weight"] == [123, 2]
    assert found["llama_whole"]["lm_head.weight"] == [123, 64]
    assert found["llama_tied"]["lm_head.weight"] == found["llama_tied"]["model.embed_tokens.weight"] == [123, 64]
    only = found["bloom_only"]
    assert {key for key in only if "lora_" not in key and ".0." in key} == {
        "transformer.h.0.mlp.dense_h_to_4h.base_layer.bias",
        "transformer.h.0.self_attention.query_key_value.base_layer.bias",
    }
    assert {"transformer.h.0.input_layernorm.bias", "transformer.h.1.mlp.dense_h_to_4h.bias"} <= set(found["bloom"])
    assert "transformer.h.1.self_attention.dense.base_layer.bias" in found["bloom"]
    assert found["gpt2"]["transformer.h.0.attn.c_attn.lora_B.weight"] == [192, 4]
    assert found["gpt2"]["transformer.h.0.attn.c_proj.weight"] == [64, 64]
    assert "transformer.h.0.attn.c_proj.bias" in found["gpt2"]


def test_layers_apart_are_named_apart() -> None:
    """PEFT matches ends of names: those of one layer are named with its number."""
    from megatron.weights.peft.export import adapter_config

    targets = "--lora-target-modules *.layers.0.* *.layers.1.mlp.up_proj --lora-rank-pattern layers.1.*up_proj=2"
    config = config_of(f"{lora('llama_gqa', 'q_proj')} {targets.replace('layers.1.*', '*.layers.1.*')}")
    content = adapter_config(config, None)
    assert content["target_modules"] == [
        "0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.v_proj", "0.self_attn.o_proj", "0.mlp.gate_proj",
        "up_proj", "0.mlp.down_proj",
    ]  # fmt: skip
    assert content["rank_pattern"] == {"1.mlp.up_proj": 2}
