"""The acceptance test of Gaudi cards, on the stand-in of tests/habana: it passes, and a wrong kernel fails by name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import gaudi_acceptance
from megatron.cli.acceptance import kernels, report, runs
from megatron.cli.acceptance.report import AcceptanceReport, Check, Group, read_rows
from megatron.cli.acceptance.runs import MODELS, CardLayout, throughput_flags
from megatron.cli.gaudi_acceptance import MODES, PARTS, build_acceptance_parser, main
from megatron.settings.command_line import read_command_line
from megatron.settings.validation import check
from tests.habana import devices, skip_with_cuda, write_distribution
from tests.ranks import RankPools

ROOT = Path(__file__).resolve().parents[2]


def run_script(folder: Path, *flags: str, cards: str = "0,1", **variables: str) -> tuple[int, str, dict[str, Any]]:
    """Run the script on the stand-in of a released software -> status, text and JSON of the report."""
    skip_with_cuda()
    packages = folder.parent / "packages"
    found = write_distribution(packages)
    info = packages / "torch-2.11.0a0+git123.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0a0+git123\n")
    done = subprocess.run(
        [str(ROOT / "scripts" / "gaudi_acceptance.sh"), "--output", str(folder), *flags],
        env=os.environ
        | {"PYTHON": sys.executable, "PYTHONPATH": found, "HABANA_STAND_IN": "1", "HABANA_VISIBLE_MODULES": cards}
        | variables,
        capture_output=True,
        text=True,
    )
    assert (folder / "report.txt").is_file(), done.stderr
    text, _, content = (folder / "report.txt").read_text().partition(report.JSON_BEGINS)
    assert text.strip() in done.stdout
    assert max(map(len, text.splitlines())) <= report.WIDTH
    return done.returncode, text, json.loads(content)


def failed(content: dict[str, Any]) -> list[str]:
    return [check["name"] for group in content["groups"] for check in group["checks"] if not check["passed"]]


@pytest.mark.slow
def test_the_script_passes_on_two_cards(tmp_path: Path) -> None:
    flags = "--parts kernels losses --modes lazy --models llama --steps 3".split()
    status, text, content = run_script(tmp_path / "out", *flags)
    assert (status, failed(content)) == (0, []), text
    count = sum(len(group["checks"]) for group in content["groups"])
    assert text.splitlines()[1] == f"passed: {count} checks"
    assert (content["passed"], content["not_run"]) == (True, [])
    titles = [group["title"] for group in content["groups"]]
    assert [title.split(",")[0] for title in titles[1:]] == [
        "kernels in lazy mode on one card",
        "3 steps of a tiny llama",
    ]
    facts = content["groups"][2]["facts"]
    assert facts["memory of rank 0 in GB: in use, peak, total"] == "1.50, 2.00, 96.00"
    assert facts["graphs compiled by rank 0"] == "17"
    assert content["groups"][0]["facts"]["habana-torch-plugin"] == "1.24.1.482"
    assert str(tmp_path.parent.parent) not in text


@pytest.mark.slow
@pytest.mark.parametrize("cards", ["0", "0,1", "0,1,2,3,4,5,6,7"])
def test_every_part_passes_in_both_modes(tmp_path: Path, cards: str) -> None:
    flags = "--throughput-preset tiny_llama --throughput-steps 6 --throughput-seq-length 128 --steps 10".split()
    status, text, content = run_script(tmp_path / "out", *flags, cards=cards)
    assert (status, failed(content)) == (0, []), text
    assert len(content["groups"]) == 1 + 2 * 4


def test_help_fits_into_100_columns_and_names_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = build_acceptance_parser().format_help()
    assert max(map(len, text.splitlines())) <= 100
    assert all(choice in text for choice in (*PARTS, *MODES, *MODELS))


@pytest.mark.parametrize("preset", ["llama32_1b", "tiny_llama", "tiny_bloom", "bloom_560m"])
def test_any_preset_can_be_measured(preset: str) -> None:
    config = read_command_line([*throughput_flags(preset, CardLayout.of(8), 20, 2048), "--data-path", "data"]).config
    assert check(config, world_size=8) == []
    assert (config.training.train_iters, config.optimizer.lr, config.optimizer.min_lr) == (20, 1e-4, 0)
    warmup = (config.optimizer.lr_warmup_samples, config.optimizer.lr_warmup_iters)
    assert (*warmup, config.optimizer.lr_warmup_fraction) == (0, 0, None)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("hpex.normalization:FusedRMSNorm", "FusedRMSNorm"),
        *(
            pytest.param(wrong, named, marks=pytest.mark.slow)
            for wrong, named in (
                ("hpex.kernels:FusedSDPA", "FusedSDPA"),
                ("hpex.kernels:RotaryPosEmbeddingHelperV1", "rotary embedding"),
                ("hpex.normalization:FusedClipNorm", "FusedClipNorm"),
                ("hpex.optimizers:FusedAdamW", "FusedAdamW"),
            )
        ),
    ],
)
def test_a_wrong_kernel_fails_the_script_by_its_name(tmp_path: Path, wrong: str, named: str) -> None:
    flags = "--parts kernels --modes eager".split()
    status, text, content = run_script(tmp_path / "out", *flags, HABANA_STAND_IN_WRONG=wrong)
    (group,) = content["groups"][1:]
    names = [check["name"] for check in group["checks"]]
    wrong_names = [name for name in names if name.startswith(named)]
    assert status == 1
    assert failed(content) == wrong_names
    assert len(wrong_names) < len(names) == 21
    assert text.splitlines()[1 : 3 + len(wrong_names)] == [
        f"FAILED: {len(wrong_names)} of {len(names) + 1} checks",
        f"  {group['title']}",
        *(f"    {name}" for name in wrong_names),
    ]


WRONG = [  # module, kernel, attribute, what the right result is multiplied with, beginnings of the checks that fail
    ("hpex.kernels", "FusedSDPA", "apply", "FusedSDPA"),
    ("hpex.kernels", "RotaryPosEmbeddingHelperV1", "apply", "rotary embedding"),
    ("hpex.normalization", "FusedRMSNorm", "apply", "FusedRMSNorm"),
    ("hpex.normalization", "FusedClipNorm", "clip_norm", "FusedClipNorm"),
]


@pytest.mark.parametrize(("module", "kernel", "function", "named"), WRONG)
def test_each_wrong_kernel_is_named(
    hpu_ranks: RankPools, tmp_path: Path, module: str, kernel: str, function: str, named: str
) -> None:
    hpu_ranks(1)(devices.check_a_wrong_kernel, tmp_path / "checks", module, kernel, function)
    checks = kernels.read_checks(tmp_path / "checks", "")
    assert {check.name.startswith(named) for check in checks if not check.passed} == {True}
    assert {check.passed for check in checks if check.name.startswith(named)} == {False}


def test_an_optimizer_that_forgets_the_weight_decay_is_named(hpu_ranks: RankPools, tmp_path: Path) -> None:
    hpu_ranks(1)(devices.check_an_optimizer_without_decay, tmp_path / "checks")
    assert [c.name for c in kernels.read_checks(tmp_path / "checks", "") if not c.passed] == [
        "FusedAdamW, 5 updates, float32"
    ]


def test_kernels_that_a_process_did_not_reach_fail_with_how_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "checks"
    lines = [{"names": {"a": 0.1, "b": 0.2}}, {"name": "a", "value": 0.05, "tolerance": 0.1, "detail": ""}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert kernels.read_checks(file, "ended with status -11") == [
        Check("a", 0.05, 0.1),
        Check("b", None, 0.2, "ended with status -11"),
    ]
    assert not any(check.passed for check in kernels.read_checks(tmp_path / "none", "gone"))


@pytest.mark.parametrize("value", [None, 0.2, float("nan"), float("inf")])
def test_a_number_that_is_missing_too_large_or_not_finite_fails(value: float | None) -> None:
    assert not Check("a", value, 0.1).passed


def test_what_has_not_run_is_named_and_nothing_passes_without_it() -> None:
    whole = AcceptanceReport("test", [Group("kernels", [Check("a", 0.05, 0.1)])])
    assert (whole.passed, whole.verdict()) == (True, ["passed: 1 check"])
    part = AcceptanceReport("test", whole.groups, ("llama, lazy mode", "throughput, lazy mode"))
    assert not part.passed
    assert part.verdict() == ["INCOMPLETE, not run: llama, lazy mode; throughput, lazy mode", "passed: 1 check"]


def test_no_line_of_a_report_is_wider_than_100_columns_and_a_reason_is_given_once() -> None:
    long = "a_preset_of_" + "many_words_" * 9
    checks = [Check(f"{long}: {name}", None, 1.0, f"/one/{'long' * 40}/path") for name in ("first", "second")]
    text = AcceptanceReport(
        "test", [Group(f"throughput of {long}, lazy", checks, {"a": "b " * 90})], ("x " * 70,)
    ).text()
    assert max(map(len, text.splitlines())) <= report.WIDTH
    assert text.count("FAILED") == 3
    assert text.count("for the same reason") == 1


def test_a_kernel_that_raises_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def raises() -> float:
        raise RuntimeError("synStatus 26")

    monkeypatch.setattr(kernels, "comparisons", lambda: {"a": (raises, 0.1), "b": (lambda: 0.05, 0.1)})
    kernels.run_all(tmp_path / "checks")
    assert kernels.read_checks(tmp_path / "checks", "") == [
        Check("a", None, 0.1, "RuntimeError: synStatus 26"),
        Check("b", 0.05, 0.1),
    ]


def test_a_process_that_hangs_is_ended_with_all_its_children(tmp_path: Path) -> None:
    pids, log = tmp_path / "pids", tmp_path / "log"
    script = f"echo stuck; sleep 600 & echo $! $$ > {pids}; kill -STOP $!; kill -STOP $$"
    fault = runs.run_process(["bash", "-c", script], os.environ, log, timeout_s=3)
    assert fault == "did not end in 3 s\nstuck"
    assert [pid for pid in pids.read_text().split() if Path(f"/proc/{pid}/exe").exists()] == []


def test_a_row_that_a_killed_writer_left_in_half_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text('{"a": 1}\n{"a": ')
    assert read_rows(tmp_path / "rows") == [{"a": 1}]
    assert read_rows(tmp_path / "none") == []


class Stages:
    """Parts in place of those of the test: the first one passes, what the second one does is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, second: Callable[[], Group]) -> None:
        def parts(options: Any, folder: Path) -> Iterator[tuple[str, Callable[[], Group]]]:
            yield "first", lambda: Group("first", [Check("a", 0.0, 0.0)])
            yield "second", second

        monkeypatch.setattr(gaudi_acceptance, "_parts", parts)
        monkeypatch.setattr(gaudi_acceptance, "_faults", lambda *_: iter(()))
        monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0")


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_a_signal_leaves_the_report_so_far(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: int,
    status: int,
    said: str,
) -> None:
    def interrupted() -> Group:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did not arrive")

    Stages(monkeypatch, interrupted)
    assert main(["--output", str(tmp_path / "out")]) == status
    assert f"{said}; 1 of 2 parts have not ended; report so far: {tmp_path}/out/report.txt" in capsys.readouterr().err
    text = (tmp_path / "out" / "report.txt").read_text()
    assert text.splitlines()[1:3] == ["INCOMPLETE, not run: second", "passed: 1 check"]
    assert json.loads(text.partition(report.JSON_BEGINS)[2])["passed"] is False


