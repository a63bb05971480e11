"""QK-clip: after an update, scale the projections to queries and keys of heads whose logits have become too large.

Source: Kimi Team 2025, "Kimi K2" (arXiv:2507.20534), of heads with keys of their own. Heads that share a key head are
scaled alike, by the largest of them, as Megatron-LM does: a factor of the key is one of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.options.config import Config
from megatron.parallel.context import ParallelContext, group_of_stage
from megatron.parallel.phase_clock import WAIT
from megatron.training.optimizers.groups import Groups
from megatron.training.state import OwnedSlice

PROJECTIONS = ("attention.qkv.weight", "attention.qkv.bias")
"""Local names of what makes queries, keys and values: [q; k; v], each with its heads in order."""


class QKClip:
    """Scales what this rank updates of the projections, by the largest logits that any rank has seen in the step.

    The optimizer's float32 weights are scaled, before 16-bit weights are made of them; its states are left alone.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        owned: Mapping[str, OwnedSlice],
        config: Config,
        ctx: ParallelContext,
    ) -> None:
        """`named`: the parameters of this rank's stage; `owned`: the slices of them that it updates. Collective."""
        self._model, self._ctx = config.model, ctx
        self._threshold, self._alpha = config.optimizer.qk_clip_threshold, config.optimizer.qk_clip_alpha
        self._owned: list[tuple[int, OwnedSlice]] = []
        layers = set()
        for name, _ in named:
            room, number, local = [*name.split(".", 2), "", ""][:3]
            if room != "layers" or local not in PROJECTIONS:
                continue
            layers.add(int(number))
            if name in owned:
                self._owned.append((int(number), owned[name]))
        self._layers = sorted(layers)
        self._group = group_of_stage(ctx)
        self._seen: dict[int, Tensor] | None = None
        """The logits that `_scales` are of."""
        self._scales: dict[int, Tensor] = {}

    @torch.no_grad()
    def apply(self, groups: Groups) -> None:
        """Scale what an update of these groups has changed. Collective over the stage, at the first call of a step."""
        logits = self._ctx.state.logits.by_layer
        # ZeRO-2 updates one group at a time
        if self._seen is not logits:
            self._scales, self._seen = self._row_scales(logits), logits
        updated = {id(tensor) for group in groups for tensor in group["params"]}
        for layer, owned in self._owned:
            if id(owned.tensor) in updated:
                _scale_rows(owned, self._scales[layer])

    def _row_scales(self, logits: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the factor of each of this rank's rows of the projections, by layer."""
        if not self._layers:  # a stage of the embedding or the output layer alone
            return {}
        ctx, heads = self._ctx, self._model.num_attention_heads
        own = heads // ctx.tensor_size
        # of all heads: a key head may be cut over tensor-parallel ranks
        largest = torch.full((len(self._layers), heads), -torch.inf, device=ctx.device)
        for index, layer in enumerate(self._layers):
            if layer in logits:
                largest[index, ctx.tensor_rank * own :][:own] = logits[layer]
        if self._group is not None:
            with ctx.state.clock.phase(WAIT):
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        of_group = largest.view(len(self._layers), self._model.num_kv_heads, -1).amax(2)
        # only those above it: a quotient of what is not positive says nothing
        factors = torch.where(of_group > self._threshold, self._threshold / of_group, 1.0)
        return {layer: self._rows(factors[index]) for index, layer in enumerate(self._layers)}

    def _rows(self, factors_k: Tensor) -> Tensor:
        """[k] of the whole model -> this rank's rows of [q; k; v]."""
        model = self._model
        group_rows = model.num_attention_heads // model.num_kv_heads * model.head_size
        of_q = (factors_k**self._alpha).repeat_interleave(group_rows)
        of_k = (factors_k ** (1 - self._alpha)).repeat_interleave(model.head_size)
        pieces = (of_q, of_k, torch.ones_like(of_k))
        # each piece is cut evenly, as the weight's is
        return torch.cat([piece.chunk(self._ctx.tensor_size)[self._ctx.tensor_rank] for piece in pieces])


def _scale_rows(owned: OwnedSlice, scales: Tensor) -> None:
    """Multiply a stretch of a flattened local tensor, whose first and last rows may be cut, by a factor of each row."""
    flat: Any = owned.weight.view(-1)
    columns = 1 if len(owned.shard.shape) == 1 else owned.shard.shape[1]
    scales = scales.to(flat.device)
    row, column = divmod(owned.start, columns)
    begin = 0
    if column:
        begin = min(columns - column, len(flat))
        flat[:begin] *= scales[row]
        row += 1
    rows = (len(flat) - begin) // columns
    whole = flat.narrow(0, begin, rows * columns).view(rows, columns)
    whole *= scales[row : row + rows, None]
    if begin + rows * columns < len(flat):
        flat[begin + rows * columns :] *= scales[row + rows]
