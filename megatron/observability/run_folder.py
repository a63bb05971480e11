"""Files of the results folder that describe a run: config.yaml, run.json and summary.txt.

    config.yaml   resolved config of the last start: a preset that repeats the run
    run.json      time, command, hosts and versions of each start, and how it ended
    summary.txt   results of the run and the reason of its end, for people

Each is replaced in one piece. A failed write, as on a full disk, is reported and does not end the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.checkpoint.folders import Run, checkpoint_folders, of_run
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import read_latest
from megatron.data.blend import Drawn, describe_mix
from megatron.data.index.indexed import DataError
from megatron.hub.names import pinned
from megatron.observability.metrics import MetricsLog
from megatron.observability.step_metrics import LossAt, RunTotals
from megatron.options.config import Config
from megatron.options.progress import Progress
from megatron.options.stored import to_yaml
from megatron.parallel.context import ParallelContext
from megatron.plan.campaign.failures import duration
from megatron.resilience import job
from megatron.resilience.errors import is_lost_peer
from megatron.runtime import accelerator
from megatron.runtime.commands import counted
from megatron.runtime.files import IMPORT_ROOT, parse_json, replacing
from megatron.runtime.result_files import CONFIG_FILE, RUN_FILE, SUMMARY_FILE, TRAINED
from megatron.weights.loader import TAG

PROJECT = "megatron-3d"
PACKAGES = ("torch", "deepspeed", "numpy")
GIT_TIMEOUT_S = 10.0


class RunFolder:
    """Writes the first two files on entering, which is collective, and all of them on leaving; on rank 0.

    Without a results_dir no file is written, but the end is printed. `progress` is the run's own, which changes.
    `drawn` returns what so many samples of the run are of each dataset of a mix.
    """

    def __init__(
        self,
        config: Config,
        ctx: ParallelContext,
        log: MetricsLog,
        progress: Progress,
        drawn: Callable[[int], list[Drawn]] = lambda _: [],
    ) -> None:
        self._config, self._ctx, self._log, self._progress, self._drawn = config, ctx, log, progress, drawn
        self._folder = None if config.logging.results_dir is None else Path(config.logging.results_dir)
        self._starts: list[dict[str, Any]] = []
        self.stopped: str | None = None
        """Reason of a requested stop."""

    def __enter__(self) -> RunFolder:
        # collective, so on all ranks and before anything that only rank 0 does
        hosts = self._ctx.gather_objects(socket.gethostname())
        if self._ctx.rank == 0:
            # appended: a restarted run keeps the history of its attempts
            self._starts = self._earlier_starts()
            self._starts.append(_start(self._config, self._ctx, hosts, self._progress))
            self._write(CONFIG_FILE, to_yaml(self._config))
            self._write_starts()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason, outcome = self.stopped or TRAINED, "stopped" if self.stopped else "done"
        if error is not None and is_lost_peer(error):
            reason, outcome = "another rank was lost", "failed"  # the transport's message names a socket
        elif kind is not None:
            # one line of run.json and of the summary
            text = " ".join(str(error).split())
            reason, outcome = ": ".join(filter(None, [kind.__name__, text])), "failed"
        self.end(reason, outcome)

    def end(self, reason: str, outcome: str = "failed") -> None:
        """Write and print the reason of the end, and the summary. Only the first call has an effect.

        `outcome`: done, stopped (by a signal, a limit or validations), or failed.

        Not collective: where a rank failed, the others may never get here.
        """
        if self._ctx.rank != 0 or "ended" in self._starts[-1]:
            return
        # by its presence a second call is known, and a start that was killed by its absence
        self._starts[-1]["ended"] = {
            "time": _now(),
            "reason": reason,
            "outcome": outcome,
            "iteration": self._progress.iteration,
            "consumed_samples": self._progress.consumed_samples,
            # since the start of the job: users wait for imports, the build and restarts too
            "wall_s": round(time.monotonic() - job.began_s(), 3),
            **self._mix(),
            **self._best(),
        }
        self._write_starts()
        tokens = self._log.tokens_of(self._progress.consumed_samples)
        summary = Summary(self._config, self._starts, self._progress, tokens, self._log.totals)
        self._write(SUMMARY_FILE, summary.text())
        self._log.message(summary.core())

    def _mix(self) -> dict[str, Any]:
        """Return what was read of each dataset of a mix; nothing where its files are gone."""
        # the files of a dataset may be gone at the end of a run
        with contextlib.suppress(DataError):
            if mix := self._drawn(self._progress.consumed_samples):
                return {"mix": [vars(each) for each in mix]}
        return {}

    def _best(self) -> dict[str, Any]:
        """Return the best validation, where a run looks for it, and the checkpoint that is kept of it."""
        best, config = self._progress.best, self._config
        keeps = config.checkpoint.keep_best and config.checkpoint.save is not None
        if best.value is None or not (keeps or config.training.early_stopping_patience):
            return {}
        row = {"metric": config.training.best_metric, "value": best.value, "iteration": best.iteration}
        if keeps:
            row["checkpoint"] = f"{TAG}{best.iteration}"
        return {"best": row}

    def _earlier_starts(self) -> list[dict[str, Any]]:
        """Return the starts in run.json for a run that resumes, or restarts before its first checkpoint.

        Otherwise, or if it is damaged, the file is renamed.
        """
        if self._folder is None:
            return []
        path = self._folder / RUN_FILE
        if not path.exists():
            return []
        try:
            starts: Any = parse_json(path.read_text(encoding="utf-8"))["starts"]
            if all(isinstance(start, dict) for start in starts) and self._continues(starts):
                return list(starts)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._log.message(f"WARNING: {path} cannot be read and is renamed: {error!r}")
        try:
            # kept under another name: another run's history, or one that can be repaired by hand
            path.replace(path.with_name(f"run.{int(time.time())}.json"))
        except OSError as error:
            self._log.message(f"WARNING: {path} cannot be renamed and is replaced: {error}")
        return []

    def _continues(self, starts: list[dict[str, Any]]) -> bool:
        if self._progress.iteration > 0:
            return True
        # killed before the first checkpoint, and started again by its agents: the same job
        return bool(starts) and job.restarts() > 0 and starts[-1].get("job") == job.identity()

    def _write_starts(self) -> None:
        self._write(RUN_FILE, json.dumps({"starts": self._starts}, indent=2, ensure_ascii=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        if self._folder is None:
            return
        try:
            with replacing(self._folder / name, partial_name=f"{name}.new") as file:
                file.write(text.encode())
        except OSError as error:
            self._log.message(f"WARNING: {self._folder / name} was not written: {error}")


class Summary:
    """Results of a run, from its starts, its counters and its rows."""

    def __init__(
        self, config: Config, starts: list[dict[str, Any]], progress: Progress, consumed_tokens: int, totals: RunTotals
    ) -> None:
        self._config, self._starts, self._progress, self._totals = config, starts, progress, totals
        self._tokens = consumed_tokens

    def text(self) -> str:
        """Return all of it, a name and a value a line."""
        start = self._starts[-1]
        layout, hosts = start["layout"], start["hosts"]
        sizes = ", ".join(f"{name} {size}" for name, size in layout.items())
        lines = [
            ("ended", f"{start['ended']['time']}, {self._reason()}"),
            *self._progress_lines(),
            *(("mix", line) for line in describe_mix([Drawn(**each) for each in start["ended"].get("mix", [])])),
            *self._loss_lines(),
            *self._best_lines(),
            *self._speed_lines(),
            ("peak memory", self._memory()),
            ("checkpoints", self._checkpoints()),
            ("layout", f"{sizes}; {counted(start['world_size'], 'rank')} on {counted(len(hosts), 'host')}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in start["versions"].items())),
            ("code", _project_text(start["project"])),
        ]
        width = max(len(name) for name, _ in lines) + 2
        return "".join(f"{name.ljust(width)}{value}\n" for name, value in lines)

    def core(self) -> str:
        """Return the main lines, for the end of the log."""
        lines = [
            ("run ended", self._reason()),
            *self._progress_lines()[:1],
            *self._loss_lines(),
            *self._best_lines(),
            *self._speed_lines(),
            ("peak memory", self._memory()),
        ]
        return "\n".join(f" {name}: {value}" for name, value in lines)

    def _reason(self) -> str:
        return str(self._starts[-1]["ended"]["reason"])

    def _progress_lines(self) -> list[tuple[str, str]]:
        progress, start = self._progress, self._starts[-1]
        jobs = _last_of_jobs(self._starts)
        wall_time = f"{_duration(start['ended']['wall_s'])} in this job"
        if len(jobs) > 1:
            # a killed start has no end, so its time is not known
            known_s = [each["ended"]["wall_s"] for each in jobs if "ended" in each]
            wall_time += f", {_duration(sum(known_s))} in {counted(len(known_s), 'job')}"
            if lost := len(jobs) - len(known_s):
                wall_time += f" and {lost} more without a recorded end"
        since, restarts = "", "none"
        if len(self._starts) > 1:
            since = f" ({progress.iteration - start['resumed_iteration']} of them in this start)"
            # the last start of a job has the number of its restarts
            by_agents = sum(each.get("restart", 0) for each in jobs)
            restarts = f"{by_agents} by agents, {counted(len(jobs) - 1, 'new job')}"
        return [
            (
                "iterations",
                f"{progress.iteration:,}{since}, {progress.consumed_samples:,} samples, {self._tokens:,} tokens; "
                f"{progress.skipped_iterations:,} skipped, {progress.nan_iterations:,} NaN",
            ),
            ("wall time", wall_time),
            ("training", f"{_duration(self._totals.training_s)} in the steps that were logged, of all starts"),
            ("restarts", restarts),
        ]

    def _loss_lines(self) -> list[tuple[str, str]]:
        names = {"train": "training loss", "valid": "validation loss", "test": "test loss"}
        return [
            (name, f"{_loss(self._totals.last[kind])}, lowest {_loss(self._totals.lowest[kind])}")
            for kind, name in names.items()
            if kind in self._totals.last
        ]

    def _best_lines(self) -> list[tuple[str, str]]:
        best = self._starts[-1]["ended"].get("best")
        if best is None:
            return []
        kept = f", kept as {best['checkpoint']}" if "checkpoint" in best else ""
        return [("best", f"{best['metric']} {best['value']:.6g} at iteration {best['iteration']:,}{kept}")]

    def _speed_lines(self) -> list[tuple[str, str]]:
        totals = self._totals
        if totals.tokens_per_second is None:
            return []
        speed = f"{totals.tokens_per_second:,.0f} tokens/s, {totals.tflops_per_device:.4g} TFLOP/s/device"
        if totals.mfu is not None:
            speed += f", MFU {totals.mfu:.1%}"
        return [("throughput", speed), *self._prediction_lines()]

    def _prediction_lines(self) -> list[tuple[str, str]]:
        seconds, ratio = self._totals.predicted_s, self._totals.over_predicted
        if seconds is None or ratio is None:
            return []
        return [("prediction", f"{duration(seconds)} a step, at last; steps took {ratio:.2f} x the predicted time")]

    def _memory(self) -> str:
        peak_gb, total_gb = self._totals.peak_memory_gb, self._totals.total_memory_gb
        if peak_gb is None:
            return "not recorded"
        total = f" of {total_gb:.2f}" if total_gb else ""
        return f"{peak_gb:.2f} GB{total}, on the fullest rank"

    def _checkpoints(self) -> str:
        save = self._config.checkpoint.save
        if save is None:
            return "none are saved"
        tags = []
        with contextlib.suppress(OSError, CheckpointError):
            run = read_latest(Path(save))[1] or Run()
            # those of other runs in the same folder are not counted
            folders = of_run(run, checkpoint_folders(Path(save)), with_ancestors=False)
            tags = [path.name for path in folders if not path.name.startswith(".")]
        if not tags:
            return f"none in {save}"
        return f"{len(tags)} in {save}, newest {tags[0]}"


def _start(config: Config, ctx: ParallelContext, hosts: list[str], progress: Progress) -> dict[str, Any]:
    return {
        "started": _now(),
        "resumed_iteration": progress.iteration,
        "job": job.identity(),
        "restart": job.restarts(),
        "command": job.command(),
        "folder": os.getcwd(),
        "world_size": ctx.world_size,
        "hosts": {host: [rank for rank, each in enumerate(hosts) if each == host] for host in dict.fromkeys(hosts)},
        "layout": {
            "tensor": ctx.tensor_size,
            "context": ctx.context_size,
            "pipeline": ctx.num_stages,
            "data": ctx.num_batch_ranks,
            "zero_stage": config.effective_zero_stage,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in PACKAGES},
            **accelerator.current().software(),
        },
        "project": _project(),
        **_on_hub(config),
    }


def _on_hub(config: Config) -> dict[str, Any]:
    """Return the names on the hub, with their commits, of what the start was given; nothing where it has none."""
    given = {
        "load": config.checkpoint.load,
        "lora_base": config.lora.lora_base,
        "tokenizer_model": config.data.tokenizer_model,
    }
    names = {option: name for option, folder in given.items() if folder is not None and (name := pinned(folder))}
    return {"hub": names} if names else {}


def _last_of_jobs(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last start of each job; one without an agent is a job by itself."""
    last = []
    for start, following in zip(starts, [*starts[1:], {}], strict=True):
        if not start.get("job") or start["job"] != following.get("job"):
            last.append(start)
    return last


