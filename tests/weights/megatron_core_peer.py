"""megatron-core's own models on gloo ranks: it trains, saves and loads them. Its CUDA calls are replaced by none.

Every function but `prepare` runs on the ranks of a pool.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import queue
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCABULARY, LENGTH, EXPERTS = 2, 64, 4, 2, 96, 250, 32, 4
PADDED = 256
"""Rows of the vocabulary: a multiple of 16 on each of two ranks."""
LEARNING_RATE = 1e-3


class _NoTracker:
    @contextlib.contextmanager
    def fork(self, *_: Any, **__: Any) -> Iterator[None]:
        yield


def _on_cpu(create: Any) -> Any:
    def created(*arguments: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return create(*arguments, **options)

    return created


def prepare() -> None:
    """Let megatron-core compute on CPUs."""
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.moe import moe_utils

    # its writers are processes of its own, which a daemon may not have; the queue to them is used in this process alone
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    filesystem_async._results_queue = queue.Queue()
    # a name that it defines with Transformer Engine alone
    moe_utils.te_general_gemm = None
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron.core") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *_, **__: _NoTracker()  # type: ignore[attr-defined]


def start(tensor: int, pipeline: int) -> None:
    from megatron.core import parallel_state

    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline)


def build(kind: str, tensor: int, pipeline: int) -> Any:
    """Return this rank's part of a `gpt`, `llama` or `mixtral`, drawn at random."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    common: dict[str, Any] = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "use_cpu_initialization": True,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline, "pipeline_dtype": torch.float32, "masked_softmax_fusion": False,
        "persist_layer_norm": False, "gradient_accumulation_fusion": False, "deallocate_pipeline_outputs": False,
        "init_method_std": 0.1,
    }  # fmt: skip
    model: dict[str, Any] = {
        "vocab_size": PADDED, "max_sequence_length": LENGTH, "parallel_output": True,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }  # fmt: skip
    torch.manual_seed(1)
    if kind == "gpt":
        config = TransformerConfig(**common, ffn_hidden_size=4 * HIDDEN, bias_activation_fusion=True)
        positions = {"share_embeddings_and_output_weights": True, "position_embedding_type": "learned_absolute"}
        return GPTModel(config, get_gpt_layer_local_spec(), **model, **positions)
    common |= {
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False, "bias_activation_fusion": False, "num_query_groups": GROUPS, "ffn_hidden_size": FFN,
    }  # fmt: skip
    experts = None
    if kind == "mixtral":
        experts = EXPERTS
        common |= {
            "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN,
            "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
        }  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm")
    rotary = {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"}
    # the same without dropout; experts on tensor-parallel ranks refuse to train without sequence parallelism, for which
    # its norms on a CPU have no form
    return GPTModel(TransformerConfig(**common), spec, **model, **rotary).eval()


def optimizer_of(model: Any) -> Any:
    """Return megatron-core's optimizer: AdamW in float32."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    # it looks for the wrapper's options, of which data-parallel ranks have use
    model.ddp_config = DistributedDataParallelConfig()

    config = OptimizerConfig(
        optimizer="adam", lr=LEARNING_RATE, min_lr=LEARNING_RATE, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95,
        adam_eps=1e-8, clip_grad=0.0, use_distributed_optimizer=False,
    )  # fmt: skip
    return get_megatron_optimizer(config, [model])


def arguments(kind: str, samples: int) -> argparse.Namespace:
    """Return the arguments with which Megatron-LM would have built the model, as it saves them."""
    given: dict[str, Any] = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "kv_channels": HIDDEN // HEADS,
        "max_position_embeddings": LENGTH, "seq_length": LENGTH, "norm_epsilon": 1e-5, "bias_gelu_fusion": True,
        "padded_vocab_size": PADDED, "make_vocab_size_divisible_by": 16, "tensor_model_parallel_size": 2,
        "consumed_train_samples": samples, "hidden_dropout": 0.0, "attention_dropout": 0.0, "swiglu": kind != "gpt",
        "params_dtype": torch.float32,
    }  # fmt: skip
    if kind == "gpt":
        given |= {
            "ffn_hidden_size": 4 * HIDDEN, "position_embedding_type": "learned_absolute", "add_bias_linear": True,
            "normalization": "LayerNorm", "untie_embeddings_and_output_weights": False,
        }  # fmt: skip
    else:
        given |= {
            "ffn_hidden_size": FFN, "position_embedding_type": "rope", "add_bias_linear": False,
            "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True, "group_query_attention": True,
            "num_query_groups": GROUPS, "rotary_base": 10000, "use_rope_scaling": False,
        }  # fmt: skip
    if kind == "mixtral":
        given |= {"num_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN}
    return argparse.Namespace(**given)


def train(model: Any, optimizer: Any, batches: Tensor) -> list[float]:
    """Train on token ids [steps, samples, LENGTH + 1], two samples at a time, and return the losses."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses = []
    for batch in batches:
        optimizer.zero_grad()
        count = len(batch) // 2
        results = get_forward_backward_func()(
            forward_step_func=_forward_step, data_iterator=iter(batch.split(2)), model=model, num_microbatches=count,
            seq_length=LENGTH, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        if parallel_state.get_pipeline_model_parallel_world_size() > 1 and model.share_embeddings_and_output_weights:
            shared = model.shared_embedding_or_output_weight()
            if shared is not None and parallel_state.is_rank_in_embedding_group():
                dist.all_reduce(shared.grad, group=parallel_state.get_embedding_group())
        for parameter in model.parameters():
            parameter.main_grad = parameter.grad
        optimizer.step()
        losses += [float(sum(result["loss"] for result in results) / count)] if results else []
    return losses


def _forward_step(batches: Iterator[Tensor], model: Any) -> Any:
    tokens = next(batches)
    output = model(*_inputs(tokens[:, :-1]), labels=tokens[:, 1:].contiguous())

    def loss_of(output: Tensor) -> Any:
        loss = output.mean()
        # a copy: the loss itself is divided by the number of microbatches
        return loss, {"loss": loss.detach().clone()}

    return output, loss_of


def _inputs(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(tokens.shape[1], tokens.shape[1]).tril()[None, None] < 0.5
    return tokens.contiguous(), positions, mask


def logits(model: Any, tokens: Tensor) -> Tensor | None:
    """Return the logits [samples, LENGTH, vocabulary] of the last stage."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    found: list[Tensor] = []

    def forward(batches: Iterator[Tensor], model: Any) -> Any:
        output = model(*_inputs(next(batches)))

        def keep(output: Tensor) -> Any:
            found.append(tensor_parallel.gather_from_tensor_model_parallel_region(output)[..., :VOCABULARY])
            return output.sum(), {}

        return output, keep

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter([tokens]), model=model, num_microbatches=1,
            seq_length=LENGTH, micro_batch_size=len(tokens), forward_only=True,
        )  # fmt: skip
    return found[0] if parallel_state.is_pipeline_last_stage() else None


def save(
    folder: str, kind: str, sizes: tuple[int, int], batches: Tensor, tokens: Tensor, metadata: dict[str, Any] | None
) -> Any:
    """Train on so many tensor-parallel ranks and stages, save, and return (losses, logits) of the last rank."""
    from megatron.core import dist_checkpointing

    start(*sizes)
    model = build(kind, *sizes)
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, batches)
    sharded = model.sharded_state_dict(metadata=metadata)
    state = {
        **sharded,
        "optimizer": optimizer.sharded_state_dict(sharded, metadata=metadata or {}),
        "args": arguments(kind, batches.shape[0] * batches.shape[1]),
        "iteration": len(batches),
        "checkpoint_version": 3.0,
    }
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, folder)
    return losses, logits(model, tokens)


def load(folder: str, kind: str, sizes: tuple[int, int], batches: Tensor, tokens: Tensor, *, resumes: bool) -> Any:
    """Load a folder by megatron-core's own loader, and return (losses of further steps, logits before them)."""
    from megatron.core import dist_checkpointing

    start(*sizes)
    model = build(kind, *sizes)
    optimizer = optimizer_of(model)
    sharded = model.sharded_state_dict()
    wanted = dict(sharded)
    if resumes:
        wanted["optimizer"] = optimizer.sharded_state_dict(sharded, is_loading=True, metadata={})
    state = dist_checkpointing.load(wanted, folder)
    model.load_state_dict({name: state[name] for name in sharded}, strict=False)
    if resumes:
        optimizer.load_state_dict(state["optimizer"])
    else:
        optimizer.reload_model_params()
    at_start = logits(model, tokens)
    return train(model, optimizer, batches), at_start
