"""Log-likelihoods of given continuations of given contexts, on any layout.

Sequences are packed into rows, where each sees itself alone, so nothing is computed for padding; only tokens of
continuations take the output projection. A context that several continuations share is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron.data.packing import pack_dataset
from megatron.generation.graphs import PassGraphs
from megatron.generation.model import InferenceModel, sequence_faults
from megatron.models.attention.kv_cache import CachedTokens
from megatron.models.embedding import unpack
from megatron.options.config import ConfigError
from megatron.parallel.chosen_log_probs import label_scores
from megatron.parallel.context import ParallelContext
from megatron.parallel.messages import StageMessages

ROW_TOKENS = 2048
"""Tokens of a row, unless a sequence is longer: enough for matrix products to be fast, few enough to fit."""
MOST_GRAPHS = 32
"""Largest number of graphs of an evaluation."""
SHOWN_FAULTS = 5


@dataclass(frozen=True)
class Continuation:
    """Ids to score after those of a context. Neither is empty."""

    context: tuple[int, ...]
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.context) + len(self.ids)


@dataclass(frozen=True)
class Score:
    """Log-likelihood of a continuation."""

    logprobs: NDArray[np.float64]
    """Natural logarithm of the probability of each of its ids."""
    is_greedy: bool
    """Each id is the most probable one in its place."""

    @property
    def total(self) -> float:
        """Log-likelihood of the whole continuation."""
        return float(self.logprobs.sum())


def score(
    model: InferenceModel,
    requests: Sequence[Continuation],
    *,
    row_tokens: int = ROW_TOKENS,
    on_row: Callable[[], None] = lambda: None,
    graphs: RowGraphs | None = None,
) -> list[Score]:
    """Return the score of each request, in order, on every rank. Collective: every rank passes the same requests.

    `on_row` is called before each pass of this rank. `graphs`: replay passes by them, those of earlier calls too.
    Raises ConfigError for requests that the model cannot take.
    """
    if faults := list(_faults(model, requests)):
        more = [f"and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []
        raise ConfigError([*faults[:SHOWN_FAULTS], *more])
    ctx, ends = model.ctx, np.cumsum([len(request.ids) for request in requests], dtype=np.int64)
    # log-probability of each id, and 1 where it is the most probable one
    found = torch.zeros(2, int(ends[-1]) if len(ends) else 0, dtype=torch.float64)
    # the sequences of a dataset, whose contexts have one token, lie alike in all rows if none is shared
    least = 1 if graphs is None else 2
    border, longest = model.config.model.rotary_border, max(map(len, requests), default=0)
    if border is not None and longest > border:
        least = longest + 1  # none is shared: how a context is encoded depends on what follows it
    documents = _documents(requests, row_tokens, least)
    rows = list(_rows(documents, row_tokens))[ctx.batch_rank :: ctx.num_batch_ranks]
    for row, (log_probs, largest) in _run(model, rows, on_row, graphs):
        # each request has its own stretch of `found`; the documents of a row come in another order than the requests
        places = np.concatenate([np.arange(ends[n] - len(requests[n].ids), ends[n]) for n in row.requests])
        found[:, torch.from_numpy(places)] = torch.stack([log_probs, largest.to(log_probs.dtype)]).cpu().double()
    # every number is set by exactly one rank and 0 elsewhere, so the sum is a gathering. On the host: HPUs hold
    # float32 where float64 is requested
    if ctx.world_size > 1:
        dist.all_reduce(found, group=ctx.control_group)
    logprobs, largest = found.numpy()
    starts = [0, *ends[:-1]]
    return [
        Score(logprobs[begin:end], bool(largest[begin:end].all())) for begin, end in zip(starts, ends, strict=False)
    ]


def _faults(model: InferenceModel, requests: Sequence[Continuation]) -> Iterator[str]:
    for number, request in enumerate(requests):
        if not request.context or not request.ids:
            empty = "continuation" if request.context else "context"
            yield f"request {number} has an empty {empty}; each needs a token, a context such as the end-of-text one"
            continue
        ids = request.context + request.ids
        for fault in sequence_faults(model, ids, len(ids) - 1):
            yield f"request {number} {fault}"


# ---------------------------------------------------------------------------------------------------------------------
# Rows


@dataclass
class _Document:
    """A context and the continuations scored after it."""

    context: tuple[int, ...]
    branches: list[tuple[int, tuple[int, ...]]]
    """Number of a request, and the ids of its continuation."""

    def __len__(self) -> int:
        """Tokens to compute; the last id of a continuation predicts nothing that is scored."""
        return len(self.context) + sum(len(ids) - 1 for _, ids in self.branches)


@dataclass
class _Row:
    """Documents one after another, as arrays."""

    requests: list[int]
    """Numbers of the requests, in the order of their labels."""
    spans: list[_Span]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    read: NDArray[np.int64]
    """Places of the tokens that predict scored ids, in order, each once."""
    predictors: NDArray[np.int64]
    """Index in `read` of the token that predicts each scored id."""
    labels: NDArray[np.int64]


class _Span(NamedTuple):
    """Places of a document in its row."""

    begin: int
    context_end: int
    ends: list[int]
    """End of each branch; the first begins at the context's end, each other one at the end of the one before."""


