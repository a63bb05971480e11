"""Work with the weights of now between the steps of a run: before the first, at intervals, and at the end."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer, tokenizer_of_run
from megatron.evaluation.commands import Commands
from megatron.evaluation.options import EvaluationOptions
from megatron.generation.generator import BatchSettings, generate
from megatron.generation.jsonl import ids_of, rows_of
from megatron.generation.model import InferenceModel, ModelOrigin, training_model
from megatron.generation.options import GenerationOptions
from megatron.generation.prompts import Ends, PromptEncoder
from megatron.generation.requests import Completion, Request
from megatron.generation.text import GeneratedText, GrowingTexts
from megatron.observability.metrics import GeneratedAnswer, MetricsLog
from megatron.options.config import Config
from megatron.options.progress import Progress
from megatron.resilience.errors import raise_on_all_ranks
from megatron.resilience.watchdog import Watchdog
from megatron.tasks.registry import load_task
from megatron.training.engine import Engine
from megatron.weights.loader import tokenizer_of

TOKENIZER_FILE = "tokenizer.json"
GENERATION_CONFIG = "generation_config.json"


class Interlude(ABC):
    """Work that a run does every `interval` steps; None: with each validation. It must not change the training."""

    def __init__(
        self, engine: Engine, progress: Progress, log: MetricsLog, watchdog: Watchdog, interval: int | None
    ) -> None:
        self._engine, self._progress, self._log, self._watchdog = engine, progress, log, watchdog
        self._interval = interval or engine.config.data.eval_interval

    @abstractmethod
    def run(self) -> None:
        """Do the work. Collective."""

    def run_if_due(self) -> None:
        """Run if the interval has passed. Collective."""
        if self._progress.iteration % self._interval == 0:
            self.run()

    def run_at_end(self) -> None:
        """Run unless the last step was due. Collective."""
        if self._progress.iteration % self._interval:
            self.run()

    def _model(self) -> AbstractContextManager[InferenceModel]:
        """Return a context with the model of now, without a copy of its weights."""
        return training_model(self._engine.module, self._engine.config, self._engine.ctx)


def tokenizer_of_texts(config: Config, folder: Path | None, option: str) -> Tokenizer:
    """Return the tokenizer for texts of a run. `folder`: `tokenizer_of(config)`. `option` needs it.

    Raises DataError.
    """
    if folder is not None and (folder / TOKENIZER_FILE).is_file():
        return build_tokenizer("HFTokenizer", str(folder), eod_token=config.data.eod_token)
    if config.data.tokenizer_type is None:
        raise DataError(f"{option} needs a tokenizer; give tokenizer_type and its file")
    return tokenizer_of_run(config)


def origin_of_run(folder: Path | None) -> ModelOrigin | None:
    """Return the files beside the tokenizer of a run. `folder`: `tokenizer_of(config)`."""
    if folder is None:
        return None
    path, content = folder / GENERATION_CONFIG, None
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
    return ModelOrigin(folder, tokenizer=folder, generation_config=content)


class Answers(Interlude):
    """Generates for the prompts of a file and logs the answers. Collective in construction and use.

    Rank 0 reads the prompts and writes the texts; all ranks generate. Tokens are chosen greedily, so nothing is drawn,
    and the training goes on as it would without.

    Raises DataError for a file that cannot be read, a prompt that is wrong, or a run without a tokenizer.
    """

    def __init__(self, engine: Engine, progress: Progress, log: MetricsLog, watchdog: Watchdog) -> None:
        logging = engine.config.logging
        assert logging.generate_prompts is not None
        super().__init__(engine, progress, log, watchdog, logging.generate_interval)
        self._path = Path(logging.generate_prompts)
        # greedy, the default: nothing is drawn, so no random stream of the training moves
        self._options = GenerationOptions(max_new_tokens=logging.generate_max_new_tokens)
        self._encoder: PromptEncoder | None = None  # on rank 0
        self._prompts: list[str] = []
        with self._model() as model:
            found = raise_on_all_ranks(engine.ctx, lambda: None if engine.ctx.rank else self._read(model))
        self._requests: list[Request]
        self._ends: dict[bool, Ends]
        # all ranks run the same batches, so each needs the lengths and the ends of all prompts
        self._requests, self._ends = engine.ctx.broadcast_object(found)
        if any(ends.strings for ends in self._ends.values()):  # on every rank: they end texts on the last stage
            self._tokenizer = raise_on_all_ranks(engine.ctx, self._read_tokenizer)

    def run(self) -> None:
        """Generate and log an answer for each prompt. Collective. Raises ConfigError for a prompt that is too long."""
        iteration, samples = self._progress.iteration, self._progress.consumed_samples
        self._watchdog.phase("generation", iteration)
        with self._engine.timers.on_host("generate"), self._model() as model:
            # a batch has one set of final ids, so texts and chats are generated one after the other
            found = {each.request: each for is_chat in self._ends for each in self._generate(model, is_chat)}
        if self._encoder is None:
            return
        # the ids of turns and of the end of a text are not shown
        decode, hidden = self._encoder.tokenizer.decode, self._encoder.tokenizer.special_ids
        answers = []
        for request, prompt in zip(self._requests, self._prompts, strict=True):
            each = found[request.number]
            text = decode([token for token in each.ids if token not in hidden])
            for end in self._ends[request.is_chat].strings:
                text = text.partition(end)[0]
            answers.append(GeneratedAnswer(prompt, text, each.reason, len(each.ids)))
        self._log.log_answers(iteration, samples, answers)

    def _generate(self, model: InferenceModel, is_chat: bool) -> Iterator[Completion]:
        """Yield the answers to chats, or the texts, on rank 0. Collective."""
        ends, requests = self._ends[is_chat], [each for each in self._requests if each.is_chat == is_chat]
        prompts = {request.number: request.prompt for request in requests}
        options = replace(self._options, stop=ends.strings)
        texts = GrowingTexts(options.stop, lambda number: GeneratedText(self._tokenizer, prompts[number], options))
        # no graphs: they would be captured at each evaluation, and hold memory that training needs
        settings = BatchSettings(batch_size=min(len(requests), BatchSettings().batch_size), use_graphs=False)
        yield from generate(
            model,
            requests,
            self._options,
            eos_ids=ends.ids,
            settings=settings,
            is_finished=texts.reason,
            on_token=lambda *token: self._watchdog.beat(),
        )

    def _read_tokenizer(self) -> Tokenizer:
        config = self._engine.config
        return tokenizer_of_texts(config, tokenizer_of(config), "generate_prompts")

    def _read(self, model: InferenceModel) -> tuple[list[Request], dict[bool, Ends]]:
        """Return the prompts, and what ends a text and an answer, by `is_chat`. On rank 0."""
        config = self._engine.config
        folder = tokenizer_of(config)
        model.tokenizer = self._read_tokenizer()
        model.origin = origin_of_run(folder)
        self._encoder = PromptEncoder(model, tokenizer_model=None if folder is None else str(folder))
        requests = list[Request]()
        # a model of chats has been trained on turns: a plain prompt is a user's first one
        as_chat = load_task(config).data.content != "text" and self._path.suffix != ".jsonl"
        for where, read in _rows(self._path):
            try:
                row = read()
                ids = ids_of(row, self._encoder, as_chat=as_chat)
            except DataError as error:
                raise DataError(f"generate_prompts: {where}: {error}") from None
            is_chat = as_chat or row.get("messages") is not None
            requests.append(Request(len(requests), ids, is_chat=is_chat))
            self._prompts.append(row.get("prompt") or str(row["messages"][-1].get("content")))
        if not requests:
            raise DataError(f"generate_prompts={self._path} has no prompts; write one a line")
        kinds = sorted({request.is_chat for request in requests})
        return requests, {is_chat: self._encoder.ends(of_chats=is_chat) for is_chat in kinds}


def _rows(path: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the place of each prompt and a function that reads it. Raises DataError."""
    try:
        yield from rows_of(str(path))
    except OSError as error:
        raise DataError(f"generate_prompts={path} cannot be read: {error.strerror}") from None


