"""Print the plan of a run on a number of devices: layout, parameters, pipeline bubble, memory of each rank.

    python tools/plan.py --config llama31_8b --num-devices 64 --tensor-model-parallel-size 8 --device-memory gaudi2

Starts nothing, reads no data, imports neither torch nor deepspeed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron.cli.command import command
from megatron.options.config import ConfigError
from megatron.parallel.layout import Layout
from megatron.plan.describe import describe
from megatron.runtime.commands import command_name, for_stderr
from megatron.settings.command_line import load_config, presets_of, read_command_line
from megatron.settings.parser import build_parser
from megatron.settings.validation import check


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog=command_name("plan"),
        usage="%(prog)s --config PRESET [--num-devices N] [--devices-per-node N]\n    [--flag VALUE ...]",
        description=(__doc__ or "").split("\n")[0],
        epilog="All other flags are those of megatron.train. --device and --device-memory say what the plan is for.",
        allow_abbrev=False,
    )
    parser.add_argument("--num-devices", type=int, metavar="N", help="default: tensor-parallel size x pipeline stages")
    parser.add_argument("--devices-per-node", type=int, default=8, metavar="N", help="default: 8")
    options, flags = parser.parse_known_args(arguments)
    try:
        config = read_command_line(flags).config  # its faults come with all others below
        num_devices = options.num_devices
        if num_devices is None:
            # the fewest that the layout runs on
            num_devices = Layout.of(config.parallel).world_size
        if num_devices < 1 or options.devices_per_node < 1:
            raise ConfigError(
                [f"num_devices={num_devices} and devices_per_node={options.devices_per_node} must be at least 1"]
            )
        if not config.data.data_path and not config.data.per_split:
            flags += ["--data-path", "DATASET"]  # the plan does not read it
        # again with all rules, which depend on the number of devices
        config = load_config(flags, num_devices)
    except ConfigError as error:
        print(for_stderr(str(error)), file=sys.stderr)
        return 2
    # a run of fewer devices than a node has is on a part of one
    per_node = min(num_devices, options.devices_per_node)
    if num_devices % per_node:
        message = f"num_devices={num_devices} is not a multiple of devices_per_node={per_node}; change one"
        print(message, file=sys.stderr)
        return 2
    title = " + ".join(presets_of(build_parser().parse_known_args(flags)[0])) or "the default config"
    nodes = num_devices // per_node
    sys.stdout.write(describe(config, nodes=nodes, devices_per_node=per_node, title=f"Plan of {title}", check=check))
    return 0
