"""Memory that layers need between their forward and backward pass, and for a moment within it.

Counted from the declared shapes by what autograd saves of each operation, in the dtype in which it saves it. Kernels
differ by device: see the comments. Sizes are bytes of one rank and one microbatch where the name says nothing else.
Source of the counts: Korthikanti et al. 2022 (arXiv:2205.05198), whose figures are those of fused kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron.options.config import Config
from megatron.parallel.costs import Activation, Attention, MatrixProduct, Norm, PassSizes, Projection
from megatron.parallel.layout import Layout
from megatron.parallel.operators.block_sizes import block_bytes
from megatron.parallel.operators.fp8_weights import operand_bytes
from megatron.parallel.operators.nf4_layout import dequantized_bytes
from megatron.parallel.shards import DeclaresShards, LayerDeclaration, Shard
from megatron.plan.context_exchange import attention_core
from megatron.plan.expert_memory import ExpertsMemory
from megatron.plan.flops import held_numel, held_shards
from megatron.plan.microbatch import BYTES, MicrobatchSizes

FLOAT32 = BYTES["fp32"]


class GradientMoment(NamedTuple):
    """The moment in a layer's backward pass at which the gradient of a weight is there."""

    beside: int
    """Bytes beside the gradient, more than the layer's `kept`; less, where much of that is freed."""
    numbers: int
    """Numbers of the gradient."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that one microbatch needs in one layer."""

    kept: int
    """From the forward pass to the layer's backward pass."""
    backward: int
    """More than `kept` at the peak of the layer's backward pass: gradients of activations, and what is recomputed."""
    forward: int = 0
    """More than `kept` in the layer's forward pass: the inside of an MLP that is recomputed."""
    products: tuple[GradientMoment, ...] = ()
    """Moments that may need more than that peak, once the gradients are counted."""


def layer_memory(layer: LayerDeclaration, config: Config) -> LayerMemory:
    """Return what a layer of the declared list needs. In 16 bit with GELU, dropout and MHA a transformer layer keeps
    S B H (10 + 24/t) bytes on CUDA, for t tensor-parallel ranks, or S B H 34/t with sequence parallelism.
    """
    sizes, layout = MicrobatchSizes(config), Layout.of(config.parallel)
    if layer.number is None:
        memory = _other_layer(layer, sizes)
    else:
        memory = _TransformerLayer(layer, sizes).memory()
    # of the other trained parameters the largest has its gradient at the layer's peak, at worst
    with_own_moment = {moment.numbers for moment in memory.products}
    trained = [held_numel(shard, layout) for shard in held_shards(layer, layout) if shard.trained]
    others = [numbers for numbers in trained if numbers not in with_own_moment]
    at_peak = GradientMoment(memory.backward, max(others, default=0))
    return replace(memory, products=(*memory.products, at_peak))


def deferred_bytes(layer: LayerDeclaration, config: Config) -> int:
    """Return what the deferred gradients of a layer's trained weights keep: the inputs and the outputs' gradients of
    its matrix products. A column-parallel input is a rank's own rows under sequence parallelism."""
    sizes, layout = MicrobatchSizes(config), Layout.of(config.parallel)
    numbers = 0.0
    for linear in _linears(layer):
        outputs, inputs = linear.weight.shape
        if not linear.weight.trained:
            continue
        if linear.weight.expert is not None:
            # all experts together take the choices of this rank's tokens, wherever each of them is
            whole_or_part = sum(linear.weight.local_shape(layout.cut_of(linear.weight)[1]))
            tokens_share = config.model.moe_router_topk * layout.expert_tensor_size / layout.tensor_size
            numbers += tokens_share * whole_or_part
        elif linear.is_column:
            numbers += inputs // sizes.sequence_cut + outputs // sizes.tensor_size
        else:
            numbers += inputs // sizes.tensor_size + outputs
    return round(sizes.tokens * numbers * sizes.number_bytes)


# Linear layers


