"""Options of a node's agent, and its command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.launch.rendezvous import NodeOptions


@dataclass(frozen=True)
class AgentOptions(NodeOptions):
    """Ranks of a node, and the nodes of their run. Each field is an option of the agent's command line."""

    ranks_per_node: int = 1
    main: str = "megatron.train"
    """Module that each rank runs: its `process` ends the process."""
    is_chat: bool = False
    """Ctrl-C stops an answer: it goes to the ranks, which do not end."""
    ends_with_connection: bool = False
    """Started by ssh: the run ends here when the connection is closed, which the reader of stdout shows."""
    by_mpirun: bool = False
    """Started by mpirun, whose variables give its order among the nodes, and which sends no rank a signal."""
    cores_per_rank: int = 0
    """Cores that each rank is bound to. 0: ranks are not bound."""
    ranks_per_socket: int = 0
    secret_file: str | None = None
    """File in the home folder from which the secret of the run is read, once, if no variable has it."""

    def arguments(self) -> list[str]:
        """Return the command line that `parse` reads."""
        given = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        known = [(name, value) for name, value in given if value != getattr(AgentOptions, name)]
        words = [(f"--{name.replace('_', '-')}", "1" if value is True else str(value)) for name, value in known]
        return [word for pair in words for word in pair]


def parse(arguments: Sequence[str]) -> tuple[AgentOptions, list[str]]:
    """Return the agent's own options, and the flags of megatron.train behind `--`."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m megatron.launch.agent",
        description="Start the ranks of this node. tools/launch.py calls it; megatron/launch/rendezvous.py describes "
        "the options.",
        epilog="After --, the flags of megatron.train.",
        allow_abbrev=False,
    )
    for field in dataclasses.fields(AgentOptions):
        kind = int if "int" in str(field.type) or "bool" in str(field.type) else str
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    options = AgentOptions(**vars(parser.parse_args(arguments[:place])))
    if options.nodes > 1 and options.rendezvous is None:
        parser.error(f"--nodes {options.nodes} needs --rendezvous HOST:PORT, the address of the first node")
    return options, list(arguments[place + 1 :])
