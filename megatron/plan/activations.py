"""Memory that layers need between their forward and backward pass, and for a moment within it.

Counted from the declared shapes by what autograd saves of each operation, in the dtype in which it saves it. Kernels
differ by device: see the comments. Sizes are bytes of one rank and one microbatch.
Source of the counts: Korthikanti et al. 2022 (arXiv:2205.05198), whose figures are those of fused kernels.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from megatron.options.config import Config
from megatron.parallel.block_sizes import BLOCK_LOGITS, BLOCK_NUMBERS, block_bytes, chunk_size
from megatron.parallel.costs import Activation, Attention, MatrixProduct, Norm, PassSizes, Projection
from megatron.parallel.operators.nf4_layout import dequantized_bytes
from megatron.parallel.shards import DeclaresShards, LayerDeclaration, Shard
from megatron.plan.attention_core import AttentionCore, is_blockwise, stores_attention_scores
from megatron.plan.flops import num_tokens, number_size
from megatron.runtime.device import Device
from megatron.runtime.devices import planned_device
from megatron.tasks.registry import load_task


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that one microbatch needs in one layer."""

    kept: int
    """From the forward pass to the layer's backward pass."""
    backward: int
    """More than `kept` at the peak of the layer's backward pass: gradients of activations, and what is recomputed."""
    products: tuple[tuple[int, int], ...] = ()
    """More than `kept` when the gradient of a weight is there (less, where much of that is freed), and its numbers."""


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
    def attention(self) -> Attention | None:
        """The core of an attention that computes its input; None: another operation does."""
        return self.cost.reads if isinstance(self.cost.reads, Attention) else None

    @property
    def activation(self) -> Activation | None:
        """The activation that computes its input; None: another operation does."""
        return self.cost.reads if isinstance(self.cost.reads, Activation) else None


def _linears(layer: LayerDeclaration) -> list[_Linear]:
    linears = []
    for name, shard in layer.shards.items():
        if isinstance(shard.cost, MatrixProduct):
            prefix = name.removesuffix("weight")
            is_adapted = any(other.added for local, other in layer.shards.items() if local.startswith(prefix))
            method = layer.methods.get(prefix.removesuffix("."))
            linears.append(_Linear(shard, shard.cost, method, shard.trained or is_adapted))
    return linears


def deferred_bytes(layer: LayerDeclaration, config: Config) -> int:
    """Return what the deferred gradients of a layer's trained weights keep: the inputs and the outputs' gradients of
    its matrix products. A column-parallel input is a rank's own rows under sequence parallelism."""
    t, cut, numbers = config.parallel.tensor_model_parallel_size, _sequence_cut(config), 0
    for linear in _linears(layer):
        outputs, inputs = linear.weight.shape
        if linear.weight.trained:
            numbers += inputs // cut + outputs // t if linear.is_column else inputs // t + outputs
    return num_tokens(config) * numbers * number_size(config)


@dataclass(frozen=True)
class LossMemory:
    """Bytes that the output projection and the loss of one microbatch need."""

    forward: int
    """At the peak of the forward pass."""
    backward: int
    """At the peak of the backward pass."""


def stream_bytes(config: Config) -> int:
    """Bytes of the residual stream of one microbatch: of a rank's own rows under sequence parallelism."""
    return num_tokens(config) * config.model.hidden_size * number_size(config) // _sequence_cut(config)


def layer_memory(layer: LayerDeclaration, config: Config) -> LayerMemory:
    """Return what a layer of the declared list needs. In 16 bit with GELU, dropout and MHA a transformer layer keeps
    S B H (10 + 24/t) bytes on CUDA, for t tensor-parallel ranks, or S B H 34/t with sequence parallelism.
    """
    memory = _other_layer(layer, config) if layer.number is None else _transformer_layer(layer, config)
    t, number, work = config.parallel.tensor_model_parallel_size, number_size(config), []
    for weight in (linear.weight for linear in _linears(layer)):
        wide = _widened(config, weight)
        if weight.quantized:
            wide = max(dequantized_bytes(weight, t, number), math.prod(weight.local_shape(t)) * number + wide)
        work.append(wide)
    backward = memory.backward + max(work, default=0)
    own_moment = {numel for _, numel in memory.products}
    sizes = [math.prod(shard.local_shape(t)) for shard in layer.shards.values() if shard.trained]
    other = max((numel for numel in sizes if numel not in own_moment), default=0)
    return replace(memory, backward=backward, products=(*memory.products, (backward, other)))


