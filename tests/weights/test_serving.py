"""Exports are what vLLM reads, by its files' contract, written out here by hand from its sources:

- vllm/model_executor/models/{llama,bloom,gpt2}.py, `load_weights`: names of the tensors, and of which it makes its own;
  layers/vocab_parallel_embedding.py: an embedding has exactly config.json's vocab_size rows.
- vllm/lora/peft_helper.py and lora_model.py: fields of adapter_config.json, names of an adapter's tensors, its scale.

vllm-gaudi loads by the same sources. Tokenizer, chat template and generation_config.json are opened by transformers.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.cli.convert_checkpoint import served
from megatron.parallel.context import ParallelContext
from megatron.weights.huggingface import export_huggingface
from megatron.weights.huggingface_source import HuggingFaceSource
from megatron.weights.peft.export import AdaptedModel, adapter_config, export_adapter
from tests.models.outputs import config_of, logits_of
from tests.models.test_adapters import lora
from tests.models.test_expert_families import adapters_of, with_adapters
from tests.weights.test_huggingface import config_json, save, save_tokenizer, weights

transformers = pytest.importorskip("transformers")

LAYER = {
    "LlamaForCausalLM": (
        r"model\.layers\.\d+\.((self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.(weight|bias)"
        r"|(input|post_attention)_layernorm\.weight)"
    ),
    "BloomForCausalLM": (
        r"transformer\.h\.\d+\.(self_attention\.(query_key_value|dense)|mlp\.dense_(h_to_4h|4h_to_h)"
        r"|(input|post_attention)_layernorm)\.(weight|bias)"
    ),
    "GPT2LMHeadModel": r"transformer\.h\.\d+\.(ln_[12]|attn\.c_(attn|proj)|mlp\.c_(fc|proj))\.(weight|bias)",
}
OTHERS = {
    "LlamaForCausalLM": r"model\.embed_tokens\.weight|model\.norm\.weight|lm_head\.weight",
    "BloomForCausalLM": r"transformer\.(word_embeddings\.weight|(word_embeddings_layernorm|ln_f)\.(weight|bias))",
    "GPT2LMHeadModel": r"transformer\.(wte\.weight|wpe\.weight|ln_f\.(weight|bias))",
}
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.word_embeddings.weight", "transformer.wte.weight")
SERVED = ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite")
LLAMA_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"}


@pytest.mark.parametrize("name", ["llama_3.1", "llama_gqa_tied_wide_heads", "bloom_8_heads", "gpt2"])
def test_a_model_is_what_vllm_reads(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "theirs")
    save_tokenizer(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    model, folder = HuggingFaceSource(tmp_path / "theirs"), tmp_path / "export"
    folder.mkdir()
    # as of a run that began here: config.json is all our own
    export_huggingface(
        folder, model.config, model.tensors(), precision="bf16", max_shard_bytes=20_000, tokenizer=tmp_path / "chat"
    )
    config, tensors = config_json(folder), weights(folder)
    (kind,) = config["architectures"]
    for tensor in tensors:
        assert re.fullmatch(f"{LAYER[kind]}|{OTHERS[kind]}", tensor), tensor
    (embedding,) = (tensor for tensor in tensors if tensor in EMBEDDINGS)
    assert len(tensors[embedding]) == config["vocab_size"]
    assert ("lm_head.weight" in tensors) == (not config["tie_word_embeddings"])
    # a file that the index does not name is not read, and one that it names must be there
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(tensors)
    assert set(index.values()) == {path.name for path in folder.glob("*.safetensors")}

    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert theirs.architectures == [kind]
    assert theirs.dtype == torch.bfloat16
    source = transformers.AutoConfig.from_pretrained(tmp_path / "theirs")
    for field in ("num_attention_heads", "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim"):
        assert getattr(theirs, field, None) == getattr(source, field, None), field
    assert getattr(theirs, "rope_parameters", None) == getattr(source, "rope_parameters", None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False) == "w1</s>"
    assert len(tokenizer) <= config["vocab_size"]
    assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id


def read_as_vllm(folder: Path) -> tuple[dict[str, dict[str, Tensor]], float]:
    """Return the factors of each module, and the one scale of all. Fails where vLLM raises an error."""
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    assert not config["modules_to_save"]
    assert not config["use_dora"]
    assert config["bias"] == "none"
    assert isinstance(config["target_modules"], list | str)
    assert config["r"] > 0
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        assert name.startswith("base_model.model.")
        parts = name.removeprefix("base_model.model.").split(".")
        if parts[-1] == "weight" and parts[-2] in ("lora_A", "lora_B"):
            module, factor = ".".join(parts[:-2]), parts[-2][-1]
        else:
            assert parts[-1] in ("lora_embedding_A", "lora_embedding_B"), name
            module, factor = ".".join(parts[:-1]), parts[-1][-1]
        assert module.rsplit(".", 1)[-1] in LLAMA_MODULES, name
        found.setdefault(module, {})[factor] = tensor
    return found, config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])


def write_adapters(model: str, words: str, folder: Path) -> dict[str, Tensor]:
    """Export random adapters, and return them by our names."""
    config, generator = config_of(words), torch.Generator().manual_seed(1)
    shards = AdaptedModel(config).shards
    found = {name: torch.rand(shard.shape, generator=generator) for name, shard in shards.items()}
    folder.mkdir()
    export_adapter(folder, config, iter(found.items()), base_name=f"org/{model}")
    return found


@pytest.mark.parametrize("more", ["", "--use-rslora"])
def test_adapters_are_what_vllm_reads(more: str, tmp_path: Path) -> None:
    model, words = "llama_gqa", "q_proj o_proj up_proj down_proj embed_tokens lm_head"
    arguments = f"{lora(model, words)} {more}"
    ours = write_adapters(model, arguments, tmp_path / "adapters")
    factors, scale = read_as_vllm(tmp_path / "adapters")
    config = config_of(arguments)
    assert {module.rsplit(".", 1)[-1] for module in factors} == set(words.split())
    assert all(len(pair) == 2 for pair in factors.values())
    assert sum(len(pair) for pair in factors.values()) == len(ours)
    # its embedding's A is [rank, vocabulary], of the true vocabulary
    assert factors["model.embed_tokens"]["A"].shape == (config.lora.lora_rank, config.model.vocab_size)
    adapted = AdaptedModel(config)
    for module in adapted.adapted:
        rank, alpha = adapted.rank_and_alpha(module)
        assert scale == alpha / (rank**0.5 if more else rank)
    content = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert served(content, "llama") == "vLLM serves these adapters with --enable-lora --max-lora-rank 8"


@pytest.mark.parametrize("kind", [*SERVED, "mixtral", "qwen3_moe", "granitemoe"])
def test_adapters_on_other_families_are_what_peft_reads(kind: str, tmp_path: Path) -> None:
    """vLLM reads these names and joins them by the names of transformers' modules; its table names the classes."""
    peft = pytest.importorskip("peft")
    theirs, config, model = with_adapters(kind, 0, lora_target_modules=("qkv_proj",) if kind == "phi3" else ("q_proj",))
    export_adapter(tmp_path, config, adapters_of(model).items(), base_name=None)
    tokens = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        plain = theirs(tokens, use_cache=False).logits
        expected = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()(tokens, use_cache=False).logits
    found = logits_of(model, tokens, ParallelContext.single()).transpose(0, 1)
    error, change = ((one - expected).abs().max() / expected.abs().max() for one in (found, plain))
    assert error < 1e-5 < 1e-2 < change
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    adapted = [module.names[0] for module in AdaptedModel(config).adapted]
    assert served(content, config.model.architecture, adapted).startswith("vLLM serves these adapters")


