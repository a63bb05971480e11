"""Memory of the output projection and the loss, which parallel/losses.py computes together.

Sizes are of one rank and one microbatch: N tokens, C of them in a chunk, H hidden, V rows of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.options.config import Config
from megatron.parallel.operators.block_sizes import BLOCK_LOGITS, BLOCK_NUMBERS, block_bytes, chunk_size
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.microbatch import BYTES, MicrobatchSizes

FLOAT32 = BYTES["fp32"]


@dataclass(frozen=True)
class LossMemory:
    """Bytes that the output projection and the loss of one microbatch need."""

    forward: int
    """At the peak of the forward pass."""
    backward: int
    """At the peak of the backward pass."""


def loss_memory(output: LayerDeclaration, config: Config) -> LossMemory:
    """Return what linear_cross_entropy needs."""
    # a single chunk keeps the gradient of its logits for the backward pass; several have made both gradients in forward
    loss = _Loss(output, MicrobatchSizes(config))
    held = loss.gathered + loss.logits
    if loss.is_one_chunk:
        work = loss.gradient_work
        if loss.sum_number_bytes != loss.sizes.number_bytes:
            # the gradient of the weight is rounded to the dtype of the weight once it is complete
            work = max(work, loss.weight_gradient)
        return LossMemory(held + loss.cap_slope + loss.softmax_block, held + loss.sums + work)
    forward = loss.sums + held + loss.cap_slope + max(loss.softmax_block, loss.gradient_work)
    # both gradients are scaled: that of the hidden states in float32 before it is rounded
    scaled = loss.hidden_gradient
    if loss.sizes.is_16_bit:
        scaled += max(FLOAT32 * loss.hidden_numbers, loss.weight_gradient)
    else:
        scaled += loss.weight_gradient
    return LossMemory(forward, loss.scaled_weight + loss.sums + scaled)


def adds_to_optimizers_sum(config: Config) -> bool:
    """Return True if the loss adds the output weight's gradient to DeepSpeed's BF16_Optimizer's float32 gradients."""
    training = config.training
    is_buffered = training.bf16 and config.effective_zero_stage == 1 and not config.optimizer.offload_optimizer
    return is_buffered and training.grad_accum_dtype == "fp32"