@dataclass(frozen=True)
class _Linear:
    """A declared linear layer: its weight, what is declared of it, and what computes it."""

    weight: Shard
    cost: MatrixProduct
    method: DeclaresShards | None
    keeps_input: bool
    """For a gradient of the weight or of what the method adds."""

    @property
    def is_column(self) -> bool:
        return self.weight.dim == 0

    @property
    def outputs(self) -> int:
        """Output channels of all tensor-parallel ranks."""
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        """Input channels of all tensor-parallel ranks."""
        return self.weight.shape[1]

    @property
    def reads_stream(self) -> bool:
        """The norm before the branch computes its input."""
        return self.cost.reads is None

    @property
    def attention(self) -> Attention | None:
        """The core of an attention that computes its input; None: another operation does."""
        return self.cost.reads if isinstance(self.cost.reads, Attention) else None

    @property
    def activation(self) -> Activation | None:
        """The activation that computes its input; None: another operation does."""
        return self.cost.reads if isinstance(self.cost.reads, Activation) else None


def _linears(layer: LayerDeclaration) -> list[_Linear]:
    """Return the linear layers; of experts, which are all alike, those of the first."""
    linears = []
    adapted = {local.rpartition(".")[0] for local, shard in layer.shards.items() if shard.added}
    for name, shard in layer.shards.items():
        if isinstance(shard.cost, MatrixProduct) and not shard.expert:
            prefix = name.removesuffix("weight")
            is_adapted = prefix.removesuffix(".") in adapted
            method = layer.methods.get(prefix.removesuffix("."))
            linears.append(_Linear(shard, shard.cost, method, shard.trained or is_adapted))
    return linears


def _converted_weight(weight: Shard, sizes: MicrobatchSizes) -> int:
    """Return the bytes that a product makes of its weight: 16 bits of 4, and on some CPUs a float32 block of those."""
    _, size = Layout.of(sizes.config.parallel).cut_of(weight)
    outputs, inputs = weight.local_shape(size)
    block = 0
    if sizes.widens_products:
        forward, of_input = (sizes.tokens, inputs, outputs), (sizes.tokens, outputs, inputs)
        block = max(block_bytes(*forward), block_bytes(*of_input))
    if not weight.quantized:
        return block
    dense = outputs * inputs * sizes.number_bytes
    # it is dequantised before the product begins
    return max(dequantized_bytes(weight, sizes.tensor_size, sizes.number_bytes), dense + block)


def _gradient_block(weight: Shard, sizes: MicrobatchSizes) -> int:
    """The float32 block of the product that gives the weight's gradient, on CPUs that widen products."""
    if not sizes.widens_products:
        return 0
    outputs, inputs = weight.local_shape(sizes.tensor_size)
    return block_bytes(outputs, sizes.tokens, inputs)


def _of_methods(layer: LayerDeclaration, sizes: MicrobatchSizes) -> int:
    """Kept by the methods of the layer's linear layers, or of its embedding: by adapters."""
    pass_sizes = PassSizes(
        tokens=sizes.tokens,
        own_tokens=sizes.own_tokens,
        number_size=sizes.number_bytes,
        mask_size=sizes.mask_number_bytes,
        tensor_size=sizes.tensor_size,
    )
    layout, kept = Layout.of(sizes.config.parallel), 0
    for prefix, method in layer.methods.items():
        name = f"{prefix}.weight".removeprefix(".")  # an embedding is a layer by itself, without a prefix
        weight, passed = layer.shards[name], pass_sizes
        if not layout.holds(weight):
            continue
        if weight.expert is not None:
            tokens = ExpertsMemory(layer, sizes).tokens_of_one
            _, cut = layout.cut_of(weight)
            passed = replace(pass_sizes, tokens=tokens, own_tokens=tokens, tensor_size=cut)
        kept += method.kept_bytes(weight, passed)
    return kept


# Transformer layers


