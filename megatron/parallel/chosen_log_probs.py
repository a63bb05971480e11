"""Log-probabilities of several chosen tokens at each place: the likeliest ones of a teacher, and a student's of these.

B rows of a microbatch, S places of a row, K chosen tokens; N tokens of the microbatch (S x B), C of them in a chunk.
Like the losses, they hold the logits of one chunk at a time, of a vocabulary cut across tensor-parallel ranks; only
`whole_logits` holds all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel import mappings
from megatron.parallel.context import ParallelContext
from megatron.parallel.layout import Layout
from megatron.parallel.losses import Head, InputGradients, head_of, join_rows, label_log_probs
from megatron.parallel.operators import products
from megatron.parallel.operators.softmax import RowSums, normalise_, row_sums, sum_dtype


class _ChosenLogProbs(torch.autograd.Function):
    """Log-probability of each id, [N, K]. Backward computes the logits of each chunk a second time."""

    @staticmethod
    def forward(function: Any, hidden_NH: Tensor, weight: Tensor, head: Head) -> Tensor:
        buffer = head.logits_buffer()
        results = [head.log_probs(part, head.logits(part, buffer), to_softmax=False) for part in head.slices()]
        peak, total = (torch.cat(parts) for parts in zip(*(sums for _, sums in results), strict=True))
        function.head = head
        function.save_for_backward(hidden_NH, weight, peak, total)
        return torch.cat([log_probs for log_probs, _ in results])

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad_NK: Tensor) -> Any:
        hidden_NH, weight, peak, total = function.saved_tensors
        head: Head = function.head
        buffer = head.logits_buffer()
        # each token's gradients are divided by their size, which 16-bit logits could not hold of a large batch
        sizes_N = grad_NK.abs().sum(-1)
        units_NK = grad_NK / sizes_N.clamp(min=torch.finfo(grad_NK.dtype).tiny).unsqueeze(-1)
        gradients = InputGradients(head, hidden_NH, weight, function.needs_input_grad[:2], sizes_N)
        for part in head.slices():
            logits = head.logits(part, buffer)
            slope = head.cap_slope(logits)
            normalise_(logits, RowSums(peak[part], total[part]))
            _to_gradient_(head, part, logits, units_NK[part])
            if slope is not None:
                logits *= slope
            gradients.add(part, logits, sizes_N[part])
        if gradients.weight is None:
            return gradients.hidden, None, None
        return gradients.hidden, gradients.weight.result(), None


def _to_gradient_(head: Head, part: slice, softmax: Tensor, grad_CK: Tensor) -> None:
    """Replace the softmax of a chunk by the gradient of sum(grad x log-probability) by the logits, in place."""
    if not head.num_rows:
        return
    softmax *= -grad_CK.sum(-1, keepdim=True)
    local, elsewhere = head.local_labels(part)
    rows = torch.arange(len(local), device=local.device).unsqueeze(-1).expand_as(local)
    # an id may be chosen twice: the label beside the likeliest tokens
    softmax.index_put_((rows, local), grad_CK.masked_fill(elsewhere, 0.0).to(softmax.dtype), accumulate=True)


def chosen_log_probs(hidden: Tensor, weight: Tensor, ids_BSK: Tensor, ctx: ParallelContext) -> Tensor:
    """Log-probabilities of K token ids at each place, [B, S, K], float32, equal on all ranks.

    hidden and weight are those of `linear_cross_entropy`. An id outside of the vocabulary has -inf.
    """
    rows, _, chosen = ids_BSK.shape
    head = head_of(hidden, weight, mappings.own_places(ids_BSK.transpose(0, 1), ctx).flatten(0, 1), ctx)
    log_probs_NK = _ChosenLogProbs.apply(head.hidden_NH, head.weight, head)
    return mappings.gather_places(log_probs_NK.view(-1, rows, chosen), ctx).transpose(0, 1)


def whole_logits(hidden: Tensor, weight: Tensor, ctx: ParallelContext) -> Tensor:
    """Logits of all tokens, [B, S, vocabulary] float32, equal on all ranks, with their gradient.

    hidden and weight are those of `linear_cross_entropy`, which holds far less: for losses of anything else.
    """
    head = head_of(hidden, weight, hidden.new_zeros((0, 0), dtype=torch.int64), ctx)
    logits = products.linear(head.hidden_NH[:, -head.weight.shape[1] :], head.weight)
    if head.base is not None:
        logits = logits + products.linear(head.hidden_NH[:, : head.base.shape[1]], head.base)
    if head.cap is not None:
        logits = head.cap * torch.tanh(logits / head.cap)
    logits = mappings.gather_vocabulary(logits.float(), ctx)
    # padded rows are no tokens
    return mappings.gather_places(logits[:, : head.vocabulary].unflatten(0, (-1, hidden.shape[1])), ctx).transpose(0, 1)


@torch.no_grad()
def top_log_probs(hidden: Tensor, weight: Tensor, count: int, ctx: ParallelContext) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids of the `count` likeliest tokens at each place, both [B, S, count].

    In descending order, of equally likely ones the smallest id first. hidden and weight are those of
    `linear_cross_entropy`; the vocabulary has `count` tokens or more.
    """
    head = head_of(hidden, weight, hidden.new_zeros((0, 0), dtype=torch.int64), ctx)
    buffer, found = head.logits_buffer(), []
    for part in head.slices():
        logits = head.logits(part, buffer)
        # the smallest ids of equally likely tokens: the choice does not depend on how the vocabulary is cut
        values, ids = _largest(logits, count)
        ids += head.first_row
        sums = row_sums(logits)
        if ctx.tensor_size > 1:
            sums, parts = join_rows(sums, torch.cat([values, ids.to(values.dtype)], -1), ctx)
            values, ids = (side.transpose(0, 1).flatten(1) for side in parts.split(count, -1))
            values, order = values.sort(dim=-1, descending=True, stable=True)  # ranks are in the order of ids
            values, ids = values[:, :count], ids.gather(-1, order[:, :count]).long()
        found.append((sums.log_probs(values), ids))
    log_probs, ids = (torch.cat(parts).view(-1, hidden.shape[1], count) for parts in zip(*found, strict=True))
    if ctx.context_size > 1:
        log_probs, ids = mappings.all_places(log_probs, ctx), mappings.all_places(ids, ctx)
    return log_probs.transpose(0, 1), ids.transpose(0, 1)


