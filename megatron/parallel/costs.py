"""Costs of the operation with a parameter, declared with its shard: FLOPs, and numbers kept for the backward pass.

The plan sums these declarations; what a kernel of a device keeps beyond them is in plan/activations.py. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Norm:
    """Normalisation with this weight. It keeps its input, `channels` numbers a token."""

    channels: int
    is_rms: bool


@dataclass(frozen=True)
class Attention:
    """Core of an attention: what an output projection multiplies is its result. It keeps q, k, v and the result."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    """Latest keys that a query sees; None: all."""
    is_capped: bool = False

    def flops_per_token(self, seq_length: int) -> int:
        """Return the forward FLOPs, over the whole square of tokens although half of it is masked.

        Under a window over twice its area: a share of the square as the window's is of the triangle.
        """
        seen = seq_length
        if self.window is not None and self.window < seq_length:
            seen = round(self.window * (2 * seq_length + 1 - self.window) / (seq_length + 1))
        return 4 * self.num_heads * self.head_size * seen


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
