"""Conditions of graphs of a device (CUDA graphs, HPU graphs), known before torch and the device's software are loaded.

Sources: the vendor's page "Run Inference Using HPU Graphs", by which several cards need PT_HPU_ENABLE_LAZY_COLLECTIVES;
habana_frameworks.torch.distributed.hccl, which reads the variable once, when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron.devices import set_backend_variables

DEVICES = ("cuda", "hpu")
"""Devices with graphs."""
LAZY_MODE = "PT_HPU_LAZY_MODE"
LAZY_COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
ON = ("1", "true")
"""Values that switch the bridge's lazy collectives on, in any case."""


def graph_faults(
    option: str, device: str, *, lazy: bool | None, tensor_size: int, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield what keeps a device from running graphs; nothing for a device that is not chosen yet (`auto`).

    `lazy`: the HPU is in lazy mode; None: it will be. `tensor_size`: ranks whose collectives are part of a graph.
    """
    if device == "auto":
        return
    if device not in DEVICES:
        yield f"{option} is for {' and '.join(DEVICES)} devices, not {device}; leave it out"
    elif device == "hpu" and lazy is False:
        yield f"{option} on HPU needs lazy mode; set {LAZY_MODE}=1 (HL_USE_LAZY_MODE=1), or leave {option} out"
    elif device == "hpu" and tensor_size > 1:
        value = environment.get(LAZY_COLLECTIVES, ON[0])
        if value.lower() not in ON:
            yield (
                f"{LAZY_COLLECTIVES}={value} keeps collectives out of HPU graphs, and {option} with "
                f"tensor_model_parallel_size={tensor_size} has some in them; unset it, or leave {option} out"
            )


def graph_variables(device: str, tensor_size: int) -> dict[str, str]:
    """Return the variables of the Gaudi software with which an HPU's graphs may hold collectives; {} elsewhere."""
    return {LAZY_COLLECTIVES: "true"} if device in ("hpu", "auto") and tensor_size > 1 else {}


def set_graph_variables(device: str, tensor_size: int, *, lazy: bool = False) -> None:
    """Set `graph_variables` for this process unless they are set; with `lazy` lazy mode too.

    No effect without the Gaudi software. Call it before `choose_device`, which loads what reads them.
    """
    if device in ("hpu", "auto"):
        set_backend_variables(graph_variables(device, tensor_size) | ({LAZY_MODE: "1"} if lazy else {}))
