"""Sizes of one microbatch on one rank, and how its device computes it: in these the plan counts memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

from megatron.options.config import Config
from megatron.runtime.device import Device
from megatron.runtime.devices import planned_device
from megatron.tasks.data import TaskData
from megatron.tasks.registry import load_task

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number of each precision."""


@dataclass(frozen=True)
class MicrobatchSizes:
    """The largest microbatch of a run. Counts are numbers, tokens or bytes of one rank, as each name says."""

    config: Config

    @cached_property
    def data(self) -> TaskData:
        return load_task(self.config).data

    @cached_property
    def tokens(self) -> int:
        """Tokens that this rank computes, with those that share its layers: a part of each row."""
        return self.config.training.micro_batch_size * self.data.row_length // self.context_size

    @property
    def tensor_size(self) -> int:
        return self.config.parallel.tensor_model_parallel_size

    @property
    def context_size(self) -> int:
        return self.config.parallel.context_parallel_size

    @property
    def sequence_cut(self) -> int:
        """Ranks over which the tokens of the residual stream are cut: those of sequence parallelism."""
        return self.tensor_size if self.config.parallel.sequence_parallel else 1

    @cached_property
    def own_tokens(self) -> int:
        """Tokens whose residual stream this rank holds."""
        return self.tokens // self.sequence_cut

    @property
    def number_bytes(self) -> int:
        """Bytes of a weight, and of an activation."""
        return BYTES[self.config.training.precision]

    @property
    def is_16_bit(self) -> bool:
        return self.number_bytes == 2

    @property
    def mask_number_bytes(self) -> int:
        """Bytes of a number of a dropout's mask."""
        # torch's CPU kernel keeps a factor, not a truth value
        return self.number_bytes if self.device.is_host else 1

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream: those of this rank's own tokens."""
        return self.own_tokens * self.config.model.hidden_size * self.number_bytes

    def cut_bytes(self, numbers: int) -> int:
        """Return the bytes of so many numbers a token, cut over the tensor-parallel ranks."""
        return self.tokens * numbers // self.tensor_size * self.number_bytes

    # How it is computed

    @cached_property
    def device(self) -> Device:
        return planned_device(self.config.parallel.device)

    @property
    def widens_products(self) -> bool:
        """This machine's CPU computes 16-bit products in float32, block by block (parallel/operators/products.py)."""
        return self.config.training.precision in _widened_by(self.device)

    @cached_property
    def pointwise(self) -> str:
        """Form of pointwise operators: plain, eager, compiled or habana (parallel/operators/fused.py)."""
        form, model = self.device.pointwise, self.config.model
        if model.kernels == "plain":
            return "plain"
        if form == "habana" and not model.use_fused_rmsnorm:
            return "plain"
        if form == "habana":
            return "habana"
        if form == "eager" and model.kernels == "auto" and not self.config.training.torch_compile:
            return "eager"
        return "compiled"


@functools.cache
def _widened_by(device: Device) -> frozenset[str]:
    return device.widened()