class _TransformerLayer:
    """Parts of a transformer layer: what its branches keep, and what their backward passes need."""

    def __init__(self, layer: LayerDeclaration, sizes: MicrobatchSizes) -> None:
        self._layer, self._sizes = layer, sizes
        self._linears = [linear for linear in _linears(layer) if linear.weight.expert is None]
        self._experts = ExpertsMemory(layer, sizes)
        self._branches = {
            part: [linear for linear in self._linears if linear.cost.part == part] for part in ("attention", "mlp")
        }
        self._cores = [attention_core(linear.attention, sizes) for linear in self._linears if linear.attention]
        self._activations = [linear.activation for linear in self._linears if linear.activation]

    def memory(self) -> LayerMemory:
        sizes = self._sizes
        recomputed = sizes.config.training.recomputed_modules
        if sizes.config.training.recompute_granularity == "full":
            # the input is kept, and everything else is back when the backward pass begins
            again = self.kept - _kept_input(self._layer, sizes)
            backward = again + max(self._mlp_backward, self._attention_backward, self._core_backward)
            moments = tuple(self._weight_gradients(recomputed=again))
            forward = self._inside_mlp + self._of_products(self._linears)
            return LayerMemory(sizes.stream_bytes, backward, forward, moments)
        no_core = no_mlp = no_norms = forward = 0
        if "core_attn" in recomputed:
            no_core = self._of_cores - sum(core.recomputed_from_bytes for core in self._cores)
        if "mlp" in recomputed:
            no_mlp = forward = self._inside_mlp
        elif "mlp_act" in recomputed:
            no_mlp = self._activated + self._experts.activated
        if "layernorm" in recomputed:
            no_norms = self._normed
        # what is dropped is back during its own backward pass; the norms' outputs after its peak
        backward = no_mlp + max(self._mlp_backward, no_core + max(self._attention_backward, self._core_backward))
        moments = tuple(self._weight_gradients(recomputed=no_mlp))
        return LayerMemory(self.kept - no_core - no_mlp - no_norms, backward, forward, moments)

    # Kept from the forward pass

    @cached_property
    def kept(self) -> int:
        """All that is kept where nothing is recomputed."""
        sizes, layer = self._sizes, self._layer
        norms = sizes.own_tokens * sum(_norm_token_bytes(norm, sizes) for norm in _norms(layer))
        norms += sum(_head_norm(shard, sizes) for shard in _head_norms(layer))
        if any(not _copies_heads(shard, sizes) for shard in _head_norms(layer)):
            # their inputs are parts of the fused projection, which repeated heads leave to them
            norms += sum(core.projection_bytes for core in self._cores if not core.keeps_projection)
        beside = layer.dropouts * _dropout_mask(sizes) + _of_methods(layer, sizes)
        return norms + self._normed + self._inside_mlp + self._of_cores + beside

    @cached_property
    def _normed(self) -> int:
        """Outputs of the norms before the branches, which the products of a branch share."""
        norms = set()
        for part, branch in self._branches.items():
            readers = [linear for linear in branch if linear.reads_stream]
            is_read = any(linear.keeps_input for linear in readers)
            # a router keeps it as it is in float32, and is given it again where its branch is recomputed
            if part == "mlp" and self._experts.exist:
                is_recomputed = "mlp" in self._sizes.config.training.recomputed_modules
                is_read = is_read or is_recomputed or not self._sizes.is_16_bit
            if is_read and any(linear.cost.shares_input for linear in readers):
                norms.add("attention")
            elif is_read:
                norms.add(part)
        return self._sizes.stream_bytes * len(norms)

    @cached_property
    def _activated(self) -> int:
        """Outputs of activations, which the products that read them keep."""
        kept = [linear.inputs for linear in self._linears if linear.activation and linear.keeps_input]
        return self._sizes.cut_bytes(sum(kept))

    @cached_property
    def _inside_mlp(self) -> int:
        """Inputs and outputs of activations, and what these keep beside; all that router and experts keep."""
        inputs = sum(linear.outputs for linear in self._branches["mlp"] if linear.reads_stream)
        beside = sum(activation.kept for activation in self._activations)
        return self._sizes.cut_bytes(inputs + beside) + self._activated + self._experts.kept

    @cached_property
    def _of_cores(self) -> int:
        """Kept by the cores of attentions."""
        reads = [linear.keeps_input for linear in self._linears if linear.attention]
        return sum(core.kept_bytes(is_read=is_read) for core, is_read in zip(self._cores, reads, strict=True))

    # Needed for a moment of the backward pass

    @cached_property
    def _inner_gradients(self) -> int:
        """Gradients of the outputs of the wider branch's column-parallel products."""
        widths = [sum(linear.outputs for linear in branch if linear.is_column) for branch in self._branches.values()]
        return self._sizes.cut_bytes(max(widths))

    def _of_products(self, linears: Iterable[_Linear]) -> int:
        """Work of the largest of some products: what it makes of its operands."""
        converted = max((_converted_weight(linear.weight, self._sizes) for linear in linears), default=0)
        return self._fp8_operands + converted

    @cached_property
    def _fp8_operands(self) -> int:
        config = self._sizes.config
        return operand_bytes(self._layer, config, Layout.of(config.parallel), self._sizes.tokens)

    @cached_property
    def _mlp_backward(self) -> int:
        """Gradients of the MLP's inner activations and of the stream, while its own inputs are still kept."""
        stream, branch = self._sizes.stream_bytes, self._branches["mlp"]
        if self._experts.exist:
            gradients = max(self._inner_gradients, self._experts.backward)
            return stream + gradients + self._of_products(_linears(self._layer))
        # in their order: the output projection, the activation, and what projects the stream
        down, up = ([linear for linear in branch if linear.is_column == is_column] for is_column in (False, True))
        of_down = self._sizes.cut_bytes(sum(linear.inputs for linear in down)) + self._of_products(down)
        of_activation = self._inner_gradients + self._fp8_operands
        if self._sizes.pointwise == "eager" and any(activation.is_gated for activation in self._activations):
            # SwiGLU's own backward pass holds a product of one half beside them
            of_activation += self._inner_gradients // 2
        of_up = stream + self._inner_gradients + self._of_products(up) - self._freed
        return stream + max(of_down, of_activation, of_up)

    @cached_property
    def _projected_gradients(self) -> int:
        """Gradients of q, k and v: apart, and fused."""
        projected = sum(linear.outputs for linear in self._branches["attention"] if linear.is_column)
        return self._sizes.cut_bytes(2 * projected)

    @cached_property
    def _attention_backward(self) -> int:
        """Gradients of q, k and v and the product that reads them, once the MLP's activations are freed."""
        products = self._of_products(self._branches["attention"])
        return self._projected_gradients + products - self._freed

    @cached_property
    def _core_backward(self) -> int:
        """The cores' own work, in which no linear layer computes."""
        sizes = self._sizes
        # before and after the softmax, in float32
        scores = 2 * FLOAT32 * sum(core.scores for core in self._cores if core.stores_scores)
        work = sizes.stream_bytes + sum(core.backward_bytes for core in self._cores)
        if scores:
            work = max(work, scores + self._projected_gradients)
        return work - self._freed

    @cached_property
    def _freed(self) -> int:
        """Bytes kept of the MLP, all of which are freed once its backward pass has ended."""
        if self._sizes.config.parallel.schedule == "zero-bubble":
            # its inputs and the gradients of its outputs wait for the weights' deferred gradients
            return 0
        return self._inside_mlp

    def _weight_gradients(self, recomputed: int) -> Iterator[GradientMoment]:
        """Yield the moment of each trained weight's gradient, with what is recomputed and still there."""
        if not self._sizes.device.is_host:
            return  # measured on CUDA at the peak of the whole layer (benchmarks/plan_memory.py on an H100)
        for linear in self._linears:
            if linear.weight.trained:
                beside = self._beside_gradient(linear) + recomputed + _gradient_block(linear.weight, self._sizes)
                yield GradientMoment(beside, math.prod(linear.weight.local_shape(self._sizes.tensor_size)))
        for weight in self._experts.trained_weights:
            yield GradientMoment(self._experts.beside_gradient + recomputed, weight)

    def _beside_gradient(self, linear: _Linear) -> int:
        """Gradients of activations beside that of the weight, less what is freed of the MLP by then."""
        stream = self._sizes.stream_bytes
        # in the order of the backward pass: MLP, then attention, of each the output projection first
        if linear.cost.part == "mlp" and not linear.is_column:
            return stream + self._sizes.cut_bytes(linear.inputs)
        if linear.cost.part == "mlp":
            return 2 * stream + self._inner_gradients - self._inside_mlp
        if not linear.is_column:
            return 2 * stream - self._inside_mlp
        return self._projected_gradients - self._freed


