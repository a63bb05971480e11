"""NEFTune: uniform noise on the embeddings of the training sequences. Source: Jain et al. 2023 (arXiv:2310.05914).

Each number is drawn from the run's seed, the samples consumed, the sequence's own tokens, the place in it and the
channel, by integer hashes. So a sequence gets the same noise in every row, on every layout and device and after a
resume, and tensor-parallel ranks agree without sending anything.

B rows, S places of a row, L tokens of a sequence, H hidden size; all integers are 32 bits wide and wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megatron.models.attention import SelfAttention, Shared
from megatron.models.kv_cache import CachedTokens
from megatron.models.positions import Packing
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import LayerNorm, RMSNorm, VocabParallelEmbedding
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.low_rank_vocabulary import output_weight, vocabulary_adapters
from megatron.parallel.rng import dropout
from megatron.parallel.shards import Shards
from megatron.runtime.devices import device_of

CHUNK_NUMBERS = 2**22
"""Numbers drawn at once, which bounds the memory for them."""


@torch.no_grad()
def add_noise(hidden: Tensor, tokens_BS: Tensor, packing: Packing | None, alpha: float, ctx: ParallelContext) -> Tensor:
    """Add uniform noise of ±alpha / sqrt(L x H) to the embeddings [S, B, H], in place.

    Under sequence parallelism `hidden` is this rank's rows of them, [S/tp, B, H]. L is the sequence's own length,
    whatever it is packed or padded with: the published code's rule, where transformers takes the row's length.
    """
    streams_SB2, length_SB = _streams(tokens_BS, packing, ctx)
    num_rows, num_batch, size = hidden.shape
    first = ctx.tensor_rank * num_rows if ctx.sequence_parallel else 0
    limit_SB = alpha / (length_SB * size).sqrt()
    channels_H = torch.arange(1, size + 1, dtype=torch.int32, device=hidden.device)
    at_once = max(1, CHUNK_NUMBERS // (num_batch * size))
    for begin in range(0, num_rows, at_once):
        rows = slice(first + begin, first + min(begin + at_once, num_rows))
        start_SB, stride_SB = streams_SB2[rows].unsqueeze(-1).unbind(2)
        bits = _mixed(start_SB + stride_SB * channels_H)
        unit = (_shifted(bits, 9).float() + 0.5) * 2.0**-22 - 1.0
        hidden[begin : begin + at_once] += (unit * limit_SB[rows].unsqueeze(-1)).to(hidden.dtype)
    return hidden


def _streams(tokens_BS: Tensor, packing: Packing | None, ctx: ParallelContext) -> tuple[Tensor, Tensor]:
    """Return the start and the odd stride of each token's stream, [S, B, 2], and its sequence's length, [S, B]."""
    device, length = tokens_BS.device, tokens_BS.shape[1]
    index_S = torch.arange(length, dtype=torch.int32, device=device)
    starts_BS = torch.zeros_like(tokens_BS) if packing is None else packing.starts_BS
    place_BS = index_S - starts_BS.int()
    ends_BS = _ends(starts_BS)
    words_BS = _mixed(tokens_BS.int() * _signed(0x9E3779B1) + (place_BS + 1) * _signed(0x85EBCA77))
    # the sum over each sequence: of equal sequences it is equal
    sums_BS = words_BS.cumsum(1, dtype=torch.int32)
    sequence_BS = sums_BS.gather(1, ends_BS) - sums_BS.gather(1, starts_BS) + words_BS.gather(1, starts_BS)
    low, high = _key(ctx.state.streams.step_key, device)
    start_BS = _mixed(_mixed(sequence_BS + low) + (place_BS + 1) * _signed(0xC2B2AE3D))
    stride_BS = _mixed(start_BS ^ high) | 1
    return torch.stack((start_BS.t(), stride_BS.t()), -1), (ends_BS - starts_BS + 1).t().float()


def _ends(starts_BS: Tensor) -> Tensor:
    """Return the place of the last token of each token's sequence, [B, S]."""
    length = starts_BS.shape[1]
    index_BS = torch.arange(length, device=starts_BS.device).expand_as(starts_BS)
    is_last_BS = torch.ones_like(starts_BS, dtype=torch.bool)
    is_last_BS[:, :-1] = starts_BS[:, 1:] != starts_BS[:, :-1]
    return index_BS.masked_fill(~is_last_BS, length).flip(1).cummin(1).values.flip(1)


