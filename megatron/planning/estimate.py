"""What a run will need, from its config alone: parameters, FLOPs, memory by component, pipeline bubble.

Pure functions; neither torch nor deepspeed is imported, so a plan answers at once on a machine without either.
Letters in formulas: L layers, H hidden, F MLP width, A query heads, K key/value heads, D head size, S sequence,
B microbatch, V padded vocabulary, t tensor-parallel size, p stages, m microbatches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron.config.options import Config, ModelConfig, batch_sizes
from megatron.config.plugins import load_task

GIB = 2**30

# ---------------------------------------------------------------------------------------------------------------------
# Parameters


def _norm_parameters(model: ModelConfig) -> int:
    """LayerNorm has a weight and a bias, RMSNorm a weight."""
    return model.hidden_size * (2 if model.architecture == "bloom" else 1)


def _layer_matrices(model: ModelConfig, tensor_model_parallel_size: int = 1) -> int:
    """Weights of one transformer layer's matrices on one tensor-parallel rank."""
    t, hidden = tensor_model_parallel_size, model.hidden_size
    heads = model.num_attention_heads // t
    # with fewer key/value heads than ranks, each rank holds one whole head, a copy
    kv_heads = max(1, model.num_kv_heads // t)
    attention = (heads + 2 * kv_heads) * model.head_size * hidden + heads * model.head_size * hidden
    mlp = (2 if model.architecture == "bloom" else 3) * hidden * (model.ffn_size // t)
    return attention + mlp


def _layer_parameters(model: ModelConfig, tensor_model_parallel_size: int = 1) -> int:
    t = tensor_model_parallel_size
    parameters = _layer_matrices(model, t) + 2 * _norm_parameters(model)
    if model.architecture == "bloom":
        heads, kv_heads = model.num_attention_heads // t, max(1, model.num_kv_heads // t)
        # the biases of the column-parallel layers are cut, those of the row-parallel ones are whole on every rank
        parameters += (heads + 2 * kv_heads) * model.head_size + model.ffn_size // t + 2 * model.hidden_size
    return parameters


def _embedding_output_parameters(model: ModelConfig, seq_length: int) -> int:
    """Learned positions and the embedding LayerNorm, where there are any."""
    parameters = 0
    if model.position_embedding_type == "learned":
        parameters += (model.max_position_embeddings or seq_length) * model.hidden_size
    if model.embed_layernorm:
        parameters += 2 * model.hidden_size
    return parameters


def count_parameters(model: ModelConfig, seq_length: int, tensor_model_parallel_size: int = 1) -> int:
    """Trainable parameters of the whole model, vocabulary padding included, each copy counted once.

    `tensor_model_parallel_size` matters only through the padding of the vocabulary.
    """
    vocabulary = model.padded_vocab_size(tensor_model_parallel_size) * model.hidden_size
    parameters = vocabulary * (2 if model.untie_embeddings_and_output_weights else 1)
    parameters += _embedding_output_parameters(model, seq_length)
    return parameters + model.num_layers * _layer_parameters(model) + _norm_parameters(model)


def parameters_by_layer(model: ModelConfig, seq_length: int, tensor_model_parallel_size: int = 1) -> list[int]:
    """Parameters one tensor-parallel rank holds of each entry of the model's list of layers.

    The entries: word embedding, its output (positions, LayerNorm), L layers, final norm, output projection. The last
    counts its weight even where it is tied, as DeepSpeed does when it balances the stages.
    """
    t = tensor_model_parallel_size
    vocabulary = model.padded_vocab_size(t) // t * model.hidden_size
    return [
        vocabulary,
        _embedding_output_parameters(model, seq_length),
        *[_layer_parameters(model, t)] * model.num_layers,
        _norm_parameters(model),
        vocabulary,
    ]


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """FLOPs of training on one token, forward and backward: 6 N + 12 L A D S.

    N counts the weights that a token is multiplied with: the matrices of the layers and the output head over the true
    vocabulary; neither the embedding look-up nor positions, norms, biases and padding. Attention counts the whole
    S x S square, although half of it is masked; recomputation does not count.
    Source: the model FLOPs of PaLM, appendix B (Chowdhery et al. 2022, arXiv:2204.02311).
    """
    weights = model.num_layers * _layer_matrices(model) + model.vocab_size * model.hidden_size
    attention = 12 * model.num_layers * model.num_attention_heads * model.head_size * seq_length
    return float(6 * weights + attention)


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Part of a 1F1B step that a stage waits: (p - 1) / (m + p - 1)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def balanced_bounds(weights: Sequence[float], num_stages: int) -> list[int]:
    """Where DeepSpeed's `partition_balanced` cuts a list of layers: stage i holds [bounds[i], bounds[i + 1]).

    It looks for the least difference between the heaviest and the lightest stage, one stage at a time; of equal cuts
    it takes the last.
    """
    if len(weights) <= num_stages:
        return [min(stage, len(weights)) for stage in range(num_stages + 1)]
    total_before = [0.0]
    for weight in weights:
        total_before.append(total_before[-1] + weight)
    # cut[j][i]: (spread, heaviest, lightest, start of the last stage) of the first i layers in j stages
    cut: list[dict[int, tuple[float, float, float, int]]] = [
        {end: (0.0, total_before[end], total_before[end], 0) for end in range(1, len(weights) + 1)}
    ]
    for stages in range(2, num_stages + 1):
        row: dict[int, tuple[float, float, float, int]] = {}
        for end in range(stages, len(weights) + 1):
            best: tuple[float, float, float, int] | None = None
            for start in range(stages - 1, end):
                _, heaviest, lightest, _ = cut[-1][start]
                last = total_before[end] - total_before[start]
                heaviest, lightest = max(heaviest, last), min(lightest, last)
                if best is None or heaviest - lightest <= best[0]:
                    best = heaviest - lightest, heaviest, lightest, start
            assert best is not None
            row[end] = best
        cut.append(row)
    bounds = [len(weights)]
    for row in reversed(cut):
        bounds.append(row[bounds[-1]][3])
    return bounds[::-1]


def uniform_bounds(num_layers: int, num_stages: int) -> list[int]:
    """Where DeepSpeed's `partition_uniform` cuts: the same number of layers a stage, the first ones take one more."""
    if num_layers <= num_stages:
        return [min(stage, num_layers) for stage in range(num_stages + 1)]
    size, over = divmod(num_layers, num_stages)
    return [stage * size + min(stage, over) for stage in range(num_stages + 1)]


def stage_bounds(config: Config) -> list[int]:
    """The cuts through the list of `parameters_by_layer` that `pipeline_partition_method` gives."""
    num_stages = config.parallel.pipeline_model_parallel_size
    by_layer = parameters_by_layer(config.model, config.training.seq_length, config.parallel.tensor_model_parallel_size)
    method = config.parallel.pipeline_partition_method
    if num_stages == 1:
        return [0, len(by_layer)]
    if method == "uniform":
        return uniform_bounds(len(by_layer), num_stages)
    if method == "parameters":
        return balanced_bounds(by_layer, num_stages)
    return balanced_bounds([0, 0, *[1] * config.model.num_layers, 0, 0], num_stages)


def stage_text(config: Config, start: int, stop: int) -> str:
    """'embed 0-19' for entries [start, stop) of the list of layers. A norm beside the head goes unnamed."""
    num_layers = config.model.num_layers
    first, last = max(start - 2, 0), min(stop - 3, num_layers - 1)
    parts = ["embed"] if start == 0 < stop else []
    if first <= last:
        parts.append(str(first) if first == last else f"{first}-{last}")
    if start <= num_layers + 3 < stop:
        parts.append("head")
    elif start <= num_layers + 2 < stop:
        parts.append("norm")
    return " ".join(parts) or "nothing"


# ---------------------------------------------------------------------------------------------------------------------
# Memory


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
    """Whether the attention keeps its S x S probabilities for the backward pass.

    The fused kernels keep none. torch has none on the CPU with dropout, nor on HPU without Habana's FusedSDPA.
    """
    if config.training.recompute_granularity != "none":
        return False
    if config.parallel.device == "cpu":
        return config.model.attention_dropout > 0
    return config.parallel.device == "hpu" and config.model.attention_backend == "sdpa"


def activation_bytes_per_layer(config: Config) -> int:
    """Bytes one rank keeps of one transformer layer and one microbatch until its backward pass.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), counted for either MLP and for fewer key/value heads; in 16 bit
    with GELU, dropout and MHA this is their S B H (10 + 24/t), or S B H 34/t with sequence parallelism, plus
    5 A S^2 B / t where the attention scores are stored. Full recomputation keeps the layer's input.
    """
    model, training = config.model, config.training
    t = config.parallel.tensor_model_parallel_size
    number = 4 if training.precision == "fp32" else 2
    tokens = training.micro_batch_size * load_task(config).row_length
    sequence_cut = t if config.parallel.sequence_parallel else 1
    if training.recompute_granularity == "full":
        return tokens * model.hidden_size * number // sequence_cut
    # inputs and outputs of both norms, and two dropout masks of one byte
    whole = model.hidden_size * (4 * number + (2 if model.hidden_dropout > 0 else 0))
    kv_heads = max(1, model.num_kv_heads // t)
    cut = (2 * model.num_attention_heads // t + 2 * kv_heads) * model.head_size * number
    # GELU: its input and output. SwiGLU: gate, SiLU of it, up, and their product
    cut += (2 if model.architecture == "bloom" else 4) * (model.ffn_size // t) * number
    if stores_attention_scores(config):
        per_score = number + (1 + number if model.attention_dropout > 0 else 0)
        cut += model.num_attention_heads // t * load_task(config).row_length * per_score
    return tokens * (whole // sequence_cut + cut)


def num_microbatches(config: Config, data_parallel_size: int) -> int:
    """Microbatches of each data-parallel rank in a step, once any ramp-up is over."""
    return config.training.global_batch_size // (config.training.micro_batch_size * data_parallel_size)


def memory_by_stage(config: Config, data_parallel_size: int) -> list[Stage]:
    """What each rank of each pipeline stage needs under 1F1B, where stage i holds min(m, p - i) microbatches at once.

    Not counted: what the allocator and the communication library keep for themselves, and kernels' work space.
    """
    model, num_stages = config.model, config.parallel.pipeline_model_parallel_size
    by_layer = parameters_by_layer(model, config.training.seq_length, config.parallel.tensor_model_parallel_size)
    bounds = stage_bounds(config)
    stages = []
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        parameters = sum(by_layer[start:stop])
        if not model.untie_embeddings_and_output_weights and start == 0 and stop == len(by_layer):
            parameters -= by_layer[-1]
        in_flight = min(num_microbatches(config, data_parallel_size), num_stages - stage)
        memory, host_bytes = _sharded_state(
            config, data_parallel_size, parameters, max(by_layer[start:stop], default=0)
        )
        activations, logits = _activations(config, start, stop, in_flight)
        memory = dataclasses.replace(memory, activations=activations, logits=logits)
        stages.append(Stage(start, stop, parameters, in_flight, memory, host_bytes))
    return stages


def _sharded_state(
    config: Config, data_parallel_size: int, parameters: int, largest_layer: int
) -> tuple[StageMemory, int]:
    """Bytes of weights, gradients and optimizer on a rank that holds `parameters`, and those in host memory."""
    optimizer, zero = config.optimizer, config.effective_zero_stage
    number = 4 if config.training.precision == "fp32" else 2

    def share(from_stage: int) -> int:
        return -(-parameters // data_parallel_size) if zero >= from_stage else parameters

    weights = share(3) * number
    # bf16 adds its gradients up in grad_accum_dtype, and drops the low-precision ones layer by layer
    widths = {"fp32": 4, "fp16": 2, "bf16": 4 if config.training.grad_accum_dtype == "fp32" else 2}
    gradients = share(2) * widths[config.training.precision]
    # DeepSpeed's sharded fp32 optimizer keeps a copy of its share of the weights too
    master = share(1) * 4 if number == 2 or zero >= 1 else 0
    moments = 2 if optimizer.optimizer != "sgd" else 1 if optimizer.sgd_momentum > 0 else 0
    states = share(1) * 4 * moments
    host_bytes = 0
    if optimizer.offload_optimizer:
        host_bytes, master, states = master + states, 0, 0
    if optimizer.offload_param:
        host_bytes, weights = host_bytes + weights, 0
    if zero >= 3:
        # the layer at work is gathered whole
        weights += largest_layer * number
    return StageMemory(weights, gradients, master, states, activations=0, logits=0), host_bytes


def _activations(config: Config, start: int, stop: int, in_flight: int) -> tuple[int, int]:
    """Bytes of the activations, and of the logits, of entries [start, stop) of the list of layers."""
    model, training, t = config.model, config.training, config.parallel.tensor_model_parallel_size
    number = 4 if training.precision == "fp32" else 2
    tokens = training.micro_batch_size * load_task(config).row_length
    num_layers = max(0, min(stop, model.num_layers + 2) - max(start, 2))
    activations = num_layers * activation_bytes_per_layer(config) * in_flight
    if start <= 1 < stop and model.hidden_dropout > 0:
        mask = tokens * model.hidden_size // (t if config.parallel.sequence_parallel else 1)
        activations += mask * in_flight
    if training.recompute_granularity == "full" and num_layers:
        # the one layer at work is held whole
        once = dataclasses.replace(config, training=dataclasses.replace(training, recompute_granularity="none"))
        activations += activation_bytes_per_layer(once)
    holds_head = start <= model.num_layers + 3 < stop
    # of one microbatch, in working precision, and their gradient
    logits = 2 * tokens * (model.padded_vocab_size(t) // t) * number if holds_head else 0
    return activations, logits


# ---------------------------------------------------------------------------------------------------------------------
# The plan, as text


def describe(config: Config, *, nodes: int, devices_per_node: int, title: str) -> str:
    """Layout, batches, parameters, pipeline bubble and memory by rank, at most 80 columns wide."""
    model, parallel, training = config.model, config.parallel, config.training
    t, p = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    world_size = nodes * devices_per_node
    dp = world_size // (t * p)
    stages = memory_by_stage(config, dp)
    tokens = training.global_batch_size * training.seq_length
    shape = f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads"
    vocabulary = f"vocabulary {model.vocab_size} padded to {model.padded_vocab_size(t)}"
    largest = max(stage.parameters for stage in stages)
    kind = "device" if parallel.device == "auto" else f"{parallel.device} device"
    ranks = f"{_count(nodes, 'node')} x {_count(devices_per_node, kind)} = {_count(world_size, 'rank')}"
    layout = f"PP {p} x TP {t} x DP {dp}" + (", sequence parallel" if parallel.sequence_parallel else "")
    task = load_task(config)
    most = "at most " if task.pads_rows else ""
    rows = [
        ("model", f"{model.architecture}, {shape}{_kv_text(model)}"),
        ("", f"{model.position_embedding_type} positions, sequence {training.seq_length}, {vocabulary}"),
        ("parameters", f"{count_parameters(model, training.seq_length, t):,} in all; at most {largest:,} a rank"),
        ("devices", ranks),
        ("layout", layout + ("" if config.uses_pipeline else ", sequential engine")),
        ("precision", f"{training.precision}, recompute {training.recompute_granularity}"),
        ("ZeRO", _zero_text(config)),
        ("batch", task.batch_text(dp)),
    ]
    if training.rampup_batch_size is not None:
        ramp_start, increment, ramp_samples = training.rampup_batch_size
        rows.append(("ramp-up", f"from {ramp_start} by {increment} over {ramp_samples:,} samples"))
    rows.append(("length", _length_text(config)))
    rows.append(("bubble", _bubble_text(config, dp)))
    tflop = flops_per_token(model, training.seq_length) * tokens / 1e12
    rows.append(
        (
            "a step",
            f"{most}{tokens:,} tokens, {_figure(tflop)} TFLOP, {_figure(tflop / world_size)} a device",
        )
    )
    lines = [title, ""] + [f"  {name:<11}{text}" for name, text in rows]
    lines += ["", f"  memory per rank, GiB (peak; 1F1B{'' if p > 1 else ', one stage'})"]
    lines += ["  " + line for line in _memory_table(config, stages)]
    return "\n".join(lines) + "\n"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + ("" if number == 1 else plural)


def _kv_text(model: ModelConfig) -> str:
    return "" if model.num_kv_heads == model.num_attention_heads else f", {model.num_kv_heads} key/value heads"


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _zero_text(config: Config) -> str:
    optimizer, stage = config.optimizer, config.effective_zero_stage
    text = f"stage {stage}" + (", optimizer in host memory" if optimizer.offload_optimizer else "")
    if stage == optimizer.zero_stage:
        return text
    return f"{text}: zero_stage is {optimizer.zero_stage}, and 16 bit always shards its optimizer"


def _length_text(config: Config) -> str:
    training = config.training
    if training.train_samples is not None:
        samples = training.train_samples
        return f"{samples:,} samples = {samples * training.seq_length:,} tokens"
    if training.train_iters is not None:
        samples = training.train_iters * training.global_batch_size
        return f"{training.train_iters:,} steps = {samples * training.seq_length:,} tokens"
    if training.num_epochs is not None:
        return _count(training.num_epochs, "epoch")
    return "neither train_samples nor train_iters is given"


def _bubble_text(config: Config, data_parallel_size: int) -> str:
    p = config.parallel.pipeline_model_parallel_size
    if p == 1:
        return "none, one stage"
    m = load_task(config).num_microbatches(data_parallel_size)
    if m is None:
        return "depends on the data: as many microbatches as the samples of a step fill"
    text = f"{bubble_fraction(p, m):.1%} of a step: (p - 1) / (m + p - 1) with p={p}, m={m}"
    first = batch_sizes(config.training)[0] // (config.training.micro_batch_size * data_parallel_size)
    return (
        text if first == m else text + f"\n{'':<13}{bubble_fraction(p, max(1, first)):.1%} at the start of the ramp-up"
    )


def _memory_table(config: Config, stages: Sequence[Stage]) -> list[str]:
    host = any(stage.host_bytes for stage in stages)
    heads = ["weights", "grads", "master", "optim", "activ", "logits", "total"] + (["host"] if host else [])
    worst = max(stages, key=lambda stage: stage.memory.total)
    lines = [" ".join(["stage", *(f"{head:>7}" for head in heads), "holds"])]
    for number, stage in enumerate(stages):
        parts = [getattr(stage.memory, field.name) for field in fields(StageMemory)]
        figures = [*parts, stage.memory.total, *([stage.host_bytes] if host else [])]
        mark = "*" if stage is worst and len(stages) > 1 else " "
        cells = [f"{number:>4}{mark}", *(f"{_gib(figure):>7}" for figure in figures)]
        lines.append(" ".join([*cells, stage_text(config, stage.start, stage.stop)]))
    if len(stages) > 1:
        lines.append("   * the stage that needs most")
    return lines


def _gib(size_bytes: int) -> str:
    return (
        "-" if size_bytes == 0 else f"{size_bytes / GIB:.2f}" if size_bytes >= GIB / 10 else f"{size_bytes / GIB:.4f}"
    )