# Other layers, and norms


def _other_layer(layer: LayerDeclaration, sizes: MicrobatchSizes) -> LayerMemory:
    """Embedding, its output, the final norm; the output projection is in `loss_memory`."""
    if any(isinstance(shard.cost, Projection) for shard in layer.shards.values()):
        return LayerMemory(0, 0)
    norms, backward = _norms(layer), sizes.stream_bytes
    kept = sizes.own_tokens * sum(_norm_token_bytes(norm, sizes) for norm in norms)
    kept += layer.dropouts * _dropout_mask(sizes) + _of_methods(layer, sizes)
    if layer.keeps_output:
        kept += sizes.stream_bytes
    if any(_is_unfused(norm, sizes) for norm in norms):
        # float32 gradients and products, by number of the stream
        work = 8
        if sizes.pointwise == "plain":
            work = 20
        elif sizes.is_16_bit:
            work = 12
        backward += sizes.own_tokens * sizes.config.model.hidden_size * work
    return LayerMemory(kept, backward)


def _dropout_mask(sizes: MicrobatchSizes) -> int:
    """The mask of a dropout over the residual stream."""
    if sizes.config.model.hidden_dropout == 0:
        return 0
    return sizes.own_tokens * sizes.config.model.hidden_size * sizes.mask_number_bytes


