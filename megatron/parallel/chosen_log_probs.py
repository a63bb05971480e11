"""Log-probabilities of several chosen tokens at each place: the likeliest ones of a teacher, and a student's of these.

B rows of a microbatch, S places of a row, K chosen tokens; N tokens of the microbatch (S x B), C of them in a chunk.
Like the losses, they hold the logits of one chunk at a time, of a vocabulary cut across tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import Head, InputGradients, head_of, join_rows
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
    rows, places, chosen = ids_BSK.shape
    head = head_of(hidden, weight, ids_BSK.transpose(0, 1).flatten(0, 1), ctx)
    log_probs_NK = _ChosenLogProbs.apply(head.hidden_NH, head.weight, head)
    return log_probs_NK.view(places, rows, chosen).transpose(0, 1)


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
    shape = (-1, hidden.shape[1], count)
    log_probs, ids = (torch.cat(parts).view(shape).transpose(0, 1) for parts in zip(*found, strict=True))
    return log_probs, ids


@torch.no_grad()
def label_scores(
    places_K: Tensor, hidden: Tensor, weight: Tensor, labels_K: Tensor, ctx: ParallelContext
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of a label at each of these places, and whether it is the largest there: [K] each.

    Arguments as those of losses.log_probs_of; labels are tokens.
    """
    head = head_of(hidden, weight, labels_K.unsqueeze(-1), ctx, places_K=places_K)
    buffer, found = head.logits_buffer(), []
    for part in head.slices():
        log_probs, sums = head.log_probs(part, head.logits(part, buffer), to_softmax=False)
        found.append((log_probs, log_probs >= sums.log_probs(sums.peak.unsqueeze(-1))))
    log_probs_K1, is_largest_K1 = (torch.cat(parts) for parts in zip(*found, strict=True))
    return log_probs_K1.squeeze(-1), is_largest_K1.squeeze(-1)


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
