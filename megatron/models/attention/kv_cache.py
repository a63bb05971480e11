"""Keys and values of earlier tokens, for generation: allocated once, written in place.

Shapes: R rows (sequences) of the cache, B rows of a pass, S tokens of a pass, k key/value heads and n query heads of
this rank, g = n / k, d head size, T places, L places that a pass reads. A token's place is its position in its own
sequence, so rows of different lengths need no padding: each row sees its own places alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.attention.kernels import attend_capped

BUCKET = 64
"""Places are allocated and read in multiples of it, so that few shapes occur."""


def bucketed(length: int) -> int:
    """Return the next multiple of BUCKET."""
    return -(-length // BUCKET) * BUCKET


class CachingLayer(Protocol):
    """Attention that reads and writes a cache."""

    num_kv_heads: int
    """Key/value heads of this rank."""
    head_size: int


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [R, k, T, d]."""

    keys: Tensor
    values: Tensor


def row_bytes(layers: Sequence[CachingLayer], length: int, dtype: torch.dtype) -> int:
    """Return the bytes of a row of a cache for at least `length` places."""
    numbers = sum(layer.num_kv_heads * layer.head_size for layer in layers)
    return 2 * numbers * bucketed(length) * dtype.itemsize


class KVCache:
    """Keys and values of the attention layers of this rank."""

    def __init__(
        self, layers: Sequence[CachingLayer], num_rows: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate `num_rows` rows with at least `length` places."""
        self.num_rows, self.length = num_rows, bucketed(length)
        self.num_bytes = num_rows * row_bytes(layers, length, dtype)
        self._layers: dict[Any, LayerCache] = {}
        for layer in layers:
            shape = (num_rows, layer.num_kv_heads, self.length, layer.head_size)
            # zeros: a place that no token has written is masked, but 0 x NaN would be NaN
            self._layers[layer] = LayerCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"))

    def of(self, layer: nn.Module) -> LayerCache:
        return self._layers[layer]

    def copy_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Let rows `targets` hold what rows `sources` hold now in their first `length` places; int64 [N] each."""
        length = min(bucketed(length), self.length)
        for cache in self._layers.values():
            for part in cache:
                part[targets, :, :length] = part[sources, :, :length]

    def copy_first_places(self, other: KVCache, length: int) -> None:
        """Take the first `length` places of a cache of the same rows and layers."""
        length = min(bucketed(length), other.length, self.length)
        for layer, cache in self._layers.items():
            for part, source in zip(cache, other._layers[layer], strict=True):
                part[:, :, :length] = source[:, :, :length]


class CachedTokens:
    """The tokens of one pass, their rows and places. It takes the place of `Packing` beside the residual stream."""

    positions_BS: Tensor
    """int64, the position each token is encoded with."""
    lengths_BS: Tensor | None = None
    """int64, tokens of its text so far, those of its pass included. None: of runs of consecutive positions."""
    num_positions: int
    """Larger than every position."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.num_positions = cache, cache.length
        self._angles: dict[Any, tuple[Tensor, Tensor]] = {}

    def angles(self, rotary: Any) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each token, each [S, B, 1, d/2] float32, from a RotaryEmbedding."""
        if rotary not in self._angles:
            self._angles[rotary] = rotary.angles_at(self.positions_BS, self.lengths_BS, self.num_positions)
        return self._angles[rotary]

    def wanted(self, x: Tensor) -> Tensor:
        """Return what belongs to the tokens whose logits are wanted, of x [S, B, H] of all tokens of the pass."""
        return x

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v [S, B, k, d], and return the context of q [S, B, n, d]: [S, B, n d]."""
        raise TypeError("a pass is a PrefillChunk or a DecodeStep")

    def attend_at_once(
        self, layer: Any, qkv: Tensor, angles: tuple[Tensor, Tensor] | None, kernel: Callable[..., Tensor | None]
    ) -> Tensor | None:
        """Return the context of qkv [S, B, (n + 2 k) d] by one kernel that turns, writes and attends; None: it cannot.

        The result is [S, B, n d].
        """
        return None


class PrefillChunk(CachedTokens):
    """Tokens `begin` to `begin + S` of the prompts of some rows.

    A prompt may end within the chunk; what stands behind it is computed for nothing, and overwritten before it is read.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: Tensor,
        lengths: Tensor,
        begin: int,
        width: int,
        ends: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`rows` [B] of the cache, and the lengths of their prompts [B], int64; S = `width`.

        `ends`: index among the rows, and place in the chunk, of each token whose logits are wanted.
        """
        super().__init__(cache)
        self._ends = torch.tensor(ends, dtype=torch.int64, device=rows.device).view(-1, 2)
        self.rows, self.begin = rows, begin
        self.end = min(begin + width, cache.length)
        positions = torch.arange(begin, begin + width, device=rows.device)
        # a table of learned positions has none behind the prompt
        self.positions_BS = torch.minimum(positions, lengths[:, None] - 1)
        # of the whole prompt, whose later chunks are known
        self.lengths_BS = lengths[:, None].expand_as(self.positions_BS)

    def wanted(self, x: Tensor) -> Tensor:
        """[S, B, H] -> [1, ends, H]"""
        index, place = self._ends.unbind(1)
        return x[place, index].unsqueeze(0)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        cache, count = self.cache.of(layer), self.end - self.begin
        for part, new in zip(cache, (k, v), strict=True):
            part[self.rows, :, self.begin : self.end] = new[:, :, :count]
        if self.begin:
            k, v = (
                torch.cat([part[self.rows, :, : self.begin], new], dim=2)
                for part, new in zip(cache, (k, v), strict=True)
            )
        return layer.core(q, k, v).permute(2, 0, 1, 3).flatten(2)  # type: ignore[no-any-return]


class DecodeStep(CachedTokens):
    """One token of each of B rows that follow each other in the cache."""

    def __init__(self, cache: KVCache, first_row: int, positions_B: Tensor, num_places: int) -> None:
        """`positions_B`: the place of each row's token; the pass reads the first `num_places`, a multiple of BUCKET."""
        super().__init__(cache)
        self.positions_B, self.positions_BS = positions_B, positions_B.unsqueeze(1)
        self.lengths_BS = self.positions_BS + 1
        self.rows = slice(first_row, first_row + len(positions_B))
        self.num_places = num_places
        self._index: Tensor | None = None
        self._biases: dict[Any, Tensor] = {}

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, num_heads, head_size = q.shape[1:]
        num_kv_heads = k.shape[2]
        cache = self.cache.of(layer)
        own = [part[self.rows] for part in cache]
        index = self._places(num_kv_heads)
        for part, new in zip(own, (k, v), strict=True):
            part.view(-1, head_size).index_copy_(0, index, new.reshape(-1, head_size))
        keys, values = (part[:, :, : self.num_places] for part in own)
        # the query heads of a key/value head take the place of queries: no head is repeated
        grouped = q.view(batch, num_kv_heads, num_heads // num_kv_heads, head_size)
        bias, scores = self._bias(layer, grouped), layer.scores
        if scores.cap is not None:
            context = attend_capped(grouped, keys, values, bias, scores, 0.0)
        else:
            context = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scores.scale)
        return context.reshape(1, batch, num_heads * head_size)

    def attend_at_once(
        self, layer: Any, qkv: Tensor, angles: tuple[Tensor, Tensor] | None, kernel: Callable[..., Tensor | None]
    ) -> Tensor | None:
        if layer.scores.is_cut(self.num_places):
            return None
        keys, values = self.cache.of(layer)
        if len(self.positions_B) < self.cache.num_rows:
            keys, values = keys[self.rows], values[self.rows]
        return kernel(qkv, angles, layer.slopes, self.positions_B, self.num_places, keys, values)

    def _places(self, num_kv_heads: int) -> Tensor:
        """Return the index of each new vector in a layer's part of these rows as a list of vectors, [B k]."""
        if self._index is None or len(self._index) != len(self.positions_BS) * num_kv_heads:
            heads = torch.arange(len(self.positions_BS) * num_kv_heads, device=self.positions_BS.device)
            self._index = (heads.view(-1, num_kv_heads) * self.cache.length + self.positions_BS).view(-1)
        return self._index

    def _bias(self, layer: Any, q: Tensor) -> Tensor:
        """Return what is added to the scores, [B, 1 or k, 1 or g, L]: -inf for places that the row's token cannot see.

        They lie behind it, or before its window.
        """
        slopes, window = layer.slopes, layer.scores.window
        key = id(slopes), window, q.dtype
        if key not in self._biases:
            places = torch.arange(self.num_places, device=q.device)
            unseen = places > self.positions_BS
            if window is not None:
                unseen = unseen | (places <= self.positions_BS - window)
            unseen = unseen[:, None, None]
            bias = torch.zeros((), dtype=torch.float32, device=q.device)
            if slopes is not None:
                distance = (places - self.positions_BS).float()[:, None, None]
                bias = slopes.view(1, *q.shape[1:3], 1) * distance
            self._biases[key] = bias.to(q.dtype).masked_fill(unseen, float("-inf"))
        return self._biases[key]