def test_adapters_of_experts_and_of_embeddings_are_named(tmp_path: Path) -> None:
    for kind, targets, said in (
        ("qwen3_moe", "all-linear", "vLLM does not serve adapters of experts: "),
        ("qwen3", "embed_tokens", "vLLM does not serve adapters of embed_tokens of architecture=qwen3: "),
    ):
        _, config, _ = with_adapters(kind, 0, lora_target_modules=(targets,))
        adapted = [module.names[0] for module in AdaptedModel(config).adapted]
        assert served(adapter_config(config, None), config.model.architecture, adapted).startswith(said)


@pytest.mark.parametrize(
    ("model", "targets", "more", "said"),
    [
        ("llama_gqa", "k_proj", "--use-dora", "DoRA"),
        ("llama_gqa", "k_proj", "--lora-modules-to-save lm_head", "modules_to_save (lm_head)"),
        ("llama_gqa", "k_proj o_proj", "--lora-rank-pattern o_proj=2", "single modules (rank_pattern)"),
        ("llama_gqa", "k_proj o_proj", "--lora-alpha-pattern o_proj=3", "single modules (alpha_pattern)"),
        ("bloom_8_heads", "dense", "", "adapters of architecture="),
        ("bloom_8_heads", "dense", "--lora-bias lora_only", "trained biases (bias=lora_only)"),
        ("gpt2", "c_attn", "", "adapters of architecture="),
    ],
)
def test_what_vllm_does_not_take_is_said(model: str, targets: str, more: str, said: str, tmp_path: Path) -> None:
    arguments = f"{lora(model, targets)} {more}"
    write_adapters(model, arguments, tmp_path / "adapters")
    content = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    line = served(content, config_of(arguments).model.architecture)
    assert line.startswith("vLLM does not serve ")
    assert said in line