def _documents(requests: Sequence[Continuation], row_tokens: int, least: int = 1) -> list[_Document]:
    """Return the contexts, each with all its continuations, or as many as a row holds.

    Contexts of fewer tokens than `least` are not shared.
    """
    found: list[_Document] = []
    last: dict[tuple[int, ...], _Document] = {}
    for number, request in enumerate(requests):
        # the last document of this context: earlier ones are full
        document = last.get(request.context) if len(request.context) >= least else None
        if document is None or len(document) + len(request.ids) - 1 > row_tokens:
            document = last[request.context] = _Document(request.context, [])
            found.append(document)
        document.branches.append((number, request.ids))
    return found


def _rows(documents: Sequence[_Document], row_tokens: int) -> Iterator[_Row]:
    """Yield rows of at most `row_tokens`, or of the longest document; the longest rows first."""
    if not documents:
        return
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    packs = pack_dataset(lengths, max(row_tokens, int(lengths.max())))
    rows = [[documents[index] for index in packs[pack]] for pack in range(len(packs))]
    # ranks take rows in turn, so in this order those of one turn are of like length
    for row in sorted(rows, key=lambda row: -sum(map(len, row))):
        yield _row(row)


def _row(documents: Sequence[_Document]) -> _Row:
    tokens: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    labels: list[int] = []
    requests: list[int] = []
    spans = []
    for document in documents:
        begin, length = len(tokens), len(document.context)
        tokens += document.context
        positions += range(length)
        span = _Span(begin, len(tokens), [])
        for number, ids in document.branches:
            # the context's last token predicts the first id of each branch, token j of a branch its id j + 1
            places += [span.context_end - 1, *range(len(tokens), len(tokens) + len(ids) - 1)]
            # every branch goes on from the context: they all have the same positions
            positions += range(length, length + len(ids) - 1)
            tokens += ids[:-1]
            labels += ids
            requests.append(number)
            span.ends.append(len(tokens))
        spans.append(span)
    tokens_S, positions_S, places_K, labels_K = (
        np.array(part, dtype=np.int64) for part in (tokens, positions, places, labels)
    )
    read, predictors_K = np.unique(places_K, return_inverse=True)
    return _Row(requests, spans, tokens_S, positions_S, read, predictors_K, labels_K)


