"""Text and JSON of an examination: a row a host, what stands out and why, and what was not compared."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.launch.doctor.examination import Examined
from megatron.launch.doctor.replies import Facts
from megatron.launch.doctor.rules import Suspicion, link_text
from megatron.runtime.commands import counted, folded

WIDTH = 100
MOST_ROWS = 32
"""Rows of hosts; of more, those of the suspects and one of the medians."""
COLUMNS = {
    "host": 16,
    "devices": 8,
    "clock ms": 8,
    "mem GB": 6,
    "disk GB": 7,
    "GFLOP/s": 9,
    "copy GB/s": 9,
    "write MB/s": 10,
    "sync ms": 7,
    "link MB/s": 9,
}
NUMBERS = list(COLUMNS)[2:]
MISSING = "-"


def text(findings: Examined) -> str:
    """Return the table, at most 100 columns wide, and below it who stands out and why."""
    return "\n".join([*_table(findings), "", *_stages(findings), "", *_verdicts(findings)])


def _table(findings: Examined) -> Iterator[str]:
    heads = [name.rjust(width) for name, width in COLUMNS.items()]
    heads[0] = "host".ljust(COLUMNS["host"])
    yield "  " + " ".join(heads)
    suspects = {suspicion.host for suspicion in findings.suspicions}
    slowest = slowest_links(findings)
    values = {number: host_values(findings, number, slowest) for number in range(len(findings.names))}
    shown = list(values)
    if len(shown) > MOST_ROWS:
        shown = sorted(suspects)[:MOST_ROWS]
    for number in shown:
        mark = "!" if number in suspects else " "
        yield _row(mark, findings.names[number], _devices(findings.facts.get(number)), values[number])
    if len(values) > 1:
        every = list(values.values())
        medians = {name: statistics.median(each[name] for each in every if name in each) for name in _known(every)}
        yield _row(" ", f"median of {len(values)}", "", medians)


def _devices(facts: Facts | None) -> str:
    if facts is None:
        return MISSING
    if facts.devices is not None:
        return f"{facts.devices} {facts.device}"
    return counted(facts.cores, "core")


def _known(values: list[dict[str, float]]) -> list[str]:
    return [name for name in NUMBERS if any(name in each for each in values)]


def _row(mark: str, name: str, devices: str, values: Mapping[str, float]) -> str:
    # whole names stand in the verdicts
    name = name if len(name) <= COLUMNS["host"] else name[: COLUMNS["host"] - 2] + ".."
    cells = [name.ljust(COLUMNS["host"]), devices[: COLUMNS["devices"]].rjust(COLUMNS["devices"])]
    cells += [_number(values.get(column)).rjust(COLUMNS[column]) for column in NUMBERS]
    return f"{mark} " + " ".join(cells).rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    if abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.2e}"
    return f"{value:.3g}" if abs(value) >= 0.01 or value == 0 else f"{value:.3f}"


def slowest_links(findings: Examined) -> dict[int, float]:
    """Return the lowest rate of the links of each host, either way."""
    found: dict[int, float] = {}
    for pair, rate in findings.links.items():
        for host in pair:
            found[host] = min(rate, found.get(host, rate))
    return found


def host_values(findings: Examined, number: int, slowest: Mapping[int, float]) -> dict[str, float]:
    """Return the numbers of a host's row: of its devices and links the slowest counts."""
    found: dict[str, float] = {}
    if (facts := findings.facts.get(number)) is not None:
        found |= {"mem GB": facts.memory_free / 1e9, "disk GB": facts.disk_free / 1e9}
    if (clock := findings.clocks.get(number)) is not None:
        found["clock ms"] = 1e3 * sum(clock) / 2
    if (disk := findings.disks.get(number)) is not None:
        found |= {"write MB/s": disk.bytes_per_s / 1e6, "sync ms": 1e3 * disk.sync_s}
    if (checks := findings.devices.get(number)) is not None:
        found |= {"GFLOP/s": min(each.flops for each in checks.products) / 1e9, "copy GB/s": min(checks.memory) / 1e9}
    if number in slowest:
        found["link MB/s"] = slowest[number] / 1e6
    return found


def _stages(findings: Examined) -> Iterator[str]:
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in findings.seconds.items())
    yield folded(f"  {stages}", WIDTH)
    if findings.clocks:
        widest = max((high - low) / 2 for low, high in findings.clocks.values())
        yield f"  clocks are known within {1e3 * widest:.2f} ms, half a round trip"
    if findings.links:
        rates, trips = list(findings.links.values()), list(findings.round_trips.values())
        pairs, every = len(trips), len(findings.names) * (len(findings.names) - 1) // 2
        yield (
            f"  links: {pairs:,} of {every:,} pairs in {counted(findings.num_rounds, 'round')}, "
            f"{link_text(min(rates))} to {link_text(max(rates))}, round trip {1e6 * min(trips):.0f} to "
            f"{1e6 * max(trips):.0f} us"
        )
    for kind in dict.fromkeys(group.kind for group in findings.groups):
        rates = [group.size / group.seconds for group in findings.groups if group.kind == kind]
        operation = next(group.operation for group in findings.groups if group.kind == kind)
        yield f"  {kind} groups: {len(rates)}, {operation} {link_text(min(rates))} to {link_text(max(rates))}"
    if len(findings.names) < 3:
        yield folded(
            "  rates of one host are compared with nothing, those of two with each other: of two, the slower one need "
            "not be the wrong one",
            WIDTH,
        )


def _verdicts(findings: Examined) -> Iterator[str]:
    if not findings.suspicions:
        yield f"Nothing stands out on {counted(len(findings.names), 'host')}."
        return
    out = findings.suspects()
    yield f"{len(out)} of {counted(len(findings.names), 'host')} would be left out by --write-hostsfile:"
    for suspicion in findings.suspicions:
        yield folded(f"- {sentence(findings, suspicion)}", WIDTH, further="  ")


def sentence(findings: Examined, suspicion: Suspicion) -> str:
    """Return who stands out, and why."""
    name = findings.names[suspicion.host]
    if suspicion.peer is not None:
        name = f"{name} to {findings.names[suspicion.peer]}"
    return f"{name}: {suspicion.reason}"


def tree(findings: Examined) -> dict[str, Any]:
    """Return all that was found, for JSON."""
    suspects = set(findings.suspects())
    hosts = []
    for number, name in enumerate(findings.names):
        own: dict[str, Any] = {"host": name, "is_suspect": number in suspects}
        for part, records in (("facts", findings.facts), ("disk", findings.disks), ("devices", findings.devices)):
            if number in records:
                own[part] = dataclasses.asdict(records[number])  # type: ignore[index]
        if number in findings.clocks:
            own["clock_ahead_s"] = list(findings.clocks[number])
        hosts.append(own)
    links = [
        {"from": findings.names[sender], "to": findings.names[receiver], "bytes_per_s": rate}
        for (sender, receiver), rate in findings.links.items()
    ]
    suspicions = [
        {
            "host": findings.names[each.host],
            "peer": None if each.peer is None else findings.names[each.peer],
            "kind": each.kind,
            "reason": each.reason,
            "leaves_out": each.leaves_out,
        }
        for each in findings.suspicions
    ]
    return {
        "hosts": hosts,
        "links": links,
        "rounds": findings.num_rounds,
        "groups": [dataclasses.asdict(group) for group in findings.groups],
        "suspicions": suspicions,
        "seconds": findings.seconds,
    }
