"""Weights & Biases log, if wandb_project is set: the values of TensorBoard under the same tags.

wandb is optional and imported only here. It takes its account from `wandb login` or WANDB_API_KEY; WANDB_MODE=offline
needs no account, and `wandb sync` uploads the run later.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.options import Config, ConfigError

RUN_ID_FILE = "wandb_run_id.txt"
"""File in the results folder: a resumed run continues the same run of wandb."""

logger = logging.getLogger(__name__)


def check_wandb(config: Config) -> None:
    """Raise ConfigError if wandb is requested and not installed."""
    if config.logging.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            [
                f"wandb_project={config.logging.wandb_project} needs the package wandb, which is not installed; "
                "pip install wandb, or leave it out"
            ]
        )


class WandbLog:
    """Run of wandb. `resumes`: continue that of the results folder, if it has one.

    Raises ConfigError if wandb cannot start.
    """

    def __init__(self, config: Config, *, resumes: bool) -> None:
        options = config.logging
        wandb: Any = importlib.import_module("wandb")
        results = Path(options.results_dir) if options.results_dir is not None else None
        run_id = _run_id(results, resumes=resumes)
        folder = options.wandb_save_dir or options.results_dir
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=options.wandb_project,
                entity=options.wandb_entity,
                name=options.wandb_exp_name or (results.resolve().name if results is not None else None),
                dir=folder,
                id=run_id,
                resume="allow",
                config=config.to_dict(),
            )
            # by our iteration, not wandb's own count of calls, which refuses to go back when a run is resumed
            self._run.define_metric("iteration")
            self._run.define_metric("*", step_metric="iteration")
        except Exception as error:  # wandb's own, and those of the network beneath it
            raise ConfigError(
                [
                    f"wandb_project={options.wandb_project}: wandb cannot start: {error}; run `wandb login`, or set "
                    "WANDB_MODE=offline"
                ]
            ) from error

    def log(self, scalars: Mapping[str, float], iteration: int, consumed_samples: int | None) -> None:
        """Log values. The first error of wandb ends its log, not the run."""
        if self._run is None:
            return
        samples = {} if consumed_samples is None else {"consumed_samples": consumed_samples}
        try:
            self._run.log({**scalars, "iteration": iteration, **samples})
        except Exception as error:  # no error of wandb is a reason to stop training
            logger.warning("wandb: logging ended at iteration %d: %s", iteration, error)
            self._run = None

    def close(self, *, failed: bool) -> None:
        """Wait until everything is sent or written. A second call does nothing."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=1 if failed else 0)
        except Exception as error:  # as in `log`
            logger.warning("wandb did not finish: %s", error)


def _run_id(results: Path | None, *, resumes: bool) -> str:
    """Return the id of the run to continue, or a new one, which is stored for the next start."""
    if results is None:
        return secrets.token_hex(4)
    file = results / RUN_ID_FILE
    if resumes and file.is_file() and (kept := file.read_text(encoding="utf-8").strip()):
        return kept
    run_id = secrets.token_hex(4)
    file.write_text(run_id + "\n", encoding="utf-8")
    return run_id