def _key(key: int, device: torch.device) -> Tensor:
    """Return a step's key as two words. A tensor, since HPU compiles again for another number, and without a wait."""
    words = torch.tensor([_signed(key & 0xFFFFFFFF), _signed(key >> 32)], dtype=torch.int32)
    if device_of(device.type).is_host:
        return words
    return get_accelerator().pin_memory(words).to(device, non_blocking=True)


def _mixed(words: Tensor) -> Tensor:
    """Hash each word, in place. Source: Wellons, "Prospecting for hash functions" (lowbias32)."""
    words ^= _shifted(words, 16)
    words *= _signed(0x7FEB352D)
    words ^= _shifted(words, 15)
    words *= _signed(0x846CA68B)
    words ^= _shifted(words, 16)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Return words >> bits of unsigned words, which torch shifts as signed ones."""
    return (words >> bits) & ((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


# ---------------------------------------------------------------------------------------------------------------------
# Recomputation of an output whose reader would keep it for its backward pass.


# torch.compile cannot trace the hooks; what is inside `function` and `reader` it still compiles
@torch._disable_dynamo(recursive=False)  # type: ignore[untyped-decorator]
def discard_output(function: Callable[[Tensor], Tensor], reader: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return reader(function(x)), where the backward pass of `reader` computes function(x) again instead of keeping it.

    For a cheap `function` in front of a matrix product, such as a norm or an activation: torch.utils.checkpoint around
    both would multiply again too. `function` must not draw random numbers.
    """
    output = function(x)
    again = _Again(function, x.detach(), output)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        return reader(output)


class _Again:
    """Stands for a discarded output among the tensors that a backward pass keeps."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, output: Tensor) -> None:
        self._function, self._x = function, x
        self._place = output.untyped_storage().data_ptr()
        self._layout = output.size(), output.stride()
        self._num_kept = self._num_left = 0
        self._output: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != self._place:
            return tensor
        self._num_kept += 1
        return self, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        _, size, stride, offset = packed
        if self._output is None:
            with torch.no_grad():
                output = self._function(self._x)
            if (output.size(), output.stride()) != self._layout:  # what is kept are views of the first one's memory
                output = output.new_empty_strided(*self._layout).copy_(output)
            self._output = output
            self._num_left = self._num_kept
        self._num_left -= 1
        found = self._output.as_strided(size, stride, offset)
        if self._num_left == 0:
            self._output = None
        return found


# ---------------------------------------------------------------------------------------------------------------------
# The layers of decoder-only transformers.
#
# What flows between layers is the residual stream [rows, B, H], alone or, over packed documents, as the tuple (hidden,
# positions, starts) of `Packing`: DeepSpeed's pipeline passes tensors and tuples of tensors between stages. In
# generation it is (hidden, tokens), with the `CachedTokens` of the pass. Every module is given its `Shards` and what
# the layers share, and allocates what is declared.

Stream = Tensor | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, CachedTokens]
Build = Callable[[Shards, Shared], nn.Module]


def unpack(stream: Stream) -> tuple[Tensor, Packing | CachedTokens | None]:
    """Return the hidden state (or tokens) of what flows between layers, and the places of its tokens."""
    if isinstance(stream, Tensor):
        return stream, None
    if len(stream) == 2:
        return stream
    hidden, positions, starts = stream
    return hidden, Packing(positions, starts)


def repack(hidden: Tensor, stream: Stream) -> Stream:
    """Return `hidden` with what came beside it in `stream`."""
    return hidden if isinstance(stream, Tensor) else (hidden, *stream[1:])


class WordEmbedding(VocabParallelEmbedding):
    """First layer, and under tied weights the last: see VocabParallelEmbedding."""

    def __init__(self, shards: Shards, shared: Shared, *, scales_noise: bool = False) -> None:
        super().__init__(shards, shared.ctx)
        self.noise_alpha = shared.config.training.neftune_noise_alpha
        if self.noise_alpha is not None and scales_noise:
            # EmbeddingOutput multiplies the noise too
            self.noise_alpha /= shared.config.model.embedding_multiplier
        self.logits_cap = shared.config.model.logits_softcap

    def forward(self, stream: Stream, project: Callable[[tuple[Tensor, Tensor]], Any] | None = None) -> Any:
        inside, packing = unpack(stream)
        result = super().forward(inside, project)
        if project is not None:
            return result
        if self.noise_alpha is not None and self.training and not isinstance(packing, CachedTokens):
            result = add_noise(result, inside, packing, self.noise_alpha, self.ctx)
        return repack(result, stream)


class OutputProjection(nn.Module):
    """Last layer of an untied model: passes (hidden, weight) to `project`, which computes the loss or the logits."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        self.ctx, self.weight = shared.ctx, shards.allocate("weight", shared.ctx)
        self.adapters = vocabulary_adapters(self, shards, shared.ctx)
        self.logits_cap = shared.config.model.logits_softcap

    def forward(self, stream: Stream, project: Callable[[tuple[Tensor, Tensor]], Any] | None = None) -> Any:
        outputs = output_weight(self, unpack(stream)[0])
        return outputs if project is None else project(outputs)