class _Parts:
    """Bytes of a transformer layer's parts: what its branches keep, and what their backward passes need."""

    def __init__(self, layer: LayerDeclaration, config: Config) -> None:
        self.config, self.linears, self.stream = config, _linears(layer), stream_bytes(config)
        self.attention = [linear for linear in self.linears if linear.cost.part == "attention"]
        self.mlp = [linear for linear in self.linears if linear.cost.part == "mlp"]
        self.cores = [
            AttentionCore(linear.attention, config) for linear in self.linears if linear.attention is not None
        ]
        self.activations = [linear.activation for linear in self.linears if linear.activation is not None]

        activated = sum(linear.weight.shape[1] for linear in self.linears if linear.activation and linear.keeps_input)
        numbers = sum(linear.weight.shape[0] for linear in self.mlp if linear.cost.reads is None) + activated
        numbers += sum(activation.kept for activation in self.activations)
        self.activated, self.inside_mlp = self._cut(activated), self._cut(numbers)
        branches = (self.attention, self.mlp)
        self.normed = self.stream * sum(
            any(linear.keeps_input for linear in branch if linear.cost.reads is None) for branch in branches
        )
        self.in_cores = sum(_attention_bytes(linear, config) for linear in self.linears)
        widest = max(sum(linear.weight.shape[0] for linear in branch if linear.is_column) for branch in branches)
        self.inner_gradients = self._cut(widest)

        norms = sum(_norm_bytes(norm, config) for norm in _norms(layer)) * num_tokens(config) // _sequence_cut(config)
        norms += sum(_head_norm_bytes(norm, config) for norm in _norms(layer, used_on="heads"))
        beside = layer.dropouts * _dropout_bytes(config) + _method_bytes(layer, config)
        self.whole = norms + self.normed + self.inside_mlp + self.in_cores + beside

    def _cut(self, numbers: int) -> int:
        """Bytes of so many numbers a token, cut over the tensor-parallel ranks."""
        config = self.config
        return num_tokens(config) * numbers // config.parallel.tensor_model_parallel_size * number_size(config)

    @property
    def mlp_work(self) -> int:
        """Gradients of the MLP's inner activations and of the stream, while its own inputs are still kept."""
        is_gated = any(activation.is_gated for activation in self.activations)
        if kernels_form(self.config) == "eager" and is_gated:
            return self.stream + self.inner_gradients * 3 // 2
        return self.stream + self.inner_gradients

    @property
    def attention_work(self) -> int:
        """Gradients of q, k and v, once the MLP's activations are freed."""
        gradients = self._cut(2 * sum(linear.weight.shape[0] for linear in self.attention if linear.is_column))
        if stores_attention_scores(self.config):
            gradients += 8 * sum(core.scores for core in self.cores)
        blockwise = sum(core.blockwise_backward for core in self.cores)
        # where the weights' gradients are deferred, the MLP's inputs and the gradients of its outputs wait for them
        freed = self.inside_mlp if self.config.parallel.schedule != "zero-bubble" else 0
        return max(gradients, self.stream + blockwise) - freed

    def moments(self, recomputed: int) -> tuple[tuple[int, int], ...]:
        """Return what is needed when each trained weight's gradient is there, and its numbers."""
        if not _device(self.config).is_host:
            return ()  # measured on CUDA at the peak of the whole layer (benchmarks/plan_memory.py on an H100)
        moments = []
        for linear in self.linears:
            if not linear.weight.trained:
                continue
            if linear.cost.part == "attention":
                size = self.attention_work if linear.is_column else 2 * self.stream - self.inside_mlp
            elif linear.is_column:
                size = 2 * self.stream + self.inner_gradients - self.inside_mlp
            else:
                size = self.stream + self._cut(linear.weight.shape[1])
            size += recomputed + _widened(self.config, linear.weight, of_weight=True)
            shape = linear.weight.local_shape(self.config.parallel.tensor_model_parallel_size)
            moments.append((size, math.prod(shape)))
        return tuple(moments)


def _transformer_layer(layer: LayerDeclaration, config: Config) -> LayerMemory:
    parts, recomputed = _Parts(layer, config), config.training.recomputed_modules
    if config.training.recompute_granularity == "full":
        again = parts.whole - _kept_input(layer, config)
        return LayerMemory(
            parts.stream, again + max(parts.mlp_work, parts.attention_work), parts.moments(recomputed=again)
        )
    no_core = no_mlp = no_norms = 0
    if "core_attn" in recomputed:
        no_core = parts.in_cores - sum(core.inputs for core in parts.cores)
    if "mlp" in recomputed:
        no_mlp = parts.inside_mlp
    elif "mlp_act" in recomputed:
        no_mlp = parts.activated
    if "layernorm" in recomputed:
        no_norms = parts.normed
    # what is dropped is back during its own backward pass; the norms' outputs after its peak
    backward = no_mlp + max(parts.mlp_work, no_core + parts.attention_work)
    return LayerMemory(parts.whole - no_core - no_mlp - no_norms, backward, parts.moments(recomputed=no_mlp))


