"""Costs of the operation with a parameter, declared with its shard: FLOPs, and numbers kept for the backward pass.

The plan sums these declarations; what a kernel of a device keeps beyond them is in plan/activations.py. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Norm:
    """Normalisation with this weight. It keeps its input, `channels` numbers a token."""

    channels: int
    is_rms: bool
    adds_one: bool = False
    """It multiplies by 1 + weight, added up in float32, and is given its input in that."""
    shares_input: bool = False
    """The norm before it has the same input."""


@dataclass(frozen=True)
class Attention:
    """Core of an attention: what an output projection multiplies is its result. It keeps q, k, v and the result."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    """Latest keys that a query sees; None: all."""
    is_capped: bool = False

    def flops_per_token(self, seq_length: int, places: Sequence[range] | None = None) -> int:
        """Return the forward FLOPs, over the whole square of tokens although half of it is masked.

        Under a window over twice its area: a share of the square as the window's is of the triangle. `places`: of the
        tokens that count, on average; None: all of the row.
        """
        counted = places or [range(seq_length)]
        pairs = sum(self.seen(each.stop) - self.seen(each.start) for each in counted)
        seen = round(2 * pairs * seq_length / (sum(map(len, counted)) * (seq_length + 1)))
        return 4 * self.num_heads * self.head_size * seen

    def seen(self, length: int) -> int:
        """Return the keys that the first so many tokens of a row see, all together."""
        within = length if self.window is None else min(length, self.window)
        return within * (within + 1) // 2 + (length - within) * within

    def heads_exchanged(self, tensor_size: int, context_size: int) -> float:
        """Return the numbers that a rank sends for each of its tokens, if context ranks exchange heads for places.

        In a step with one forward pass: queries, keys, values and context once each way, all but the own share of cp.
        Key/value heads are repeated to a number that cp divides.
        """
        heads, kv_heads = self._heads(tensor_size)
        sent = 2 * heads + 2 * math.lcm(kv_heads, context_size)
        return 2 * sent * self.head_size * (context_size - 1) / context_size

    def ring_exchanged(self, tensor_size: int, context_size: int, seq_length: int) -> float:
        """Return the same if keys and values travel: forward, again for the backward pass, and their gradients back.

        Of the 2 cp chunks of a row, rank r has r and 2 cp - 1 - r. What it sends to another is of each chunk the latest
        rows that the next later chunk there sees: all without a window, so 3 chunks for a pair of ranks and its
        reverse, 3/4 (cp - 1) of its own rows to all.
        """
        chunk = seq_length // (2 * context_size)

        def rows(distance: int) -> int:
            """Return the rows of a chunk that a window lets the chunk at this distance see."""
            if self.window is None:
                return chunk
            return max(0, min(chunk, self.window - 1 - (distance - 1) * chunk))

        # first half to later ranks and second half to earlier ones, and first half to the second half of earlier ones
        alike = sum(2 * (context_size - distance) * rows(distance) for distance in range(1, context_size))
        pairs = [(rank, other) for rank in range(context_size) for other in range(rank)]
        across = sum(rows(2 * context_size - 1 - rank - other) for rank, other in pairs)
        tokens = chunk * 2 * context_size
        return 3 * 2 * self._heads(tensor_size)[1] * self.head_size * (alike + across) / tokens

    def _heads(self, tensor_size: int) -> tuple[int, int]:
        """Return the query and key/value heads of a tensor-parallel rank."""
        return self.num_heads // tensor_size, max(1, self.num_kv_heads // tensor_size)


@dataclass(frozen=True)
class Activation:
    """Pointwise function between two products. It keeps its input, the outputs of the products before it."""

    is_gated: bool = False
    kept: int = 0
    """Further numbers that it keeps for a token, cut over the tensor-parallel ranks."""


@dataclass(frozen=True)
class MatrixProduct:
    """Linear layer with this weight: 2 FLOPs a number and token. It keeps its input where it trains a parameter."""

    part: Literal["attention", "mlp"]
    """Branch of the layer, as `recompute_modules` names it. Products of one branch that read the stream share it."""
    reads: Attention | Activation | None = None
    """Operation that computes the input; None: the norm before the branch."""
    share: float = 1.0
    """Share of the tokens that is multiplied: of an expert's, on average."""
    shares_input: bool = False
    """The norm before the branch is that before the attention too."""


@dataclass(frozen=True)
class Router:
    """Scores of the experts for each token, in float32: 2 FLOPs a number and token, and no linear layer to adapt."""


@dataclass(frozen=True)
class Table:
    """Table whose rows are read by number: no FLOPs, and nothing is kept."""


@dataclass(frozen=True)
class Projection:
    """Output projection over the vocabulary, computed together with the loss."""


Cost = Norm | MatrixProduct | Router | Table | Projection


@dataclass(frozen=True)
class PassSizes:
    """Sizes of one microbatch on one rank, in which linear methods count what they keep."""

    tokens: int
    own_tokens: int
    """Tokens of the residual stream: a rank's own rows under sequence parallelism."""
    number_size: int
    """Bytes of an activation."""
    mask_size: int
    """Bytes of a number of a dropout's mask."""
    tensor_size: int
