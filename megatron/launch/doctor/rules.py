"""Rules by which hosts of a fleet stand out. Pure: from records to suspicions.

A rate is low where it is below a share of the median of its kind, and further below it, in logarithms, than three times
the spread (MAD, scaled to a standard deviation) of all: other work disturbs rates by a factor. Of two there is no
majority: the lower is named where it is below that share of the other. One host alone is compared with what is stated
alone.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron.launch.doctor.replies import DeviceChecks, Facts, GroupTime

SPREADS = 3 * 1.4826
LOW_PRODUCT = 0.7
LOW_MEMORY = 0.6
LOW_WRITE = 0.4
LOW_SYNC = 0.2
LOW_LINK = 0.5
LOW_GROUP = 0.5
"""Least shares of the median. Those of what varies by itself, such as a disk, are lower."""
LOW_TOTAL, LOW_FREE = 0.95, 0.5
"""Least shares of the memory of the other hosts, and of what is free of it."""
LEAST_DISK = 10**9
LARGEST_OFFSET_S = 1.0
"""Offset of a clock: logs of hosts are read side by side by the second."""
LOW_INTERFACE, FASTEST_STREAM = 0.3, 10e9
"""Least share of an interface's stated bits a second that one stream reaches; a faster one is counted as so fast."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Suspicion:
    """Reason to look at a host, and to leave it out."""

    host: int
    kind: str
    """facts, clock, disk, device, link, group or lost."""
    reason: str
    peer: int | None = None
    """Other end of a slow link, which may be at fault as well."""
    leaves_out: bool = True
    """False: of several hosts that have it in common, none is known to be at fault."""


@dataclass(frozen=True)
class Low:
    """A rate that stands out."""

    value: float
    usual: float
    count: int
    """Rates that it was compared with, itself included."""

    def text(self, shown: Callable[[float], str]) -> str:
        """Return the rate, its share, and what of."""
        of = f"of the median of {self.count}" if self.count > 2 else "of the other; of two, either may be unusual"
        return f"{shown(self.value)}, {self.value / self.usual:.2f} {of} ({shown(self.usual)})"


def lows(rates: Mapping[Key, float], least_share: float, spreads: float = SPREADS) -> dict[Key, Low]:
    """Return the rates, all above 0, that stand out below. `spreads`: how many of them count as disturbance."""
    values = list(rates.values())
    if len(values) < 2:
        return {}
    if len(values) == 2:
        usual, spread = max(values), 0.0
    else:
        usual = statistics.median(values)
        spread = statistics.median(abs(math.log(value / usual)) for value in values)
    return {
        key: Low(value, usual, len(values))
        for key, value in rates.items()
        if value < least_share * usual and math.log(usual / value) > spreads * spread
    }


def usual_value(values: Sequence[Key]) -> tuple[Key, int]:
    """Return the most common value, and how often it is; of equally common ones the first host's, or the earliest."""
    counts = Counter(values)
    most = max(counts.values())
    value = next(value for value in values if counts[value] == most)
    return value, most


# ---------------------------------------------------------------------------------------------------------------------
# What hosts state


def judge_facts(facts: Mapping[int, Facts], slots: Mapping[int, int], needed_files: int) -> Iterator[Suspicion]:
    """Yield what a host lacks, or has otherwise than most."""
    for host, own in facts.items():
        for reason in _lacks(own, slots[host], needed_files):
            yield Suspicion(host, "facts", reason)
    if len(facts) < 2:
        return
    for name, read in _COMPARED.items():
        values = {host: read(own) for host, own in facts.items()}
        yield from _different(name, values)
    for package in sorted({name for own in facts.values() for name in own.packages}):
        values = {host: own.packages.get(package, "not installed") for host, own in facts.items()}
        yield from _different(package, values)
    yield from _low_memory_sizes(facts)


def _low_memory_sizes(facts: Mapping[int, Facts]) -> Iterator[Suspicion]:
    # equal machines differ by some megabytes, which firmware and kernel take
    for host, low in lows({host: max(1, own.memory_bytes) for host, own in facts.items()}, LOW_TOTAL, 0.0).items():
        yield Suspicion(host, "facts", f"its memory is {low.text(_gigabytes)}")
    for host, low in lows({host: max(1, own.memory_free) for host, own in facts.items()}, LOW_FREE).items():
        yield Suspicion(host, "facts", f"its free memory is {low.text(_gigabytes)}: something else uses it")


_COMPARED: dict[str, Callable[[Facts], str]] = {
    "device": lambda facts: facts.device,
    "number of devices": lambda facts: str(facts.devices),
    "driver": lambda facts: facts.driver or "none",
    "processor": lambda facts: facts.processor,
    "number of cores": lambda facts: str(facts.cores),
    "chips": lambda facts: ", ".join(sorted(set(facts.chips))) or "none",
}


