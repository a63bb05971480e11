"""Files of Megatron-LM's legacy format, made of transformers' models by the published layout: none of our code is used.

Source: NVIDIA/Megatron-LM, megatron/training/checkpointing.py; its models of before megatron-core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

GPT = {"hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "ffn_hidden_size": 128, "vocab": 101, "length": 24}
LLAMA = {**GPT, "ffn_hidden_size": 80, "num_query_groups": 2}
MULTIPLE = 8


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=GPT["vocab"],
        n_positions=GPT["length"],
        n_embd=32,
        n_layer=4,
        n_head=4,
    )
    return _shaken(GPT2LMHeadModel(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LLAMA["vocab"], hidden_size=32, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    return _shaken(LlamaForCausalLM(config))


def _shaken(model: nn.Module) -> nn.Module:
    """Norms and biases start at ones and zeros, of which any order is right."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return model.eval()


def _split(tensor: Tensor, rank: int, tp: int, dim: int = 0) -> Tensor:
    return tensor.chunk(tp, dim)[rank].clone()


def _qkv(parts: Sequence[Tensor], rank: int, tp: int, version: float, heads: int, groups: int) -> Tensor:
    """Return a rank's rows of q, k and v, in the order of the version."""
    size = len(parts[0]) // heads
    q, k, v = (_split(each, rank, tp) for each in parts)
    heads, groups, rest = heads // tp, groups // tp, q.shape[1:]
    if version == 0:  # [3, heads, size]
        return torch.cat([q, k, v])
    if version == 1:  # [heads, size, 3]
        by_channel = [each.view(heads, size, *rest) for each in (q, k, v)]
        return torch.stack(by_channel, dim=2).reshape(3 * heads * size, *rest)
    # [groups, q heads of the group + k + v, size]
    rows = []
    for group in range(groups):
        of_group = heads // groups
        rows += [q[group * of_group * size : (group + 1) * of_group * size]]
        rows += [each[group * size : (group + 1) * size] for each in (k, v)]
    return torch.cat(rows)


def _padded(table: Tensor, tp: int) -> Tensor:
    multiple = MULTIPLE * tp
    missing = -len(table) % multiple
    # Megatron's padding is trained like other rows, and means nothing
    return torch.cat([table, torch.full((missing, table.shape[1]), 9.0)])


def _layer_of_gpt2(state: dict[str, Tensor], number: int, rank: int, tp: int, version: float) -> dict[str, Tensor]:
    def of(name: str) -> Tensor:
        return state[f"transformer.h.{number}.{name}"]

    weight, bias = of("attn.c_attn.weight").t().chunk(3), of("attn.c_attn.bias").chunk(3)
    return {
        "input_layernorm.weight": of("ln_1.weight"),
        "input_layernorm.bias": of("ln_1.bias"),
        "attention.query_key_value.weight": _qkv(weight, rank, tp, version, 4, 4),
        "attention.query_key_value.bias": _qkv(bias, rank, tp, version, 4, 4),
        "attention.dense.weight": _split(of("attn.c_proj.weight").t(), rank, tp, 1),
        "attention.dense.bias": of("attn.c_proj.bias"),
        "post_attention_layernorm.weight": of("ln_2.weight"),
        "post_attention_layernorm.bias": of("ln_2.bias"),
        "mlp.dense_h_to_4h.weight": _split(of("mlp.c_fc.weight").t(), rank, tp),
        "mlp.dense_h_to_4h.bias": _split(of("mlp.c_fc.bias"), rank, tp),
        "mlp.dense_4h_to_h.weight": _split(of("mlp.c_proj.weight").t(), rank, tp, 1),
        "mlp.dense_4h_to_h.bias": of("mlp.c_proj.bias"),
    }


def _layer_of_llama(state: dict[str, Tensor], number: int, rank: int, tp: int) -> dict[str, Tensor]:
    def of(name: str) -> Tensor:
        return state[f"model.layers.{number}.{name}.weight"]

    q, k, v = (of(f"self_attn.{each}_proj") for each in "qkv")
    gate, up = (_split(of(f"mlp.{each}_proj"), rank, tp) for each in ("gate", "up"))
    return {
        "input_norm.weight": of("input_layernorm"),
        "self_attention.query_key_value.weight": _qkv((q, k, v), rank, tp, 3, 4, 2),
        "self_attention.dense.weight": _split(of("self_attn.o_proj"), rank, tp, 1),
        "post_attention_norm.weight": of("post_attention_layernorm"),
        "mlp.dense_h_to_4h.weight": torch.cat([gate, up]),
        "mlp.dense_4h_to_h.weight": _split(of("mlp.down_proj"), rank, tp, 1),
    }


