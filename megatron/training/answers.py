"""Answers generated while a run trains, with its weights of now (`generate_prompts`).

Rank 0 reads the prompts and writes the texts; all ranks generate. Tokens are chosen greedily, so nothing is drawn, and
the training goes on as it would without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.data.indexed import DataError
from megatron.generation.generator import BatchSettings, generate
from megatron.generation.jsonl import ids_of, rows_of
from megatron.generation.model import InferenceModel
from megatron.generation.options import GenerationOptions
from megatron.generation.prompts import PromptEncoder
from megatron.generation.requests import Request
from megatron.observability.metrics import GeneratedAnswer, MetricsLog
from megatron.planning.progress import Progress
from megatron.resilience.errors import raise_on_all_ranks
from megatron.resilience.watchdog import Watchdog
from megatron.training.engine import Engine
from megatron.training.interludes import Interlude, origin_of_run, tokenizer_of_texts
from megatron.weights.opening import tokenizer_of


class Answers(Interlude):
    """Generates for the prompts of a file and logs the answers. Collective in construction and use.

    Raises DataError for a file that cannot be read, a prompt that is wrong, or a run without a tokenizer.
    """

    def __init__(self, engine: Engine, progress: Progress, log: MetricsLog, watchdog: Watchdog) -> None:
        logging = engine.config.logging
        assert logging.generate_prompts is not None
        super().__init__(engine, progress, log, watchdog, logging.generate_interval)
        self._path = Path(logging.generate_prompts)
        self._options = GenerationOptions(max_new_tokens=logging.generate_max_new_tokens)
        self._encoder: PromptEncoder | None = None  # on rank 0
        self._prompts: list[str] = []
        with self._model() as model:
            found = raise_on_all_ranks(engine.ctx, lambda: None if engine.ctx.rank else self._read(model))
        requests, self._eos_ids = engine.ctx.broadcast_object(found)
        self._requests = [Request(number, tuple(ids)) for number, ids in enumerate(requests)]

    def run(self) -> None:
        """Generate and log an answer for each prompt. Collective. Raises ConfigError for a prompt that is too long."""
        iteration, samples = self._progress.iteration, self._progress.consumed_samples
        self._watchdog.phase("generation", iteration)
        found = []
        with self._engine.timers.on_host("generate"), self._model() as model:
            for completion in generate(
                model,
                self._requests,
                self._options,
                eos_ids=self._eos_ids,
                # no graphs: they would be captured at each evaluation, and hold memory that training needs
                settings=BatchSettings(
                    batch_size=min(len(self._requests), BatchSettings().batch_size), use_graphs=False
                ),
                on_token=lambda *token: self._watchdog.beat(),
            ):
                found.append(completion)
        if self._encoder is not None:
            decode = self._encoder.tokenizer.decode
            hidden = self._encoder.tokenizer.special_ids
            texts = [decode([token for token in each.ids if token not in hidden]) for each in found]
            answers = [
                GeneratedAnswer(prompt, text, each.reason, len(each.ids))
                for prompt, text, each in zip(self._prompts, texts, found, strict=True)
            ]
            self._log.log_answers(iteration, samples, answers)

    def _read(self, model: InferenceModel) -> tuple[list[list[int]], list[int]]:
        """Return the ids of the prompts, and those that end an answer. On rank 0."""
        config = self._engine.config
        folder = tokenizer_of(config)
        model.tokenizer = tokenizer_of_texts(config, folder, "generate_prompts")
        model.origin = origin_of_run(folder)
        self._encoder = PromptEncoder(model, tokenizer_model=None if folder is None else str(folder))
        prompts, of_chats = [], False
        as_chat = config.training.task != "pretrain" and self._path.suffix != ".jsonl"
        for where, read in _rows(self._path):
            try:
                row = read()
                prompts.append(list(ids_of(row, self._encoder, as_chat=as_chat)))
            except DataError as error:
                raise DataError(f"generate_prompts: {where}: {error}") from None
            of_chats |= as_chat or row.get("messages") is not None
            self._prompts.append(row.get("prompt") or str(row["messages"][-1].get("content")))
        if not prompts:
            raise DataError(f"generate_prompts={self._path} has no prompts; write one a line")
        return prompts, sorted(self._encoder.final_ids(of_chats=of_chats))


def _rows(path: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the place of each prompt and a function that reads it. Raises DataError."""
    try:
        yield from rows_of(str(path))
    except OSError as error:
        raise DataError(f"generate_prompts={path} cannot be read: {error.strerror}") from None
