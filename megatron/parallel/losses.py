"""The output projection and cross-entropy in one, over a vocabulary cut across tensor-parallel ranks.

N tokens of the microbatch (S x B), C of them in a chunk, H hidden, V vocabulary rows of this rank that are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel import mappings
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators import products
from megatron.parallel.operators.block_sizes import chunk_size, chunks
from megatron.parallel.operators.softmax import RowSums, normalise_, row_sums, softmax_, sum_dtype
from megatron.parallel.operators.weight_gradient import GradientSum, WeightGradient, scaled
from megatron.parallel.phase_clock import WAIT
from megatron.parallel.shards import shard_of


@dataclass(frozen=True)
class Head:
    """The inputs of a loss: hidden states, this rank's rows of the vocabulary, and K token ids for each token."""

    hidden_NH: Tensor
    weight: Tensor
    """Rows with padding. It is the only one that may be trained."""
    labels_NK: Tensor
    """The losses have one id for each token, its label; chosen_log_probs.py any number."""
    first_row: int
    num_rows: int
    ctx: ParallelContext
    into: GradientSum | None
    """Receives the gradient of the weight, which autograd then does not get; None: autograd gets it."""
    base: Tensor | None = None
    """With an adapter the frozen weight: `weight` is the adapter's B then, and hidden states end with its inputs."""
    smoothing: float = 0.0
    """Share of a label's probability that is spread evenly over the vocabulary, in the loss of one label a token."""
    vocabulary: int = 1
    """Tokens of all ranks."""
    cap: float | None = None
    """Soft cap: logits z become cap * tanh(z / cap)."""

    @property
    def _products(self) -> list[tuple[Tensor, slice]]:
        """The matrices [V, channels] that make the logits, and the channels of the hidden states that each takes."""
        # padded rows are no tokens: they take no part in the softmax
        rows, channels = self.weight[: self.num_rows], self.hidden_NH.shape[1]
        if self.base is None:
            return [(rows, slice(0, channels))]
        return [(self.base[: self.num_rows], slice(0, self.base.shape[1])), (rows, slice(self.base.shape[1], channels))]

    def inputs(self, part: slice) -> Tensor:
        """Return the channels of hidden states that `weight` takes."""
        return self.hidden_NH[part, -self.weight.shape[1] :]

    def slices(self) -> list[slice]:
        return list(chunks(*self.hidden_NH.shape))

    def logits_buffer(self) -> Tensor:
        """Return memory for the logits of the largest chunk; new memory for each would cost more than the sums."""
        row = self.num_rows
        # a matrix product on a device is fast only where rows begin at a multiple of 16 bytes
        if not self.hidden_NH.is_cpu:
            row = -(-row // 64) * 64
        return self.hidden_NH.new_empty((chunk_size(*self.hidden_NH.shape), row))[:, : self.num_rows]

    def logits(self, part: slice, buffer: Tensor) -> Tensor:
        hidden, (first, *more) = self.hidden_NH[part], self._products
        logits = products.mm(hidden[:, first[1]], first[0].t(), out=buffer[: hidden.shape[0]])
        for rows, channels in more:
            products.add_mm_(logits, hidden[:, channels], rows.t())
        if self.cap is None:
            return logits
        return cap_(logits, self.cap)

    def cap_slope(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of the soft cap at these capped logits; None: without a cap."""
        if self.cap is None:
            return None
        return (logits / self.cap).square_().neg_().add_(1.0)  # that of tanh is 1 - tanh^2

    def hidden_gradient(self, grad_logits: Tensor, into: Tensor) -> Tensor:
        for rows, channels in self._products:
            products.mm(grad_logits, rows, out=into[:, channels])
        return into

    def local_labels(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return the row [C, K] of each label on this rank, 0 where it has none, and where it has none [C, K]."""
        local = self.labels_NK[part] - self.first_row
        elsewhere = (local < 0) | (local >= self.num_rows)
        return local.masked_fill_(elsewhere, 0), elsewhere

    def log_probs(self, part: slice, logits: Tensor, *, to_softmax: bool) -> tuple[Tensor, RowSums]:
        """Return the log-probability of each label [C, K], -inf of one outside the vocabulary, and the rows' sums.

        With smoothing the mean log-probability of the vocabulary is one more column. `to_softmax`: replace the logits
        by this rank's part of their softmax.
        """
        local, elsewhere = self.local_labels(part)
        if self.num_rows:
            label_logits = logits.gather(-1, local).to(sum_dtype(logits.dtype)).masked_fill_(elsewhere, -torch.inf)
        else:
            label_logits = torch.full_like(local, -torch.inf, dtype=sum_dtype(logits.dtype))
        if self.smoothing:
            own_means = logits.sum(-1, keepdim=True, dtype=sum_dtype(logits.dtype)) / self.vocabulary
            label_logits = torch.cat([label_logits, own_means], -1)
        if self.ctx.tensor_size == 1 and to_softmax:
            sums = softmax_(logits)
            return sums.log_probs(label_logits), sums
        sums = row_sums(logits)
        if self.ctx.tensor_size > 1:
            sums, parts = join_rows(sums, label_logits, self.ctx)
            label_logits = parts.amax(0)  # -inf on all ranks but the one that holds the label
            if self.smoothing:
                label_logits[:, -1] = parts[:, :, -1].sum(0)
            if to_softmax:
                normalise_(logits, sums)
        return sums.log_probs(label_logits), sums

    def smoothed(self, log_probs: Tensor) -> Tensor:
        """Return the negative losses [C, 1] of labels from the result of `log_probs`."""
        if not self.smoothing:
            return log_probs
        return (1 - self.smoothing) * log_probs[:, :1] + self.smoothing * log_probs[:, 1:]

    def subtract_labels_(self, part: slice, softmax: Tensor, log_probs: Tensor, slope: Tensor | None) -> None:
        """Turn the softmax of a chunk into the gradient of the loss with respect to the logits, in place.

        `log_probs`, `slope`: the results of these methods for a label each.
        """
        if not self.num_rows:
            return
        uniform = self.smoothing / self.vocabulary
        if uniform:
            softmax -= uniform
        local, elsewhere = self.local_labels(part)
        # written rather than subtracted: 1 - the rounded softmax would lose the digits of a confident model
        value = (torch.expm1(log_probs[:, :1]) + (self.smoothing - uniform)).to(softmax.dtype)
        value = torch.where(elsewhere, softmax.gather(-1, local), value)
        # not scatter_, which takes 0.3 s for 1,024 x 131,072 numbers on a CPU
        softmax[torch.arange(len(local), device=local.device), local.squeeze(-1)] = value.squeeze(-1)
        if slope is not None:
            softmax *= slope


def join_rows(own: RowSums, columns_CK: Tensor, ctx: ParallelContext) -> tuple[RowSums, Tensor]:
    """Join the sums of rows that the tensor-parallel ranks hold; return them and each rank's columns, [ranks, C, K]."""
    # side by side, so that a chunk needs one collective
    mine = torch.cat([torch.stack([*own]), columns_CK.t()])
    ctx.state.checks.partial(own.total)
    # the columns may be -inf: these are traced, not checked
    ctx.state.checks.gathered(mine)
    with ctx.state.clock.phase(WAIT):
        gathered = torch.stack(mappings.of_all_ranks(mine, ctx.tensor_group))
    peaks, totals = gathered[:, 0], gathered[:, 1]
    peak = peaks.amax(0)
    return RowSums(peak, (totals * (peaks - peak).exp()).sum(0)), gathered[:, 2:].transpose(1, 2)


class InputGradients:
    """Gradients of a loss by hidden states and weight, chunk by chunk, each where it is needed."""

    def __init__(
        self,
        head: Head,
        hidden_NH: Tensor,
        weight: Tensor,
        needs: Sequence[bool],
        token_weights_N: Tensor,
        into: GradientSum | None = None,
    ) -> None:
        """`needs`: that of hidden states, and that of the weight, whose tokens count by `token_weights_N`."""
        needs_hidden, needs_weight = needs
        self._head = head
        self.hidden: Tensor | None = None
        self.weight: WeightGradient | None = None
        if needs_hidden:
            self.hidden = torch.empty_like(hidden_NH)
        if needs_weight:
            self.weight = WeightGradient(weight, head.num_rows, len(head.slices()), token_weights_N, into)

    def add(self, part: slice, grad_logits: Tensor, token_weights_C: Tensor | None = None) -> None:
        """Add a chunk. `token_weights_C`: factors of its hidden states' gradients."""
        if self.hidden is not None:
            hidden = self._head.hidden_gradient(grad_logits, self.hidden[part])
            if token_weights_C is not None:
                hidden.mul_(token_weights_C.unsqueeze(-1))
        if self.weight is not None:
            self.weight.add(part, grad_logits, self._head.inputs(part))


# torch calls a function's forward with autograd off; `needs_input_grad` does not show whether it was on before
def _needed(function: Any, *, with_gradients: bool) -> tuple[bool, bool]:
    """Return whether hidden states and weight need gradients; `with_gradients`: autograd was on where it is applied."""
    needs_hidden, needs_weight = function.needs_input_grad[:2]
    return with_gradients and needs_hidden, with_gradients and needs_weight


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of weighted token losses over several chunks."""

    # The gradients of both inputs are computed in forward, so that no logits outlive their chunk and none are computed
    # twice; backward only scales them by the gradient of the sum. Of `head.into`, that gradient is known before.
    @staticmethod
    def forward(
        function: Any, hidden_NH: Tensor, weight: Tensor, token_weights_N: Tensor, head: Head, with_gradients: bool
    ) -> Tensor:
        needs = _needed(function, with_gradients=with_gradients)
        factors_N = token_weights_N
        if head.into is not None:
            factors_N = token_weights_N * head.into.loss_gradient
        gradients = InputGradients(head, hidden_NH, weight, needs, factors_N, head.into)
        buffer, log_probs_N = head.logits_buffer(), torch.empty_like(token_weights_N)
        for part in head.slices():
            logits = head.logits(part, buffer)
            slope = head.cap_slope(logits)
            log_probs, _ = head.log_probs(part, logits, to_softmax=any(needs))
            log_probs_N[part] = head.smoothed(log_probs).squeeze(-1)
            if any(needs):
                head.subtract_labels_(part, logits, log_probs, slope)
                gradients.add(part, logits)
        function.weight_dtype, function.into = weight.dtype, None
        total = unit = None
        if gradients.weight is not None and head.into is not None:
            function.into, function.loss_gradient = head.into, head.into.loss_gradient
        elif gradients.weight is not None:
            total, unit = gradients.weight.total, gradients.weight.unit
        function.save_for_backward(gradients.hidden, token_weights_N, total, unit)
        return _weighted_sum(log_probs_N, token_weights_N)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        grad_hidden, token_weights_N, grad_weight, unit = function.saved_tensors
        if function.into is not None:
            function.into.close()
            # the sum holds the gradient for another factor: the update gate is to see it
            grad = torch.where(grad == function.loss_gradient, grad, torch.nan)
        if grad_hidden is not None:
            # in the dtype of the sums: a 16-bit factor would bend all gradients by up to 0.4 %
            grad_hidden = (grad_hidden * (token_weights_N * grad).unsqueeze(-1)).to(grad_hidden.dtype)
        if grad_weight is not None:
            if unit is not None:
                grad = unit * grad
            grad_weight = scaled(grad_weight, grad, function.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


class _TokenLogProbs(torch.autograd.Function):
    """Log-probability of each label."""

    # How much a token weighs in the gradient of the weight is known only in backward: a single chunk keeps the gradient
    # of its logits until then, several compute their logits a second time. Of a frozen weight they need no logits then:
    # the gradient of each token's hidden state is computed in forward, and scaled later.
    @staticmethod
    def forward(function: Any, hidden_NH: Tensor, weight: Tensor, head: Head, with_gradients: bool) -> Tensor:
        slices, buffer, results = head.slices(), head.logits_buffer(), []
        needs_hidden, needs_weight = _needed(function, with_gradients=with_gradients)
        keeps_logits = len(slices) == 1 and (needs_hidden or needs_weight)
        makes_gradient = needs_hidden and not needs_weight and not keeps_logits
        grad_hidden = None
        if makes_gradient:
            grad_hidden = torch.empty_like(hidden_NH)
        for part in slices:
            logits = head.logits(part, buffer)
            slope = head.cap_slope(logits)
            results.append(head.log_probs(part, logits, to_softmax=keeps_logits or makes_gradient))
            if grad_hidden is not None:
                head.subtract_labels_(part, logits, results[-1][0], slope)
                head.hidden_gradient(logits, grad_hidden[part])
        log_probs_NK = torch.cat([log_probs for log_probs, _ in results])
        sums = RowSums(*(torch.cat(parts) for parts in zip(*(sums for _, sums in results), strict=True)))
        function.head, function.has_gradient = head, makes_gradient
        if grad_hidden is not None:
            function.save_for_backward(grad_hidden)
        elif keeps_logits:  # of a single chunk, whose slope is the last
            head.subtract_labels_(slices[0], buffer, log_probs_NK, slope)
            function.save_for_backward(hidden_NH, weight, log_probs_NK, *sums, buffer)
        else:
            function.save_for_backward(hidden_NH, weight, log_probs_NK, *sums, None)
        return head.smoothed(log_probs_NK).squeeze(-1).clone()

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad_N: Tensor) -> Any:
        if function.has_gradient:
            (grad_hidden,) = function.saved_tensors
            return (grad_hidden * -grad_N.unsqueeze(-1)).to(grad_hidden.dtype), None, None, None
        hidden_NH, weight, log_probs_NK, peak, total, kept = function.saved_tensors
        head: Head = function.head
        token_weights_N = -grad_N
        gradients = InputGradients(head, hidden_NH, weight, function.needs_input_grad[:2], token_weights_N, head.into)
        buffer = kept
        if kept is None:
            buffer = head.logits_buffer()
        for part in head.slices():
            logits = buffer[: part.stop - part.start]
            if kept is None:
                slope = head.cap_slope(head.logits(part, buffer))
                normalise_(logits, RowSums(peak[part], total[part]))
                head.subtract_labels_(part, logits, log_probs_NK[part], slope)
            gradients.add(part, logits, token_weights_N[part])
        if gradients.weight is None:
            return gradients.hidden, None, None, None
        if head.into is not None:
            head.into.close()
            return gradients.hidden, None, None, None
        return gradients.hidden, gradients.weight.result(), None, None


def _weighted_sum(log_probs_N: Tensor, token_weights_N: Tensor) -> Tensor:
    """Return the sum of weighted losses. A token of weight 0 counts for nothing, whatever its label is."""
    # a label outside the vocabulary has -inf, and 0 times that is NaN
    return -torch.where(token_weights_N == 0, 0.0, log_probs_N * token_weights_N).sum()


# torch's F.linear_cross_entropy has no weight for each token and returns the loss in 16 bits; it sums the weight's
# gradient in 16 bits, or on a CPU computes in float32, over 20 times as long.
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels_BS: Tensor,
    token_weights_BS: Tensor,
    ctx: ParallelContext,
    *,
    is_total: bool = False,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Sum over tokens of token_weight x cross-entropy of hidden @ weight^T: a float32 scalar, equal on all ranks.

    hidden and weight are what the output layer passes on: this rank's rows of the residual stream [rows, B, H], S of
    them unless ranks share them (sequence and context parallelism), and its rows of the vocabulary (with an adapter:
    `with_adapter`); labels [B, S] int64, of all places on every rank; token_weights [B, S] (the loss mask times
    whatever normalises the sum). A token of weight 0 may have any label; a label outside the vocabulary with another
    weight makes the sum infinite.
    `label_smoothing`: this share of a label's probability is spread evenly over the vocabulary, as in torch's
    cross_entropy. The weights take no gradient. Holds the logits of one chunk of tokens at a time
    (megatron/parallel/operators/block_sizes.py).

    `is_total`: the loss of the microbatch that a task returns to the engine is this result, or this plus other terms.
    The gradient of the weight is then added to the optimizer's float32 sum, where there is one, and does not pass
    through autograd. A result times a factor would make the gradients NaN, which the update gate refuses.
    """
    if token_weights_BS.requires_grad:
        raise ValueError("token weights take no gradient here; multiply the result of token_log_probs by them instead")
    into = None
    # not in float16, which could not hold hidden states times the weight of one token of a large batch
    if is_total and weight.dtype != torch.float16:
        into = getattr(weight, "gradient_sum", None)
    head = head_of(hidden, weight, _own_labels(labels_BS, ctx), ctx, into, smoothing=label_smoothing)
    token_weights_N = mappings.own_places(token_weights_BS.t(), ctx).flatten().to(sum_dtype(hidden.dtype))
    if ctx.context_size > 1:  # the mean of what the ranks have is the sum then
        token_weights_N = token_weights_N * ctx.context_size
    arguments = head, torch.is_grad_enabled()
    if len(head.slices()) == 1:
        total = _weighted_sum(_TokenLogProbs.apply(head.hidden_NH, head.weight, *arguments), token_weights_N)
    else:
        total = _ChunkedCrossEntropy.apply(head.hidden_NH, head.weight, token_weights_N, *arguments)
    return mappings.mean_over_context(total, ctx)


def token_log_probs(hidden: Tensor, weight: Tensor, labels_BS: Tensor, ctx: ParallelContext) -> Tensor:
    """Log-probability of each label [B, S], float32, equal on all ranks.

    hidden, weight and labels are those of `linear_cross_entropy`. A negative label has log-probability 0 and no
    gradient, a label beyond the vocabulary -inf. Backward of several chunks computes their logits a second time if the
    weight is trained: where a weighted sum is all that is needed, `linear_cross_entropy` does three matrix products
    instead of four.
    """
    log_probs_N = label_log_probs(head_of(hidden, weight, _own_labels(labels_BS, ctx), ctx))
    return mappings.gather_places(log_probs_N.view(-1, len(labels_BS)), ctx).t()


def _own_labels(labels_BS: Tensor, ctx: ParallelContext) -> Tensor:
    """Return the labels of this rank's places, [N, 1]."""
    return mappings.own_places(labels_BS.t(), ctx).reshape(-1, 1)


def label_log_probs(head: Head) -> Tensor:
    """Return the log-probability of each label, [N]; 0 of a negative one."""
    log_probs_N = _TokenLogProbs.apply(head.hidden_NH, head.weight, head, torch.is_grad_enabled())
    return torch.where(head.labels_NK.squeeze(-1) < 0, 0.0, log_probs_N)


def head_of(
    hidden: Tensor,
    weight: Tensor,
    labels_NK: Tensor,
    ctx: ParallelContext,
    into: GradientSum | None = None,
    places_K: Tensor | None = None,
    smoothing: float = 0.0,
) -> Head:
    """Return the inputs of a loss: what the output layer passes on, and K ids for each token (`places_K`: of these)."""
    hidden_NH = mappings.enter_tensor_region(hidden, ctx).flatten(0, 1)
    if places_K is not None:
        hidden_NH = hidden_NH.index_select(0, places_K)
    trained, base = weight, None
    up = _up(weight)
    if up is not None:  # an adapter's B is trained in place of the weight
        trained, base = up, weight
    rows, vocabulary = own_vocabulary(weight, ctx), shard_of(weight).shape[0]
    return Head(hidden_NH, trained, labels_NK, *rows, ctx, into, base, smoothing, vocabulary, _cap(weight))


def own_vocabulary(weight: Tensor, ctx: ParallelContext) -> tuple[int, int]:
    """First token id of this rank's rows, and how many of them are tokens rather than padding."""
    shard = shard_of(weight)
    ((start, stop),) = shard.spans(ctx.tensor_rank, ctx.tensor_size)
    return start, max(0, min(stop, shard.shape[0]) - start)


def gather_logits(
    hidden: Tensor,
    weight: Tensor,
    ctx: ParallelContext,
    product: Callable[[Tensor, Tensor], Tensor] = products.linear,
) -> Tensor:
    """[S, B, true vocabulary] on every rank, padding cut off; no autograd. For evaluation and generation.

    `product` of (hidden, weight): hidden @ weight^T, where the weight has another layout.
    """
    with torch.no_grad():
        up, channels = _up(weight), weight.shape[1]
        local = mappings.enter_tensor_region(hidden, ctx)
        if up is None:
            local = product(local, weight)
        else:
            local = products.mm(local[..., :channels], weight.t()) + products.mm(local[..., channels:], up.t())
        cap = _cap(weight)
        if cap is not None:
            local = cap_(local, cap)
        if ctx.tensor_size > 1:
            local = torch.cat(mappings.of_all_ranks(local, ctx.tensor_group), dim=-1)
        logits = local[..., : shard_of(weight).shape[0]]
        if ctx.context_size > 1:
            logits = mappings.all_places(logits, ctx)
        return logits


class _JoinAdapter(torch.autograd.Function):
    """(hidden [rows, B, H], low [rows, B, R], up [V, R]) -> (both first side by side, up)."""

    # One node of the graph, so that hooks on hidden states run before anything of the output layer has a gradient
    # (shards.alias): nothing sees `up` among a model's outputs.
    @staticmethod
    def forward(function: Any, hidden: Tensor, low: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        function.channels = hidden.shape[-1]
        return torch.cat([hidden, low], dim=-1), up.view_as(up)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor, grad_up: Tensor) -> Any:
        return grad[..., : function.channels], grad[..., function.channels :], grad_up


def with_adapter(hidden: Tensor, weight: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return what an output layer with a low-rank adapter passes on, (hidden, weight) to the functions above.

    hidden and weight: as without one. `parts`: the adapter's inner result for hidden, low [..., R], and its B, `up`
    [rows of the weight, R], with every factor. The logits are hidden @ weight^T plus low @ up^T of each part. The
    weight takes no gradient.
    """
    joined, up = _JoinAdapter.apply(
        hidden, torch.cat([low for low, _ in parts], dim=-1), torch.cat([up for _, up in parts], dim=1)
    )
    weight.adapter_up = up  # type: ignore[attr-defined]
    return joined, weight


def capped(weight: Tensor, cap: float | None) -> Tensor:
    """Let the functions above cap the logits of this weight, which an output layer passes on."""
    weight.logits_cap = cap  # type: ignore[attr-defined]
    return weight


def _cap(weight: Tensor) -> float | None:
    return getattr(weight, "logits_cap", None)


def cap_(logits: Tensor, cap: float) -> Tensor:
    """Replace logits z by cap * tanh(z / cap), in place."""
    return logits.div_(cap).tanh_().mul_(cap)


def _up(weight: Tensor) -> Tensor | None:
    return getattr(weight, "adapter_up", None)
