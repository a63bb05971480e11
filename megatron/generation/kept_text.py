"""Keys and values of the last text, kept for a next prompt that begins like it: the turns of a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from megatron.accelerator import free_memory_bytes
from megatron.generation.model import InferenceModel
from megatron.generation.passes import StagePasses
from megatron.models.kv_cache import BUCKET, CachingLayer, bucketed, row_bytes

NewPasses = Callable[[int], StagePasses]
"""Return passes over a new cache of at least so many places. Raises ConfigError on all ranks where it does not fit."""


class KeptText:
    """The cache of one row, with the passes over it and their graphs, and the ids whose keys and values it holds.

    Every rank of a replica knows the ids, so all of them begin the next prompt at the same place.
    """

    def __init__(self) -> None:
        self.ids: Sequence[int] = ()
        self._passes: StagePasses | None = None

    def begin(self, prompt: Sequence[int], *, few_shapes: bool) -> int:
        """Return the number of first tokens of a prompt whose keys and values are there, and keep these alone.

        The last token of a prompt is always read: its logits choose the first new token. `few_shapes`: a multiple of
        BUCKET.
        """
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, prompt[:-1], strict=False))
        count = sum(1 for _ in same)
        if few_shapes:
            count -= count % BUCKET
        self.ids = prompt[:count]
        return count

    def passes(self, model: InferenceModel, layers: Sequence[CachingLayer], length: int, new: NewPasses) -> StagePasses:
        """Return passes over a cache of at least `length` places that holds what is kept. Collective.

        A larger cache has twice the places of the one before, as later turns need still more; without memory for that,
        as many as needed; without memory for the old and the new one, what was kept is dropped.
        """
        old = self._passes
        if old is None or old.cache.length < length:
            wanted = [length]
            if old is not None:
                wanted = self._fitting(model, layers, [max(length, 2 * old.cache.length), length])
                if not wanted:
                    self.ids, self._passes, old = (), None, None
            self._passes = new((wanted or [length])[0])
            if old is not None:
                self._passes.cache.copy_first_places(old.cache, len(self.ids))
        assert self._passes is not None
        return self._passes

    @staticmethod
    def _fitting(model: InferenceModel, layers: Sequence[CachingLayer], lengths: Sequence[int]) -> list[int]:
        """Return those lengths whose cache fits beside the present one on every rank."""
        free = free_memory_bytes()
        own = [row_bytes(layers, bucketed(length), model.dtype) <= free for length in lengths]
        fits = model.ctx.gather_objects(own)
        return [length for length, *each in zip(lengths, *fits, strict=True) if all(each)]
