"""A model that computes without training: this rank's stage of its layers, and nothing of an engine.

Shapes: S tokens of a row, B rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from megatron.data.tokenizers.base import Tokenizer
from megatron.models.attention.layer import SelfAttention
from megatron.models.embedding import OutputProjection, WordEmbedding
from megatron.models.sequential import build_layers, compute_dtype, default_dtype
from megatron.models.transformer import TransformerLayer
from megatron.options.config import Config, ConfigError
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import gather_logits
from megatron.parallel.operators import products
from megatron.parallel.operators.cpu_weights import lay_out, onednn_product, pack, transpose, transposed_product
from megatron.parallel.operators.nf4 import QuantizedWeight, quantized_weights
from megatron.parallel.shards import named_parameters
from megatron.plan.flops import declared_layers
from megatron.plan.pipeline import stage_bounds
from megatron.tasks.registry import load_task

Layer = Callable[[Any], Any]
OutputProduct = Callable[[Tensor, Tensor], Tensor]
OUTPUTS = (WordEmbedding, OutputProjection)
"""Modules whose weight may project onto the vocabulary: the last one in a stage does."""


@dataclass(frozen=True)
class ModelOrigin:
    """Origin of a model, and the files beside its weights."""

    folder: Path
    """The checkpoint, or the folder of the model or adapter."""
    tokenizer: Path | None = None
    """Folder with tokenizer files and chat templates."""
    generation_config: dict[str, Any] | None = None
    """Content of Hugging Face's generation_config.json, or where there is none, of config.json."""
    ckpt_step: int | None = None
    """Iteration of the run's checkpoint."""


