"""megatron-core's own GPTModel and optimizers on gloo ranks, saved as Megatron-LM's `--ckpt-format torch` saves them.

megatron-core runs on CUDA alone: here its requests for that device give the CPU. Nothing else of it is replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tests.training import layouts

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256}
LENGTH, VOCABULARY, SAMPLES, LR = 32, 256, 8, 1e-3
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True, "group_query_attention": False,
        "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False,
    },
    "llama": {
        "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "group_query_attention": True,
        "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "num_query_groups": 2,
    },
}  # fmt: skip


class _OnCPU(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@contextlib.contextmanager
def _cpu_for_cuda() -> Iterator[None]:
    type_of = torch.Tensor.type

    def named(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if arguments or options:
            return type_of(tensor, *arguments, **options)
        return type_of(tensor).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")

    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with (
        # states of CUDA's generators, from which nothing is drawn without dropout
        patch.object(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
        patch.object(torch.cuda, "current_device", lambda: "cpu"),
        patch.object(torch.cuda, "synchronize", lambda *_: None),
        patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        patch.object(torch.Tensor, "type", named),
        _OnCPU(),
    ):
        yield


@contextlib.contextmanager
def _ranks(tp: int, pp: int, vpp: int | None) -> Iterator[Any]:
    """Give megatron-core's groups. Every rank of the world."""
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    with _cpu_for_cuda():
        parallel_state.initialize_model_parallel(tp, pp, vpp)
        try:
            yield parallel_state
        finally:
            parallel_state.destroy_model_parallel()