def test_a_disk_that_is_full_leaves_the_earlier_report_and_prints_the_newer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fills() -> Group:
        @contextlib.contextmanager
        def full(path: Path) -> Iterator[None]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            yield

        monkeypatch.setattr(report, "replacing", full)
        return Group("second", [Check("b", 2.0, 1.0)])

    Stages(monkeypatch, fills)
    assert main(["--output", str(tmp_path / "out")]) == 1
    said, file = capsys.readouterr(), tmp_path / "out" / "report.txt"
    assert said.err == f"error: {file}: No space left on device; report so far: {file}\n"
    assert "FAILED: 1 of 2 checks" in said.out
    assert "INCOMPLETE, not run: second" in file.read_text()


def test_an_error_in_a_part_fails_that_part_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Group:
        raise ValueError("not this one")

    Stages(monkeypatch, broken)
    assert main(["--output", str(tmp_path / "out")]) == 1
    assert "ValueError: not this one" in capsys.readouterr().out


def test_a_report_names_neither_host_nor_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gaudi-07")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    detail = "gaudi-07: ada at 10.1.2.3: /home/ada/run failed; not gaudi-071"
    variables = {"HCCL_COMM_ID": "10.1.2.3:5555", "PT_HPU_RECIPE_CACHE_CONFIG": f"{tmp_path}/cache,True"}
    group = Group("kernels", [Check("a", float("nan"), 0.1, detail)], {"software": "1.24.1.482"}, variables)
    full = AcceptanceReport("test", [group])
    for identifies in (False, True):
        (full if identifies else full.anonymous(tmp_path)).write(tmp_path / "report.txt")
        text = (tmp_path / "report.txt").read_text()
        assert (detail in text) == identifies
        assert ("gaudi-07:" in text) == ("10.1.2.3" in text) == (str(tmp_path) in text) == identifies
        assert "1.24.1.482" in text
        assert json.loads(text.partition(report.JSON_BEGINS)[2])["passed"] is False