def _lacks(own: Facts, slots: int, needed_files: int) -> Iterator[str]:
    if own.devices is not None and own.devices < slots:
        yield f"it has {own.devices} devices, but {slots} ranks are to run on it"
    if own.open_files < needed_files:
        yield f"its limit of open files is {own.open_files} (ulimit -Hn), but a rank here needs up to {needed_files}"
    if own.disk_free < LEAST_DISK:
        yield f"its disk has {own.disk_free / 1e9:.2f} GB free, less than {LEAST_DISK / 1e9:.0f} GB"


def _different(name: str, values: Mapping[int, str]) -> Iterator[Suspicion]:
    usual, count = usual_value(list(values.values()))
    others = f"on {count} of {len(values)} hosts"
    if 2 * count <= len(values):
        others += ", not a majority"
    for host, value in values.items():
        if value != usual:
            yield Suspicion(host, "facts", f"its {name} is {value[:60]}, but {usual[:60]} {others}")


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


# ---------------------------------------------------------------------------------------------------------------------
# Clocks


def judge_clocks(offsets: Mapping[int, tuple[float, float]]) -> Iterator[Suspicion]:
    """Yield hosts whose clock is certainly off. `offsets`: between which seconds each is ahead of this machine's."""
    # this machine's own clock is one of the voters
    usual = statistics.median([0.0, *((low + high) / 2 for low, high in offsets.values())])
    if len(offsets) == 1:
        usual = 0.0
    for host, (low, high) in offsets.items():
        if low - usual > LARGEST_OFFSET_S or usual - high > LARGEST_OFFSET_S:
            bounds = f"between {low - usual:+.3f} and {high - usual:+.3f} s"
            yield Suspicion(host, "clock", f"its clock is {bounds} off that of most")


# ---------------------------------------------------------------------------------------------------------------------
# Cores, devices and their memory


def low_products(checks: Mapping[int, DeviceChecks], alike: Mapping[int, Hashable]) -> dict[tuple[int, int], Low]:
    """Return the cores or devices, by host and place, that are slow among those of equal hardware."""
    return _among_alike(
        {(host, place): each.flops for host, own in checks.items() for place, each in enumerate(own.products)},
        alike,
        LOW_PRODUCT,
    )


def low_memory(checks: Mapping[int, DeviceChecks], alike: Mapping[int, Hashable]) -> dict[tuple[int, int], Low]:
    """Return the memories, of a host or of its devices, that are slow among those of equal hardware."""
    return _among_alike(
        {(host, place): rate for host, own in checks.items() for place, rate in enumerate(own.memory)},
        alike,
        LOW_MEMORY,
    )


def _among_alike(
    rates: Mapping[tuple[int, int], float], alike: Mapping[int, Hashable], share: float
) -> dict[tuple[int, int], Low]:
    found: dict[tuple[int, int], Low] = {}
    for kind in dict.fromkeys(alike.values()):
        found |= lows({key: rate for key, rate in rates.items() if alike[key[0]] == kind}, share)
    return found


def judge_bits(checks: Mapping[int, DeviceChecks], alike: Mapping[int, Hashable]) -> Iterator[Suspicion]:
    """Yield hosts with a core or device that computes wrongly: against itself, whole numbers, or its equals."""
    sound: dict[tuple[int, int], str] = {}
    for host, own in checks.items():
        for place, each in enumerate(own.products):
            if each.repeats and each.is_exact:
                sound[host, place] = each.digest
                continue
            how = "gives a wrong product of whole numbers"
            if not each.repeats:
                how = "gives other bits when it repeats a product"
            yield Suspicion(host, "device", f"{each.name} computes wrongly: it {how}")
    for kind in dict.fromkeys(alike.values()):
        of_kind = {key: digest for key, digest in sound.items() if alike[key[0]] == kind}
        yield from _odd_bits(of_kind, checks)


def _odd_bits(digests: Mapping[tuple[int, int], str], checks: Mapping[int, DeviceChecks]) -> Iterator[Suspicion]:
    if len(set(digests.values())) < 2:
        return
    usual, count = usual_value(list(digests.values()))
    for (host, place), digest in digests.items():
        name = checks[host].products[place].name
        reason = f"computes wrongly: {count} of {len(digests)} like it give the same other bits"
        if 2 * count <= len(digests):
            reason = "and its equals give different bits, and no result is that of a majority"
        elif digest == usual:
            continue
        yield Suspicion(host, "device", f"{name} {reason}")