class InferenceModel:
    """This rank's stage of a model, in evaluation mode.

    Every rank of a copy of the model calls `forward_stage` in turn, from the first stage to the last; what one returns
    is what the next one takes.
    """

    def __init__(
        self,
        config: Config,
        ctx: ParallelContext,
        layers: Sequence[Layer],
        module: nn.Module,
        *,
        tokenizer: Tokenizer | None = None,
        origin: ModelOrigin | None = None,
        is_trained: bool = False,
    ) -> None:
        """`layers`: those of this stage, in order. `module`: the modules behind them, each once.

        `is_trained`: the weights are those of a run under way. Otherwise they are this model's own, and those of linear
        layers are laid out for inference.
        """
        self.config, self.ctx, self.module = config, ctx, module.eval()
        self._layers = list(layers)
        self.tokenizer, self.origin = tokenizer, origin
        quantized = (weight.packed for _, weight in quantized_weights(module))
        # an nf4 weight is not a parameter, so it is counted beside them
        tensors = [*(parameter for _, parameter in named_parameters(module)), *quantized]
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        """Bytes of this rank's weights."""
        self.drops_unwanted = self._drop_unwanted()
        """`forward_stage` returns those tokens alone of a prompt's chunk whose logits are wanted."""
        self._product: OutputProduct = products.linear
        if not is_trained:
            self._lay_out()

    def _drop_unwanted(self) -> bool:
        """Let the last layer with attention drop tokens whose logits are not wanted; return True if it does."""
        last = None
        for layer in self.module.children():
            if any(isinstance(each, SelfAttention) for each in layer.modules()):
                last = layer
        # not a family's own type of layer, which may read all tokens behind its attention too
        if not self.ctx.is_last_stage or last is None or type(last) is not TransformerLayer:
            return False
        last.drops_unwanted = True
        return True

    def _lay_out(self) -> None:
        """Lay the weights out for inference."""
        lay_out(self.module)
        # the embedding of the first stage is of a type in OUTPUTS too; the last such module of the last stage projects
        output = next((each for each in reversed(list(self.module.children())) if isinstance(each, OUTPUTS)), None)
        if output is None or output.adapters is not None or not self.ctx.is_last_stage:
            return
        if (packed := pack(output.weight)) is not None:
            # a copy: the same weight may be the embedding, and losses take it
            self.weight_bytes += output.weight.nbytes
            self._product = lambda x, _weight: onednn_product(x, packed)
        elif transpose(output.weight):
            self._product = transposed_product

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and of what flows between stages."""
        return compute_dtype(self.config)

    @property
    def vocab_size(self) -> int:
        return self.config.model.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that learned positions allow; None: any."""
        model = self.config.model
        if model.position_embedding_type != "learned":
            return None
        return model.max_position_embeddings or self.config.training.seq_length

    @torch.no_grad()  # not inference mode: a training run's rotary table may grow here
    def forward_stage(self, stream: Any) -> Any:
        """Run this stage's layers, without gradients.

        The first stage takes tokens [B, S] int64, or the tuple (tokens, positions, starts) of models/positions.py's
        Packing, each [B, S]; the others take what the stage before returned: hidden states [S, B, H], or the tuple with
        them first. The last stage returns (hidden [S, B, H], output weight), for `logits` and parallel/losses.py.
        """
        for layer in self._layers:
            stream = layer(stream)
        return stream

    def logits(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        """Return the logits [S, B, V] of what the last stage returned, whole on each of its ranks. Collective there."""
        # each tensor-parallel rank has V / t columns; the padding of the vocabulary is cut off where they are joined
        return gather_logits(*outputs, self.ctx, self._product)


def sequence_faults(model: InferenceModel, ids: Sequence[int], num_positions: int) -> Iterator[str]:
    """Describe the ids that the model's vocabulary lacks, and more positions than it has learned."""
    # the embedding is padded: an id of the padding would be looked up without an error
    wrong = next((token for token in ids if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        yield f"has the id {wrong}, but the model's vocabulary has the ids 0 to {model.vocab_size - 1}"
    if model.max_positions is not None and num_positions > model.max_positions:
        yield f"needs {num_positions} positions, but the model has {model.max_positions} learned ones; shorten it"


def build_stage(config: Config, ctx: ParallelContext, device: torch.device) -> tuple[list[Layer], nn.ModuleList]:
    """Return this rank's layers, and their modules, each once, with uninitialised weights on `device`.

    Raises ConfigError for a pipeline schedule whose stages hold several ranges of layers.
    """
    if config.parallel.num_virtual_stages_per_pipeline_rank > 1:
        chunks = config.parallel.num_virtual_stages_per_pipeline_rank
        raise ConfigError(
            [
                f"num_virtual_stages_per_pipeline_rank={chunks} spreads each stage over {chunks} ranges of layers, "
                "which text cannot be generated with while the run trains; leave it out, or generate from its "
                "checkpoints"
            ]
        )
    # packed documents decide the attention kernel, which is to be that of the training
    packs_documents = load_task(config).data.packs_documents
    specs = build_layers(config, ctx, packs_documents=packs_documents, trains=False)
    bounds = stage_bounds(config, declared_layers(config))
    # a tied weight whose two ends are in one stage is one module, under one name: it must be built, and filled, once
    layers, modules, tied = [], nn.ModuleList(), dict[str, nn.Module]()
    # in the final dtype and place from the start: a float32 copy of the whole stage would be its largest moment
    with default_dtype(compute_dtype(config)), device:
        for spec in specs[bounds[ctx.stage] : bounds[ctx.stage + 1]]:
            module = tied.get(spec.layer.name) or spec.build()
            is_output = spec is specs[-1] and isinstance(spec, TiedLayerSpec)
            if spec.layer.name not in tied:
                modules.append(module)
            tied[spec.layer.name] = module
            layers.append(_projection(spec.forward_fn, module) if is_output else module)
    return layers, modules


def _projection(project: Callable[[Any, Any], Any], module: nn.Module) -> Layer:
    """The tied output projection of a weight that is the embedding too."""
    return lambda stream: project(module, stream)


@contextlib.contextmanager
def training_model(
    module: nn.Module, config: Config, ctx: ParallelContext, tokenizer: Tokenizer | None = None
) -> Iterator[InferenceModel]:
    """Yield a model with the weights of a run under way, which are not copied. Collective.

    `module`, `config`: those of its engine. Under ZeRO-3 the weights are gathered meanwhile, whole on every rank of
    the data-parallel group. Its layers are new ones: without sequence and context parallelism, which single tokens
    cannot be cut by, and without an engine's hooks. Raises ConfigError for an interleaved pipeline.
    """
    alone = ctx.of_copies
    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, context_parallel_size=1, sequence_parallel=False),
        training=dataclasses.replace(config.training, torch_compile=False),
    )
    # without memory of its own: each weight is replaced by the run's below
    layers, modules = build_stage(config, alone, torch.device("meta"))
    held = dict(named_parameters(module))
    packed = dict(quantized_weights(module))
    for each in modules.modules():
        # by full name, which is the same in every engine, as paths of modules are not
        for name, parameter in list(each.named_parameters(recurse=False)):
            each._parameters[name] = held[parameter.full_name]  # type: ignore[attr-defined]
        for name, child in list(each.named_children()):
            if isinstance(child, QuantizedWeight):
                each._modules[name] = packed[child.full_name]
    with _gathered(list(held.values()), config):
        yield InferenceModel(config, alone, layers, modules, tokenizer=tokenizer, is_trained=True)


def _gathered(parameters: list[nn.Parameter], config: Config) -> contextlib.AbstractContextManager[Any]:
    if config.optimizer.zero_stage != 3:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)