def _method_bytes(layer: LayerDeclaration, config: Config) -> int:
    """Kept by the methods of the layer's linear layers, or of its embedding: by adapters."""
    sizes = PassSizes(
        tokens=num_tokens(config),
        own_tokens=num_tokens(config) // _sequence_cut(config),
        number_size=number_size(config),
        mask_size=number_size(config) if _device(config).is_host else 1,
        tensor_size=config.parallel.tensor_model_parallel_size,
    )
    weights = {prefix: layer.shards[f"{prefix}.weight" if prefix else "weight"] for prefix in layer.methods}
    return sum(method.kept_bytes(weights[prefix], sizes) for prefix, method in layer.methods.items())


def _device(config: Config) -> Device:
    return planned_device(config.parallel.device)


@functools.cache
def _widened_by(device: Device) -> frozenset[str]:
    return device.widened()


def widens(config: Config) -> bool:
    """Return True if this machine's CPU computes the run's products in float32, block by block."""
    return config.training.precision in _widened_by(_device(config))


def _widened(config: Config, shard: Shard, *, of_weight: bool = False) -> int:
    """Bytes in float32 of a block of the products with a weight, or of that for its gradient."""
    if not widens(config):
        return 0
    tokens = num_tokens(config)
    outputs, inputs = shard.local_shape(config.parallel.tensor_model_parallel_size)
    if of_weight:
        return block_bytes(outputs, tokens, inputs)
    return max(block_bytes(tokens, inputs, outputs), block_bytes(tokens, outputs, inputs))


