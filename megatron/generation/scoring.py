"""Log-likelihoods of given continuations of given contexts, on any layout.

Sequences are packed into rows, where each sees itself alone, so nothing is computed for padding; only tokens of
continuations take the output projection. A context that several continuations share is computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron.config.options import ConfigError
from megatron.data.packing import pack_dataset
from megatron.generation.model import InferenceModel
from megatron.models.transformer import unpack
from megatron.parallel.chosen_log_probs import label_scores

ROW_TOKENS = 2048
"""Tokens of a row, unless a sequence is longer: enough for matrix products to be fast, few enough to fit."""
MOST_SENDS = 2
"""Hidden states that a stage sends before it waits for the next stage."""
SHOWN_FAULTS = 5


@dataclass(frozen=True)
class Continuation:
    """Ids to score after those of a context. Neither is empty."""

    context: tuple[int, ...]
    ids: tuple[int, ...]


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


def score(model: InferenceModel, requests: Sequence[Continuation], *, row_tokens: int = ROW_TOKENS) -> list[Score]:
    """Return the score of each request, in order, on every rank. Collective: every rank passes the same requests.

    Raises ConfigError for requests that the model cannot take.
    """
    if faults := list(_faults(model, requests)):
        more = [f"and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []
        raise ConfigError([*faults[:SHOWN_FAULTS], *more])
    ctx, ends = model.ctx, np.cumsum([len(request.ids) for request in requests], dtype=np.int64)
    # log-probability of each id, and 1 where it is the most probable one
    found = torch.zeros(2, int(ends[-1]) if len(ends) else 0, dtype=torch.float64)
    rows = list(_rows(_documents(requests, row_tokens), row_tokens))[ctx.batch_rank :: ctx.num_batch_ranks]
    for row, (log_probs, largest) in _run(model, rows):
        places = np.concatenate([np.arange(ends[n] - len(requests[n].ids), ends[n]) for n in row.requests])
        found[:, torch.from_numpy(places)] = torch.stack([log_probs.double(), largest.double()]).cpu()
    if ctx.world_size > 1:
        dist.all_reduce(found, group=ctx.control_group)
    logprobs, largest = found.numpy()
    starts = [0, *ends[:-1]]
    return [
        Score(logprobs[begin:end], bool(largest[begin:end].all())) for begin, end in zip(starts, ends, strict=False)
    ]


def _faults(model: InferenceModel, requests: Sequence[Continuation]) -> Iterator[str]:
    vocab_size, positions = model.vocab_size, model.max_positions
    for number, request in enumerate(requests):
        if not request.context or not request.ids:
            empty = "continuation" if request.context else "context"
            yield f"request {number} has an empty {empty}; each needs a token, a context such as the end-of-text one"
            continue
        ids = request.context + request.ids
        if (wrong := next((each for each in ids if not 0 <= each < vocab_size), None)) is not None:
            yield f"request {number} has the id {wrong}, but the model's vocabulary has the ids 0 to {vocab_size - 1}"
        if positions is not None and len(ids) - 1 > positions:
            yield f"request {number} needs {len(ids) - 1} positions, but the model has {positions}; shorten its context"


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
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    starts: NDArray[np.int64]
    places: NDArray[np.int64]
    """Place of the token that predicts each scored id."""
    labels: NDArray[np.int64]

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        tokens, positions, starts = (
            torch.from_numpy(part).unsqueeze(0).to(device) for part in (self.tokens, self.positions, self.starts)
        )
        return tokens, positions, starts


def _documents(requests: Sequence[Continuation], row_tokens: int) -> list[_Document]:
    return [_Document(request.context, [(number, request.ids)]) for number, request in enumerate(requests)]


def _rows(documents: Sequence[_Document], row_tokens: int) -> Iterator[_Row]:
    """Yield rows of at most `row_tokens`, or of the longest document; the longest rows first."""
    if not documents:
        return
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    packs = pack_dataset(lengths, max(row_tokens, int(lengths.max())))
    rows = [[documents[index] for index in packs[pack]] for pack in range(len(packs))]
    for row in sorted(rows, key=lambda row: -sum(map(len, row))):
        yield _row(row)


def _row(documents: Sequence[_Document]) -> _Row:
    tokens: list[int] = []
    positions: list[int] = []
    starts: list[int] = []
    places: list[int] = []
    labels: list[int] = []
    requests: list[int] = []
    for document in documents:
        begin, length = len(tokens), len(document.context)
        tokens += document.context
        positions += range(length)
        for number, ids in document.branches:
            places += [begin + length - 1, *range(len(tokens), len(tokens) + len(ids) - 1)]
            positions += range(length, length + len(ids) - 1)
            tokens += ids[:-1]
            labels += ids
            requests.append(number)
        starts += [begin] * (len(tokens) - begin)
    arrays = [np.array(part, dtype=np.int64) for part in (tokens, positions, starts, places, labels)]
    return _Row(requests, *arrays)


# ---------------------------------------------------------------------------------------------------------------------
# Passes through the stages


def _run(model: InferenceModel, rows: Sequence[_Row]) -> Iterator[tuple[_Row, tuple[Tensor, Tensor]]]:
    """Run the rows through all stages; yield each with its scores on the rank that reports them."""
    ctx = model.ctx
    distance = ctx.world_size // ctx.num_stages
    sends: deque[Any] = deque()
    for row in rows:
        tokens, positions, starts = row.inputs(ctx.device)
        inside = tokens
        if not ctx.is_first_stage:
            shape = (len(row.tokens), 1, model.config.model.hidden_size)
            inside = torch.empty(shape, dtype=model.dtype, device=ctx.device)
            dist.recv(inside, ctx.rank - distance)
        outputs = model.forward_stage((inside, positions, starts))
        if not ctx.is_last_stage:
            hidden = unpack(outputs)[0].contiguous()
            sends.append((dist.isend(hidden, ctx.rank + distance), hidden))
            if len(sends) > MOST_SENDS:
                sends.popleft()[0].wait()
            continue
        places, labels = (torch.from_numpy(part).to(ctx.device) for part in (row.places, row.labels))
        hidden, weight = outputs
        scores = label_scores(places, hidden, weight, labels, ctx)
        if ctx.tensor_rank == 0:
            yield row, scores
    for work, _ in sends:
        work.wait()
