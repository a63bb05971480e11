"""The process of a rank that loads a model and works with it. Imports torch only when it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.generation.options import LoadOptions
from megatron.resilience.process import print_once
from megatron.runtime.first_steps import importing
from megatron.weights.model_folder import fetch_weights

if TYPE_CHECKING:
    from megatron.generation.model import InferenceModel


def work_with_model(
    load: LoadOptions, work: Callable[[InferenceModel], None], *, use_graphs: bool | None = None
) -> None:
    """Load the model onto the ranks that a launcher has started, or this one alone, and call `work` on each.

    `use_graphs`: passes are to be replayed as graphs of the device.
    """
    # before the ranks join: none waits for a download of another
    fetch_weights(load.load, lora_base=load.lora_base)
    # within the function: a command that only checks its options must not wait for torch
    from megatron.runtime import accelerator
    from megatron.runtime.devices import set_graph_variables

    # these variables are read when the device's plugin is imported, so they come before everything else
    if use_graphs:
        set_graph_variables(load.device, load.tensor_model_parallel_size, lazy=True)
    with importing():
        device = accelerator.choose_device(load.device)  # before anything imports deepspeed

        import torch.distributed as dist

        from megatron.generation.loading import load_model
        from megatron.generation.saved_model import parallel_options
        from megatron.parallel.context import ParallelContext
        from megatron.resilience.errors import raise_on_all_ranks

    try:
        ctx = ParallelContext.build(parallel_options(load), device)
        work(load_model(load, ctx, print_once))
        raise_on_all_ranks(ctx, lambda: None)  # no rank leaves while another still needs it
    finally:
        # not where joining the group has failed
        if dist.is_initialized():
            dist.destroy_process_group()
