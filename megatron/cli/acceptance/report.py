"""Report of an acceptance test: checks, facts, verdict, and versions of the Gaudi software that belong together."""

from __future__ import annotations

import datetime
import getpass
import json
import math
import os
import platform
import re
import socket
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.cli.command import jsonable
from megatron.runtime.commands import counted
from megatron.runtime.device_hpu import HPU, count_devices
from megatron.runtime.files import IMPORT_ROOT, replacing


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file; [] if there is none."""
    if not file.is_file():
        return []
    lines = file.read_bytes().splitlines(keepends=True)
    # of a writer that was killed the last line may lack its end
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


# ---------------------------------------------------------------------------------------------------------------------
# The report of an acceptance test: verdict, checks, facts, and one file of text with the same in JSON below it.

WIDTH = 100
NAME, VALUE = 58, 12
JSON_BEGINS = "\nJSON\n"
TIME = "%Y-%m-%d %H:%M UTC"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
ADDRESS = re.compile(rf"(?<![\d.]){_OCTET}(?:\.{_OCTET}){{3}}(?![\d.]*\d)")
"""An IPv4 address. 1.24.1.482, a version, is none."""


@dataclass(frozen=True)
class Check:
    """A number and its bound. Without a number it failed, and `detail` says why."""

    name: str
    value: float | None
    tolerance: float
    """The largest good value."""
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.value is not None and math.isfinite(self.value) and self.value <= self.tolerance


@dataclass
class Group:
    """Checks and facts of one part of the test."""

    title: str
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """Variables of the environment."""

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]


def summary(groups: Iterable[Group]) -> str:
    """Return one line on all checks."""
    checks = [check for group in groups for check in group.checks]
    failed = sum(not check.passed for check in checks)
    if failed:
        return f"FAILED: {failed} of {counted(len(checks), 'check')}"
    return f"passed: {counted(len(checks), 'check')}"


@dataclass(frozen=True)
class AcceptanceReport:
    """Results of a test so far."""

    title: str
    groups: Sequence[Group]
    not_run: Sequence[str] = ()
    """Names of its parts that have not ended."""
    time: str = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).strftime(TIME))

    @property
    def passed(self) -> bool:
        return not self.not_run and not any(group.failures for group in self.groups)

    def verdict(self) -> list[str]:
        """Return the lines that say what did not run, what passed, and what failed."""
        lines: list[str] = []
        if self.not_run:
            lines += _wrap(f"INCOMPLETE, not run: {'; '.join(self.not_run)}")
        lines.append(summary(self.groups))
        for group in self.groups:
            if group.failures:
                lines += _wrap(group.title, "  ")
                lines += [line for check in group.failures for line in _wrap(check.name, "    ", "      ")]
        return lines

    def text(self) -> str:
        """Return the report, the verdict first. Its lines have at most WIDTH characters."""
        lines = [f"{self.title}, {self.time}", *self.verdict(), ""]
        for group in self.groups:
            title = _wrap(group.title)
            lines += [*title, "-" * max(map(len, title)), *_facts(group.facts | group.variables), *_checks(group), ""]
        return "\n".join(lines)

    def write(self, file: Path) -> None:
        """Write text and JSON, replacing an earlier report there. Raises OSError, and leaves that one then."""
        content: dict[str, Any] = {
            "title": self.title,
            "time": self.time,
            "passed": self.passed,
            "not_run": list(self.not_run),
            "groups": [
                asdict(group) | {"checks": [asdict(check) | {"passed": check.passed} for check in group.checks]}
                for group in self.groups
            ],
        }
        with replacing(file) as output:
            # a number that is not finite has no form in JSON
            output.write(f"{self.text()}{JSON_BEGINS}{json.dumps(jsonable(content), indent=1)}\n".encode())

    def anonymous(self, output: Path) -> AcceptanceReport:
        """Replace names of this host and user, folders, and addresses in details and variables.

        Args:
            output: the folder of the test.
        """
        names = _private_names(output)
        return replace(self, groups=[_anonymous_group(group, names) for group in self.groups])


def _private_names(output: Path) -> dict[str, str]:
    """Return what stands for the names of this host and user, and for folders; those inside others come first."""
    folders = {
        str(Path.cwd()): "FOLDER",
        tempfile.gettempdir(): "TEMPORARY",
        str(Path.home()): "HOME",
        sys.prefix: "PYTHON",
        str(IMPORT_ROOT): "CHECKOUT",
        str(output.absolute()): "OUTPUT",
    }
    names = dict(sorted(folders.items(), key=lambda item: -len(item[0])))
    # behind the folders, in whose paths they may stand
    names |= {socket.gethostname(): "HOST", _user(): "USER"}
    # names that identify no one
    public = ("root", "localhost")
    return {name: stands_for for name, stands_for in names.items() if len(name) > 1 and name not in public}


def _anonymous_group(group: Group, names: Mapping[str, str]) -> Group:
    def anonymous(text: str) -> str:
        for name, stands_for in names.items():
            # whole words alone: a short name may be a part of others
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stands_for, text)
        return text

    return Group(
        anonymous(group.title),
        [
            replace(check, name=anonymous(check.name), detail=ADDRESS.sub("ADDRESS", anonymous(check.detail)))
            for check in group.checks
        ],
        {name: anonymous(value) for name, value in group.facts.items()},
        {name: ADDRESS.sub("ADDRESS", anonymous(value)) for name, value in group.variables.items()},
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name, as in many containers
        return ""


def _wrap(text: str, indent: str = "", further: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=further or indent,
        break_on_hyphens=False,
    )


def _facts(facts: Mapping[str, str]) -> list[str]:
    width = max((len(name) for name in facts), default=0)
    return [line for name, value in facts.items() for line in _wrap(f"{name:{width}}  {value}", "", " " * (width + 2))]


def _checks(group: Group) -> list[str]:
    if not group.checks:
        return []
    lines = [f"{'check':{NAME}}{'value':>{VALUE}}{'tolerance':>{VALUE}}  verdict"]
    previous = ""
    for check in group.checks:
        value = "none" if check.value is None else f"{check.value:.3g}"
        verdict = "passed" if check.passed else "FAILED"
        *first, last = textwrap.wrap(check.name, NAME, break_on_hyphens=False)
        lines += [*first, f"{last:{NAME}}{value:>{VALUE}}{check.tolerance:>{VALUE}.3g}  {verdict}"]
        # a process that has ended fails many checks by one reason
        is_repeated = check.detail != "" and check.detail == previous
        reasons = check.detail.splitlines()
        if is_repeated:
            reasons = ["for the same reason"]
        for line in reasons:
            lines += _wrap(line, "    ", "      ")
        previous = check.detail
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Versions of the Gaudi software that belong together, and those installed. Imports neither torch nor deepspeed.


@dataclass(frozen=True)
class Release:
    """A release of the Gaudi software, and what its image for PyTorch holds."""

    software: str
    torch: str
    python: str | None = None
    """None: no published recipe says it."""


# from the vendor's published recipes: vllm-gaudi, optimum-habana, Megatron-LM
RELEASES = (
    Release("1.24.1", "2.11.0", "3.12"),
    Release("1.24.0", "2.10.0", "3.12"),
    Release("1.23.0", "2.9.0"),
    Release("1.22.0", "2.7.1"),
    Release("1.21.0", "2.6.0"),
)
PACKAGES = ("habana-torch-plugin", "torch", "deepspeed", "habana-pyhlml", "transformers", "numpy")
REPORTED = ("PT_HPU_", "PT_ENABLE_", "HABANA_VISIBLE_", "HCCL_", "HL_FP8_", "DEEPSPEED_HPU_")
"""Beginnings of the variables that a report holds."""


def installed(package: str) -> str:
    """Return the version of a distribution, 'none' if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def release_of(version: str) -> Release | None:
    """Return the release that 1.24.1.482, say, is a build of; None for one that is not in the table.

    1.24.2 and later patches, which no published recipe names, count as the newest of their minor release.
    """
    numbers = version.split(".")[:3]
    exact = next((release for release in RELEASES if release.software == ".".join(numbers)), None)
    # RELEASES has the newest first
    return exact or next((r for r in RELEASES if r.software.split(".")[:2] == numbers[:2]), None)


