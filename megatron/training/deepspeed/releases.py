"""The releases of DeepSpeed that this folder is written for, and all that it takes from inside of them.

Upstream's 0.19.8, and the fork in the Gaudi software (0.16.1 in release 1.21, the newest that is public); what differs
between them is here. Where a comment in training/ says what DeepSpeed does, it is upstream's 0.19.8.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler
from torch import Tensor

from megatron.options.config import ConfigError
from megatron.runtime.device import Device

RELEASES = "0.19.8, or the fork 0.16.1 of the Gaudi software"
NEVER = 2**62
"""More steps than a run has."""

MEMBERS: Mapping[str, Sequence[str]] = {
    # a name that is replaced must be one that DeepSpeed calls: with another it would reduce, clip or log by itself
    "DeepSpeedEngine": (
        *("allreduce_gradients", "get_global_grad_norm", "gradient_predivide_factor", "postscale_gradients"),
        *("is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary", "set_train_batch_size"),
        *("global_steps", "global_samples", "skipped_steps", "micro_steps", "steps_per_print", "timers", "monitor"),
        *("_config", "load_universal_checkpoint"),
    ),
    "PipelineEngine": (
        *("_INSTRUCTION_MAP", "_exec_schedule", "_aggregate_total_loss"),
        *("_send_tensor_meta", "_recv_tensor_meta", "dynamic_shape", "first_output_send", "pipe_buffers"),
        *("pipe_recv_buf", "grad_layer", "grid", "DTYPE_TO_ID", "ID_TO_DTYPE"),
    ),
    "BF16_Optimizer": (
        *("step", "clear_hp_grads", "update_lp_params", "_lazy_init_hp_params_optimizer_state", "clip_grad"),
        *("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition", "fp32_groups_gradients_flat"),
        "_grad_acc_hooks",
    ),
    "DeepSpeedZeroOptimizer": (
        *("step", "_update_scale", "loss_scaler", "clip_grad", "unscale_and_clip_grads", "average_tensor"),
        *("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups", "params_in_partition"),
        "allreduce_bucket",
        *("update_lp_params", "_lazy_init_hp_params_optimizer_state", "_grad_acc_hooks", "averaged_gradients"),
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        *("step", "_update_scale", "loss_scaler", "clip_grad", "unscale_and_clip_grads", "fp16_groups"),
        *("fp32_partitioned_groups_flat", "grad_position", "get_param_id", "persistent_parameters"),
        *("partition_grads", "communication_data_type"),
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
    ),
}
"""Members of DeepSpeed's engines and optimizers that this program reads, calls or replaces, by the class's name."""


def check_members(built: object) -> None:
    """Raise ConfigError if an engine or an optimizer of DeepSpeed's lacks one of its MEMBERS."""
    names = [name for cls in type(built).__mro__ for name in MEMBERS.get(cls.__name__, ())]
    missing = [name for name in names if not hasattr(built, name)]
    if missing:
        raise ConfigError(
            [
                f"DeepSpeed {deepspeed.__version__} has no {', '.join(missing)} in its {type(built).__name__}, which "
                f"this program needs; install deepspeed {RELEASES}"
            ]
        )


def adapted(settings: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's settings as its release takes them.

    The pipeline of the fork divides by steps_per_print, where upstream prints nothing if it is unset.
    """
    return settings if _release() >= (0, 17) else {"steps_per_print": NEVER, **settings}


def prints_steps(engine: Any) -> bool:
    """Return True if the user has set steps_per_print, so that DeepSpeed logs steps itself."""
    return engine.steps_per_print() not in (None, NEVER)


def set_garbage_collection(engine: Any) -> None:
    """Follow `disable_python_gc` of the user's JSON, as deepspeed.initialize does upstream."""
    if hasattr(engine, "_configure_python_gc"):
        engine._configure_python_gc()


def clear_backward_seen_flag(optimizer: Any) -> None:
    """Have upstream's ZeRO begin a step, as its engine does in the forward pass; the fork has nothing to begin."""
    if hasattr(optimizer, "clear_backward_seen_flag"):
        optimizer.clear_backward_seen_flag()


def scaled(loss: Tensor, optimizer: Any) -> Tensor:
    """Return a loss times the loss scale, of which the fork's backward pass takes care otherwise."""
    if hasattr(optimizer, "scale_if_loss"):
        return optimizer.scale_if_loss(loss)  # type: ignore[no-any-return]
    scaler = getattr(optimizer, "loss_scaler", None)
    return loss if scaler is None else loss * scaler.loss_scale


def _release() -> tuple[int, ...]:
    """Return major and minor release."""
    return tuple(int(part) for part in deepspeed.__version__.split(".")[:2])


def sum_norms_as_it_can(device: Device) -> None:
    """Let upstream sum norms of gradients in float32 where there is no float64, of which it knows for Apple's alone."""
    if not device.has_64_bits:
        # on the accelerator's object, which each sum of norms queries
        get_accelerator().is_fp64_supported = lambda: False


def import_late_modules() -> None:
    """Import, once for all ranks, what DeepSpeed imports where it joins them and builds an engine."""
    import_muon_uncompiled()
    late = "comm.mori", "module_inject.auto_ep_layer", "runtime.zero.muon.muon_optimizer"
    for name in (f"deepspeed.{module}" for module in late):
        with contextlib.suppress(ModuleNotFoundError):  # some releases lack it
            importlib.import_module(name)


def import_muon_uncompiled() -> None:
    """Keep torch's compiler out of the start of a run.

    DeepSpeed checks each optimizer for its Muon, and that module passes functions to torch.compile when it is imported:
    2 s of processor time a rank, for an optimizer that is not in use. The fork has none.
    """
    if importlib.util.find_spec("deepspeed.runtime.zero.muon") is None:
        return
    # replaced during this import alone
    compile_function = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compile_function


# ---------------------------------------------------------------------------------------------------------------------
# What DeepSpeed and torch hold of a run that a rank has left, and whose process goes on (--keep-healthy-ranks)


def leave_groups() -> None:
    """Leave all process groups, whichever rank has ended."""
    from deepspeed.utils import groups

    for candidate in gc.get_objects():
        # by its type: some objects warn where they are looked at
        if issubclass(type(candidate), deepspeed.DeepSpeedEngine):
            candidate.destroy()  # before the groups: it looks for its rank
    dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    importlib.reload(groups)  # it remembers groups, release by release others


def free_engines() -> None:
    """Free the engines of a run that has been left. They hang in cycles through C++, which the collector cannot see."""
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    for candidate in gc.get_objects():
        # hooks on the outputs of a step that was cut short; the fork has no such class
        if type(candidate).__name__ == "OutputBackwardHookManager":
            vars(candidate).clear()
    for member in vars(PartitionedParameterCoordinator).values():
        if hasattr(member, "cache_clear"):
            member.cache_clear()
    parameter_offload.FWD_MODULE_STACK.clear()
    importlib.reload(p2p)  # it remembers the last pipeline
    if "torch._dynamo" in sys.modules:
        # layers are compiled again, from what was compiled before: a process may do it a few times only
        torch._dynamo.reset()
    gc.collect()