def _config(name: str, tp: int, pp: int, vpp: int | None, bf16: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    spec = MODELS[name]
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    return TransformerConfig(
        **SIZES,
        num_query_groups=spec.get("num_query_groups", SIZES["num_attention_heads"]),
        normalization=spec["normalization"],
        gated_linear_unit=spec["swiglu"],
        activation_func=torch.nn.functional.silu if spec["swiglu"] else gelu,
        add_bias_linear=spec["add_bias_linear"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        bf16=bf16,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        batch_p2p_comm=False,
    )


def _model(name: str, config: Any, state: Any, vpp: int | None) -> list[Any]:
    """Return the rank's model, a chunk for each virtual stage."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = MODELS[name]
    torch.manual_seed(1234 + 10 * state.get_pipeline_model_parallel_rank())
    chunks = []
    for number in range(vpp or 1):
        stage = None if vpp is None else number
        chunks.append(
            GPTModel(
                config,
                get_gpt_layer_local_spec(normalization=spec["normalization"]),
                VOCABULARY,
                LENGTH,
                pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                position_embedding_type=spec["position_embedding_type"],
                share_embeddings_and_output_weights=not spec["untie_embeddings_and_output_weights"],
                vp_stage=stage,
            )
        )
    # norms and biases start at ones and zeros, of which any order is right
    with torch.no_grad():
        generator = torch.Generator().manual_seed(state.get_pipeline_model_parallel_rank())
        for chunk in chunks:
            for key, parameter in chunk.named_parameters():
                is_cut = getattr(parameter, "tensor_model_parallel", False)
                if parameter.dim() == 1 and not is_cut:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
                elif key.endswith("bias"):
                    parameter.add_(0.05 * torch.randn(parameter.shape))
    return chunks


def arguments_of(name: str, tp: int, pp: int, vpp: int | None, bf16: bool, iteration: int) -> argparse.Namespace:
    """Return what Megatron-LM's command line leaves: values, enumerations, dtypes."""
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        **SIZES,
        **{"num_query_groups": 1, **MODELS[name]},
        kv_channels=SIZES["hidden_size"] // SIZES["num_attention_heads"],
        seq_length=LENGTH,
        max_position_embeddings=LENGTH,
        norm_epsilon=1e-5,
        rotary_base=10000,
        rotary_percent=1.0,
        use_rope_scaling=False,
        rotary_seq_len_interpolation_factor=None,
        bias_gelu_fusion=True,
        openai_gelu=False,
        padded_vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=1,
        bf16=bf16,
        fp16=False,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        attention_backend=AttnBackend.auto,
        consumed_train_samples=iteration * SAMPLES,
        global_batch_size=SAMPLES,
        use_mcore_models=True,
        ckpt_format="torch",
        data_path=["some/data"],
        lr=LR,
    )


class Peer:
    """megatron-core's model, data-parallel wrapper and optimizer of one rank."""

    def __init__(self, name: str, tp: int, pp: int, vpp: int | None, bf16: bool, distributed: bool, state: Any) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.module import Float16Module

        self.state, self.vpp = state, vpp
        config = _config(name, tp, pp, vpp, bf16)
        self.chunks = _model(name, config, state, vpp)
        wrapped: list[Any] = self.chunks
        if bf16:
            wrapped = [Float16Module(config, chunk.bfloat16()) for chunk in wrapped]
        overlap = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, bucket_size=None
        )
        self.wrapped = [DistributedDataParallel(config, overlap, chunk) for chunk in wrapped]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=LR,
                weight_decay=0.1,
                adam_beta1=0.9,
                adam_beta2=0.95,
                adam_eps=1e-8,
                clip_grad=1.0,
                bf16=bf16,
                use_distributed_optimizer=distributed,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
            ),
            self.wrapped,
        )
        # it gives vectors no weight decay, as training.py has it
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=LR,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=1000 * SAMPLES,
            lr_decay_style="constant",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=1000 * SAMPLES,
            wd_incr_style="constant",
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = None
        self._forward_backward = get_forward_backward_func()

    def step(self, number: int) -> float:
        """Train on the batch of a step; its loss on the last stage, on others NaN."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._passes(layouts.step_tokens(number, SAMPLES, LENGTH))
        succeeded, _, _ = self.optimizer.step()
        assert succeeded
        self.scheduler.step(increment=SAMPLES)
        return float(np.mean([float(loss["loss"]) for loss in losses])) if losses else float("nan")

    def logits(self, tokens: np.ndarray) -> torch.Tensor | None:
        """Return [samples, length, vocabulary] on the last stage."""
        parts = [part["logits"] for part in self._passes(tokens, only_logits=True)]
        if not parts:
            return None
        local = torch.cat(parts)
        gathered = [torch.empty_like(local) for _ in range(self.state.get_tensor_model_parallel_world_size())]
        torch.distributed.all_gather(gathered, local.contiguous(), group=self.state.get_tensor_model_parallel_group())
        return torch.cat(gathered, dim=-1)

    def _passes(self, tokens: np.ndarray, *, only_logits: bool = False) -> list[dict[str, Any]]:
        rows = torch.from_numpy(tokens)
        size = 2
        position = torch.arange(LENGTH).expand(size, -1)
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()

        def forward(batches: Any, model: Any) -> tuple[Any, Any]:
            batch = next(batches)
            labels = None if only_logits else batch[:, 1:]
            output = model(batch[:, :-1], position, mask, labels=labels)

            def loss_of(output: torch.Tensor, **_: Any) -> Any:
                if only_logits:
                    return output.float().detach().clone()
                loss = output.float().mean()
                return loss, {"loss": loss.detach().clone()}

            return output, loss_of

        data = [iter(rows.split(size)) for _ in range(self.vpp or 1)]
        result: list[Any] = self._forward_backward(
            forward_step_func=forward,
            data_iterator=data if self.vpp else data[0],
            model=self.wrapped if self.vpp else self.wrapped[0],
            num_microbatches=len(rows) // size,
            seq_length=LENGTH,
            micro_batch_size=size,
            forward_only=only_logits,
            collect_non_loss_data=only_logits,
        )
        return [{"logits": each} for each in result] if only_logits else result

    def save(self, folder: Path, arguments: argparse.Namespace, iteration: int) -> None:
        """Write this rank's file as Megatron-LM's save_checkpoint does for `--ckpt-format torch`."""
        tensor, stage = self.state.get_tensor_model_parallel_rank(), self.state.get_pipeline_model_parallel_rank()
        has_stages = self.state.get_pipeline_model_parallel_world_size() > 1
        rank = f"mp_rank_{tensor:02d}_{stage:03d}" if has_stages else f"mp_rank_{tensor:02d}"
        path = folder / f"iter_{iteration:07d}" / rank
        content: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": iteration}
        for number, chunk in enumerate(self.chunks):
            key = "model" if len(self.chunks) == 1 else f"model{number}"
            content[key] = chunk.state_dict_for_save_checkpoint()
        content["optimizer"] = self.optimizer.state_dict()
        content["opt_param_scheduler"] = self.scheduler.state_dict()
        content["rng_state"] = [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),  # noqa: NPY002 - as Megatron saves it
                "torch_rng_state": torch.get_rng_state(),
                "cuda_rng_state": torch.get_rng_state(),
                "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
            }
        ]
        if self.state.get_data_parallel_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            torch.save(content, path / "model_optim_rng.pt")
        if self.optimizer.config.use_distributed_optimizer:
            self.optimizer.save_parameter_state(str(path / "distrib_optim.pt"))
        torch.distributed.barrier()
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def save(
    name: str,
    folder: str,
    tp: int,
    pp: int,
    *,
    steps: int = 3,
    more: int = 0,
    vpp: int | None = None,
    bf16: bool = False,
    distributed: bool = False,
) -> tuple[torch.Tensor | None, list[float]]:
    """Train `steps` steps and save; logits of a batch, and the losses of `more` steps, on ranks of the last stage."""
    with _ranks(tp, pp, vpp) as state:
        peer = Peer(name, tp, pp, vpp, bf16, distributed, state)
        for step in range(steps):
            peer.step(step)
        peer.save(Path(folder), arguments_of(name, tp, pp, vpp, bf16, steps), steps)
        logits = peer.logits(layouts.step_tokens(layouts.HELD_OUT, 4, LENGTH))
        return logits, [peer.step(steps + step) for step in range(more)]


def resume(arguments: str, steps: int) -> list[float]:
    """Resume ours from the folder that `arguments` load, and train so many steps; their losses."""
    engine, task = layouts.build(arguments)
    start = layouts.resume(engine)
    return [layouts.loss_of_step(engine, task, start + step) for step in range(steps)]
