"""Memory of each rank of each pipeline stage, by component, from the declared layers and the config."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron.config.options import Config
from megatron.config.plugins import load_task
from megatron.parallel.loss_chunks import chunk_size
from megatron.parallel.shards import LayerDeclaration
from megatron.planning.pipeline import stage_bounds
from megatron.planning.sizes import declared_layers, is_matrix, parameters_of_layer


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each device of one pipeline stage, at the peak of a step."""

    weights: int
    gradients: int
    master_weights: int
    optimizer_states: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: the entries of the list of layers it holds, and what each of its ranks needs."""

    start: int
    stop: int
    parameters: int
    """Held by one rank, before ZeRO cuts anything."""
    in_flight: int
    """Microbatches whose activations are alive at once."""
    memory: StageMemory
    host_bytes: int
    """Offloaded to host memory by each rank."""


def stores_attention_scores(config: Config) -> bool:
    """Return True if the attention keeps its S x S probabilities for the backward pass.

    The fused kernels keep none. torch has none on the CPU with dropout, nor on HPU without Habana's FusedSDPA,
    which may be set to keep them too.
    """
    if config.training.recompute_granularity != "none":
        return False
    if config.parallel.device == "cpu":
        return config.model.attention_dropout > 0
    model = config.model
    fused = model.uses_fused_sdpa("hpu")
    return config.parallel.device == "hpu" and not (fused and model.fused_sdpa_recompute)


def activation_bytes(layer: LayerDeclaration, config: Config) -> int:
    """Bytes one rank keeps of one transformer layer and one microbatch until its backward pass.

    Counted from the declared shapes: inputs and outputs of matrices and norms, masks of dropout, and what the layer
    keeps besides. In 16 bit with GELU, dropout and MHA this is S B H (10 + 24/t), or S B H 34/t with sequence
    parallelism, plus 5 A S^2 B / t where the attention scores are stored, for S tokens, B samples, H hidden, A query
    heads, t tensor-parallel ranks. Full recomputation keeps the layer's input.
    Source: Korthikanti et al. 2022 (arXiv:2205.05198).
    """
    model, training = config.model, config.training
    t = config.parallel.tensor_model_parallel_size
    number = 4 if training.precision == "fp32" else 2
    tokens = training.micro_batch_size * load_task(config).row_length
    sequence_cut = t if config.parallel.sequence_parallel else 1
    if training.recompute_granularity == "full":
        return tokens * model.hidden_size * number // sequence_cut
    shards = layer.shards.values()
    columns = [shard for shard in shards if is_matrix(shard) and shard.dim == 0]
    rows = [shard for shard in shards if is_matrix(shard) and shard.dim == 1]
    norms = [
        shard for name, shard in layer.shards.items() if shard.used_on == "stream" and name.endswith("norm.weight")
    ]
    # what a norm reads, and the column-parallel matrix after it; a dropout mask of one byte on each branch
    whole = number * (sum(shard.shape[0] for shard in norms) + sum(shard.shape[1] for shard in columns))
    whole += sum(shard.shape[0] for shard in rows) if model.hidden_dropout > 0 else 0
    kept = sum(shard.shape[0] for shard in columns) + sum(shard.shape[1] for shard in rows) + layer.kept_per_token
    cut = kept // t * number
    # with fewer key/value heads than ranks, each rank gathers one whole head of k and of v
    cut += 2 * max(0, model.head_size - model.num_kv_heads * model.head_size // t) * number
    if stores_attention_scores(config):
        per_score = number + (1 + number if model.attention_dropout > 0 else 0)
        cut += model.num_attention_heads // t * load_task(config).row_length * per_score
    return tokens * (whole // sequence_cut + cut)


def num_microbatches(config: Config, data_parallel_size: int) -> int:
    """Microbatches of each data-parallel rank in a step, once any ramp-up is over."""
    return config.training.global_batch_size // (config.training.micro_batch_size * data_parallel_size)


def memory_by_stage(config: Config, data_parallel_size: int) -> list[Stage]:
    """Return what each rank of each pipeline stage needs under 1F1B, where stage i holds min(m, p - i) microbatches.

    Not counted: what the allocator and the communication library keep for themselves, and kernels' work space.
    """
    layers, num_stages = declared_layers(config), config.parallel.pipeline_model_parallel_size
    stages = []
    for stage, (start, stop) in enumerate(itertools.pairwise(stage_bounds(config, layers))):
        in_flight = min(num_microbatches(config, data_parallel_size), num_stages - stage)
        held = list({layer.name: layer for layer in layers[start:stop]}.values())  # a tied weight is held once a stage
        memory, host_bytes = _sharded_state(config, data_parallel_size, held)
        activations = _activations(config, layers[start:stop], in_flight)
        logits = _logits(config, layers[-1]) if start < len(layers) == stop else 0
        memory = dataclasses.replace(memory, activations=activations, logits=logits)
        t = config.parallel.tensor_model_parallel_size
        parameters = sum(parameters_of_layer(layer, t) for layer in held)
        stages.append(Stage(start, stop, parameters, in_flight, memory, host_bytes))
    return stages


def _sharded_state(
    config: Config, data_parallel_size: int, layers: Sequence[LayerDeclaration]
) -> tuple[StageMemory, int]:
    """Bytes of weights, gradients and optimizer on a rank that holds `layers`, and those in host memory."""
    optimizer, zero = config.optimizer, config.effective_zero_stage
    number = 4 if config.training.precision == "fp32" else 2
    t = config.parallel.tensor_model_parallel_size
    parameters = sum(parameters_of_layer(layer, t) for layer in layers)
    trained = sum(parameters_of_layer(layer, t, trained_only=True) for layer in layers)

    def share(count: int, from_stage: int) -> int:
        return -(-count // data_parallel_size) if zero >= from_stage else count

    weights = share(parameters, 3) * number
    # accumulated in grad_accum_dtype; those in 16 bits are freed layer by layer
    gradients = share(trained, 2) * (4 if config.training.grad_accum_dtype == "fp32" else 2)
    # DeepSpeed's sharded fp32 optimizer keeps a copy of its share of the weights too
    master = share(trained, 1) * 4 if number == 2 or zero >= 1 else 0
    moments = 2 if optimizer.optimizer != "sgd" else 1 if optimizer.sgd_momentum > 0 else 0
    states = share(trained, 1) * 4 * moments
    host_bytes = 0
    if optimizer.offload_optimizer:
        host_bytes, master, states = master + states, 0, 0
    if optimizer.offload_param:
        host_bytes, weights = host_bytes + weights, 0
    if zero >= 3:
        # the current layer is gathered whole
        weights += max((parameters_of_layer(layer, t) for layer in layers), default=0) * number
    return StageMemory(weights, gradients, master, states, activations=0, logits=0), host_bytes


def _activations(config: Config, layers: Sequence[LayerDeclaration], in_flight: int) -> int:
    """Bytes of the activations that one rank keeps of these layers, `in_flight` microbatches of them."""
    model, training, t = config.model, config.training, config.parallel.tensor_model_parallel_size
    tokens = training.micro_batch_size * load_task(config).row_length
    blocks = [layer for layer in layers if layer.number is not None]
    activations = sum(activation_bytes(layer, config) for layer in blocks) * in_flight
    if any(layer.name == "embedding" for layer in layers) and model.hidden_dropout > 0:
        mask = tokens * model.hidden_size // (t if config.parallel.sequence_parallel else 1)
        activations += mask * in_flight
    if training.recompute_granularity == "full" and blocks:
        # the current layer is held whole
        once = dataclasses.replace(config, training=dataclasses.replace(training, recompute_granularity="none"))
        activations += max(activation_bytes(layer, once) for layer in blocks)
    return activations


def _logits(config: Config, output: LayerDeclaration) -> int:
    """Bytes of the logits of a chunk of tokens, and of the float32 sum of the output weight's gradient over chunks."""
    t, precision = config.parallel.tensor_model_parallel_size, config.training.precision
    tokens, hidden_size = config.training.micro_batch_size * load_task(config).row_length, config.model.hidden_size
    chunk = chunk_size(tokens, hidden_size)
    is_trained = any(shard.vocabulary and shard.trained for shard in output.shards.values())
    is_summed = is_trained and (precision == "fp16" or (precision == "bf16" and chunk < tokens))
    row = chunk * (4 if precision == "fp32" else 2) + (4 * hidden_size if is_summed else 0)
    return config.model.padded_vocab_size(t) // t * row
