"""A run, planned and trained, as calls of Python.

It is validated in the caller's process, and trained by the launcher in its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import CheckpointError
from megatron.cli.calls.commands import call_command, listed
from megatron.cli.launch import launch_words, parse_command_line
from megatron.cli.plan import PlannedRun, plan_parser, plan_run, with_chip
from megatron.launch.options import ChatOptions, LaunchOptions
from megatron.launch.plan import LaunchRequest, RefusedError
from megatron.launch.preflight import preflight
from megatron.observability.run_plots import read_run
from megatron.options.config import ConfigError
from megatron.options.dialect import flag_words
from megatron.options.flags import flag
from megatron.options.stored import read_preset
from megatron.parallel.layout import Layout
from megatron.plan.fit import Capacity, capacity, for_device, needed_bytes
from megatron.plan.flops import count_parameters
from megatron.plan.memory import memory_by_stage
from megatron.runtime.result_files import CONFIG_FILE
from megatron.weights.folder_files import newest_export
from megatron.weights.huggingface_config import preset_of
from megatron.weights.model_folder import find_model

OF_LAUNCHER = frozenset(field.name for cls in (LaunchOptions, ChatOptions) for field in dataclasses.fields(cls))


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run; print() shows it whole."""

    text: str
    num_parameters: int
    memory_bytes: tuple[int, ...]
    """Memory that a rank needs at the peak of a step, by pipeline stage."""
    device_memory_bytes: int | None
    """Memory that a rank may use; None: the device is not known."""
    fits: bool | None
    """True if a tenth of that stays free; None: the device is not known."""
    step_seconds: float | None
    """Predicted time of a step; None: without the device's rates."""

    def __str__(self) -> str:
        return self.text


def plan(
    *,
    config: str | Path | list[str] | tuple[str, ...] = (),
    num_devices: int | None = None,
    devices_per_node: int = 8,
    rates: str | Path | None = None,
    **options: Any,
) -> RunPlan:
    """Return the plan of a run: layout, parameters, memory, what fits, and the time of a step where rates are known.

    Starts nothing, and reads no data.

    Args:
        config: presets or YAML files; a later one overrides an earlier one.
        num_devices: devices of the run; the fewest that the layout runs on unless given.
        devices_per_node: devices of a node.
        rates: a file of `megatron-plan --measure`, or a known machine.
        options: flags of megatron-train; `device` may name a chip, such as h100.

    Raises ConfigError with every fault.
    """
    presets = listed(config)
    given: dict[str, Any] = {"config": presets} if presets else {}
    given |= {name: "none" if value is None else value for name, value in options.items()}
    # the command's own flags come from its parser, for their defaults
    of_plan, _ = plan_parser().parse_known_args([])
    of_plan.num_devices, of_plan.devices_per_node = num_devices, devices_per_node
    of_plan.rates = None if rates is None else str(rates)
    # rules, sizes and rates are the command's, so that both print the same plan
    return _summary(plan_run(of_plan, with_chip(flag_words({flag(name): value for name, value in given.items()}))))


def _summary(planned: PlannedRun) -> RunPlan:
    # kernels, and so the memory, are those of the device that is planned for
    config = for_device(planned.config)
    stages = memory_by_stage(config, Layout.of(config.parallel, planned.nodes * planned.devices_per_node))
    needed = tuple(needed_bytes(config, stage) for stage in stages)
    room: Capacity | None = capacity(config, planned.devices_per_node)
    step = planned.times.step
    return RunPlan(
        text=planned.text,
        num_parameters=count_parameters(config),
        memory_bytes=needed,
        device_memory_bytes=None if room is None else room.size_bytes,
        fits=None if room is None else room.is_enough_for(max(needed)),
        step_seconds=None if step is None else step.seconds,
    )


@dataclass(frozen=True)
class TrainedRun:
    """A training in its results folder."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints: for load(), convert(), or a further train()."""
        return self._place("checkpoints", "save")

    @property
    def export(self) -> Path:
        """Newest export of a fine-tuning: a model in Hugging Face's format, or adapters in PEFT's.

        Raises CheckpointError where there is none.
        """
        folder = self._place("hf_format", "save_hf")
        newest = newest_export(folder)
        if newest == folder:
            raise CheckpointError(f"{folder} holds no export; a fine-tuning writes one after each epoch")
        return newest

    def _place(self, name: str, option: str) -> Path:
        """Return a folder in the results; where it is not there, the one that the option has named instead."""
        usual, config = self.folder / name, self.folder / CONFIG_FILE
        # first: results may have been moved, with what they hold
        if usual.is_dir() or not config.is_file():
            return usual
        given = read_preset(str(config))["checkpoint"][option]
        return usual if given is None else Path(given)

    def rows(self, kind: str = "train") -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl of a kind, such as train or valid, in the order of their iterations."""
        # an iteration may have several of a kind, such as valid_set; one that only evaluates trains no step
        rows = [row for row in read_run(self.folder, needs_steps=False) if row["kind"] == kind]
        return sorted(rows, key=lambda row: int(row["iteration"]))


def train(
    results_dir: str | Path,
    *,
    config: str | Path | list[str] | tuple[str, ...] = (),
    model: str | Path | None = None,
    **options: Any,
) -> TrainedRun:
    """Train to the end, and return the run.

    Args:
        results_dir: folder for checkpoints, exports and metrics. Called again with it, a run resumes.
        config: presets or YAML files; a later one overrides an earlier one.
        model: Hugging Face folder to start from, whose config.json gives the model and whose tokenizer is taken.
        options: flags of megatron-launch, such as devices_per_node and chats, and of megatron-train; None unsets one.

    Raises ConfigError with every fault before anything starts, and CommandError where the training fails.
    """
    if "dry_run" in options:
        raise ConfigError(["dry_run starts nothing; call plan()"])
    presets = listed(config)
    given: dict[str, Any] = {"config": presets} if presets else {}
    given["results_dir"] = results_dir
    if model is not None:
        # as HL_MODEL: the sizes come from the folder, so that a recipe without a model suffices
        folder = find_model(str(model), "model")
        given |= preset_of(folder)["model"]
        given |= {"load": str(folder), "tokenizer_type": "HFTokenizer", "tokenizer_model": str(folder)}
    own = {name: value for name, value in options.items() if name in OF_LAUNCHER and value is not None}
    given |= {name: value for name, value in options.items() if name not in OF_LAUNCHER}
    # here, where the faults are objects; the launcher checks once more what may have changed since
    try:
        plan = preflight(_request(own, given))
    except RefusedError as refused:
        raise ConfigError(refused.faults) from None
    call_command("launch", launch_words(plan))
    return TrainedRun(Path(results_dir))


def _request(own: dict[str, Any], of_training: dict[str, Any]) -> LaunchRequest:
    # None is training's word for an option without a value
    named = {flag(name): "none" if value is None else value for name, value in of_training.items()}
    words = flag_words({flag(name): value for name, value in own.items()})
    request, _ = parse_command_line([*words, "--", *flag_words(named)])
    # as the scripts do: checkpoints in the results folder, from which the same call goes on
    request.save = request.resume = True
    return request
