"""docs/start/gaudi.md, the Dockerfile, the requirements and the table of releases agree; what the page names exists."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement

from megatron.cli.acceptance.report import RELEASES
from megatron.cli.gaudi_acceptance import build_acceptance_parser
from megatron.cli.launch import build_launch_parser
from megatron.launch.dialects.hl_variables import VARIABLES
from megatron.launch.host_environment import sent_variables
from megatron.settings.parser import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "start" / "gaudi.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_the_page_has_the_table_of_releases() -> None:
    rows = re.findall(r"^\| (\d[\d.]*) \| ([\d.]+) \| ?([\d.]*) ?\|$", section("Versions"), re.MULTILINE)
    assert rows == [(release.software, release.torch, release.python or "") for release in RELEASES]


def test_the_image_starts_from_the_newest_release_and_keeps_its_torch() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    assert arguments == {"SOFTWARE": RELEASES[0].software, "TORCH": RELEASES[0].torch}
    (base,) = re.findall(r"^FROM (\S+)$", DOCKERFILE, re.MULTILINE)
    assert base.endswith("/${SOFTWARE}/ubuntu24.04/habanalabs/pytorch-installer-${TORCH}:latest")
    copied = {name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    # the requirements name what they read, and pip must not fetch another torch for them
    read = set(re.findall(r"^-r (\S+)$", (ROOT / "requirements-hpu.txt").read_text(), re.MULTILINE))
    assert read == {"requirements.txt"}
    assert {"requirements-hpu.txt", *read} <= copied
    assert "-c torch.txt -r requirements-hpu.txt" in DOCKERFILE
    lowest = re.findall(r"^torch>=([\d.]+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[0]
    assert all(_numbers(release.torch) >= _numbers(lowest) for release in RELEASES)
    python = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0]
    assert _numbers(RELEASES[0].python or "") >= _numbers(python)


def test_pip_keeps_the_builds_of_torch_and_deepspeed_that_the_vendor_installed() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = {one.name: one for one in map(Requirement, (line for line in lines if not line.startswith("#")))}
    for name, versions in {
        "torch": [f"{release.torch}{suffix}" for release in RELEASES for suffix in ("a0+git3c5ac0f", "+hpu")],
        "deepspeed": ["0.16.1+hpu.synapse.v1.21.0"],
    }.items():
        # pip takes an installed pre-release
        assert [v for v in versions if not wanted[name].specifier.contains(v, prereleases=True)] == []
        assert {one.operator for one in wanted[name].specifier} == {">="}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_flags_and_variables_of_the_page_exist() -> None:
    outside = PAGE.replace(re.findall(r"   docker run[^`]+", PAGE)[0], "")
    known = {
        flag
        for parser in (build_parser(), build_launch_parser(), build_acceptance_parser())
        for action in parser._actions
        for flag in action.option_strings
    }
    unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", outside)) - known
    # of other programs: the vendor's installer, docker, and generation
    assert unknown <= {"--type", "--ipc", "--shm-size", "--net", "--use-graphs"}
    assert set(re.findall(r"\bHL_[A-Z0-9_]+", PAGE)) - {"HL_"} <= {variable.name for variable in VARIABLES}
    assert {name for name in re.findall(r"(?:scripts|tools)/\w+\.\w+", PAGE) if not (ROOT / name).is_file()} == set()


def test_the_variables_of_the_table_are_sent_to_other_hosts() -> None:
    names = [
        name
        for cell in re.findall(r"^\| (`.*?`) \|", section("Environment variables"), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    ]
    assert len(names) > 10
    kept = sent_variables(dict.fromkeys(names, "1"))
    assert [name for name in names if name not in kept] == []
