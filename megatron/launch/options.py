"""Options of a launch, declared once: flags of the commands that start ranks, and fields of a request and its plan."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.options.types import STRICT, DeviceName, NonNegative, Positive, TooLong, TrainOn, Whole

Launcher = Literal["pdsh", "mpirun"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
"""Programs that start an agent on each host."""


@dataclass(config=STRICT)
class RankOptions:
    """Ranks and hosts. One rank runs in the process of the command itself."""

    nodes: Positive = 1
    """Nodes."""
    devices_per_node: Positive | None = None
    """Devices of each node. Unset: what the layout needs; of a training on an accelerator, or on other hosts, 8."""
    data_parallel_size: Positive | None = None
    """Copies of the model, which share the data. Unset: what the layout leaves of the devices."""
    hostsfile: str | None = None
    """File with a line `<host> slots=<n>` for each node."""
    master_port: Annotated[Whole, Field(ge=1, le=65535)] | None = None
    """Port of the first node. Unset: 29500 over several nodes, else a free one."""
    dry_run: bool = False
    """Print what would be started, and start nothing."""


@dataclass(config=STRICT)
class LaunchOptions(RankOptions):
    """Ranks, hosts and restarts of a training."""

    device: DeviceName = "auto"
    """Device of the ranks: hpu, cuda, cpu, auto, or your own as package.module:RECORD."""
    launcher: Launcher = "pdsh"
    """Program that starts an agent on each host: pdsh, by DeepSpeed's launcher; mpirun, also on this machine alone."""
    cores_per_rank: NonNegative = 0
    """Cores that each rank is bound to. 0: ranks are not bound."""
    ranks_per_socket: NonNegative = 0
    """Bound ranks on each socket. 0: as many on each."""
    max_restarts: NonNegative = 0
    """Restarts from the newest checkpoint after ranks have failed, without a new checkpoint between."""
    min_nodes: Positive | None = None
    """Nodes that suffice to continue when others are lost. Unset: all of them."""
    spare_hosts: NonNegative = 0
    """Hosts of the hostsfile after those of the run, which replace hosts that are lost or fail twice."""
    rendezvous: str | None = None
    """HOST:PORT of the first node, if a scheduler starts this launcher on each node; instead of a hostsfile."""
    activate: str | None = None
    """Folder whose `activate` every other host sources first."""
    doctor: bool = False
    """Examine the hosts first, as megatron-doctor does, and start nothing where one stands out."""

    def options(self) -> dict[str, Any]:
        """Return these options by name, without what a subclass adds."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(LaunchOptions)}


@dataclass(frozen=True, config=STRICT)
class RowOptions:
    """Fine-tuning: reading of the rows of chats, or of pairs of answers."""

    chat_template: str | None = None
    """Template of the chats: a preset, or a .jinja or .py file. Unset: the tokenizer's own."""
    train_on: TrainOn = "assistant"
    """Tokens of the chats to train."""
    too_long: TooLong = "drop"
    """Treatment of chats of more than seq_length tokens."""
    ignore_columns: tuple[str, ...] = ()
    """Columns of the rows that are left out, though they look like a part of the prompt."""


@dataclass(frozen=True, config=STRICT)
class ChatOptions(RowOptions):
    """Fine-tuning: data that is tokenized before the ranks start."""

    chats: str | None = None
    """JSONL file of chats to tokenize first (of pairs with --task preference), or folder of tokenized ones."""
