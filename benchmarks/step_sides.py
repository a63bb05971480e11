"""The sides of benchmarks/step.py: one training step through our engine, and through each peer's model.

All sides have the same shapes, read the same batch, clip the gradient to a norm of 1 and update by torch's fused AdamW
with float32 weights. In bfloat16 the peers hold a float32 copy of each weight and round it after the update
(`masters`), or run float32 weights under autocast (`autocast`); their gradients add up over microbatches in the
precision of their weights, while ours add up in float32.
"""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.options.config import Config

LR = 1e-4


@dataclass(frozen=True)
class Workload:
    """Work of each side: a model, and a global batch of tokens [samples, sequence + 1] on the host."""

    config: Config
    tokens: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens a step."""
        return self.tokens.shape[0] * (self.tokens.shape[1] - 1)

    @property
    def is_bf16(self) -> bool:
        return self.config.training.bf16

    def microbatches(self) -> list[Tensor]:
        return list(self.tokens.split(self.config.training.micro_batch_size))


class Side(ABC):
    """A model with its optimizer."""

    name: str
    modules: tuple[str, ...] = ()
    """Modules that it imports, which a measurement of its memory leaves out."""

    @abstractmethod
    def step(self) -> Tensor | float:
        """Take a step; return the mean loss."""

    def close(self) -> None:
        """Free the memory."""
        for name in list(vars(self)):
            delattr(self, name)
        gc.collect()


class Ours(Side):
    """A step of a real run: DeepSpeed's engine as `megatron.train` builds it, guard and clipping included."""

    name = "ours"
    modules = ("megatron.training.build", "megatron.tasks.pretrain")

    def __init__(self, work: Workload, ctx: Any) -> None:
        from megatron.tasks.pretrain import PretrainTask
        from megatron.training.build import build_engine
        from megatron.training.engine import pinned

        task = PretrainTask(work.config)
        self.engine = build_engine(work.config, ctx, task)
        self._batch = [pinned(task.data.collate(tokens.numpy()), ctx.device) for tokens in work.microbatches()]
        self._consumed = 0

    def step(self, num_microbatches: int | None = None) -> float:
        """`num_microbatches`: of a shorter step."""
        batch = self._batch[:num_microbatches]
        result = self.engine.train_step(batch, consumed_samples=self._consumed, lr=LR)
        self._consumed += len(batch)
        return result.loss