def _project() -> dict[str, Any]:
    """Return version and commit of this code; None where they are unknown, as without git or outside of a checkout."""
    project: dict[str, Any] = dict.fromkeys(("version", "commit", "dirty"))
    with contextlib.suppress(metadata.PackageNotFoundError):
        project["version"] = metadata.version(PROJECT)
    answer = _git("rev-parse", "--show-toplevel", "HEAD")
    # a copy inside another repository must not pass for that one
    if answer is not None and len(answer) == 2 and Path(answer[0]).resolve() == IMPORT_ROOT:
        project["commit"] = answer[1]
        changes = _git("status", "--porcelain", "--untracked-files=no")
        if changes is not None:
            project["dirty"] = bool(changes)
    return project


def _git(*arguments: str) -> list[str] | None:
    """Return the output lines of a git command; None if it fails."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(IMPORT_ROOT), *arguments],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # a status otherwise writes to the repository
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    return answer.stdout.splitlines()


def _project_text(project: dict[str, Any]) -> str:
    version, commit = project["version"] or "not installed", project["commit"] or "commit unknown"
    changes = ", with changes" if project["dirty"] else ""
    return f"{PROJECT} {version}, {commit}{changes}"


def _loss(best: LossAt) -> str:
    return f"{best.loss:.4f} at iteration {best.iteration:,}"


def _duration(seconds: float) -> str:
    """Return a duration such as 1 day, 2:03:04."""
    return str(timedelta(seconds=round(seconds)))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
