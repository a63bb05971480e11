"""Computations that the first rank starts and all ranks share.

An evaluation is a program of another project: it runs on rank 0 alone, so that nothing depends on all ranks taking the
same way through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from megatron.evaluation.scoring import Continuation, RowGraphs, Score, score
from megatron.generation.generator import BatchSettings, GenerationStatistics, generate
from megatron.generation.model import InferenceModel
from megatron.generation.options import GenerationOptions
from megatron.generation.prompts import tokenizer_of
from megatron.generation.requests import Request
from megatron.generation.text import GeneratedText, GrowingTexts
from megatron.resilience.errors import OtherRankFailed, exit_status

T = TypeVar("T")


class Commands:
    """Computations of all ranks, as rank 0 calls them."""

    def __init__(
        self,
        model: InferenceModel,
        settings: BatchSettings,
        beat: Callable[[], None] = lambda: None,
        graphs: RowGraphs | None = None,
    ) -> None:
        """`settings`: of generation. `graphs`: of scoring. `beat` is called on each rank as they advance."""
        self.model, self._settings, self._beat, self._graphs = model, settings, beat, graphs
        self.statistics = GenerationStatistics()
        self._is_computing = False

    def score(self, requests: Sequence[Continuation]) -> list[Score]:
        """Return `scoring.score` of the requests. Raises ConfigError."""
        found: list[Score] = self._send("score", [[request.context, request.ids] for request in requests])
        return found

    def generate(self, prompts: Sequence[Sequence[int]], options: GenerationOptions, eos_ids: Sequence[int]) -> Any:
        """Return the ids that follow each prompt, in order. Raises ConfigError."""
        return self._send("generate", [list(map(list, prompts)), asdict(options), list(eos_ids)])

    def lead(self, action: Callable[[Commands], T]) -> T | None:
        """Run `action` on rank 0, with the other ranks computing what it needs; return its result there. Collective.

        An error of `action` is raised on rank 0, and OtherRankFailed on the others.
        """
        ctx, fault = self.model.ctx, None
        # rank 0 alone runs foreign code; the others wait for its commands and compute them
        if ctx.rank:
            self._follow()
            return None
        try:
            return action(self)
        except Exception as error:
            # the others end with the status of the cause, not with one of their own
            fault = [str(error), exit_status(error)]
            raise
        finally:
            if not self._is_computing:  # else the others have met the same error
                ctx.broadcast_object(["end", fault])

    def _send(self, name: str, content: Any) -> Any:
        # lists and dicts: between ranks goes plain data alone, never a pickle
        self.model.ctx.broadcast_object([name, content])
        self._beat()
        # no try: if _compute raises, it has raised on all ranks, which then are no longer in _follow
        self._is_computing = True
        result = self._compute(name, content)
        self._is_computing = False
        return result

    def _follow(self) -> None:
        while True:
            name, content = self.model.ctx.broadcast_object(None)
            self._beat()
            if name == "end":
                if content is not None:
                    raise OtherRankFailed(f"rank 0 failed: {content[0]}", content[1])
                return
            self._compute(name, content)

    def _compute(self, name: str, content: Any) -> Any:
        if name == "score":
            continuations = [Continuation(tuple(context), tuple(ids)) for context, ids in content]
            return score(self.model, continuations, on_row=self._beat, graphs=self._graphs)
        prompts, options, eos_ids = content
        return self._generate(prompts, GenerationOptions(**options), eos_ids)

    def _generate(self, prompts: list[list[int]], options: GenerationOptions, eos_ids: list[int]) -> list[list[int]]:
        texts = GrowingTexts(
            options.stop, lambda number: GeneratedText(tokenizer_of(self.model), prompts[number], options)
        )
        # completions come back in order on rank 0, and the other ranks return an empty list that no one reads
        requests = [Request(number, tuple(prompt)) for number, prompt in enumerate(prompts)]
        completions = generate(
            self.model,
            requests,
            options,
            eos_ids=eos_ids,
            settings=self._settings,
            is_finished=texts.reason,
            on_token=lambda *token: self._beat(),
            statistics=self.statistics,
        )
        return [list(completion.ids) for completion in completions]
