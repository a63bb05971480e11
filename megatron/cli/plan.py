"""Print the plan of a run on a number of devices: layout, parameters, pipeline bubble, memory of each rank.

    python tools/plan.py --config llama31_8b --num-devices 64 --tensor-model-parallel-size 8 --device h100

Starts nothing, reads no data, imports neither torch nor deepspeed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.cli.command import command, command_parser
from megatron.cli.planning.measuring import add_measure_flags, check_measure_flags, measure
from megatron.cli.planning.search import add_search, check_search, search_text
from megatron.cli.planning.times import add_compare, planned_times, times_text, with_run
from megatron.options.config import Config, ConfigError
from megatron.options.flags import HelpFormatter
from megatron.parallel.layout import Layout
from megatron.plan.campaign.question import Question
from megatron.plan.describe import describe
from megatron.plan.page.content import PageContent
from megatron.plan.page.page import PlannedTimes, check_output, plan_content, write_page
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.text import for_rates, rates_of_plan
from megatron.runtime.commands import DONE, FAILED, REFUSED, for_stderr
from megatron.runtime.devices import known_chip
from megatron.settings.command_line import load_config, presets_of, read_command_line
from megatron.settings.parser import build_parser
from megatron.settings.validation import check

DESCRIPTION = "Print the plan of a run on a number of devices: layout, parameters, bubble, memory of each rank."


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    parser = plan_parser()
    options, flags = parser.parse_known_args(arguments)
    try:
        check_measure_flags(options, parser.parse_args([]))
        if options.measure is not None:
            return measure(options, flags)
        check_search(options)
        if options.search:
            sys.stdout.write(search_text(options, with_chip(flags)))
        else:
            _print_plan(options, with_chip(with_run(options, flags)))
    except ConfigError as error:
        print(for_stderr(str(error)), file=sys.stderr)
        return REFUSED
    except OSError as error:
        if error.filename is None:  # of the output, which every command handles alike
            raise
        print(for_stderr(f"error: {error.filename}: {error.strerror or error}"), file=sys.stderr)
        return FAILED
    return DONE


def _print_plan(options: argparse.Namespace, flags: list[str]) -> None:
    if options.output is not None:
        check_output(options.output)
    plan = plan_run(options, flags)
    sys.stdout.write(plan.text)
    if options.output is not None:
        write_page(plan.content(), options.output)
        print(f"\nwrote {options.output}")


@dataclass(frozen=True)
class PlannedRun:
    """A valid run on a number of devices, with what is predicted of its time."""

    title: str
    config: Config
    nodes: int
    devices_per_node: int
    times: PlannedTimes

    @property
    def text(self) -> str:
        sizes = {"nodes": self.nodes, "devices_per_node": self.devices_per_node}
        text = describe(self.config, **sizes, title=self.title, check=check, rates=self.times.rates)
        return text + times_text(self.times)

    def content(self) -> PageContent:
        sizes = {"nodes": self.nodes, "devices_per_node": self.devices_per_node}
        return plan_content(self.config, **sizes, title=self.title, times=self.times)


def plan_run(options: argparse.Namespace, flags: list[str]) -> PlannedRun:
    """Return the plan of a run. Raises ConfigError with every fault."""
    config = read_command_line(flags).config  # its faults come with all others below
    num_devices = options.num_devices
    if num_devices is None:
        # the fewest that the layout runs on
        num_devices = Layout.of(config.parallel).world_size
    if num_devices < 1 or options.devices_per_node < 1:
        raise ConfigError(
            [f"num_devices={num_devices} and devices_per_node={options.devices_per_node} must be at least 1"]
        )
    # again with all rules, which depend on the number of devices
    config = load_config(_with_data(flags, config), num_devices)
    # a run of fewer devices than a node has is on a part of one
    per_node = min(num_devices, options.devices_per_node)
    if num_devices % per_node:
        raise ConfigError([f"num_devices={num_devices} is not a multiple of devices_per_node={per_node}; change one"])
    nodes = num_devices // per_node
    # a run's own config may name them
    rates = rates_of_plan(options.rates or config.logging.rates, config)
    if rates is not None:
        config = for_rates(config, rates)
    times = planned_times(config, Cluster.of(nodes, per_node), rates, options)
    return PlannedRun(f"Plan of {title_of(flags)}", config, nodes, per_node, times)


def _with_data(flags: list[str], config: Config) -> list[str]:
    """Return the flags with a dataset, which a plan does not read."""
    if config.data.data_path or config.data.per_split:
        return flags
    return [*flags, "--data-path", "DATASET"]


def title_of(flags: Sequence[str]) -> str:
    """Return the presets of a command line."""
    return " + ".join(presets_of(build_parser().parse_known_args(list(flags))[0])) or "the default config"


def plan_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own flags, a group for each question."""
    parser = command_parser(
        "plan",
        DESCRIPTION,
        usage="%(prog)s --config PRESET [--num-devices N] [--devices-per-node N]\n    [--flag VALUE ...]",
        epilog="All other flags are those of megatron.train. --device takes a chip's name too: gaudi2 stands for its "
        "device and its memory. See docs/guides/planning.md.",
        formatter_class=HelpFormatter,
    )
    _add_devices(parser.add_argument_group("devices"))
    add_search(parser.add_argument_group("search of the fastest layout"))
    time_of_step = parser.add_argument_group("time of a step")
    time_of_step.add_argument(
        "--rates",
        metavar="FILE|NAME",
        help="rates of the devices: a file of --measure, or a machine of megatron/plan/machines (default: the one that "
        "--device or --device-memory names)",
    )
    add_compare(time_of_step)
    add_measure_flags(parser.add_argument_group("rates of a machine"))
    Question.add_options(parser.add_argument_group("time to train, failures and cost"))
    parser.add_argument_group("picture").add_argument(
        "--output", type=Path, metavar="FILE", help="also write the plan as a page (.html) or a picture (.png)"
    )
    return parser


def _add_devices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-devices", type=int, metavar="N", help="devices (default: tensor-parallel size x pipeline stages)"
    )
    group.add_argument("--devices-per-node", type=int, default=8, metavar="N", help="devices of each node (default: 8)")
    group.add_argument(
        "--hostsfile", metavar="FILE", help="nodes of --search and --measure: a line `<host> slots=<n>` for each"
    )


def with_chip(flags: Sequence[str]) -> list[str]:
    """Return the flags of training with the device and the memory of the chip that `--device` names, if it does."""
    namespace, _ = build_parser().parse_known_args(list(flags))
    known = known_chip(namespace.device)
    if known is None:
        return list(flags)
    device, chip = known
    own = [namespace.device, f"--device={namespace.device}"]
    words = [word for before, word in zip(["", *flags], flags, strict=False) if not _names_chip(before, word, *own)]
    words += ["--device", device.name]
    if namespace.device_memory is None:
        words += ["--device-memory", chip.name]
    return words


def _names_chip(before: str, word: str, name: str, together: str) -> bool:
    """Return whether a word of a command line is part of `--device NAME`."""
    return word in ("--device", together) or (before == "--device" and word == name)
