"""Work with the weights of now between the steps of a run: before the first, at intervals, and at the end."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.config.options import Config
from megatron.data.indexed import DataError
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer, tokenizer_of_run
from megatron.generation.model import InferenceModel, ModelOrigin, training_model
from megatron.observability.metrics import MetricsLog
from megatron.planning.progress import Progress
from megatron.resilience.watchdog import Watchdog
from megatron.training.engine import Engine

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

    @contextmanager
    def _model(self) -> Iterator[InferenceModel]:
        """Yield the model of now, without a copy of its weights."""
        engine = self._engine
        with training_model(engine.module, engine.config, engine.ctx) as model:
            yield model


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
    path = folder / GENERATION_CONFIG
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return ModelOrigin(folder, tokenizer=folder, generation_config=content)