def _other_layer(layer: LayerDeclaration, config: Config) -> LayerMemory:
    """Embedding, its output, the final norm; the output projection is in `loss_memory`."""
    if any(isinstance(shard.cost, Projection) for shard in layer.shards.values()):
        return LayerMemory(0, 0)
    tokens, backward, norms = num_tokens(config), stream_bytes(config), _norms(layer)
    kept = sum(_norm_bytes(norm, config) * tokens // _sequence_cut(config) for norm in norms)
    kept += layer.dropouts * _dropout_bytes(config) + _method_bytes(layer, config)
    kept += stream_bytes(config) if layer.keeps_output else 0
    if any(_is_unfused(norm, config) for norm in norms):  # float32 gradients and products
        work = {"plain": 20, "eager": 12 if number_size(config) == 2 else 8}[kernels_form(config)]
        backward += tokens * config.model.hidden_size * work // _sequence_cut(config)
    return LayerMemory(kept, backward)


def mask_bytes(config: Config) -> int:
    """Bytes of the attention mask that a rank's layers share."""
    model, length = config.model, load_task(config).data.row_length
    heads = model.num_attention_heads // config.parallel.tensor_model_parallel_size
    device, alibi = _device(config), model.position_embedding_type == "alibi"
    flex = "flex" in device.attention and model.suits_flex
    if flex and model.attention_backend in ("auto", "flex"):
        return 0
    packed = load_task(config).data.packs_documents and not device.is_host  # the CPU attends document by document
    batch = config.training.micro_batch_size if packed else 1
    if alibi:
        return batch * heads * length**2 * (4 if widens(config) else number_size(config))
    return batch * length**2 if packed else 0


def loss_memory(output: LayerDeclaration, config: Config) -> LossMemory:
    """Return what linear_cross_entropy of one microbatch needs.

    A single chunk keeps the gradient of its logits for the backward pass; several have made both gradients in forward.
    The weight's gradient takes no memory where it is added to the optimizer's own.
    """
    number, tokens, hidden = number_size(config), num_tokens(config), config.model.hidden_size
    t = config.parallel.tensor_model_parallel_size
    rows = config.model.padded_vocab_size(t) // t
    chunk, on_cpu = chunk_size(tokens, hidden), _device(config).is_host
    is_trained = any(shard.vocabulary and shard.trained for shard in output.shards.values())
    is_separate = is_trained and not adds_to_optimizers_sum(config)
    method = output.methods.get("")
    scales = method is not None and method.scales_weight  # the whole weight, before and after the factors
    is_trained, is_separate = is_trained or scales, is_separate or scales
    scaled = 2 * rows * hidden * number if scales else 0
    # the gradient of the weight is summed over chunks in float32; float16 could not hold even one
    wide = 4 if chunk < tokens or config.training.fp16 or is_separate != is_trained else number
    gradients = tokens * hidden * number + (rows * hidden * wide if is_separate else 0)
    gathered = scaled + (tokens * hidden * number if config.parallel.sequence_parallel else 0)
    logits = chunk * rows * number
    # inputs times the weights of tokens, in float32 and rounded; torch's softmax, and products of blocks
    weighted = chunk * hidden * (4 + (number if number == 2 else 0))
    block = min(chunk, max(1, BLOCK_LOGITS // rows)) * rows * (8 if number == 2 else 4) if on_cpu else 0
    # the product of a block, and its copy in the dtype of the sum that it is added to
    product = min(rows * hidden, BLOCK_NUMBERS) * (number + wide) if on_cpu and wide != number else 0
    if widens(config):
        block = max(block, block_bytes(chunk, hidden, rows))
        product = max(block_bytes(chunk, rows, hidden), block_bytes(rows, chunk, hidden, adds=wide == 4))
    work = max(weighted, chunk * hidden * number + product)
    result = rows * hidden * number if is_separate else 0
    if chunk == tokens:
        rounded = result if wide != number else 0
        return LossMemory(gathered + logits + block, gathered + logits + gradients + max(work, rounded))
    backward = tokens * hidden * number + max(4 * tokens * hidden if number == 2 else 0, result)
    return LossMemory(gradients + gathered + logits + max(block, work), scaled + gradients + backward)


def adds_to_optimizers_sum(config: Config) -> bool:
    """Return True if the loss adds the output weight's gradient to DeepSpeed's BF16_Optimizer's float32 gradients."""
    training = config.training
    is_buffered = training.bf16 and config.effective_zero_stage == 1 and not config.optimizer.offload_optimizer
    return is_buffered and training.grad_accum_dtype == "fp32"


def kernels_form(config: Config) -> str:
    """Return the form of pointwise operators: plain, eager, compiled or habana (parallel/operators/fused.py)."""
    form, model = _device(config).pointwise, config.model
    if model.kernels == "plain":
        return "plain"
    if form == "habana":
        return "habana" if model.use_fused_rmsnorm else "plain"
    is_eager = form == "eager" and model.kernels == "auto" and not config.training.torch_compile
    return "eager" if is_eager else "compiled"


def _attention_bytes(linear: _Linear, config: Config) -> int:
    """Kept by the core that computes the input of this linear layer, if one does.

    megatron/models/blockwise_attention.py keeps neither its statistics nor its output, which is there only where the
    output projection keeps its input.
    """
    if linear.attention is None:
        return 0
    core = AttentionCore(linear.attention, config)
    if not is_blockwise(config):
        return core.kept
    left_out = 4 * core.heads
    if not linear.keeps_input:
        left_out += core.query * number_size(config)
    return core.kept - num_tokens(config) * left_out


def _dropout_bytes(config: Config) -> int:
    """The mask of a dropout over the residual stream: a byte a number, on the CPU a number."""
    if config.model.hidden_dropout == 0:
        return 0
    size = number_size(config) if _device(config).is_host else 1
    return num_tokens(config) * config.model.hidden_size * size // _sequence_cut(config)


def _norms(layer: LayerDeclaration, used_on: str = "stream") -> list[Norm]:
    """Return the layer's norms over the residual stream, or over heads."""
    used = [shard.cost for shard in layer.shards.values() if shard.used_on == used_on]
    return [cost for cost in used if isinstance(cost, Norm)]


def _norm_bytes(norm: Norm, config: Config) -> int:
    """Kept of a norm over the stream for each token beside its output: its input, and its statistics.

    torch's RMSNorm is not fused on the CPU: it keeps its input and the normalised input in float32.
    """
    if _is_unfused(norm, config) and kernels_form(config) == "plain":
        return 8 * norm.channels + 4
    return number_size(config) * norm.channels


def _head_norm_bytes(norm: Norm, config: Config) -> int:
    """Kept of a norm over heads of q or k. Its input is a part of the fused projection, which v keeps whole.

    The core keeps the output in place of that, unless it rotates it.
    """
    channels = norm.channels // config.parallel.tensor_model_parallel_size
    kept = 0 if config.model.position_embedding_type == "rope" else number_size(config) * channels
    if _is_unfused(norm, config) and kernels_form(config) == "plain":
        # the normalised input in float32, and of 16 bits the input too
        kept += (8 if number_size(config) == 2 else 4) * channels
    return num_tokens(config) * kept


def _is_unfused(norm: Norm, config: Config) -> bool:
    return norm.is_rms and _device(config).is_host and kernels_form(config) != "compiled"


def _kept_input(layer: LayerDeclaration, config: Config) -> int:
    """The layer's input among what its first norm keeps, if that keeps the tensor itself."""
    copies = any(_is_unfused(norm, config) for norm in _norms(layer)[:1]) and kernels_form(config) == "plain"
    return 0 if copies and number_size(config) == 2 else stream_bytes(config)


def _sequence_cut(config: Config) -> int:
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
