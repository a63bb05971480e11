"""Llamas as Meta publishes them: their files, and their forward pass in float64, written from the published one.

Shares no code with the reading: rotary positions turn neighbouring rows as complex numbers, and ranks cut the weights
as Megatron's column- and row-parallel layers do.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = dict[str, Tensor]


class Release(NamedTuple):
    """A release of Llama in small."""

    params: dict[str, Any]
    vocab_size: int
    ffn_size: int
    embedding_dim: int
    """Dimension along which ranks cut the word embedding."""
    is_scaled: bool = False
    has_rotary_table: bool = False


LLAMA_2 = {"dim": 64, "multiple_of": 16, "n_heads": 8, "n_layers": 2, "norm_eps": 1e-5, "vocab_size": -1}
LLAMA_3 = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 4,
    "vocab_size": 128,
    "multiple_of": 16,
    "ffn_dim_multiplier": 1.3,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
RELEASES = {
    # 2/3 of 256 is 170, rounded up to 176
    "Llama 1": Release(LLAMA_2 | {"norm_eps": 1e-6}, 96, 176, 1, has_rotary_table=True),
    "Llama 2": Release(LLAMA_2, 96, 176, 1),
    # 1.3 * 170 is 221, rounded up to 224
    "Llama 3": Release(LLAMA_3, 128, 224, 0),
    "Llama 3.1": Release(LLAMA_3 | {"use_scaled_rope": True}, 128, 224, 0, is_scaled=True),
}


def draw(release: Release, seed: int = 5, dtype: torch.dtype = torch.float32) -> State:
    """Random weights under Meta's names, whole."""
    params, generator = release.params, torch.Generator().manual_seed(seed)
    width, head_size = params["dim"], params["dim"] // params["n_heads"]
    kv_size = params.get("n_kv_heads", params["n_heads"]) * head_size

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.15).to(dtype)

    state = {"tok_embeddings.weight": weight(release.vocab_size, width)}
    for layer in range(params["n_layers"]):
        begin = f"layers.{layer}."
        state[f"{begin}attention.wq.weight"] = weight(width, width)
        state[f"{begin}attention.wk.weight"] = weight(kv_size, width)
        state[f"{begin}attention.wv.weight"] = weight(kv_size, width)
        state[f"{begin}attention.wo.weight"] = weight(width, width)
        state[f"{begin}feed_forward.w1.weight"] = weight(release.ffn_size, width)
        state[f"{begin}feed_forward.w2.weight"] = weight(width, release.ffn_size)
        state[f"{begin}feed_forward.w3.weight"] = weight(release.ffn_size, width)
        state[f"{begin}attention_norm.weight"] = 1 + weight(width)
        state[f"{begin}ffn_norm.weight"] = 1 + weight(width)
    state["norm.weight"] = 1 + weight(width)
    state["output.weight"] = weight(release.vocab_size, width)
    return state


def part(release: Release, name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """What one of `size` ranks has of a tensor."""
    if tensor.dim() == 1:
        return tensor
    dim = 0
    if name == "tok_embeddings.weight":
        dim = release.embedding_dim
    elif name.endswith(("wo.weight", "w2.weight")):
        dim = 1
    return tensor.chunk(size, dim)[rank].clone()


def write(folder: Path, release: Release, state: State, size: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(release.params))
    for rank in range(size):
        content = {name: part(release, name, tensor, rank, size) for name, tensor in state.items()}
        if release.has_rotary_table:
            content["rope.freqs"] = torch.ones(4)
        torch.save(content, folder / f"consolidated.{rank:02}.pth")
    return folder


def frequencies(release: Release) -> Tensor:
    """[pairs of a head]"""
    size = release.params["dim"] // release.params["n_heads"]
    theta = release.params.get("rope_theta", 10000.0)
    plain = [theta ** (-pair / size) for pair in range(0, size, 2)]
    if not release.is_scaled:
        return torch.tensor(plain, dtype=torch.float64)
    scaled = []
    for frequency in plain:
        turns = 8192 * frequency / (2 * math.pi)  # over the length that the model was first trained on
        share = min(max((turns - 1) / (4 - 1), 0.0), 1.0)
        scaled.append(frequency * (share + (1 - share) / 8))
    return torch.tensor(scaled, dtype=torch.float64)


def logits(release: Release, state: State, tokens_BS: Tensor) -> Tensor:
    """[B, S, V] in float64."""
    params, (rows, length) = release.params, tokens_BS.shape
    heads, groups = params["n_heads"], params.get("n_kv_heads", params["n_heads"])
    weights = {name: tensor.double() for name, tensor in state.items()}
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies(release))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # [S, 1, pairs]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + params["norm_eps"]).sqrt() * weights[name]

    def turned(x: Tensor, count: int) -> Tensor:
        pairs = torch.view_as_complex(x.view(rows, length, count, -1, 2))
        return torch.view_as_real(pairs * turn).flatten(3).transpose(1, 2)  # [B, heads, S, size]

    hidden = weights["tok_embeddings.weight"][tokens_BS]
    for layer in range(params["n_layers"]):
        begin = f"layers.{layer}."
        x = norm(hidden, f"{begin}attention_norm.weight")
        q = turned(x @ weights[f"{begin}attention.wq.weight"].T, heads)
        k = turned(x @ weights[f"{begin}attention.wk.weight"].T, groups)
        v = (x @ weights[f"{begin}attention.wv.weight"].T).view(rows, length, groups, -1).transpose(1, 2)
        k, v = (each.repeat_interleave(heads // groups, dim=1) for each in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        hidden = hidden + mixed @ weights[f"{begin}attention.wo.weight"].T
        x = norm(hidden, f"{begin}ffn_norm.weight")
        gate = torch.nn.functional.silu(x @ weights[f"{begin}feed_forward.w1.weight"].T)
        up = x @ weights[f"{begin}feed_forward.w3.weight"].T
        hidden = hidden + (gate * up) @ weights[f"{begin}feed_forward.w2.weight"].T
    return norm(hidden, "norm.weight") @ weights["output.weight"].T