class _BranchingTokens(CachedTokens):
    """The tokens of a row: each sees its context and its own branch. Nothing is cached."""

    def __init__(self, spans: list[_Span], num_positions: int, positions_BS: Tensor, read: Tensor) -> None:
        self._spans, self.num_positions, self.positions_BS = spans, num_positions, positions_BS
        self._read = read
        self._angles = {}

    def wanted(self, x: Tensor) -> Tensor:
        """[S, 1, H] -> [read, 1, H]"""
        # of a dataset's row every token is read
        if len(self._read) == len(x):
            return x
        return x[self._read]

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the context of q [S, 1, n, d] over k and v [S, 1, k, d]: [S, 1, n d]."""
        # [S, 1, n, d] -> [1, n, S, d], as the attention kernels take them
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        parts = [part for span in self._spans for part in self._of_span(layer, q, k, v, span)]
        return torch.cat(parts, dim=2).permute(2, 0, 1, 3).flatten(2)

    def _of_span(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, span: _Span) -> Iterator[Tensor]:
        context = slice(span.begin, span.context_end)
        # context and continuation are one causal sequence: one kernel instead of two
        if len(span.ends) == 1:
            whole = slice(span.begin, span.ends[0])
            yield layer.core(q[:, :, whole], k[:, :, whole], v[:, :, whole])
            return
        yield layer.core(q[:, :, context], k[:, :, context], v[:, :, context])
        for begin, end in pairwise([span.context_end, *span.ends]):
            # a continuation of one id has no token to compute: the context predicts it
            if begin < end:
                own = slice(begin, end)
                keys, values = (torch.cat([part[:, :, context], part[:, :, own]], dim=2) for part in (k, v))
                yield layer.core(q[:, :, own], keys, values)


# ---------------------------------------------------------------------------------------------------------------------
# Passes through the stages


class RowGraphs:
    """Forward passes of a stage, replayed as graphs of the device for rows whose layout has come before.

    The rows of a dataset have one layout, those of most tasks as many as there are rows.
    """

    def __init__(self, ctx: ParallelContext) -> None:
        """Raises ConfigError where the device has no graphs."""
        self._graphs = PassGraphs(ctx, most=MOST_GRAPHS)
        self._seen: set[Hashable] = set()

    @property
    def count(self) -> int:
        """Number of graphs captured."""
        return self._graphs.count

    def run(self, layout: Hashable, forward: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        """Return forward(*inputs); the next row may overwrite it."""
        # a capture runs the pass twice more; a layout that comes once is not worth it
        if layout in self._seen:
            return self._graphs.run(layout, forward, inputs)
        self._seen.add(layout)
        return forward(*inputs)


def _run(
    model: InferenceModel, rows: Sequence[_Row], on_row: Callable[[], None], graphs: RowGraphs | None
) -> Iterator[tuple[_Row, tuple[Tensor, Tensor]]]:
    """Run the rows through all stages; yield each with its scores on the rank that reports them."""
    ctx = model.ctx
    messages = StageMessages(ctx, model.config.model.hidden_size, model.dtype)
    for row in rows:
        on_row()
        num_tokens = len(row.tokens)
        if ctx.is_first_stage:
            inside = torch.from_numpy(row.tokens).unsqueeze(0).to(ctx.device)
        else:
            inside = messages.receive(num_tokens, 1)
        positions = torch.from_numpy(row.positions).unsqueeze(0).to(ctx.device)
        read, predictors, labels = (
            torch.from_numpy(part).to(ctx.device) for part in (row.read, row.predictors, row.labels)
        )
        outputs = _forward(model, row, (inside, positions, read), graphs)
        if not ctx.is_last_stage:
            hidden = unpack(outputs)[0]
            hidden = hidden if graphs is None else hidden.clone()  # the next graph may overwrite it
            messages.send(hidden, num_tokens, 1)
            continue
        hidden, weight = outputs
        scores = label_scores(predictors, hidden, weight, labels, ctx)
        if ctx.tensor_rank == 0:
            yield row, scores
    messages.end()


def _forward(model: InferenceModel, row: _Row, inputs: tuple[Tensor, Tensor, Tensor], graphs: RowGraphs | None) -> Any:
    """Return what this stage makes of a row; the last stage has the hidden states of the places that are read alone.

    `inputs`: its tokens [1, S], or the hidden states [S, 1, H] of the stage before; positions [1, S]; places to read.
    """
    num_positions = int(row.positions.max()) + 1

    def forward(inside: Tensor, positions_BS: Tensor, read: Tensor) -> Any:
        tokens = _BranchingTokens(row.spans, num_positions, positions_BS, read)
        outputs = model.forward_stage((inside, tokens))
        if not model.ctx.is_last_stage or model.drops_unwanted:
            return outputs
        hidden, weight = outputs
        return tokens.wanted(hidden), weight

    if graphs is None:
        return forward(*inputs)
    # the spans steer Python's slices and calls, which a graph has fixed; they decide how many places are read
    layout = num_positions, tuple((span.begin, span.context_end, *span.ends) for span in row.spans)
    return graphs.run(layout, forward, inputs)
