"""The report of an acceptance test: checks, facts, and one file of text with the same in JSON below it."""

from __future__ import annotations

import datetime
import getpass
import json
import math
import re
import socket
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

WIDTH = 100
NAME, VALUE = 58, 12
JSON_BEGINS = "\nJSON\n"
ADDRESS = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b")
"""An IPv4 address; versions of four numbers look like one, and are facts, not details."""


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


def failures(groups: Iterable[Group]) -> list[Check]:
    """Return the checks that failed."""
    return [check for group in groups for check in group.checks if not check.passed]


def summary(groups: Sequence[Group]) -> str:
    """Return one line on all checks."""
    count, failed = sum(len(group.checks) for group in groups), len(failures(groups))
    return f"{count} checks: {count - failed} passed, {failed} failed"


def write_report(file: Path, title: str, groups: Sequence[Group], *, identifies: bool) -> str:
    """Write the report, and return its text without the JSON.

    Unless it `identifies`, names of this host and user, folders of the user, and addresses in details are replaced.
    """
    if not identifies:
        groups = [
            Group(
                group.title,
                [replace(check, detail=ADDRESS.sub("ADDRESS", anonymous(check.detail))) for check in group.checks],
                {name: anonymous(value) for name, value in group.facts.items()},
            )
            for group in groups
        ]
    when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lines = [f"{title}, {when}", summary(groups), ""]
    for group in groups:
        lines += [group.title, "-" * len(group.title), *_facts(group), *_checks(group), ""]
    failed = failures(groups)
    lines += ["passed" if not failed else "FAILED:", *(f"  {check.name}" for check in failed)]
    content: dict[str, Any] = {
        "title": title,
        "time": when,
        "passed": not failed,
        "groups": [
            {
                "title": group.title,
                "facts": group.facts,
                "checks": [asdict(check) | {"passed": check.passed} for check in group.checks],
            }
            for group in groups
        ],
    }
    text = "\n".join(lines) + "\n"
    # a number that is not finite has no form in JSON
    file.write_text(text + JSON_BEGINS + json.dumps(_finite(content), indent=1) + "\n", encoding="utf-8")
    return text


def anonymous(text: str) -> str:
    """Replace the names of this host and user, and the user's folders."""
    named = {str(Path.cwd()): "FOLDER", str(Path.home()): "HOME", socket.gethostname(): "HOST", _user(): "USER"}
    for name, stands_for in named.items():
        if len(name) > 1 and name not in ("root", "/root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stands_for, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name, as in many containers
        return ""


def _facts(group: Group) -> list[str]:
    width = max((len(name) for name in group.facts), default=0)
    return [
        line
        for name, value in group.facts.items()
        for line in textwrap.wrap(
            f"{name:{width}}  {value}", WIDTH, subsequent_indent=" " * (width + 2), break_on_hyphens=False
        )
    ]


def _checks(group: Group) -> list[str]:
    if not group.checks:
        return []
    lines = [f"{'check':{NAME}}{'value':>{VALUE}}{'tolerance':>{VALUE}}  verdict"]
    for check in group.checks:
        value = "none" if check.value is None else f"{check.value:.3g}"
        verdict = "passed" if check.passed else "FAILED"
        lines.append(f"{check.name:{NAME}}{value:>{VALUE}}{check.tolerance:>{VALUE}.3g}  {verdict}")
        lines += textwrap.wrap(check.detail, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return lines


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
