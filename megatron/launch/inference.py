"""Launch of commands that load a model without training it: on this machine, or over the hosts of a hostsfile.

Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from megatron.generation.options import LoadOptions
from megatron.generation.saved_model import layout_faults
from megatron.launch import checks
from megatron.launch.child_processes import threads_per_rank
from megatron.launch.dialects.hl_help import variable_lines
from megatron.launch.dialects.hl_requests import inference_request
from megatron.launch.dialects.hl_variables import Script, path_of, variables_of
from megatron.launch.host_environment import check_variables, sent_variables
from megatron.launch.options import RankOptions
from megatron.launch.plan import LaunchPlan, LaunchRequest, RefusedError, check_addresses, find_hosts
from megatron.launch.preflight import check_environment, run_id
from megatron.options.config import Config, ConfigError
from megatron.options.flags import add_flags, dashed, read_known_flags
from megatron.parallel.layout import Layout
from megatron.resilience.process import leave, status_of
from megatron.runtime import devices
from megatron.runtime.commands import DONE, REFUSED, UserError, command_name, for_stderr
from megatron.runtime.device_hpu import LAZY_MODE
from megatron.runtime.devices import detect_device
from megatron.weights.model_folder import names_on_hub


class Command(Protocol):
    """Content of the flags of a command."""

    @property
    def load(self) -> LoadOptions: ...

    @property
    def use_graphs(self) -> bool | None:
        """Passes are replayed as graphs of the device."""
        ...


C = TypeVar("C", bound=Command)


@dataclass(frozen=True)
class InferenceCommand(Generic[C]):
    """A command that runs a model, as `megatron-NAME` and by scripts/NAME.sh."""

    name: Script
    build_parser: Callable[[str], argparse.ArgumentParser]
    """Returns the parser of the flags, without those of the launch, for a name of the program."""
    read: Callable[[Sequence[str]], tuple[C, list[str]]]
    """Returns what the flags say, and notes. Raises ConfigError with every fault."""
    check: Callable[[C, LaunchRequest, LaunchPlan], Iterable[str]] = lambda command, request, plan: ()
    """Describes what is wrong with the command on these ranks."""
    is_chat: Callable[[C], bool] = lambda command: False
    """The command reads the terminal."""

    @property
    def main(self) -> str:
        """Module that each rank runs."""
        return f"megatron.{self.name}"

    def run(self, argv: Sequence[str] | None) -> int:
        """Run the command on its ranks; return the exit status.

        A single rank runs in this process, as does one that torchrun or another launcher has started; the agent that
        starts training starts several. `argv` None: the process's own, which then ends here.
        """
        arguments = list(argv or ())
        if argv is None:
            arguments = sys.argv[1:]
        if "--help" in arguments or "-h" in arguments:
            self._print_help(with_variables="--variables" in arguments)
            return DONE
        # torchrun, or another launcher, has started this process as a rank
        if "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return self._run_here(arguments, ends=argv is None)
        try:
            plan = self._plan(arguments)
        except RefusedError as error:
            return refused(error.faults)
        if plan.dry_run:
            print(plan_text(plan), end="")
            return DONE
        for note in plan.notes:
            print(for_stderr(f"note: {note}"), file=sys.stderr)
        if plan.nodes * plan.devices_per_node == 1 and not plan.hosts:
            os.environ.update(plan.environment)
            return self._run_here(plan.train_flags, ends=argv is None)
        from megatron.launch.agents.hosts import launch  # late: one rank needs none of it

        if not plan.hosts:  # ranks of this machine may read the terminal, and have no input of their own
            plan.environment = {**plan.environment, "MEGATRON_TERMINAL": f"/proc/{os.getpid()}/fd/0"}
        return launch(plan)

    def _plan(self, arguments: Sequence[str]) -> LaunchPlan:
        """Return the plan of a command line. Raises RefusedError with every fault."""
        own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        add_launch_flags(own, self.name)
        # what is left is the command's own, which its ranks read once more
        namespace, flags = own.parse_known_args(dashed(arguments))
        request = launch_request(namespace, self.name, os.environ)
        flags = [*request.train_flags, *flags]
        try:
            command, _ = self.read(flags)  # the first rank gives the notes
        except ConfigError as error:
            raise RefusedError([*request.faults, *error.faults]) from None
        plan = plan_ranks(self.main, request, flags, command, is_chat=self.is_chat(command))
        faults = [*request.faults, *self.check(command, request, plan)]
        if faults:
            raise RefusedError(faults)
        return plan

    def _print_help(self, *, with_variables: bool) -> None:
        parser = self.build_parser(command_name(self.name))
        add_launch_flags(parser, self.name)
        print(parser.format_help(), end="")
        if with_variables:
            print(f"\nvariables of {path_of(self.name)}, which flags override:")
            print(variable_lines(variables_of(self.name)), end="")

    def _run_here(self, flags: Sequence[str], *, ends: bool) -> int:
        """Run a rank in this process."""
        status = status_of(importlib.import_module(self.main).main, flags)
        if ends:
            return leave(status)
        return status


def plan_text(plan: LaunchPlan) -> str:
    """Return the text of a dry run."""
    where = ", ".join(host.name for host in plan.hosts) or "this machine"
    command = shlex.join([sys.executable, "-m", plan.main, *plan.train_flags])
    return f"{plan.nodes * plan.devices_per_node} ranks of {plan.main} on {where}; nothing was started\n{command}\n"


def refused(faults: Sequence[str]) -> int:
    """Print all faults, each once; return the exit status."""
    print(for_stderr(RefusedError(faults).text()), file=sys.stderr)
    return REFUSED


def add_launch_flags(parser: argparse.ArgumentParser, script: Script) -> None:
    """Add the flags that say where ranks run, and `--variables`, by which the script passes its HL_* variables."""
    group = parser.add_argument_group("launch", RankOptions.__doc__)
    group.add_argument("--variables", choices=(script,), help=argparse.SUPPRESS)
    add_flags(group, RankOptions)


def launch_request(namespace: argparse.Namespace, script: Script, environment: Mapping[str, str]) -> LaunchRequest:
    """Return what the launch flags and, with --variables, the HL_* variables request; flags come first."""
    request = LaunchRequest()
    if namespace.variables:
        request = inference_request(environment, script)
    faults: list[str] = []
    options, unread = read_known_flags(RankOptions, namespace, faults)
    for field in dataclasses.fields(RankOptions):
        if field.name not in unread and getattr(namespace, field.name) is not None:
            setattr(request, field.name, getattr(options, field.name))
    request.faults += faults
    return request


def plan_ranks(
    main: str, request: LaunchRequest, flags: Sequence[str], command: Command, *, is_chat: bool
) -> LaunchPlan:
    """Return the plan of the ranks that run the module `main`. Problems are added to request.faults."""
    load, device = command.load, command.load.device
    if device == "auto":
        device = request.device
    if not devices.is_device(device):
        device = detect_device(allow_hpu=device != "no-hpu")
    ranks = Layout.of(load).model_size * (request.data_parallel_size or 1)
    # rounded up, as many on each node
    num_devices = request.devices_per_node or -(-ranks // request.nodes)
    world_size = request.nodes * num_devices
    if request.data_parallel_size is None:  # all devices are used
        request.data_parallel_size = Layout.of(load, world_size).num_batch_ranks
    # behind the sizes, which say how many devices each host must have
    hosts, faults_of_hosts = find_hosts(request, num_devices)
    # rules of the layout make sense for sizes that fill the devices
    if request.data_parallel_size * Layout.of(load).model_size == world_size:
        request.faults += layout_faults(load, world_size, device)
    else:
        request.faults += checks.check_layout(request, load, num_devices)
    request.faults += [*faults_of_hosts, *check_addresses(hosts, request.hostsfile), *check_environment(request)]
    if hosts:
        request.faults += checks.check_remote([*flags, *request.environment.values()], request)
        request.faults += check_variables(device, num_devices)
    else:
        request.faults += checks.check_local_devices(device, num_devices)
        request.faults += checks.check_plugin(device, request.activate)
        request.faults += checks.check_precision(device, load.precision)
    if is_chat and hosts:
        request.faults.append("--chat needs its ranks on this machine; leave the hostsfile out")
    environment = _rank_environment(request, command, device, num_devices)
    models: tuple[str, ...] = ()
    try:
        models = names_on_hub(load.load, None, load.lora_base)
    except UserError as error:
        request.faults.append(str(error))
    if hosts:
        environment = sent_variables(os.environ) | environment
    return LaunchPlan(
        **request.options() | {"device": device, "devices_per_node": num_devices, "min_nodes": request.nodes},
        # no training: what runs is in the flags
        config=Config(),
        # chosen here, so that no rank detects another one
        # with the commits that were resolved here, so that all hosts have one model
        train_flags=(*flags, "--device", device, *load.pinned_flags(flags)),
        hosts=tuple(hosts),
        environment=environment,
        warnings=(),
        notes=tuple(request.notes),
        run_id=run_id(request, flags),
        models=models,
        main=main,
        is_chat=is_chat,
    )


def _rank_environment(request: LaunchRequest, command: Command, device: str, num_devices: int) -> dict[str, str]:
    """Return the variables of the ranks. What keeps the device from replaying graphs is added to request.faults."""
    environment = dict(request.environment) | devices.rank_variables(device)
    record = devices.find_device(device)
    if record.is_host:
        environment.setdefault("OMP_NUM_THREADS", threads_per_rank(num_devices))
    if command.use_graphs:
        given, lazy = {**os.environ, **environment}, None
        if given.get(LAZY_MODE):
            lazy = given[LAZY_MODE] != "0"
        size = command.load.tensor_model_parallel_size
        request.faults += devices.graph_faults("use_graphs", device, lazy=lazy, tensor_size=size, environment=given)
        # HPU graphs are captured in lazy mode alone
        if record.has_lazy_mode:
            environment |= {LAZY_MODE: "1"} | devices.graph_variables(device, size)
    return environment
