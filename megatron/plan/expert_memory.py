"""Memory of a layer's router and experts between forward and backward pass, where all experts are used alike.

N tokens of a rank, K experts of each token, n = N K choices that a rank's experts compute: as many as its tokens make,
since what it sends to other ranks comes from them too. H channels, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from megatron.options.config import ModelConfig
from megatron.parallel.costs import Activation, MatrixProduct, Router
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration, Shard
from megatron.plan.microbatch import BYTES, MicrobatchSizes

FLOAT32, INT64 = BYTES["fp32"], 8


class ExpertsMemory:
    """Bytes of one microbatch on one rank."""

    def __init__(self, layer: LayerDeclaration, sizes: MicrobatchSizes) -> None:
        self._sizes, self._layout = sizes, Layout.of(sizes.config.parallel)
        shards = layer.shards.values()
        self._router = next((shard for shard in shards if isinstance(shard.cost, Router)), None)
        self._one = [shard for shard in shards if shard.expert == 0 and isinstance(shard.cost, MatrixProduct)]
        self._is_trained = any(shard.trained for shard in shards if shard.expert is not None)

    @property
    def exist(self) -> bool:
        return self._router is not None

    @property
    def _model(self) -> ModelConfig:
        return self._sizes.config.model

    @cached_property
    def _tokens(self) -> int:
        """N: where each expert is whole, each tensor-parallel rank sends its own share of the tokens."""
        if self._layout.experts_are_whole:
            return -(-self._sizes.tokens // self._layout.tensor_size)
        return self._sizes.tokens

    @cached_property
    def _choices(self) -> int:
        """n"""
        return self._tokens * self._model.moe_router_topk

    @property
    def tokens_of_one(self) -> int:
        """Tokens of one expert of this rank."""
        return -(-self._choices * self._layout.expert_size // (self._model.num_experts or 1))

    @property
    def choice_bytes(self) -> int:
        """One vector of the stream for each choice: [n, H]."""
        return self._choices * self._model.hidden_size * self._sizes.number_bytes

    # Kept from the forward pass

    @cached_property
    def kept(self) -> int:
        """All of it: router, sorted tokens, experts and their outputs."""
        if not self.exist:
            return 0
        # the outputs, for the gradient of the weights; the order of the choices, and their weights in it
        exchanged = self.choice_bytes + self._choices * (INT64 + FLOAT32)
        if self._is_trained:
            exchanged += self.choice_bytes
        return self._of_router + exchanged + self._inside + self.activated

    @cached_property
    def _of_router(self) -> int:
        sizes, model, router = self._sizes, self._model, self._router
        assert router is not None
        num_experts, topk = router.shape[0], model.moe_router_topk
        # scores, and for the z-loss the logits
        of_token = FLOAT32 * num_experts * (2 if model.moe_z_loss_coeff > 0 else 1)
        # chosen experts, their scores, and the weights that these become
        of_token += topk * (INT64 + 2 * FLOAT32)
        # its input in float32, which of float32 is the stream itself; times jitter another one
        copies = (1 if sizes.is_16_bit else 0) + (1 if model.moe_input_jitter_eps > 0 else 0)
        of_token += FLOAT32 * model.hidden_size * copies
        return sizes.own_tokens * of_token

    @cached_property
    def _inside(self) -> int:
        """Inputs of the activations, and what these keep beside."""
        numbers = 0
        for shard in self._one:
            cost = shard.cost
            assert isinstance(cost, MatrixProduct)
            if cost.reads is None:
                numbers += self._local(shard)[0]
            elif isinstance(cost.reads, Activation):
                numbers += cost.reads.kept // self._layout.expert_tensor_size
        return self._choices * numbers * self._sizes.number_bytes

    @cached_property
    def activated(self) -> int:
        """Outputs of the activations, which the products that read them keep."""
        read = [self._local(shard)[1] for shard in self._one if _reads_activation(shard) and shard.trained]
        return self._choices * sum(read) * self._sizes.number_bytes

    def _local(self, shard: Shard) -> tuple[int, ...]:
        _, size = self._layout.cut_of(shard)
        return shard.local_shape(size)

    # Needed for a moment of the backward pass

    @property
    def backward(self) -> int:
        """Gradient of the weighed outputs, in float32, and its products with the weights and with the outputs."""
        if not self.exist:
            return 0
        return 3 * FLOAT32 * self._choices * self._model.hidden_size

    @property
    def trained_weights(self) -> list[int]:
        """Numbers of each trained weight of one expert."""
        return [math.prod(self._local(shard)) for shard in self._one if shard.trained]

    @property
    def beside_gradient(self) -> int:
        """Beside the gradient of an expert's weight, more than `kept`: gradients of its tokens, and of the outputs."""
        return self.choice_bytes

    def sent_bytes(self) -> int:
        """Bytes that this rank sends to others in a forward and a backward pass."""
        size = self._layout.expert_size
        if not self.exist or size == 1:
            return 0
        # there and back, twice; a share of 1 / size stays
        passes = 4 if self._is_trained else 2
        if self._sizes.config.training.recompute_granularity == "full":
            passes += 2
        return math.ceil(passes * self.choice_bytes * (size - 1) / size)


def _reads_activation(shard: Shard) -> bool:
    return isinstance(shard.cost, MatrixProduct) and isinstance(shard.cost.reads, Activation)


def exchange_bytes(layers: Sequence[LayerDeclaration], sizes: MicrobatchSizes) -> int:
    """Bytes that a rank which holds these layers sends to others for one microbatch: tokens on the way to experts."""
    return sum(ExpertsMemory(layer, sizes).sent_bytes() for layer in layers)
