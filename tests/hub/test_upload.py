"""--push-to-hub: one commit of a finished export, to a stand-in for the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.cli import convert_checkpoint
from megatron.hub.names import HubError, HubName
from megatron.hub.upload import check_target, push
from tests.hub_server import Answer, HubServer, no_waits, serving, use_hub

EXPORT = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with serving() as server:
        use_hub(monkeypatch, server, tmp_path / "home")
        no_waits(monkeypatch)
        monkeypatch.setenv("HF_TOKEN", HubServer.TOKEN)
        yield server


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    for name, data in EXPORT.items():
        (folder / name).write_bytes(data)
    return folder


def files_of(hub: HubServer, repo: str = "org/new") -> dict[str, bytes]:
    repository = hub.repositories["model", repo]
    return repository.commits[repository.references["main"]]


def test_a_folder_is_pushed_in_one_commit_to_a_private_repository(
    hub: HubServer, export: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = check_target("org/new")
    assert name == HubName("org/new")
    address = push(export, name, "Upload")
    assert files_of(hub) == EXPORT
    repository = hub.repositories["model", "org/new"]
    assert repository.private
    assert address == f"{hub.url}/org/new/commit/{repository.references['main']}"
    assert len(repository.commits) == 2  # with that of the creation
    assert HubServer.TOKEN not in "".join(capfd.readouterr())


def test_weights_that_were_there_before_do_not_stay_beside_the_new_ones(hub: HubServer, export: Path) -> None:
    older = {"model-00001-of-00002.safetensors": b"1", "model.safetensors.index.json": b"{}", "README.md": b"# Card"}
    hub.add("org/new", older)
    push(export, HubName("org/new"), "Upload")
    assert files_of(hub) == {**EXPORT, "README.md": b"# Card"}
    assert not hub.repositories["model", "org/new"].private


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/repos/create", 403, r"refuses it \(403\); log in with `hf auth login`"),
        ("/preupload/", 500, "answered with status 500"),
        ("/uploads/", 403, r"refuses it \(403\)"),
        ("/commit/", 429, "answered with status 429"),
    ],
)
def test_a_push_that_fails_leaves_the_folder_and_names_the_command(
    hub: HubServer, export: Path, path: str, status: int, said: str
) -> None:
    hub.override = lambda request: Answer.of_error(status) if path in request.path else None
    with pytest.raises(HubError, match=rf"--push-to-hub org/new: .*{said}.*`hf upload org/new .*export`"):
        push(export, HubName("org/new"), "Upload")
    assert {file.name: file.read_bytes() for file in export.iterdir()} == EXPORT


def test_what_cannot_be_pushed_is_refused_before_the_work(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("new", "org/new@v1", "a/b/c"):
        with pytest.raises(HubError, match="give ORGANISATION/NAME"):
            check_target(text)
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(HubError, match=r"log in with `hf auth login`.*; nothing was started"):
        check_target("org/new")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        check_target("org/new")
    words = ["--load", str(tmp_path), "--save", str(tmp_path / "out"), "--push-to-hub", "org/new"]
    with pytest.raises(SystemExit):
        convert_checkpoint.main([*words, "--to", "native"])
    assert "--push-to-hub is for --to hf, --to peft" in capsys.readouterr().err
    # before the model is looked at
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        convert_checkpoint.run(convert_checkpoint.parse_arguments([*words, "--to", "hf"]))
    assert not (tmp_path / "out").exists()
