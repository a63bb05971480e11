"""Passes of tokens through this rank's stage: prompts in chunks, then a token of each row at a time.

Shapes: S tokens, B rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from megatron.generation.graphs import PassGraphs
from megatron.generation.model import InferenceModel
from megatron.models.attention import kv_cache
from megatron.models.embedding import unpack
from megatron.options.config import ModelConfig
from megatron.parallel.messages import StageMessages
from megatron.runtime.accelerator import free_memory_bytes

CHUNK = 512
"""Largest number of tokens of a prompt that go through the stages at once."""
TOKENS_AT_ONCE = 4096
"""Largest number of tokens of all prompts in one pass, which bounds its activations."""


@dataclass(frozen=True)
class PromptPass:
    """A chunk of some prompts. `ends`: index among the rows, and place in the chunk, of each prompt that ends here."""

    rows: list[int]
    prompts: list[Sequence[int]]
    begin: int
    width: int

    @property
    def ends(self) -> list[tuple[int, int]]:
        stop = self.begin + self.width
        return [
            (index, len(prompt) - 1 - self.begin)
            for index, prompt in enumerate(self.prompts)
            if self.begin < len(prompt) <= stop
        ]

    @property
    def num_tokens(self) -> int:
        return sum(min(len(prompt) - self.begin, self.width) for prompt in self.prompts)

    def ids(self) -> Tensor:
        """int64 [B, S], 0 behind the end of a prompt."""
        ids = torch.zeros(len(self.rows), self.width, dtype=torch.int64)
        for row, prompt in zip(ids, self.prompts, strict=True):
            part = torch.tensor(prompt[self.begin : self.begin + self.width])
            row[: len(part)] = part
        return ids


def prompt_passes(
    rows: Sequence[int], prompts: Sequence[Sequence[int]], *, few_shapes: bool, first: int = 0
) -> list[PromptPass]:
    """Cut prompts into passes, those of similar length together. `few_shapes`: round widths up, for compiled graphs.

    `first`: number of tokens of every prompt that have been read.
    """
    # the longest first: a prompt drops out of the later chunks of its batch, never joins them
    waiting = deque(sorted(zip(rows, prompts, strict=True), key=lambda pair: -len(pair[1])))
    passes = []
    while waiting:
        # rows of a pass, by the width of its first chunk, which no later one exceeds
        most = max(1, TOKENS_AT_ONCE // min(CHUNK, len(waiting[0][1])))
        batch = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        longest = len(batch[0][1])
        for begin in range(first, longest, CHUNK):
            batch = [pair for pair in batch if len(pair[1]) > begin]
            width = min(CHUNK, longest - begin)
            if few_shapes:
                # the next power of two, from BUCKET to CHUNK: four widths in all, each of which is compiled once
                width = min(CHUNK, max(kv_cache.BUCKET, 1 << (width - 1).bit_length()))
            passes.append(PromptPass([row for row, _ in batch], [prompt for _, prompt in batch], begin, width))
    return passes


class StagePasses:
    """Runs passes on this stage: receives what the stage before sends, computes, and sends on."""

    def __init__(self, model: InferenceModel, cache: kv_cache.KVCache, *, use_graphs: bool) -> None:
        self.model, self.cache = model, cache
        self._ctx = model.ctx
        self._messages = StageMessages(model.ctx, model.config.model.hidden_size, model.dtype)
        self._graphs: PassGraphs | None = None
        if use_graphs:
            self._graphs = PassGraphs(model.ctx)

    @property
    def num_graphs(self) -> int:
        """Number of graphs captured: at most one for each group of rows and each multiple of BUCKET places."""
        if self._graphs is None:
            return 0
        return self._graphs.count

    def prefill(self, chunk: PromptPass) -> Tensor | None:
        """Run a chunk of prompts. Returns the logits of their last tokens, [ends, V] float32, on the last stage."""
        device = self._ctx.device
        rows = torch.tensor(chunk.rows, device=device)
        lengths = torch.tensor([len(prompt) for prompt in chunk.prompts], device=device)
        # a chunk in which no prompt ends only writes keys and values: one token, which is not read, stands for none
        ends = chunk.ends or [(0, 0)]
        tokens = kv_cache.PrefillChunk(self.cache, rows, lengths, chunk.begin, chunk.width, ends)
        inside = self._input(chunk.ids, chunk.width, len(chunk.rows))
        outputs = self.model.forward_stage((inside, tokens))
        if not self._ctx.is_last_stage:
            self._messages.send(unpack(outputs)[0], chunk.width, len(chunk.rows))
            return None
        if not chunk.ends:
            return None
        # hidden [S, B, H] -> [1, ends, H]: the output projection has V columns, and only last tokens need their logits
        hidden, weight = outputs
        if not self.model.drops_unwanted:
            hidden = tokens.wanted(hidden)
        return self.model.logits((hidden, weight))[0].float()

    def decode(self, first_row: int, ids: Sequence[int], positions: Sequence[int]) -> Tensor | None:
        """Run the newest token of each row from `first_row` on. Returns the logits [B, V] float32 on the last stage."""
        # reads as many places as the longest row has: a text that ends shortens the passes after it
        num_places = min(kv_cache.bucketed(max(positions) + 1), self.cache.length)
        # [B, 1]; the other stages receive hidden states of the same pass
        inside = self._input(lambda: torch.tensor(ids).unsqueeze(1), 1, len(ids))
        places = torch.tensor(positions).to(self._ctx.device, non_blocking=True)
        if self._graphs is None:
            outputs = self._decode(inside, places, first_row, num_places)
        else:
            decode = partial(self._decode, first_row=first_row, num_places=num_places)
            # both are constants in the graph: the slice of the cache and the places that attention reads
            outputs = self._graphs.run((first_row, num_places), decode, (inside, places))
        if self._ctx.is_last_stage:
            return outputs
        if self._graphs is not None:
            outputs = outputs.clone()  # the next graph may overwrite it
        self._messages.send(outputs, 1, len(ids))
        return None

    def _decode(self, inside: Tensor, positions: Tensor, first_row: int, num_places: int) -> Tensor:
        """Return logits [B, V] float32 on the last stage, hidden states [1, B, H] on the others."""
        tokens: kv_cache.CachedTokens = kv_cache.DecodeStep(self.cache, first_row, positions, num_places)
        outputs = self.model.forward_stage((inside, tokens))
        if not self._ctx.is_last_stage:
            return unpack(outputs)[0]
        return self.model.logits(outputs)[0].float()

    def end_sends(self) -> None:
        """Wait until what was sent has been received."""
        self._messages.end()

    def _input(self, ids: Callable[[], Tensor], width: int, num_rows: int) -> Tensor:
        """Return the ids [B, S] on this device, or receive the hidden states [S, B, H]."""
        if self._ctx.is_first_stage:
            return ids().to(self._ctx.device, non_blocking=True)
        return self._messages.receive(width, num_rows)


# ---------------------------------------------------------------------------------------------------------------------
# Keys and values of the last text, kept for a next prompt that begins like it: the turns of a chat.

NewPasses = Callable[[int], StagePasses]
"""Return passes over a new cache of at least so many places. Raises ConfigError on all ranks where it does not fit."""


class KeptText:
    """The cache of one row, with the passes over it and their graphs, and the ids whose keys and values it holds.

    Every rank of a replica knows the ids, so all of them begin the next prompt at the same place.
    """

    def __init__(self) -> None:
        self.ids: Sequence[int] = ()
        self._passes: StagePasses | None = None

    def begin(self, prompt: Sequence[int], model: ModelConfig, *, few_shapes: bool) -> int:
        """Return the number of first tokens of a prompt whose keys and values are there, and keep these alone.

        The last token of a prompt is always read: its logits choose the first new token. `few_shapes`: a multiple of
        BUCKET.
        """
        # prompt[:-1]: a prompt that was kept whole still has to run its last token
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, prompt[:-1], strict=False))
        count = sum(1 for _ in same)
        if not model.encodes_alike(len(self.ids), len(prompt)):
            count = 0
        # what is left to read then begins at a multiple of BUCKET, as the passes of a new prompt do
        if few_shapes:
            count -= count % kv_cache.BUCKET
        # what follows in the cache is overwritten before it is read, as a place belongs to its position
        self.ids = prompt[:count]
        return count

    def passes(
        self, model: InferenceModel, layers: Sequence[kv_cache.CachingLayer], length: int, new: NewPasses
    ) -> StagePasses:
        """Return passes over a cache of at least `length` places that holds what is kept. Collective.

        A larger cache has twice the places of the one before, as later turns need still more; without memory for that,
        as many as needed; without memory for the old and the new one, what was kept is dropped.
        """
        old = self._passes
        if old is None or old.cache.length < length:
            wanted = [length]
            if old is not None:
                wanted = self._fitting(model, layers, [max(length, 2 * old.cache.length), length])
                # given up before the new cache is allocated: only together do both not fit
                if not wanted:
                    self.ids, self._passes, old = (), None, None
            self._passes = new((wanted or [length])[0])
            if old is not None:
                self._passes.cache.copy_first_places(old.cache, len(self.ids))
        assert self._passes is not None
        return self._passes

    @staticmethod
    def _fitting(model: InferenceModel, layers: Sequence[kv_cache.CachingLayer], lengths: Sequence[int]) -> list[int]:
        """Return those lengths whose cache fits beside the present one on every rank."""
        free = free_memory_bytes()
        own = [kv_cache.row_bytes(layers, kv_cache.bucketed(length), model.dtype) <= free for length in lengths]
        # memory differs from rank to rank, and all have to choose the same length
        fits = model.ctx.gather_objects(own)
        return [length for length, *each in zip(lengths, *fits, strict=True) if all(each)]
