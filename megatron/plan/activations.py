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
from megatron.parallel.block_sizes import ATTENTION_QUERIES, BLOCK_LOGITS, BLOCK_NUMBERS, block_bytes, chunk_size
from megatron.parallel.operators.nf4_layout import dequantized_bytes
from megatron.parallel.shards import LayerDeclaration, Shard
from megatron.plan.flops import is_matrix, number_size
from megatron.runtime.devices import BLOCKWISE_LENGTHS, attends_blockwise, missing_products
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


def deferred_bytes(layer: LayerDeclaration, config: Config) -> int:
    """Return what the deferred gradients of a layer's trained weights keep: the inputs and the outputs' gradients of
    its matrix products. A column-parallel input is a rank's own rows under sequence parallelism."""
    if layer.number is None:
        return 0
    t, number, cut = config.parallel.tensor_model_parallel_size, number_size(config), _sequence_cut(config)
    columns = sum(shard.shape[1] // cut + shard.shape[0] // t for shard in _columns(layer) if shard.trained)
    rows = sum(shard.shape[1] // t + shard.shape[0] for shard in _rows(layer) if shard.trained)
    return num_tokens(config) * (columns + rows) * number


@dataclass(frozen=True)
class LossMemory:
    """Bytes that the output projection and the loss of one microbatch need."""

    forward: int
    """At the peak of the forward pass."""
    backward: int
    """At the peak of the backward pass."""


def num_tokens(config: Config) -> int:
    """Tokens of the largest microbatch."""
    return config.training.micro_batch_size * load_task(config).data.row_length


def stream_bytes(config: Config) -> int:
    """Bytes of the residual stream of one microbatch: of a rank's own rows under sequence parallelism."""
    return num_tokens(config) * config.model.hidden_size * number_size(config) // _sequence_cut(config)


def layer_memory(layer: LayerDeclaration, config: Config) -> LayerMemory:
    """Return what a layer of the declared list needs. In 16 bit with GELU, dropout and MHA a transformer layer keeps
    S B H (10 + 24/t) bytes on CUDA, for t tensor-parallel ranks, or S B H 34/t with sequence parallelism.
    """
    memory = _other_layer(layer, config) if layer.number is None else _transformer_layer(layer, config)
    t, number = config.parallel.tensor_model_parallel_size, number_size(config)
    work = [
        max(dequantized_bytes(shard, t, number), math.prod(shard.local_shape(t)) * number + _widened(config, shard))
        if shard.quantized
        else _widened(config, shard)
        for shard in (_columns(layer) + _rows(layer) if layer.number is not None else [])
    ]
    backward = memory.backward + max(work, default=0)
    own_moment = {numel for _, numel in memory.products}
    sizes = [math.prod(shard.local_shape(t)) for shard in layer.shards.values() if shard.trained]
    other = max((numel for numel in sizes if numel not in own_moment), default=0)
    return replace(memory, backward=backward, products=(*memory.products, (backward, other)))


def _transformer_layer(layer: LayerDeclaration, config: Config) -> LayerMemory:
    tokens, number, t = num_tokens(config), number_size(config), config.parallel.tensor_model_parallel_size
    stream = stream_bytes(config)
    columns, rows = _columns(layer), _rows(layer)
    norms = sum(_norm_bytes(layer, name, config) for name in _norms(layer)) * tokens // _sequence_cut(config)
    kept_norms = sum(_keeps_input(layer, shard) for shard in columns) * stream
    branches = kept_norms + len(rows) * _dropout_bytes(config)
    activations = sum(shard.shape[1] for shard in rows[1:] if _keeps_input(layer, shard))
    mlp = sum(shard.shape[0] for shard in columns[1:]) + activations
    mlp_bytes = tokens * (mlp + layer.kept_per_token) // t * number
    core, inputs = _attention_core(config) - _context_let_go(layer, config), _attention_inputs(config)
    adapters = sum(_adapter_bytes(layer, shard, config) for shard in columns + rows) + _unscaled_bytes(layer, config)
    whole = norms + branches + mlp_bytes + core + adapters
    # gradients of the MLP's inner activations and of the residual stream, while its own inputs are still kept
    inner = tokens * max((shard.shape[0] for shard in columns), default=0) // t * number
    work = stream + (inner * 3 // 2 if kernels_form(config) == "eager" and _is_gated(columns, rows) else inner)
    # those of q, k and v, once the MLP's activations are freed
    scores = 8 * _scores(config) if stores_attention_scores(config) else 0
    gradients = 2 * tokens * sum(columns[0].pieces or columns[0].shape[:1]) // t * number + scores
    # where the weights' gradients are deferred, the MLP's inputs and the gradients of its outputs wait for them
    freed = mlp_bytes if config.parallel.schedule != "zero-bubble" else 0
    attention_work = max(gradients, stream + _blockwise_backward(config)) - freed
    products = [
        (attention_work, columns[0]),
        (2 * stream - mlp_bytes, rows[0]),
        *((2 * stream + inner - mlp_bytes, shard) for shard in columns[1:]),
        *((stream + tokens * shard.shape[1] // t * number, shard) for shard in rows[1:]),
    ]
    # on CUDA measured at the peak of the whole layer (benchmarks/plan_memory.py on an H100)
    on_cpu = config.parallel.device == "cpu"
    trained = [
        (size + _widened(config, shard, of_weight=True), math.prod(shard.local_shape(t)))
        for size, shard in products
        if shard.trained and on_cpu
    ]
    if config.training.recompute_granularity == "full":
        again = whole - _kept_input(layer, config)
        return LayerMemory(stream, again + max(work, attention_work), _after(again, trained))
    parts = config.training.recomputed_modules
    no_core = core - inputs if "core_attn" in parts else 0
    activation = tokens * activations // t * number
    no_mlp = mlp_bytes if "mlp" in parts else activation if "mlp_act" in parts else 0
    no_norms = kept_norms if "layernorm" in parts else 0
    # what is dropped is back during its own backward pass; the norms' outputs after its peak
    backward = no_mlp + max(work, no_core + attention_work)
    return LayerMemory(whole - no_core - no_mlp - no_norms, backward, _after(no_mlp, trained))


@functools.cache
def _missing_products() -> frozenset[str]:
    return missing_products()


def widens(config: Config) -> bool:
    """Return True if this machine's CPU computes the run's products in float32, block by block."""
    return config.parallel.device == "cpu" and config.training.precision in _missing_products()


def _widened(config: Config, shard: Shard, *, of_weight: bool = False) -> int:
    """Bytes in float32 of a block of the products with a weight, or of that for its gradient."""
    if not widens(config):
        return 0
    tokens = num_tokens(config)
    outputs, inputs = shard.local_shape(config.parallel.tensor_model_parallel_size)
    if of_weight:
        return block_bytes(outputs, tokens, inputs)
    return max(block_bytes(tokens, inputs, outputs), block_bytes(tokens, outputs, inputs))


def _after(recomputed: int, products: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((recomputed + size, numel) for size, numel in products)


def _other_layer(layer: LayerDeclaration, config: Config) -> LayerMemory:
    """Embedding, its output, the final norm; the output projection is in `loss_memory`."""
    tokens, stream = num_tokens(config), stream_bytes(config)
    norms = [_norm_bytes(layer, name, config) * tokens // _sequence_cut(config) for name in _norms(layer)]
    if layer.name == "embedding":
        return LayerMemory(sum(norms) + _dropout_bytes(config), stream)
    if not norms:
        scaled = "lora_embedding_magnitude_vector" in layer.shards
        found = tokens * config.model.hidden_size * number_size(config) if scaled else 0
        return LayerMemory(found, stream if layer.name == "embedding.word" else 0)
    work = 0
    if _unfused_norm(layer, config):  # float32 gradients and products
        work = {"plain": 20, "eager": 12 if number_size(config) == 2 else 8}[kernels_form(config)]
    return LayerMemory(sum(norms) + stream, stream + tokens * config.model.hidden_size * work // _sequence_cut(config))


def _unscaled_bytes(layer: LayerDeclaration, config: Config) -> int:
    """Outputs of linear layers that DoRA keeps beside the scaled ones: the factors' gradients need them."""
    t, rows = config.parallel.tensor_model_parallel_size, 0
    for name, shard in layer.shards.items():
        place = f"{name.removesuffix('weight')}lora_magnitude_vector"
        if is_matrix(shard) and any(other.startswith(place) for other in layer.shards):
            rows += shard.local_shape(t)[0]
    return num_tokens(config) * rows * number_size(config)


def stores_attention_scores(config: Config) -> bool:
    """Return True if the attention keeps its S x S probabilities for the backward pass.

    The fused kernels keep none. torch has none on the CPU with dropout, nor on HPU without Habana's FusedSDPA.
    """
    if config.parallel.device == "cpu":
        return config.model.attention_dropout > 0
    return config.parallel.device == "hpu" and not (
        config.model.uses_fused_sdpa("hpu") and config.model.fused_sdpa_recompute
    )


def mask_bytes(config: Config) -> int:
    """Bytes of the attention mask that a rank's layers share."""
    model, length = config.model, load_task(config).data.row_length
    heads = model.num_attention_heads // config.parallel.tensor_model_parallel_size
    on_cpu, alibi = config.parallel.device == "cpu", model.position_embedding_type == "alibi"
    flex = config.parallel.device in ("auto", "cuda") and model.suits_flex
    if flex and model.attention_backend in ("auto", "flex"):
        return 0
    packed = load_task(config).data.packs_documents and not on_cpu  # the CPU attends document by document
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
    chunk, on_cpu = chunk_size(tokens, hidden), config.parallel.device == "cpu"
    is_trained = any(shard.vocabulary and shard.trained for shard in output.shards.values())
    is_separate = is_trained and not adds_to_optimizers_sum(config)
    scales = "lora_magnitude_vector" in output.shards  # the whole weight, before and after DoRA's factors
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
    """Return the form of a layer's pointwise operators: plain, eager, compiled or habana (parallel/kernels.py)."""
    device, model = config.parallel.device, config.model
    if model.kernels == "plain":
        return "plain"
    if device == "hpu":
        return "habana" if model.use_fused_rmsnorm else "plain"
    return "eager" if device == "cpu" and model.kernels == "auto" and not config.training.torch_compile else "compiled"


def _attention_core(config: Config) -> int:
    """Kept by the attention core: its inputs, its output, which the output projection keeps too, and its statistics."""
    model, number, tokens = config.model, number_size(config), num_tokens(config)
    query, key = _head_channels(config)
    heads = model.num_attention_heads // config.parallel.tensor_model_parallel_size
    rotary, grouped = model.position_embedding_type == "rope", key < query and _repeats_heads(config)
    on_cpu = config.parallel.device == "cpu"
    # v is a view of the fused projection, all of which it keeps; q and k too, unless they are rotated
    inputs = query + 2 * key + (query + key if rotary else 0)
    if grouped:  # key and value heads are repeated for their group
        inputs = (query if rotary else query + 2 * key) + 2 * query
    kept = tokens * (inputs + query) * number + tokens * heads * 4
    if load_task(config).data.packs_documents and on_cpu:
        kept += tokens * query * number  # the outputs of documents, concatenated
    if config.parallel.device in ("auto", "cuda") and number == 4 and config.training.micro_batch_size > 1:
        kept += tokens * query * number  # no flash kernel: the output comes by sample, and is copied by position
    if not stores_attention_scores(config):
        return kept
    if on_cpu:  # torch's plain attention, in float32: probabilities, dropout mask, product; q, k, v; output twice
        copies = 8 * query + (4 * query if number == 2 else number * (query + 2 * key))
        return 12 * _scores(config) + tokens * (copies + number * query)
    return kept + _scores(config) * (number + (1 + number if model.attention_dropout > 0 else 0))


def _context_let_go(layer: LayerDeclaration, config: Config) -> int:
    """Bytes of `_attention_core` that megatron/models/blockwise_attention.py does not keep.

    Not its statistics, nor its output, which is there only where the output projection keeps its input.
    """
    if not _is_blockwise(config):
        return 0
    model = config.model
    query, _ = _head_channels(config)
    statistics = 4 * model.num_attention_heads // config.parallel.tensor_model_parallel_size
    context = 0 if _keeps_input(layer, _rows(layer)[0]) else query * number_size(config)
    return num_tokens(config) * (statistics + context)


def _blockwise_backward(config: Config) -> int:
    """Bytes that the backward pass of megatron/models/blockwise_attention.py takes, besides what it is given.

    Of 16-bit numbers it holds the keys and values, and the sums of their gradients, in float32, and of a block of
    scores the probabilities, their gradient before and after the softmax, and that rounded.
    """
    if not _is_blockwise(config):
        return 0
    number, tokens = number_size(config), num_tokens(config)
    query, key = _head_channels(config)
    heads = config.model.num_attention_heads // config.parallel.tensor_model_parallel_size
    copies = 2 * 4 if number == 2 else 0
    sums = 2 * 4
    scores = 3 * 4 + (number if number == 2 else 0)
    return tokens * (query * number + key * (copies + sums)) + tokens * heads * ATTENTION_QUERIES * scores


def _is_blockwise(config: Config) -> bool:
    """Return True if megatron/models/blockwise_attention.py computes the attention."""
    model, training = config.model, config.training
    if config.parallel.device != "cpu" or model.attention_backend != "auto":
        return False
    if model.kernels == "plain" or training.torch_compile or model.attention_dropout > 0:
        return False
    task = load_task(config)
    if task.data.packs_documents:  # document by document, of lengths that the plan does not know
        return False
    return task.data.row_length in BLOCKWISE_LENGTHS and _attends_blockwise(training.precision)


@functools.cache
def _attends_blockwise(precision: str) -> bool:
    return attends_blockwise(precision)


def _repeats_heads(config: Config) -> bool:
    """Return True if key/value heads are repeated in memory for their groups of query heads."""
    model, device = config.model, config.parallel.device
    if model.kernels == "plain" or device == "cpu":
        return model.kernels == "plain"
    if device == "hpu":
        return not model.uses_fused_sdpa(device)
    masked = model.position_embedding_type == "alibi" or load_task(config).data.packs_documents
    in_sdpa = model.attention_backend == "sdpa" or model.attention_dropout > 0
    return (config.training.precision == "fp32" and (in_sdpa or not masked)) or (masked and in_sdpa)


def _attention_inputs(config: Config) -> int:
    """Kept of the attention core where it is recomputed: the fused projection, and the output."""
    query, key = _head_channels(config)
    return num_tokens(config) * (2 * query + 2 * key) * number_size(config)


def _head_channels(config: Config) -> tuple[int, int]:
    """Channels of q, and of k or v, on a rank."""
    model, t = config.model, config.parallel.tensor_model_parallel_size
    query = model.num_attention_heads * model.head_size // t
    # with fewer key/value heads than ranks, each rank gathers one whole head of k and of v
    return query, max(model.num_kv_heads * model.head_size // t, model.head_size)


def _scores(config: Config) -> int:
    """Number of attention scores."""
    heads = config.model.num_attention_heads // config.parallel.tensor_model_parallel_size
    return num_tokens(config) * load_task(config).data.row_length * heads


def _dropout_bytes(config: Config) -> int:
    """The mask of a dropout over the residual stream: a byte a number, on the CPU a number."""
    if config.model.hidden_dropout == 0:
        return 0
    size = number_size(config) if config.parallel.device == "cpu" else 1
    return num_tokens(config) * config.model.hidden_size * size // _sequence_cut(config)


def _norm_bytes(layer: LayerDeclaration, name: str, config: Config) -> int:
    """Kept of a norm for each token beside its output: its input, and its statistics.

    torch's RMSNorm is not fused on the CPU: it keeps its input and the normalised input in float32.
    """
    hidden = layer.shards[name].shape[0]
    if _unfused_norm(layer, config) and kernels_form(config) == "plain":
        return 8 * hidden + 4
    return number_size(config) * hidden


def _unfused_norm(layer: LayerDeclaration, config: Config) -> bool:
    norms = _norms(layer)
    is_rms = bool(norms) and f"{norms[0].removesuffix('weight')}bias" not in layer.shards
    return is_rms and config.parallel.device == "cpu" and kernels_form(config) != "compiled"


def _kept_input(layer: LayerDeclaration, config: Config) -> int:
    """The layer's input among what its first norm keeps, if that keeps the tensor itself."""
    copied = _unfused_norm(layer, config) and kernels_form(config) == "plain" and number_size(config) == 2
    return 0 if copied else stream_bytes(config)


def _norms(layer: LayerDeclaration) -> list[str]:
    """Weights of the norms over the residual stream."""
    of_norms = [name for name in layer.shards if f"{layer.name}.{name}".endswith("norm.weight")]
    return [name for name in of_norms if layer.shards[name].used_on == "stream"]


def _columns(layer: LayerDeclaration) -> list[Shard]:
    return [shard for shard in layer.shards.values() if is_matrix(shard) and shard.dim == 0]


def _rows(layer: LayerDeclaration) -> list[Shard]:
    return [shard for shard in layer.shards.values() if is_matrix(shard) and shard.dim == 1]


def _keeps_input(layer: LayerDeclaration, weight: Shard) -> bool:
    """Return True if the product with this weight keeps its input, for a gradient of the weight or of adapters."""
    return weight.trained or bool(_added(layer, weight))


def _added(layer: LayerDeclaration, weight: Shard) -> dict[str, Shard]:
    """Return what the method of this weight's linear layer adds to it, by name in that layer."""
    prefix = next(name for name, shard in layer.shards.items() if shard is weight).removesuffix("weight")
    named = {name.removeprefix(prefix): shard for name, shard in layer.shards.items() if name.startswith(prefix)}
    return {name: shard for name, shard in named.items() if shard.added}


def _adapter_bytes(layer: LayerDeclaration, weight: Shard, config: Config) -> int:
    """Kept by the adapters of a linear layer: the products with A, B by its scale, fused A, and what dropout makes."""
    downs = [shard for name, shard in _added(layer, weight).items() if name.startswith("lora_A")]
    if not downs:
        return 0
    t, number = config.parallel.tensor_model_parallel_size, number_size(config)
    rank, (rows, columns) = sum(shard.shape[0] for shard in downs), weight.local_shape(t)
    kept = (num_tokens(config) + rows + (columns if len(downs) > 1 else 0)) * rank * number
    if config.lora.lora_dropout == 0:
        return kept
    # the dropped input instead of the input, which the core of the attention keeps too; the mask
    mask = number if config.parallel.device == "cpu" else 1
    channels = columns * num_tokens(config) // (_sequence_cut(config) if weight.dim == 0 else 1)
    is_context = weight.dim == 1 and weight is _rows(layer)[0]
    return kept + channels * (mask + number * is_context)


def _is_gated(columns: list[Shard], rows: list[Shard]) -> bool:
    return bool(columns and rows) and columns[-1].shape[0] == 2 * rows[-1].shape[1]


def _sequence_cut(config: Config) -> int:
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