@dataclass(frozen=True)
class _Loss:
    """Tensors of the loss, in bytes where the name does not say numbers."""

    output: LayerDeclaration
    sizes: MicrobatchSizes

    # Shapes

    @cached_property
    def rows(self) -> int:
        """V: rows of the vocabulary on this rank, padding included."""
        return self.sizes.config.model.padded_vocab_size(self.sizes.tensor_size) // self.sizes.tensor_size

    @property
    def hidden_size(self) -> int:
        return self.sizes.config.model.hidden_size

    @cached_property
    def chunk(self) -> int:
        """C: tokens of a chunk."""
        return chunk_size(self.sizes.tokens, self.hidden_size)

    @property
    def is_one_chunk(self) -> bool:
        return self.chunk == self.sizes.tokens

    @property
    def hidden_numbers(self) -> int:
        """[N, H] of the hidden states, and of their gradient."""
        return self.sizes.tokens * self.hidden_size

    @property
    def weight_numbers(self) -> int:
        """[V, H] of the weight, and of its gradient."""
        return self.rows * self.hidden_size

    # Gradients

    @cached_property
    def scales_weight(self) -> bool:
        """A method of the layer scales the weight's rows (DoRA): the product is that of another, whole weight."""
        method = self.output.methods.get("")
        return method is not None and method.scales_weight

    @property
    def _is_trained(self) -> bool:
        return any(shard.vocabulary and shard.trained for shard in self.output.shards.values())

    @property
    def _adds_in_place(self) -> bool:
        """The gradient of the weight is added to the optimizer's own sum, and takes no memory."""
        return self._is_trained and not self.scales_weight and adds_to_optimizers_sum(self.sizes.config)

    @property
    def _gives_weight_gradient(self) -> bool:
        return self.scales_weight or self._is_trained

    @property
    def _gradient_numbers(self) -> int:
        """Numbers of the weight's gradient that the loss holds itself; 0: it is frozen, or added in place."""
        if self._gives_weight_gradient and not self._adds_in_place:
            return self.weight_numbers
        return 0

    @property
    def sum_number_bytes(self) -> int:
        """Bytes of a number of the sum of the weight's gradient."""
        # over chunks it is summed in float32, as the optimizer's sum is; float16 could not hold the gradient of one
        if not self.is_one_chunk or self.sizes.config.training.fp16 or self._adds_in_place:
            return FLOAT32
        return self.sizes.number_bytes

    @property
    def hidden_gradient(self) -> int:
        return self.hidden_numbers * self.sizes.number_bytes

    @property
    def weight_gradient(self) -> int:
        """The weight's gradient as autograd gets it."""
        return self._gradient_numbers * self.sizes.number_bytes

    @property
    def sums(self) -> int:
        """Both gradients as they are computed."""
        return self.hidden_gradient + self._gradient_numbers * self.sum_number_bytes

    # Inputs and logits

    @property
    def scaled_weight(self) -> int:
        """The weight before and after its rows are scaled."""
        if not self.scales_weight:
            return 0
        return 2 * self.weight_numbers * self.sizes.number_bytes

    @property
    def gathered(self) -> int:
        """Inputs made for the loss: the scaled weight, and under sequence parallelism all ranks' hidden states."""
        gathered = self.scaled_weight
        if self.sizes.config.parallel.sequence_parallel:
            gathered += self.hidden_gradient
        return gathered

    @property
    def cap_slope(self) -> int:
        """[C, V] of the soft cap's derivative, until the gradient of the logits is there."""
        if self.sizes.config.model.logits_softcap is None:
            return 0
        return self.logits

    @property
    def logits(self) -> int:
        return self.chunk * self.rows * self.sizes.number_bytes

    # Work for a moment

    @property
    def softmax_block(self) -> int:
        """Logits that torch's softmax on a CPU converts at once: 16-bit ones to two copies in float32."""
        if not self.sizes.device.is_host:
            return 0
        block_tokens = min(self.chunk, max(1, BLOCK_LOGITS // self.rows))
        copies = 2 if self.sizes.is_16_bit else 1
        block = block_tokens * self.rows * copies * FLOAT32
        if self.sizes.widens_products:
            block = max(block, block_bytes(self.chunk, self.hidden_size, self.rows))
        return block

    @property
    def gradient_work(self) -> int:
        """Tensors of a chunk's products that give the gradients: the weight's reads a copy of the inputs."""
        if not self._gives_weight_gradient:
            return self._hidden_block
        chunk_numbers, number_bytes = self.chunk * self.hidden_size, self.sizes.number_bytes
        # inputs times the weights of tokens, in float32 and rounded
        weighted = chunk_numbers * FLOAT32
        if self.sizes.is_16_bit:
            weighted += chunk_numbers * number_bytes
        return max(weighted, self._hidden_block, chunk_numbers * number_bytes + self._weight_block)

    @property
    def _hidden_block(self) -> int:
        """A float32 block of the gradient of the hidden states, on CPUs that widen products."""
        if not self.sizes.widens_products:
            return 0
        return block_bytes(self.chunk, self.rows, self.hidden_size)

    @property
    def _weight_block(self) -> int:
        """A block of the weight's gradient, which the CPU makes apart from the sum that it is added to."""
        C, H, V = self.chunk, self.hidden_size, self.rows
        if self.sizes.widens_products:
            return block_bytes(V, C, H, adds=self.sum_number_bytes == FLOAT32)
        if not self.sizes.device.is_host or self.sum_number_bytes == self.sizes.number_bytes:
            return 0
        # the product, and its copy in the dtype of the sum
        return min(self.weight_numbers, BLOCK_NUMBERS) * (self.sizes.number_bytes + self.sum_number_bytes)
