"""Llama's tensors by the names of Meta and torchtitan, as those of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron.weights.huggingface_files import StoredTensor, some

EMBEDDING = "model.embed_tokens.weight"
_ENDS = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    # torchtitan's, since 0.3
    "lm_head": "lm_head",
}
_BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NAME = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.weight")
_ROTARY = re.compile(r"(?:layers\.\d+\.attention\.(?:inner_attention\.)?)?(?:rope\.freqs|rope\.cache|freqs_cis)")
_FUSED = ".wqkv.weight"
_BY_PAIRS = re.compile(r"self_attn\.([qk])_proj\.weight$")


def is_rotary_table(name: str) -> bool:
    """Return True for frequencies of the rotary positions, which are computed here."""
    return _ROTARY.fullmatch(name) is not None


def transformers_name(name: str) -> str | None:
    """Return transformers' name of a tensor; None: no Llama has it."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match[1] is None:
        module = _ENDS.get(match[2])
        return None if module is None else f"{module}.weight"
    # torchtitan's, since 0.3
    module = _BLOCK.get(match[2].replace("attention.qkv_linear.", "attention."))
    return None if module is None else f"model.layers.{int(match[1])}.{module}.weight"


def known_names(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return {transformers' name: theirs}, without rotary tables, and the names that no Llama has, or has twice."""
    known: dict[str, str] = {}
    strange = []
    for name in names:
        if is_rotary_table(name):
            continue
        ours = transformers_name(name)
        if ours is None or ours in known:
            strange.append(name)
        else:
            known[ours] = name
    return known, strange


def in_halves(tensors: Mapping[str, StoredTensor], heads: int, groups: int) -> dict[str, StoredTensor]:
    """Return tensors by transformers' names with the rows of q and k in its order.

    Rotary positions turn pairs of rows: Meta's are neighbours, (0, 1), (2, 3), ..., transformers' half a head apart.
    """
    ordered = {}
    for name, tensor in tensors.items():
        match = _BY_PAIRS.search(name)
        if match is not None:
            tensor = _in_halves(tensor, tensor.shape[0] // (heads if match[1] == "q" else groups))
        ordered[name] = tensor
    return ordered


def _in_halves(tensor: StoredTensor, head_size: int) -> StoredTensor:
    def window(first: int, end: int, columns: tuple[int, int]) -> Tensor:
        # whole heads: both rows of a pair lie in one
        begin, stop = first // head_size * head_size, -(-end // head_size) * head_size
        pairs = tensor.matrix(begin, stop, columns).unflatten(0, (-1, head_size // 2, 2))  # [heads, pairs, 2, columns]
        return pairs.transpose(1, 2).flatten(0, 2)[first - begin : end - begin]

    return _read_by(tensor, tensor.shape, window)


def split_qkv(tensors: Mapping[str, StoredTensor], heads: tuple[int, int]) -> dict[str, StoredTensor]:
    """Return torchtitan's tensors with q, k and v apart, which its optimizer holds as one.

    `heads`: of queries, and of keys and values. The rows of the one are [key/value head][its queries, key, value].
    """
    # its model's state dict has them apart, by a hook; its optimizer knows the one parameter that is trained
    apart: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_FUSED):
            begin = name.removesuffix(_FUSED)
            apart |= {f"{begin}.{kind}.weight": part for kind, part in _apart(tensor, *heads)}
        else:
            apart[name] = tensor
    return apart


def _apart(tensor: StoredTensor, heads: int, groups: int) -> Iterator[tuple[str, StoredTensor]]:
    own = heads // groups  # queries of a key/value head
    head_size = tensor.shape[0] // (groups * (own + 2))
    numbers = {
        "wq": [group * (own + 2) + query for group in range(groups) for query in range(own)],
        "wk": [group * (own + 2) + own for group in range(groups)],
        "wv": [group * (own + 2) + own + 1 for group in range(groups)],
    }
    for kind, theirs in numbers.items():
        shape = (len(theirs) * head_size, *tensor.shape[1:])
        yield kind, _read_by(tensor, shape, partial(_of_heads, tensor, theirs, head_size))


def _of_heads(
    tensor: StoredTensor, heads: Sequence[int], head_size: int, first: int, end: int, columns: tuple[int, int]
) -> Tensor:
    """Return columns of rows [first, end) of these heads of the tensor, one after the other."""
    begin, stop = first // head_size, -(-end // head_size)
    blocks = [tensor.matrix(head * head_size, (head + 1) * head_size, columns) for head in heads[begin:stop]]
    rows = torch.cat(blocks) if blocks else tensor.matrix(0, 0, columns)
    return rows[first - begin * head_size : end - begin * head_size]


def _read_by(
    tensor: StoredTensor, shape: tuple[int, ...], window: Callable[[int, int, tuple[int, int]], Tensor]
) -> StoredTensor:
    """Return a matrix that this function reads from another one."""
    return replace(
        tensor, shape=shape, rows=lambda first, end: window(first, end, (0, shape[1])), window=window, begin=None
    )


def wrong_names(expected: Collection[str], found: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the names of a model's tensors."""
    if missing := [name for name in expected if name not in found]:
        yield f"missing: {some(missing)}"
    if surplus := [name for name in found if name not in expected]:
        yield f"unknown to a model of this size: {some(surplus)}"