class Masters:
    """float32 copies of 16-bit weights; or the weights themselves where they are float32."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self._low: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._is_copy = self._low[0].dtype != torch.float32
        self._high: list[Any] = [p.detach().float() if self._is_copy else p for p in self._low]
        options = config.optimizer
        groups = [
            {"params": [p for p in self._high if p.dim() > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in self._high if p.dim() == 1], "weight_decay": 0.0},
        ]
        betas = (options.adam_beta1, options.adam_beta2)
        self._optimizer = torch.optim.AdamW(groups, lr=LR, betas=betas, eps=options.adam_eps, fused=True)

    @torch.no_grad()
    def update(self, max_norm: float) -> None:
        if self._is_copy:
            for low, high in zip(self._low, self._high, strict=True):
                high.grad, low.grad = low.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._high, max_norm, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._is_copy:
            torch._foreach_copy_(self._low, self._high)


class PeerModel(Side):
    """Forward, backward, clipping and update in a plain loop over a peer's model, which returns logits."""

    residual_projections: tuple[str, ...]
    """Modules whose output is added to the residual stream."""

    def __init__(self, work: Workload, device: torch.device, *, is_compiled: bool, is_autocast: bool) -> None:
        dtype = torch.bfloat16 if work.is_bf16 and not is_autocast else torch.float32
        torch.manual_seed(work.config.training.seed)
        with torch.device(device):
            model = self.build(work.config, dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.split(".")[-2] in self.residual_projections:  # as ours start; all sides learn alike
                    parameter.div_(math.sqrt(2 * work.config.model.num_layers))
        self._model, self._device = self.adapted(model.to(device, dtype), work.config).train(), device
        self._masters = Masters(self._model, work.config)
        batch = [tokens.pin_memory() if device.type == "cuda" else tokens for tokens in work.microbatches()]
        self._batch, self._clip = batch, work.config.optimizer.clip_grad
        self._loss: Callable[[Tensor, Tensor], Tensor] = self._plain_loss
        if is_compiled:
            self._loss = torch.compile(self._plain_loss)
        self._autocast: AbstractContextManager[Any] = (
            torch.autocast(device.type, torch.bfloat16) if work.is_bf16 and is_autocast else nullcontext()
        )

    @abstractmethod
    def build(self, config: Config, dtype: torch.dtype) -> nn.Module:
        """Return the model, randomly initialised."""

    def adapted(self, model: nn.Module, config: Config) -> nn.Module:
        """Return the model with what is trained of it: by default all."""
        return model

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """[B, S] token ids -> [B, S, V]."""

    def _plain_loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        # in float32, as both peers' own training does
        return F.cross_entropy(self.logits(inputs).float().flatten(0, 1), labels.flatten())

    def step(self) -> Tensor:
        total = torch.zeros((), device=self._device)
        for tokens in self._batch:
            moved = tokens.to(self._device, non_blocking=True)
            with self._autocast:
                loss = self._loss(moved[:, :-1].contiguous(), moved[:, 1:].contiguous()) / len(self._batch)
            loss.backward()
            total += loss.detach()
        self._masters.update(self._clip)
        return total


class Transformers(PeerModel):
    """Hugging Face's class of the same shapes, with torch's scaled_dot_product_attention where it has that.

    Compiled as a whole, its own `sdpa` cannot see that a batch has no packed documents, and passes a mask, with which
    attention takes three times as long (transformers 5.17, CUDA). So it is given the causal kernel by its own interface
    for attention functions, which makes no mask.
    """

    name = "transformers"
    modules: tuple[str, ...] = (
        "transformers.models.auto.modeling_auto",
        "transformers.models.bloom.modeling_bloom",
        "transformers.models.llama.modeling_llama",
        "transformers.integrations.sdpa_attention",
    )
    residual_projections = ("o_proj", "down_proj", "dense", "dense_4h_to_h")

    def build(self, config: Config, dtype: torch.dtype) -> nn.Module:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        from megatron.weights.huggingface_config import their_config

        fields = their_config(config, "bf16" if dtype == torch.bfloat16 else "fp32", {})
        theirs = AutoConfig.for_model(**fields)
        attention = "eager"  # Bloom's only one, which adds ALiBi
        if theirs.model_type != "bloom":
            attention = "causal"
            AttentionInterface.register(attention, partial(sdpa_attention_forward, is_causal=True))
        return AutoModelForCausalLM.from_config(theirs, attn_implementation=attention, dtype=dtype)  # type: ignore[no-any-return]

    def logits(self, inputs: Tensor) -> Tensor:
        return self._model(input_ids=inputs, use_cache=False).logits  # type: ignore[no-any-return]


class LitGPT(PeerModel):
    """litgpt's GPT of the same shapes. It has no ALiBi, so it has no Bloom."""

    name = "litgpt"
    modules = ("litgpt.model",)
    residual_projections = ("proj",)

    def build(self, config: Config, dtype: torch.dtype) -> nn.Module:
        from litgpt.model import GPT  # type: ignore[import-not-found]
        from litgpt.model import Config as Shape

        model = config.model
        shape = Shape(
            name="benchmark",
            block_size=config.training.seq_length,
            n_layer=model.num_layers,
            n_embd=model.hidden_size,
            vocab_size=model.vocab_size,
            padded_vocab_size=model.vocab_size,
            n_head=model.num_attention_heads,
            n_query_groups=model.num_kv_heads,
            intermediate_size=model.ffn_size,
            norm_class_name="RMSNorm",
            norm_eps=model.norm_epsilon,
            mlp_class_name="LLaMAMLP",
            rotary_percentage=1.0,
            rope_base=int(model.rotary_base),
            parallel_residual=False,
            bias=False,
        )
        built = GPT(shape)
        built.apply(built._init_weights)
        built.lm_head.weight = built.transformer.wte.weight
        return built  # type: ignore[no-any-return]

    def logits(self, inputs: Tensor) -> Tensor:
        return self._model(inputs)  # type: ignore[no-any-return]


class Peft(Transformers):
    """Hugging Face's class with PEFT's adapters in the dtype of the base."""

    name = "peft"
    modules = (*Transformers.modules, "peft")
    casts_adapters = False

    def adapted(self, model: nn.Module, config: Config) -> nn.Module:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

        lora = config.lora
        options = LoraConfig(
            r=lora.lora_rank,
            lora_alpha=lora.lora_alpha,
            lora_dropout=lora.lora_dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        found = get_peft_model(model, options, autocast_adapter_dtype=self.casts_adapters)
        if config.training.recompute_granularity == "full":
            found.gradient_checkpointing_enable({"use_reentrant": False})
        return found  # type: ignore[no-any-return]


class PeftFloat32(Peft):
    """As PEFT makes them by default: float32 adapters on a base in 16 bits."""

    name = "peft_float32"
    casts_adapters = True


PEERS: dict[str, type[PeerModel]] = {peer.name: peer for peer in (Transformers, LitGPT, Peft, PeftFloat32)}
