"""Attention and rotary embedding."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from habana_frameworks.torch import hpu, stand_in
from torch import Tensor


class FusedSDPA:
    """The published one is an autograd function; torch's own operators give the gradients here."""

    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        arguments = {name: value for name, value in locals().items() if name not in ("q", "k", "v")}
        stand_in.calls.append(("FusedSDPA", arguments | {"num_kv_heads": k.shape[1], "shape": tuple(q.shape)}))
        trains = q.requires_grad or k.requires_grad or v.requires_grad
        recompute = hpu.recompute_sdp_enabled() if recompute_mode is None else recompute_mode
        assert not (return_attn_probs and trains), "return_attn_probs is supported only for inference mode"
        recompute = recompute and not return_attn_probs
        if recompute and trains and softmax_mode.lower() == "fast":
            assert is_causal, (
                "Optimized softmax mode is supported in recompute training mode only in causal(triangular) mask case"
            )
        if valid_seq_len is not None:
            assert (is_causal, trains, attn_mask) == (True, False, None), "Valid sequence length: only in inference"
        assert not (recompute and return_dropout_mask), "Return_dropout_mask is not supported in recompute mode"
        _check_shapes(q, k, v, attn_mask)
        # over slices of the keys a row of -inf alone is NaN; in training alone, since a capture reads no number
        if recompute and trains and attn_mask is not None:
            noted = len(stand_in.calls)
            assert not attn_mask.isinf().any(), "keys are hidden by a large number, such as -1e9, and not by -inf"
            del stand_in.calls[noted:]  # the kernel itself reads nothing on the host
        if k.shape[1] != 1:  # one key/value head is broadcast
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None:
            scores = scores + attn_mask
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        probabilities = torch.softmax(scores.float(), dim=-1).to(q.dtype)
        out = torch.dropout(probabilities, dropout_p, train=True) @ v
        return (out, probabilities) if return_attn_probs else out


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    batch, heads, queries, width = q.shape
    assert k.shape[1] in (1, v.shape[1]), "keys and values in groups have one number of heads"
    assert heads % k.shape[1] == 0, "query heads divide into the groups of key/value heads"
    assert (k.shape[0], k.shape[3]) == (batch, width)
    assert v.shape[:3] == k.shape[:3]
    if mask is not None:
        assert mask.dtype == q.dtype, "an additive mask in the dtype of the operands"
        assert mask.dim() == 4, "the groups' reshape takes four dimensions"
        assert mask.shape[0] in (1, batch)
        assert mask.shape[1] in (1, heads)
        assert mask.shape[2:] == (queries, k.shape[2])


class RotaryPosEmbeddingMode(Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(p: Tensor, *args: Any) -> Tensor:
    """The form with cos and sin. In float32 where any of the three is, otherwise in the dtype of p."""
    cos, sin, *others = args
    assert others in ([], [None, 0, RotaryPosEmbeddingMode.BLOCKWISE]), "not computed here"
    stand_in.calls.append(("apply_rotary_pos_emb", {"dtype": p.dtype, "cos": cos.shape}))
    dtype = torch.float32 if torch.float32 in (p.dtype, cos.dtype, sin.dtype) else p.dtype
    p, cos, sin = (x.to(dtype) for x in (p, cos, sin))
    first, second = p.chunk(2, dim=-1)
    return p * cos + torch.cat([-second, first], dim=-1) * sin


class RotaryPosEmbeddingHelperV1:
    @staticmethod
    def apply(p: Tensor, cos: Tensor, sin: Tensor, offset: int) -> Tensor:
        return apply_rotary_pos_emb(p, cos, sin, None, offset, RotaryPosEmbeddingMode.BLOCKWISE)