def write_gpt2(model: nn.Module, folder: Path, tp: int, pp: int, version: float) -> Path:
    """Write GPT-2 as the releases of 2019 to 2022 did; return the folder of the iteration."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    table = _padded(state["transformer.wte.weight"], tp)
    for rank in range(tp):
        for stage in range(pp):
            language: dict[str, Any] = {}
            if stage == 0:
                language["embedding"] = {
                    "word_embeddings": {"weight": _split(table, rank, tp)},
                    "position_embeddings": {"weight": state["transformer.wpe.weight"]},
                }
            layers: dict[str, Tensor] = {}
            for number in range(4 // pp):
                own = _layer_of_gpt2(state, stage * (4 // pp) + number, rank, tp, version)
                layers |= {f"layers.{number}.{name}": tensor for name, tensor in own.items()}
            if stage == pp - 1:
                layers |= {f"final_layernorm.{each}": state[f"transformer.ln_f.{each}"] for each in ("weight", "bias")}
            language["transformer" if version < 2 else "encoder"] = layers
            content: dict[str, Any] = {"language_model": language}
            if stage == pp - 1 and pp > 1:
                content["word_embeddings_for_head"] = {"weight": _split(table, rank, tp)}
            _save(folder, rank, stage, pp, content, _arguments_of_gpt2(len(table), tp, pp, version), version)
    return _finish(folder)


def _arguments_of_gpt2(rows: int, tp: int, pp: int, version: float) -> dict[str, Any]:
    sizes = {"model_parallel_size": tp} if version < 2 else {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp
    }  # fmt: skip
    return {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 128, "seq_length": 24,
        "max_position_embeddings": 24, "layernorm_epsilon": 1e-5, "padded_vocab_size": rows, "bias_gelu_fusion": True,
        "make_vocab_size_divisible_by": MULTIPLE, "params_dtype": torch.float32, **sizes,
    }  # fmt: skip


def write_llama(model: nn.Module, folder: Path, tp: int, pp: int) -> Path:
    """Write Llama as Megatron-LM's own model of 2023; return the folder of the iteration."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    table, head = (_padded(state[name], tp) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    arguments = {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "group_query_attention": True,
        "num_query_groups": 2, "ffn_hidden_size": 80, "seq_length": 24, "max_position_embeddings": 24,
        "norm_epsilon": 1e-5, "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True, "use_rotary_position_embeddings": True,
        "position_embedding_type": "rope", "rotary_percent": 1.0, "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp, "padded_vocab_size": len(table),
        "make_vocab_size_divisible_by": MULTIPLE,
    }  # fmt: skip
    for rank in range(tp):
        for stage in range(pp):
            language: dict[str, Any] = {}
            if stage == 0:
                language["embedding"] = {"word_embeddings": {"weight": _split(table, rank, tp)}}
            layers: dict[str, Tensor] = {}
            for number in range(4 // pp):
                own = _layer_of_llama(state, stage * (4 // pp) + number, rank, tp)
                layers |= {f"layers.{number}.{name}": tensor for name, tensor in own.items()}
            if stage == pp - 1:
                layers["final_norm.weight"] = state["model.norm.weight"]
                language["output_layer"] = {"weight": _split(head, rank, tp)}
            language["encoder"] = layers
            _save(folder, rank, stage, pp, {"language_model": language}, arguments, 3.0)
    return _finish(folder)


def _save(
    folder: Path, rank: int, stage: int, pp: int, model: dict[str, Any], arguments: dict[str, Any], version: float
) -> None:
    name = f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
    path = folder / "iter_0000100" / name
    path.mkdir(parents=True, exist_ok=True)
    content = {
        "args": argparse.Namespace(**arguments, consumed_train_samples=800),
        "checkpoint_version": version,
        "iteration": 100,
        "model": model,
    }
    torch.save(content, path / "model_optim_rng.pt")


def _finish(folder: Path) -> Path:
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder / "iter_0000100"