@pytest.mark.parametrize(
    ("plugin", "torch", "passed"),
    [
        ("1.24.1.482", "2.11.0a0+git1", True),
        ("1.24.2.481", "2.11.0", True),  # a patch that no recipe names
        ("1.24.0.1007", "2.10.0+hpu", True),
        ("1.24.0.1007", "2.11.0", False),
        ("1.20.0.1", "2.5.1", False),
        ("none", "2.13.0", False),
    ],
)
def test_versions_that_do_not_belong_together_fail(
    monkeypatch: pytest.MonkeyPatch, plugin: str, torch: str, passed: bool
) -> None:
    versions = {"habana-torch-plugin": plugin, "torch": torch}
    monkeypatch.setattr(report, "installed", lambda package: versions.get(package, "none"))
    (check,) = report.check_software(1).checks
    assert check.passed == passed
    assert passed or plugin in check.detail or torch in check.detail


@pytest.mark.parametrize(("devices", "layout"), [(1, (1, 1, 1)), (2, (2, 1, 1)), (3, (1, 1, 3)), (8, (2, 2, 2))])
def test_the_layout_has_every_parallelism_that_fits(devices: int, layout: tuple[int, int, int]) -> None:
    assert CardLayout.of(devices) == CardLayout(*layout)


def test_faults_are_refused_together_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0,1")
    with contextlib.chdir(tmp_path) if sys.version_info >= (3, 11) else contextlib.nullcontext():
        assert main(["--devices", "3", "--steps", "1", "--output", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    for part in ("habana_frameworks.torch is not installed", "shows 2 cards", "--steps 1 must be", "exists"):
        assert part in printed
    assert list(tmp_path.iterdir()) == []