class TaskEvaluation(Interlude):
    """Measures the model by lm-eval's tasks and logs the results. Collective in construction and use.

    lm-eval runs on rank 0; all ranks compute. Raises ConfigError without lm-eval, DataError for a task that cannot be
    read or a run without a tokenizer.
    """

    def __init__(self, engine: Engine, progress: Progress, log: MetricsLog, watchdog: Watchdog) -> None:
        config, logging = engine.config, engine.config.logging
        super().__init__(engine, progress, log, watchdog, logging.lm_eval_interval)
        self._options = EvaluationOptions(
            tasks=logging.lm_eval_tasks, task_path=logging.lm_eval_task_path, limit=logging.lm_eval_limit
        )
        folder = tokenizer_of(config)
        self._origin = origin_of_run(folder)
        # on every rank: stop strings end texts on the last stage
        self._tokenizer = raise_on_all_ranks(engine.ctx, lambda: tokenizer_of_texts(config, folder, "lm_eval_tasks"))
        # lm-eval seeds the generators as soon as its tasks are read
        with kept_random_state():
            raise_on_all_ranks(engine.ctx, lambda: None if engine.ctx.rank else self._check())

    def run(self) -> None:
        """Run the tasks and log their results. Collective. Raises ConfigError or DataError."""
        self._watchdog.phase("lm-eval", self._progress.iteration)
        with self._engine.timers.on_host("lm-eval"), kept_random_state(), self._model() as model:
            model.tokenizer, model.origin = self._tokenizer, self._origin
            # no graphs: they would be captured at each evaluation, and hold memory that training needs
            settings = BatchSettings(batch_size=self._options.batch_size, use_graphs=False)
            found = Commands(model, settings, self._watchdog.beat).lead(self._measure)
        if found is not None:
            self._log.log_tasks(self._progress.iteration, self._progress.consumed_samples, found)

    def _check(self) -> None:
        from megatron.evaluation import harness  # late: it needs lm-eval

        harness.check_tasks(self._options)

    def _measure(self, commands: Commands) -> dict[str, dict[str, float]]:
        from megatron.evaluation import harness

        # none of a bootstrap's processes is forked from one that trains
        return metrics_of(harness.run_tasks(commands, self._options, bootstrap_iters=0))


def metrics_of(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the metrics of each task and group of lm-eval's results: `acc`, or `exact_match,FILTER` of a filter."""
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in values.items()
            # lm-eval's keys are METRIC,FILTER, and METRIC_stderr,FILTER for the deviations; others are names
            if isinstance(value, int | float) and "," in name and "_stderr," not in name
        }
        for task, values in results["results"].items()
    }


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch, which lm-eval seeds."""
    accelerator = get_accelerator()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), accelerator.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        accelerator.set_rng_state(states[3])