class PositionEmbedding(nn.Module):
    """Learned positions: the table's rows for this rank's rows of the sequence, [rows, 1 or B, H]."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        self.ctx = shared.ctx
        self.weight = shards.allocate("weight", self.ctx)

    def forward(self, num_rows: int, packing: Packing | CachedTokens | None) -> Tensor:
        first = self.ctx.tensor_rank * num_rows if self.ctx.sequence_parallel else 0
        if packing is None:
            return self.weight[first : first + num_rows].unsqueeze(1)
        return F.embedding(packing.positions_BS.t()[first : first + num_rows], self.weight)


class EmbeddingOutput(nn.Module):
    """Layer after the word embedding: multiplier, learned positions and LayerNorm, where declared, and dropout."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        model = shared.config.model
        self.ctx, self.probability, self.multiplier = shared.ctx, model.hidden_dropout, model.embedding_multiplier
        position, norm = shards.below("position"), shards.below("norm")
        self.position = PositionEmbedding(position, shared) if position else None
        self.norm = layer_norm(norm, shared) if norm else None

    def forward(self, stream: Stream) -> Stream:
        hidden, packing = unpack(stream)
        if self.multiplier != 1.0:
            # rounded as transformers' models round it: in bfloat16 the square root of a width is another number
            hidden = hidden * torch.tensor(self.multiplier, dtype=hidden.dtype, device="cpu").item()
        if self.position is not None:
            hidden = hidden + self.position(hidden.shape[0], packing)
        if self.norm is not None:
            hidden = self.norm(hidden)
        sharded = self.ctx.sequence_parallel
        return repack(dropout(hidden, self.probability, self.training, self.ctx.state.streams, sharded=sharded), stream)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class MLP(nn.Module):
    """`up` (or the fused [gate; up]), activation, down."""

    def __init__(self, shards: Shards, shared: Shared, *, activation: str, is_gated: bool = False) -> None:
        super().__init__()
        self._up = "gate_up" if is_gated else "up"
        self.activation = ACTIVATIONS[activation]
        if is_gated:
            kernels = {"silu": shared.kernels.swiglu, "gelu_tanh": shared.kernels.geglu}
            self.activation = kernels[activation]
        self.discards_activation = "mlp_act" in shared.config.training.recomputed_modules
        self.add_module(self._up, ColumnParallelLinear(shards.below(self._up), shared.ctx))
        self.down = RowParallelLinear(shards.below("down"), shared.ctx)

    def forward(self, hidden: Tensor) -> Tensor:
        inside = getattr(self, self._up)(hidden)
        if self.discards_activation and self.training:
            return discard_output(self.activation, self.down, inside)
        return self.down(self.activation(inside))


class FinalLayerNorm(LayerNorm):
    """LayerNorm before the output projection, which needs no packing."""

    divisor: float

    def forward(self, stream: Stream) -> Tensor:
        return _divided(super().forward(unpack(stream)[0]), self.divisor)


class FinalRMSNorm(RMSNorm):
    """RMSNorm before the output projection, which needs no packing."""

    divisor: float

    def forward(self, stream: Stream) -> Tensor:
        return _divided(super().forward(unpack(stream)[0]), self.divisor)


def _divided(hidden: Tensor, divisor: float) -> Tensor:
    """Divide by the scaling of the logits, which are linear in the hidden states."""
    return hidden if divisor == 1.0 else hidden / divisor


def layer_norm(shards: Shards, shared: Shared, module: type[LayerNorm] = LayerNorm) -> LayerNorm:
    return module(shards, shared.config.model.norm_epsilon, shared.ctx)


