"""megatron-plan --search: the fastest layouts on some nodes, and the command that starts the first."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import textwrap
from collections.abc import Iterator, Sequence

from megatron.cli.planning.start_command import StartCommand, command_lines
from megatron.launch.plan import DEVICES_PER_NODE, read_hostsfile
from megatron.options.config import Config, ConfigError
from megatron.options.flags import flag
from megatron.plan.campaign.question import OPTIONS
from megatron.plan.fit import Capacity, capacity, for_device, needed_bytes
from megatron.plan.page.content import LayoutRow, PageContent
from megatron.plan.page.page import PlannedTimes, check_output, plan_content, write_page
from megatron.plan.rates.rates import Rates
from megatron.plan.search.found import Found, SearchResult
from megatron.plan.search.search import clusters_of, search
from megatron.plan.search.space import NEUTRAL
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.text import for_rates, rates_of_plan, seconds_text
from megatron.runtime.commands import counted
from megatron.runtime.devices import GIB, known_chips
from megatron.settings.command_line import presets_of, read_command_line
from megatron.settings.parser import build_parser
from megatron.settings.validation import check

WIDTH = 98
MOST_TIMES = 64
"""Times the nodes, up to which more are tried where nothing fits."""
NODES = ("node_sizes", "nodes_down")


def add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--search", action="store_true", help="print the ten fastest layouts that fit")
    group.add_argument(
        "--node-sizes", type=int, nargs="+", metavar="N", help="devices of each node, where they differ: 8 8 4"
    )
    group.add_argument(
        "--nodes-down", type=int, default=0, metavar="N", help="nodes that are lost: the best layout without them"
    )


def check_search(options: argparse.Namespace) -> None:
    """Raise ConfigError for flags of the search without it, and for those that it does not read."""
    given = [name for name in NODES if getattr(options, name)]
    if given and not options.search:
        raise ConfigError([f"{flag(name)} is for --search; add that, or leave it out" for name in given])
    of_one_layout = [name for name in ("compare", *OPTIONS) if getattr(options, name) is not None]
    if of_one_layout and options.search:
        faults = [f"{flag(name)} is for the plan of one layout; leave out --search, or it" for name in of_one_layout]
        raise ConfigError(faults)


def search_text(options: argparse.Namespace, flags: Sequence[str]) -> str:
    """Return the fastest layouts of a run, and draw them where `--output` says.

    Raises ConfigError for what cannot be searched.
    """
    if options.output is not None:
        check_output(options.output)
    question = _Question(options, flags)
    lines = list(question.lines())
    if options.output is not None:
        write_page(question.page(), options.output)
        lines += ["", f"wrote {options.output}"]
    return "\n".join(lines) + "\n"


class _Question:
    def __init__(self, options: argparse.Namespace, flags: Sequence[str]) -> None:
        self.options, self.flags = options, list(flags)
        command = read_command_line(self.flags)
        if command.faults:
            raise ConfigError(command.faults)
        self.sizes = _node_sizes(options)
        self.config, self.rates = self._with_rates(for_device(command.config))
        if not self.config.data.data_path and not self.config.data.per_split:
            self.config = read_command_line([*self.flags, "--data-path", "DATASET"]).config
            self.config, self.rates = self._with_rates(for_device(self.config))
        # a preset's values are a proposal, a flag is a decision
        given = vars(build_parser().parse_known_args(self.flags)[0])
        self.fixed = frozenset(name for name in NEUTRAL if given.get(name) is not None)
        self.presets = presets_of(build_parser().parse_known_args(self.flags)[0])
        self.result = SearchResult()

    def _with_rates(self, config: Config) -> tuple[Config, Rates]:
        # a run's own config may name them
        rates = rates_of_plan(self.options.rates or config.logging.rates, config)
        if rates is None:
            known = ", ".join(known_chips())
            raise ConfigError(
                [f"the search needs rates of the devices; give --device {known}, or --rates FILE of --measure"]
            )
        return for_rates(config, rates), rates

    def _room(self, devices_per_node: int) -> Capacity:
        # ranks of a CPU share their host's memory
        room = capacity(self.config, devices_per_node)
        if room is None:
            known = ", ".join(known_chips())
            raise ConfigError([f"the memory of the device is unknown; give --device-memory {known}, or GiB"])
        return room

    def _search(self, clusters: Sequence[Cluster], count: int) -> SearchResult:
        room = self._room(max(cluster.node_sizes[0] for cluster in clusters))
        return search(self.config, clusters, self.rates, room, check, count=count, fixed=self.fixed)

    def lines(self) -> Iterator[str]:
        down = self.options.nodes_down
        # which nodes fail is not known: at worst the largest
        left = sorted(self.sizes, reverse=True)[down:]
        if not left:
            raise ConfigError([f"--nodes-down {down} leaves none of {counted(len(self.sizes), 'node')}; lower it"])
        result = self.result = self._search(clusters_of(left, may_leave=down > 0), 10)
        if not result.found:
            raise ConfigError([self._why_nothing(result, left)])
        yield from self._head(left)
        yield from self._table(result)
        if down:
            yield from self._compared(result.found[0])
        yield from self._start(result.found[0])
        tried = f"{result.timed:,} layouts timed, {result.too_large:,} groups and layouts too large"
        yield f"  {tried}; {result.seconds:.1f} s"
        for fault, count in result.unknown.most_common(1):
            yield from _wrapped(f"left out, {count:,} times: {fault}")

    def _head(self, left: Sequence[int]) -> Iterator[str]:
        training = self.config.training
        nodes = " + ".join(f"{left.count(size)} x {size}" for size in sorted(set(left), reverse=True))
        title = " + ".join(self.presets) or "the default config"
        yield f"Fastest layouts of {title} on {sum(left)} devices (nodes: {nodes})"
        yield ""
        kind = "measured" if self.rates.is_measured else "published figures, not measured"
        yield from _wrapped(f"a step of {training.global_batch_size:,} samples; rates of {self.rates.title}: {kind}")
        if self.fixed:
            yield from _wrapped("given, and so not varied: " + ", ".join(sorted(self.fixed)))
        yield ""

    def _table(self, result: SearchResult) -> Iterator[str]:
        yield f"  {'':>2} {'step':>8} {'tokens/s':>12} {'MFU':>6} {'bubble':>6} {'sent GiB':>8}  layout"
        for number, found in enumerate(result.found, 1):
            yield from self._entry(number, found)
        yield ""

    def _entry(self, number: int, found: Found) -> Iterator[str]:
        time, peak = found.time, self.rates.peak_flops.get(found.time.precision)
        mfu = "-" if peak is None else f"{time.mfu(peak):.1%}"
        bubble = time.parts.wait / time.seconds
        figures = f"{seconds_text(time.seconds):>8} {time.tokens_per_second:>12,.0f} {mfu:>6} {bubble:>6.1%}"
        head = f"  {number:>2} {figures} {time.sent_bytes.total / GIB:>8.1f}  "
        indent = " " * 6
        yield from _wrapped(self._title(found), head, " " * len(head))
        # as the plan's memory table has it: a rank of each stage
        sizes = " ".join(f"{needed_bytes(found.config, stage) / GIB:.1f}" for stage in found.stages)
        room = self._room(found.cluster.node_sizes[0]).size_bytes / GIB
        yield from _wrapped(f"{sizes} of {room:.1f} GiB by stage; {found.limit}", indent, indent)

    def _title(self, found: Found) -> str:
        """Return the layout, with the devices that it is on where others are left over."""
        if found.cluster.num_devices == sum(self.sizes):
            return _layout_text(found)
        return f"{len(found.cluster.node_sizes)} x {found.cluster.node_sizes[0]} devices: {_layout_text(found)}"

    def page(self) -> PageContent:
        """Return the page of the fastest layout, with the list of all."""
        best = self.result.found[0]
        content = plan_content(
            best.config,
            nodes=len(best.cluster.node_sizes),
            devices_per_node=best.cluster.node_sizes[0],
            title=f"Fastest layout of {' + '.join(self.presets) or 'the default config'}",
            times=PlannedTimes(rates=self.rates, step=best.time),
        )
        rows = [self._row(found) for found in self.result.found]
        return dataclasses.replace(content, layouts=rows, refused=self.result.refused + self.result.unknown)

    def _row(self, found: Found) -> LayoutRow:
        time, start = found.time, StartCommand(found, self.flags, self.presets, self.options.hostsfile)
        peak = self.rates.peak_flops.get(time.precision)
        return LayoutRow(
            title=self._title(found),
            seconds=time.seconds,
            tokens_per_second=time.tokens_per_second,
            mfu=None if peak is None else time.mfu(peak),
            memory_bytes=found.largest_bytes,
            wait=time.parts.wait / time.seconds,
            sent_bytes=time.sent_bytes.total,
            limit=found.limit,
            command=shlex.join(start.launch_words()),
        )

    def _compared(self, best: Found) -> Iterator[str]:
        # the same question on all nodes, of which one answer is enough
        now = self._search(clusters_of(self.sizes, may_leave=False), 1)
        if not now.found:
            yield from _wrapped("with all nodes no layout fits")
            return
        before, after = now.found[0].time.seconds, best.time.seconds
        used = f"{best.cluster.num_devices} of {sum(self.sizes)} devices"
        text = f"with all nodes {seconds_text(before)} a step; without {self.options.nodes_down} on {used} "
        yield from _wrapped(f"{text}{after / before:.2f} times that, with the same global batch")
        yield ""

    def _start(self, best: Found) -> Iterator[str]:
        start = StartCommand(best, self.flags, self.presets, self.options.hostsfile)
        # both forms, of which a cluster's users know one
        yield "  start the first with:"
        yield ""
        script = start.script_words()
        if script is not None:
            variables, words = script
            yield from (f"  {line}" for line in command_lines(words, variables))
            yield ""
        yield from (f"  {line}" for line in command_lines(start.launch_words()))
        yield ""

    def _why_nothing(self, result: SearchResult, sizes: Sequence[int]) -> str:
        """Return the reasons that no layout is left, and the least number of devices that has one."""
        reasons = [fault for fault, _ in (result.refused + result.unknown).most_common(3)]
        why = "none fits" if result.too_large else f"all are refused, such as: {'; '.join(reasons)}"
        text = f"no layout of {sum(sizes)} devices can run this: {why}"
        least = self._least_number(sizes)
        if least is None:
            return f"{text}; nor do twice, 4, ... {MOST_TIMES} times as many nodes have one"
        return f"{text}; the least number with one is {least} devices"

    def _least_number(self, sizes: Sequence[int]) -> int | None:
        per_node, nodes, least = max(sizes), len(sizes), None
        fails = nodes
        # by doubling, then one by one: between two numbers that fit there may be one that divides nothing
        while least is None and fails < MOST_TIMES * nodes:
            tried = min(2 * fails, MOST_TIMES * nodes)
            if self._search([Cluster.of(tried, per_node)], 1).found:
                least = tried
            else:
                fails = tried
        if least is None:
            return None
        for between in range(fails + 1, least):
            if self._search([Cluster.of(between, per_node)], 1).found:
                return between * per_node
        return least * per_node


def _node_sizes(options: argparse.Namespace) -> list[int]:
    given = [name for name in ("num_devices", "node_sizes", "hostsfile") if getattr(options, name)]
    if len(given) != 1:
        ways = "--num-devices, --node-sizes and --hostsfile"
        raise ConfigError([f"--search needs one of {ways}, to know the devices; give one"])
    if options.num_devices is None and options.devices_per_node != DEVICES_PER_NODE:
        own = f"--devices-per-node {options.devices_per_node}"
        raise ConfigError([f"{own} is for --num-devices, and {flag(given[0])} has its own; leave it out"])
    if options.hostsfile is not None:
        return _slots(options.hostsfile)
    sizes: list[int] = options.node_sizes
    if options.num_devices is not None:
        per_node = min(options.num_devices, options.devices_per_node)
        if per_node < 1 or options.num_devices % per_node:
            raise ConfigError(
                [f"num_devices={options.num_devices} is not a multiple of devices_per_node={per_node}; change one"]
            )
        sizes = [per_node] * (options.num_devices // per_node)
    if min(sizes) < 1:
        raise ConfigError([f"--node-sizes {' '.join(map(str, sizes))} must be 1 or more each"])
    return sizes


def _slots(path: str) -> list[int]:
    hosts, faults = read_hostsfile(path)
    if not hosts and not faults:
        faults = [f"hostsfile {path} lists no host; write one line `<host> slots=<n>` for each node"]
    if faults:
        raise ConfigError(faults)
    return [host.slots for host in hosts]


def _layout_text(found: Found) -> str:
    """Return 'PP 2 x TP 4 x DP 8, micro 1, interleaved 5, recompute mlp_act, ZeRO 1'."""
    config, layout = found.config, found.layout
    parallel, training, optimizer = config.parallel, config.training, config.optimizer
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    is_cut = layout.num_stages > 1
    recomputed = ", ".join(sorted(training.recomputed_modules)) or training.recompute_granularity
    schedule = parallel.schedule.replace("1f1b", "1F1B")
    words = {
        layout.title: True,
        f"EP {layout.expert_size} x TP {layout.expert_tensor_size}": layout.divides_experts,
        parallel.context_parallel_exchange: layout.context_size > 1,
        "sequence parallel": parallel.sequence_parallel,
        f"micro {training.micro_batch_size}": True,
        schedule: is_cut and chunks == 1,
        f"{schedule} {chunks}": is_cut and chunks > 1,
        f"cut by {parallel.pipeline_partition_method}": is_cut and parallel.pipeline_partition_method != "cost",
        f"recompute {recomputed}": recomputed != "none",
        "activations on the host": training.offload_activations,
        f"ZeRO {config.effective_zero_stage}": True,
        f"{layout.num_replicas} replicas": layout.num_replicas > 1,
        "optimizer on the host": optimizer.offload_optimizer,
        "weights on the host": optimizer.offload_param,
    }
    return ", ".join(text for text, is_shown in words.items() if is_shown)


def _wrapped(text: str, first: str = "  ", rest: str = "    ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