def _norms(layer: LayerDeclaration) -> list[Norm]:
    """Return the layer's norms over the residual stream."""
    return [shard.cost for shard in layer.shards.values() if isinstance(shard.cost, Norm) and shard.used_on == "stream"]


def _head_norms(layer: LayerDeclaration) -> list[Shard]:
    """Return the weights of the layer's norms over heads."""
    # a norm over all heads together is cut as they are, and has no other use
    return [shard for shard in layer.shards.values() if isinstance(shard.cost, Norm) and shard.used_on != "stream"]


def _is_unfused(norm: Norm, sizes: MicrobatchSizes) -> bool:
    """torch's RMSNorm has no kernel of its own on the CPU; one that torch compiles is fused all the same."""
    return norm.is_rms and sizes.device.is_host and sizes.pointwise != "compiled"


def _is_plain(norm: Norm, sizes: MicrobatchSizes) -> bool:
    """The norm is computed operator by operator, and autograd keeps what each reads, in float32."""
    return _is_unfused(norm, sizes) and sizes.pointwise == "plain"


def _norm_token_bytes(norm: Norm, sizes: MicrobatchSizes) -> int:
    """Kept of a norm over the stream for each token beside its output: its input, and its statistics."""
    kept = 0
    if _copies_input(norm, sizes):
        kept = FLOAT32 * norm.channels
    elif not norm.shares_input:
        kept = sizes.number_bytes * norm.channels
    if _is_plain(norm, sizes):
        kept += FLOAT32 * norm.channels + FLOAT32  # normalised input, and one root of the mean
    return kept


def _copies_input(norm: Norm, sizes: MicrobatchSizes) -> bool:
    """The norm keeps a copy of its 16-bit input in float32."""
    return sizes.is_16_bit and (norm.adds_one or _is_plain(norm, sizes))


def _head_norm(shard: Shard, sizes: MicrobatchSizes) -> int:
    """Kept of a norm over heads of q or k."""
    # its input is a part of the fused projection, which v keeps whole; the core keeps the output in place of that,
    # unless it rotates it
    norm = _norm_of(shard)
    channels = norm.channels // sizes.tensor_size
    channel_bytes = 0
    if sizes.config.model.position_embedding_type != "rope":
        channel_bytes += sizes.number_bytes
    if _copies_heads(shard, sizes):
        channel_bytes += FLOAT32
    if _is_plain(norm, sizes) or _is_split(shard, sizes):
        channel_bytes += FLOAT32  # the normalised input
    return sizes.tokens * channels * channel_bytes


def _copies_heads(shard: Shard, sizes: MicrobatchSizes) -> bool:
    """The norm over heads keeps a copy of its 16-bit input in float32."""
    return _copies_input(_norm_of(shard), sizes) or (sizes.is_16_bit and _is_split(shard, sizes))


def _is_split(shard: Shard, sizes: MicrobatchSizes) -> bool:
    """Ranks share the heads of one norm (SplitRMSNorm), which is computed operator by operator."""
    return shard.dim == 0 and sizes.tensor_size > 1


def _norm_of(shard: Shard) -> Norm:
    assert isinstance(shard.cost, Norm)
    return shard.cost


def _kept_input(layer: LayerDeclaration, sizes: MicrobatchSizes) -> int:
    """The layer's input among what its first norm keeps, if that keeps the tensor itself."""
    if any(_copies_input(norm, sizes) for norm in _norms(layer)[:1]):
        return 0
    return sizes.stream_bytes