def rms_norm(shards: Shards, shared: Shared, module: type[RMSNorm] = RMSNorm, *, adds_one: bool = False) -> RMSNorm:
    return module(shards, shared.config.model.norm_epsilon, shared.ctx, kernels=shared.kernels, adds_one=adds_one)


NORMS: Mapping[str, Build] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "rms_norm_1p": partial(rms_norm, adds_one=True),
}
"""By the kinds of models/decoder.py."""


def final_norm(shards: Shards, shared: Shared, *, norm: str) -> nn.Module:
    final = FinalLayerNorm if norm == "layer_norm" else FinalRMSNorm
    build: Callable[..., Any] = NORMS[norm]
    module = build(shards, shared, final)
    module.divisor = shared.config.model.logits_scaling
    return module  # type: ignore[no-any-return]


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the norms that are declared and dropout on both branches.

    `is_parallel`: x + attention(norm(x)) + mlp(norm(x)).
    `attention_norm` and `mlp_norm` are those of the branches' inputs, `attention_output_norm` and `mlp_output_norm`
    those of their outputs.
    """

    def __init__(
        self,
        shards: Shards,
        shared: Shared,
        *,
        norm: Build,
        mlp: Build,
        attention: Build = SelfAttention,
        is_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.is_parallel = is_parallel
        model, training = shared.config.model, shared.config.training
        self.ctx, self.probability, self.multiplier = shared.ctx, model.hidden_dropout, model.residual_multiplier
        self.recompute_all = training.recompute_granularity == "full"
        self.discards_norms = "layernorm" in training.recomputed_modules
        self.recompute_mlp = "mlp" in training.recomputed_modules

        def declared(name: str) -> nn.Module | None:
            return norm(shards.below(name), shared) if shards.below(name) else None

        self.attention_norm = declared("attention_norm")
        self.attention = attention(shards.below("attention"), shared)
        self.attention_output_norm = declared("attention_output_norm")
        self.mlp_norm = declared("mlp_norm")
        self.mlp = mlp(shards.below("mlp"), shared)
        self.mlp_output_norm = declared("mlp_output_norm")

    def forward(self, stream: Stream) -> Stream:
        hidden, packing = unpack(stream)
        if self.recompute_all and self.training:
            return repack(self.ctx.state.streams.recomputed(self._layer, hidden, packing), stream)
        return repack(self._layer(hidden, packing), stream)

    def _layer(self, hidden: Tensor, packing: Packing | CachedTokens | None) -> Tensor:
        attention = partial(self.attention, packing=packing)
        output = self._branch(self.attention_norm, attention, hidden, recomputed=False)
        attended = self._add(hidden, output, self.attention_output_norm)
        read = hidden if self.is_parallel else attended
        output = self._branch(self.mlp_norm, self.mlp, read, recomputed=self.recompute_mlp)
        return self._add(attended, output, self.mlp_output_norm)

    def _branch(
        self, norm: nn.Module | None, branch: Callable[[Tensor], Tensor], hidden: Tensor, *, recomputed: bool
    ) -> Tensor:
        """branch(norm(hidden)), with what is to be recomputed of it."""
        recomputed, discards = recomputed and self.training, self.discards_norms and self.training
        streams = self.ctx.state.streams
        if norm is None:
            return streams.recomputed(branch, hidden) if recomputed else branch(hidden)
        if recomputed and discards:
            return streams.recomputed(lambda x: branch(norm(x)), hidden)
        if recomputed:
            return streams.recomputed(branch, norm(hidden))
        return discard_output(norm, branch, hidden) if discards else branch(norm(hidden))

    def _add(self, hidden: Tensor, branch: Tensor, norm: nn.Module | None) -> Tensor:
        """hidden + multiplier x dropout(norm(branch))"""
        if norm is not None:
            branch = norm(branch)
        sharded = self.ctx.sequence_parallel
        branch = dropout(branch, self.probability, self.training, self.ctx.state.streams, sharded=sharded)
        if self.multiplier != 1.0:
            return torch.add(hidden, branch, alpha=self.multiplier)
        return hidden + branch


def project_tied(module: WordEmbedding, stream: Stream) -> tuple[Tensor, Tensor]:
    """The tied last layer in a pipeline: (hidden, weight) for the loss function."""
    return module(stream, project=lambda outputs: outputs)
