"""PEFT's rule of what a folder of adapters holds, against the installed PEFT over generated configs."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron.checkpoint.folders import CheckpointError
from megatron.weights.peft.adapter_merge import Merge

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

PREFIX = "base_model.model."
PHASES = (Phase.explicit, Phase.generate)
LLAMA = [
    "q_proj",
    "k_proj",
    "self_attn.v_proj",
    "down_proj",
    "0.mlp.up_proj",
    "model.layers.2.mlp.gate_proj",
    "lm_head",
]
GPT2 = ["c_attn", "attn.c_proj", "c_fc", "transformer.h.1.mlp.c_fc"]
PATTERNS = [r".*\.[01]\..*(q|down)_proj", "all-linear", "All-Linear", r".*(c_attn|v_proj)", r".*\.\d\.mlp\..*"]


def model(family: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 24, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    if family == "gpt2":
        sizes |= {"n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 8}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    sizes |= {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(attention_bias=True, **sizes))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    found = {}
    for family in ("llama", "gpt2"):
        folder = tmp_path_factory.mktemp(family)
        made = model(family)
        made.save_pretrained(folder)
        found[family] = (made, folder)
    return found


def configs_of(targets: list[str], saved: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(targets)
    return st.fixed_dictionaries(
        {
            "target_modules": st.lists(names, min_size=1, max_size=4, unique=True) | st.sampled_from(PATTERNS),
            "exclude_modules": st.none() | st.lists(names, min_size=1, max_size=2) | st.just(r".*\.1\..*"),
            "layers_to_transform": st.none() | st.integers(0, 2) | st.lists(st.integers(0, 3), max_size=3),
            "layers_pattern": st.none() | st.sampled_from(["layers", "h", "blocks", ["h", "layers"]]),
            "modules_to_save": st.none() | st.lists(st.sampled_from(saved), min_size=1, max_size=2),
            "bias": st.sampled_from(["none", "all", "lora_only"]),
            "rank_pattern": st.just({}) | st.dictionaries(st.sampled_from([targets[0], r".*\.1\..*"]), st.just(3)),
        }
    )


CASES = st.tuples(st.just("llama"), configs_of(LLAMA, ["lm_head", "norm", "head", "layers.1.mlp"])) | st.tuples(
    st.just("gpt2"), configs_of(GPT2, ["wte", "ln_f", "h.0.attn"])
)
PLAIN: dict[str, Any] = {"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None}
PLAIN |= {"modules_to_save": None, "bias": "none", "rank_pattern": {}}


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=PHASES)
@given(CASES, st.integers(0, 10**6))
@example(("llama", PLAIN | {"target_modules": ["q_proj"], "layers_to_transform": [0, 1]}), 3)
@example(("llama", PLAIN | {"target_modules": ["q_proj"], "layers_to_transform": [1], "bias": "lora_only"}), 0)
@example(("llama", PLAIN | {"target_modules": ["lm_head", "embed_tokens"], "bias": "all"}), 1)
@example(("gpt2", PLAIN | {"target_modules": "all-linear", "bias": "all"}), 5)
def test_a_folder_holds_what_peft_trains_no_more_and_no_less(
    bases: dict[str, tuple[Any, Path]],
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[str, dict[str, Any]],
    draw: int,
) -> None:
    made, base = bases[case[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = peft.get_peft_model(copy.deepcopy(made), peft.LoraConfig(r=2, **case[1]))
        except (ValueError, TypeError):  # PEFT refuses it, or finds nothing to adapt
            assume(False)
        whole = peft.get_peft_model_state_dict(adapted)
    folder = tmp_path_factory.mktemp("adapter")
    adapted.peft_config["default"].save_pretrained(folder)
    _write(folder, whole)
    Merge(base, [(folder, 1.0)])
    _refused_without_one(base, folder, whole, draw)
    _refused_with_one_more(base, folder, whole)


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def _refused_without_one(base: Path, folder: Path, whole: dict[str, torch.Tensor], draw: int) -> None:
    """Leave out one module or whole tensor: the refusal has its name, or a note, where releases of PEFT left it out."""
    parts = sorted({name.partition(".lora_")[0] for name in whole if ".base_layer.weight" not in name})
    left = parts[draw % len(parts)]
    _write(folder, {name: tensor for name, tensor in whole.items() if name.partition(".lora_")[0] != left})
    name = left.removeprefix(PREFIX).replace(".base_layer", "")
    try:
        notes = Merge(base, [(folder, 1.0)]).notes
    except CheckpointError as error:
        named = str(error)
        assert name in named or "holds no tensors" in named
    else:
        assert left.endswith("bias")
        assert any("lora_only, but not" in note and name in note for note in notes)


def _refused_with_one_more(base: Path, folder: Path, whole: dict[str, torch.Tensor]) -> None:
    """Add the adapter of one module to one of another layer that PEFT does not select."""
    modules = {name.partition(".lora_")[0] for name in whole if ".lora_A." in name}
    moves = [(f".{here}.", f".{there}.") for here in range(3) for there in range(3) if here != there]
    for module in sorted(modules):
        for other in (module.replace(*move) for move in moves):
            if other in modules:
                continue
            own = {name: tensor for name, tensor in whole.items() if name.startswith(f"{module}.lora_")}
            _write(folder, whole | {name.replace(module, other): tensor for name, tensor in own.items()})
            with pytest.raises(CheckpointError, match=f"{other.removeprefix(PREFIX)}.*does not name|gives it rank"):
                Merge(base, [(folder, 1.0)])
            return