def own_labels(places_K: NDArray[np.int64], shape: Sequence[int], layout: Layout) -> NDArray[np.int64]:
    """Return the numbers in `places_K` of those that a rank of this layout computes; none where it computes all.

    Arguments as those of `log_probs_of`, `shape`: B and S. On the host.
    """
    if layout.context_size == 1:
        return np.zeros(0, np.int64)
    num_rows, length = shape
    is_own_S = np.zeros(length, np.bool_)
    for part in layout.places(length):
        is_own_S[part.start : part.stop] = True
    return np.flatnonzero(is_own_S[places_K // num_rows])


class _PartOfLabels(NamedTuple):
    """The labels of some tokens at places of this rank's rows."""

    places_K: Tensor
    labels_K: Tensor
    """-1: another rank has its place."""

    @classmethod
    def of(cls, places_K: Tensor, labels_K: Tensor, hidden: Tensor, ctx: ParallelContext) -> _PartOfLabels:
        if ctx.context_size == 1:
            return cls(places_K, labels_K)
        length, num_rows = hidden.shape[:2]
        if ctx.sequence_parallel:
            length *= ctx.tensor_size
        own_K = mappings.own_numbers(places_K, num_rows, length, ctx)
        return cls(own_K.clamp(min=0), labels_K.masked_fill(own_K < 0, -1))


def log_probs_of(
    places_K: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels_K: Tensor,
    ctx: ParallelContext,
    own_K: Tensor | None = None,
) -> Tensor:
    """Log-probability of the labels [K] of some tokens, as losses.token_log_probs. The others take no matrix product.

    places: s * B + b of each in whole rows, int64; the caller makes them on the host, so that no device is waited for.
    own: the result of `own_labels`, by which ranks that share rows share the products; None: each has those of all.
    """
    if ctx.context_size == 1:
        own_K = None
    places, labels = places_K, labels_K
    if own_K is not None:
        places, labels = places_K[own_K], labels_K[own_K]
    part = _PartOfLabels.of(places, labels, hidden, ctx)
    found = label_log_probs(head_of(hidden, weight, part.labels_K.unsqueeze(-1), ctx, places_K=part.places_K))
    if own_K is not None:
        found = found.new_zeros(len(labels_K)).index_copy(0, own_K, found)
    # each number is that of one rank, and 0 on the others, so that the sum is exact
    return mappings.sum_over_context(found, ctx)


@torch.no_grad()
def label_scores(
    places_K: Tensor, hidden: Tensor, weight: Tensor, labels_K: Tensor, ctx: ParallelContext
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of a label at each of these places, and whether it is the largest there: [K] each.

    Arguments as those of `log_probs_of`; labels are tokens.
    """
    part = _PartOfLabels.of(places_K, labels_K, hidden, ctx)
    head = head_of(hidden, weight, part.labels_K.unsqueeze(-1), ctx, places_K=part.places_K)
    buffer, found = head.logits_buffer(), []
    for chunk in head.slices():
        log_probs, sums = head.log_probs(chunk, head.logits(chunk, buffer), to_softmax=False)
        found.append((log_probs, log_probs >= sums.log_probs(sums.peak.unsqueeze(-1))))
    log_probs_K, is_largest_K = (torch.cat(parts).squeeze(-1) for parts in zip(*found, strict=True))
    if ctx.context_size == 1:
        return log_probs_K, is_largest_K
    both = torch.stack([log_probs_K, is_largest_K.to(log_probs_K.dtype)]).masked_fill(part.labels_K < 0, 0.0)
    log_probs_K, is_largest = mappings.sum_over_context(both, ctx)
    return log_probs_K, is_largest > 0


def _largest(logits_CV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits of each row and their columns, [C, count]; of equal ones the first columns.

    Where there are fewer columns, the rest is -inf.
    """
    own = min(count, logits_CV.shape[1])
    values, columns = logits_CV.topk(own, -1, sorted=False)
    if own:
        smallest = values.amin(-1, keepdim=True)
        # several columns may share the last place: 16-bit logits often do
        shared = ((logits_CV >= smallest).sum(-1) > own).nonzero().squeeze(-1)
        if len(shared):
            rows, bound = logits_CV[shared], smallest[shared]
            above, equal = rows > bound, rows == bound
            places = equal.cumsum(-1, dtype=torch.int32)
            chosen = above | (equal & (places <= own - above.sum(-1, keepdim=True)))
            columns[shared] = chosen.nonzero()[:, 1].view(-1, own)
    columns = columns.sort(-1).values
    values = logits_CV.gather(-1, columns).to(sum_dtype(logits_CV.dtype))
    values, order = values.sort(dim=-1, descending=True, stable=True)
    missing = (0, count - own)
    return F.pad(values, missing, value=-torch.inf), F.pad(columns.gather(-1, order), missing)