def cards() -> list[tuple[str, str, str]]:
    """Return (name, driver, memory in MiB) of each card, by the vendor's hl-smi; [] where that fails."""
    rows = HPU.query("name", "driver_version", "memory.total", timeout_s=30.0)
    return [(name, driver, memory) for name, driver, memory in rows]


def check_software(devices: int) -> Group:
    """Return the versions found here, and whether they belong together; `devices`: cards of the test."""
    names, drivers, memories = _distinct(cards())
    group = Group("software")
    group.facts = {
        "cards": f"{devices} of {count_devices()}",
        "card": ", ".join(names) or "unknown (no hl-smi)",
        "driver": ", ".join(drivers) or "unknown (no hl-smi)",
        "memory, MiB": ", ".join(memories) or "unknown (no hl-smi)",
        "python": platform.python_version(),
        **{package: installed(package) for package in PACKAGES},
        "Linux": platform.release(),
    }
    group.variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(REPORTED)}
    plugin, torch = (group.facts[name] for name in PACKAGES[:2])
    group.checks.append(_agreement("torch is the one of the Gaudi software", _torch_fault(plugin, torch)))
    if drivers:
        group.checks.append(_agreement("driver and plugin are of one release", _driver_fault(plugin, drivers)))
    return group


def _distinct(rows: list[tuple[str, str, str]]) -> list[list[str]]:
    """Return the sorted values of each of the three columns; of no rows, three empty lists."""
    return [sorted({row[column] for row in rows}) for column in range(3)]


def _agreement(name: str, fault: str) -> Check:
    return Check(f"{name} (0: yes)", float(bool(fault)), 0.0, fault)


def _torch_fault(plugin: str, torch: str) -> str:
    release = release_of(plugin)
    if release is None:
        return f"docs/start/gaudi.md lists no release of habana-torch-plugin {plugin}"
    # 2.9.0+hpu and 2.10.0a0+git are builds of 2.9.0 and 2.10.0
    if torch.split("+")[0].split("a")[0] != release.torch:
        return f"Gaudi software {release.software} has torch {release.torch}, and torch {torch} is installed"
    return ""


def _driver_fault(plugin: str, drivers: list[str]) -> str:
    minor = plugin.split(".")[:2]
    # 1.24 of 1.24.1-5b2d8f1
    if all(driver.split("-")[0].split(".")[:2] == minor for driver in drivers):
        return ""
    return f"driver {', '.join(drivers)}, habana-torch-plugin {plugin}"
