"""Commands that are given names on the hub: planned, launched, converted and pushed, with a stand-in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.checkpoint.reader import _are_of_one_name
from megatron.cli import convert_checkpoint, model_config
from megatron.generation.options import read_command
from megatron.launch.agents.agent_command import agent_options, parse
from megatron.launch.plan import LaunchRequest, RefusedError
from megatron.launch.preflight import preflight
from megatron.options.config import ConfigError
from megatron.weights.model_folder import names_on_hub
from tests import runs
from tests.finetuning_files import write_config, write_model, write_tokenizer
from tests.hub_server import HubServer, hub_variables, no_waits, serving, use_hub

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with serving() as server:
        use_hub(monkeypatch, server, tmp_path / "home")
        no_waits(monkeypatch)
        yield server


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def request_of(*flags: str) -> LaunchRequest:
    return LaunchRequest(device="cpu", dry_run=True, train_flags=["--train-iters", "2", *flags])


def test_a_plan_names_the_commit_for_all_hosts_and_downloads_no_weights(hub: HubServer, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model")
    write_tokenizer(folder)
    commit = hub.add("org/llama", files_in(folder))
    plan = preflight(
        request_of("--load", "org/llama", "--tokenizer-type", "HFTokenizer", "--tokenizer-model", "org/llama")
    )
    assert plan.config.model.num_layers == 2
    assert plan.config.checkpoint.load == str(tmp_path / f"home/hub/models--org--llama/snapshots/{commit}")
    pinned = f"org/llama@{commit}"
    assert plan.train_flags[-4:] == ("--load", pinned, "--tokenizer-model", pinned)
    assert plan.models == (pinned,)
    assert any(note.startswith(f"load=org/llama is {pinned}, in ") for note in plan.notes)
    # each host's agent has them before its ranks start
    options, _ = parse([*agent_options(plan).arguments(), "--"])
    assert options.models == pinned
    assert hub.asked("GET", r"model\.safetensors$") == 0


def test_a_run_that_goes_on_needs_neither_the_network_nor_its_start(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "saved/global_step2").mkdir(parents=True)
    (tmp_path / "saved/global_step2/manifest.json").write_text("{}")
    assert names_on_hub("org/llama", str(tmp_path / "saved"), None) == ()
    folder = tmp_path / "home/hub/models--org--llama/snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    # the same start, whatever the commit is by now
    assert _are_of_one_name(str(folder), "org/llama")
    assert _are_of_one_name("org/llama@v1", "hf://org/llama")
    assert not _are_of_one_name(str(folder), "org/other")
    assert not _are_of_one_name(str(folder), str(tmp_path))


def test_a_name_that_cannot_be_resolved_is_one_fault(hub: HubServer) -> None:
    with pytest.raises(RefusedError) as refused:
        preflight(request_of("--load", "org/llama"))
    (fault,) = refused.value.faults
    assert fault.startswith("load=org/llama is neither a folder here nor a model that")
    with pytest.raises(ConfigError) as caught:
        read_command(["--load", "org/llama", "--prompt", "x"])
    assert [fault.split(" is ")[0] for fault in caught.value.faults] == ["load=org/llama"]


def test_a_generation_takes_names_and_pins_them(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add("org/llama", files_in(write_config(tmp_path / "model")))
    command, _ = read_command(["--load", "org/llama", "--prompt", "x"])
    assert Path(command.load.load).name == commit
    assert command.load.pinned_flags([]) == ["--load", f"org/llama@{commit}"]
    # of transformers' flags --load is the base of the adapters
    assert command.load.pinned_flags(["--peft-model", "x"]) == ["--peft-model", f"org/llama@{commit}"]


def test_the_description_of_a_model_is_printed_by_its_name(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.add("org/llama", files_in(write_config(tmp_path / "model")))
    assert model_config.main(["--load", "org/llama"]) == 0
    assert f"# The model of org/llama@{commit}, by its config.json." in capsys.readouterr().out
    assert model_config.main(["--load", "org/absent"]) == 1
    assert "error: --load=org/absent is neither a folder here" in capsys.readouterr().err


def test_a_model_is_converted_from_its_name_and_pushed(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/llama", files_in(write_model(tmp_path / "model")))
    monkeypatch.setenv("HF_TOKEN", HubServer.TOKEN)
    words = ["--load", "org/llama", "--save", str(tmp_path / "out"), "--to", "hf", "--no-verify"]
    assert convert_checkpoint.main([*words, "--push-to-hub", "org/copy"]) == 0
    repository = hub.repositories["model", "org/copy"]
    assert repository.private
    assert repository.commits[repository.references["main"]] == files_in(tmp_path / "out")
    assert f"pushed: {hub.url}/org/copy/commit/" in capsys.readouterr().out


@pytest.mark.slow
def test_a_launch_downloads_once_trains_adapters_and_names_their_base(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add("org/llama", files_in(write_model(tmp_path / "model")))
    runs.write_dataset(tmp_path / "data", vocabulary=200)
    environment = {**os.environ, **hub_variables(hub, tmp_path / "home"), "MEGATRON_DEVICE": "cpu"}
    pinned = f"org/llama@{commit}"

    def call(*words: str) -> tuple[str, str]:
        command = [sys.executable, *words]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    flags = f"--load org/llama --data-path {tmp_path / 'data'} --train-iters 2 --eval-iters 0 --seq-length 32 --lr 1e-3"
    flags += f" --lora-rank 2 --lora-target-modules q_proj v_proj --save {tmp_path / 'saved'} --global-batch-size 2"
    flags += f" --results-dir {tmp_path / 'results'} --micro-batch-size 1"
    launch = ["tools/launch.py", "--device", "cpu", "--devices-per-node", "2", "--", *flags.split()]
    assert f"downloading {pinned}" in call(*launch)[1]
    assert hub.asked("GET", r"/resolve/.*model\.safetensors$") == 1
    assert json.loads((tmp_path / "results/run.json").read_text())["starts"][-1]["hub"] == {"load": pinned}
    # the name, not the folder of this machine's cache
    call("tools/convert_checkpoint.py", "--load", f"{tmp_path}/saved", "--save", f"{tmp_path}/peft", "--to", "peft")
    adapters = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (adapters["base_model_name_or_path"], adapters["revision"]) == ("org/llama", commit)
    # adapters and their base by their names, on a machine that has neither
    hub.add("org/adapters", files_in(tmp_path / "peft"))
    environment.update(hub_variables(hub, tmp_path / "other"))
    text = "--prompt sum --max-new-tokens 2 --device cpu --load org/adapters".split()
    answer, _ = call("tools/generate.py", *text)
    assert (tmp_path / f"other/hub/models--org--llama/snapshots/{commit}/model.safetensors").is_file()
    merged = ["--base", "org/llama", "--adapter", "org/adapters", "--save", f"{tmp_path}/merged"]
    call("tools/merge_adapter.py", *merged)
    # the same again where there is no network
    environment.update(hub_variables(None, tmp_path / "other"))
    assert call("tools/generate.py", *text)[0] == answer
    assert answer