def slow_devices(
    checks: Mapping[int, DeviceChecks], products: Mapping[tuple[int, int], Low], memory: Mapping[tuple[int, int], Low]
) -> Iterator[Suspicion]:
    for (host, place), low in products.items():
        yield Suspicion(host, "device", f"{checks[host].products[place].name} multiplies at {low.text(_flops)}")
    for (host, place), low in memory.items():
        of = "its memory"
        if len(checks[host].memory) > 1:
            of = f"the memory of {checks[host].products[place].name}"
        yield Suspicion(host, "device", f"{of} copies at {low.text(link_text)}")


def _flops(rate: float) -> str:
    scale, unit = (1e12, "TFLOP/s") if rate >= 1e12 else (1e9, "GFLOP/s")
    return f"{rate / scale:.3g} {unit}"


# ---------------------------------------------------------------------------------------------------------------------
# Links


def low_links(
    rates: Mapping[tuple[int, int], float], stated_bits: Mapping[int, int], spreads: float = SPREADS
) -> list[Suspicion]:
    """Return slow hosts, all of whose links are slow one way, and slow links between others.

    `rates`: bytes a second from the first host to the second. `stated_bits`: of the hosts' interfaces.
    """
    senders, receivers = _low_ends(rates, 0, spreads), _low_ends(rates, 1, spreads)
    found = [Suspicion(host, "link", f"it sends at {low} over all its links") for host, low in senders.items()]
    found += [Suspicion(host, "link", f"it receives at {low} over all its links") for host, low in receivers.items()]
    left = {pair: rate for pair, rate in rates.items() if pair[0] not in senders and pair[1] not in receivers}
    low_pairs = lows(left, LOW_LINK, spreads)
    for (sender, receiver), low in low_pairs.items():
        found.append(Suspicion(sender, "link", f"its link sends at {low.text(link_text)}", receiver))
    for (sender, receiver), rate in left.items():
        stated = min(stated_bits[sender], stated_bits[receiver])
        least = LOW_INTERFACE * min(stated, FASTEST_STREAM) / 8
        if rate < least and (sender, receiver) not in low_pairs:
            rule = f"less than {link_text(least)}, {LOW_INTERFACE} of what its interface states"
            found.append(Suspicion(sender, "link", f"its link sends at {link_text(rate)}, {rule}", receiver))
    return found


def _low_ends(rates: Mapping[tuple[int, int], float], end: int, spreads: float) -> dict[int, str]:
    """Return the hosts that are slow as senders (end 0) or receivers (1), and how."""
    of_hosts: dict[int, list[float]] = {}
    for pair, rate in rates.items():
        of_hosts.setdefault(pair[end], []).append(rate)
    # of three hosts each has two links, whose pairs are named instead
    if len(of_hosts) < 4:
        return {}
    # the higher half: a host with one slow link is not slow
    usual = {host: statistics.median_high(each) for host, each in of_hosts.items()}
    return {host: low.text(link_text) for host, low in lows(usual, LOW_LINK, spreads).items()}


def broken_links(broken: Mapping[tuple[int, int], str], links: Mapping[tuple[int, int], float]) -> Iterator[Suspicion]:
    """Yield hosts that reached less than half of the hosts that they were tested with, and links between others."""
    tried: dict[int, int] = {}
    lost: dict[int, int] = {}
    for pair in {*broken, *(pair for pair in links if pair[0] < pair[1])}:
        for host in pair:
            tried[host] = tried.get(host, 0) + 1
            lost[host] = lost.get(host, 0) + (pair in broken)
    cut_off = {host for host, count in lost.items() if tried[host] > 1 and 2 * count > tried[host]}
    for host in sorted(cut_off):
        why = next(error for pair, error in broken.items() if host in pair)
        yield Suspicion(host, "link", f"it reached {tried[host] - lost[host]} of {tried[host]} others: {why}")
    for (one, other), error in broken.items():
        if not {one, other} & cut_off:
            yield Suspicion(one, "link", f"its link could not be measured: {error}", other)


def link_text(rate: float) -> str:
    """Return bytes a second with three digits."""
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6)):
        if rate >= scale:
            return f"{rate / scale:.3g} {unit}"
    return f"{rate / 1e3:.3g} kB/s"


def per_second(rate: float) -> str:
    return f"{rate:.3g} a second"


# ---------------------------------------------------------------------------------------------------------------------
# Groups


def low_groups(best: Mapping[tuple[str, tuple[int, ...]], GroupTime]) -> dict[tuple[str, tuple[int, ...]], Low]:
    found: dict[tuple[str, tuple[int, ...]], Low] = {}
    for kind in dict.fromkeys(key[0] for key in best):
        rates = {key: each.size / each.seconds for key, each in best.items() if key[0] == kind}
        found |= lows(rates, LOW_GROUP)
    return found
