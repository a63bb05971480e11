"""Comparison of a run's learning rate and weight decay with those of the checkpoint that it resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.format import CheckpointError
from megatron.config.options import OptimizerConfig
from megatron.planning.param_schedule import ParamSchedule
from megatron.planning.schedule import Schedule


def resumed_schedule(
    schedule: Schedule, saved: Mapping[str, Any] | None, where: str, options: OptimizerConfig
) -> tuple[Schedule, str | None]:
    """Return the schedule to resume `saved` with, and a line on what differs or could not be compared.

    `saved`: ParamSchedule.to_dict of the checkpoint `where`; None: it has none. As in Megatron, a difference is an
    error unless override_opt_param_scheduler selects this run's numbers, or use_checkpoint_opt_param_scheduler the
    checkpoint's. Raises CheckpointError.
    """
    if saved is None:
        if options.use_checkpoint_opt_param_scheduler:
            raise CheckpointError(
                f"{where} holds no learning-rate schedule for --use-checkpoint-opt-param-scheduler; leave that out, "
                "and give the options of the schedule"
            )
        return schedule, f"WARNING: {where} holds no learning-rate schedule; that of this command applies, unchecked"
    try:
        theirs = ParamSchedule.from_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} has no usable schedule ({error!r}); load another one") from None
    here, there = schedule.params.in_effect(), theirs.in_effect()
    said = "; ".join(
        f"{name}={_said(here.get(name))} here, {_said(there.get(name))} there"
        for name in dict.fromkeys([*here, *there])
        if here.get(name) != there.get(name)
    )
    if options.use_checkpoint_opt_param_scheduler:
        return dataclasses.replace(schedule, restored=theirs), said and f"schedule of {where} applies: {said}"
    if said and not options.override_opt_param_scheduler:
        raise CheckpointError(
            f"{where} was trained with another schedule (lengths in samples): {said}. Give the same options, or pass "
            "--override-opt-param-scheduler for the numbers here, --use-checkpoint-opt-param-scheduler for those there"
        )
    return schedule, said and f"override_opt_param_scheduler: {said}"


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{value[-1][0]:g}" + (f" in {len(value)} slopes" if len(value) > 1 else "") if value else "0"
    return "unused" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
