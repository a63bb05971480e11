"""Names of the hub, resolved in the cache and downloaded from a stand-in, also one that answers wrongly."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.hub import download
from megatron.hub.download import find, hidden_name, lacks_weights, local_folder, whole_folder, with_weights
from megatron.hub.names import HubError, HubName, name_of, parse_name, pinned, repository_of, snapshot_of
from tests.hub_server import Answer, HubServer, Request, hub_variables, no_waits, serving, use_hub

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"model": {}}',
    "additional_chat_templates/tool_use.jinja": b"{{ messages }}",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"the same weights",
    "original/consolidated.00.pth": b"pickled",
    "modeling_llama.py": b"raise SystemExit",
    "README.md": b"# A model",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with serving() as server:
        use_hub(monkeypatch, server, tmp_path / "home")
        no_waits(monkeypatch)
        yield server


def held(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("hf://org/name", HubName("org/name")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("Org-1/na_me.v2@main", HubName("Org-1/na_me.v2", "main")),
        *((path, None) for path in ("name", "./org/name", "/org/name", "../name", "~/name", "a/b/c", "org/name/", "")),
        *(
            (path, None)
            for path in ("org/..", "org/a--b", "org/name@", "org/name@../x", "org/na me", ".org/name", "a:b/c")
        ),
    ],
)
def test_a_name_has_an_organisation_and_perhaps_a_revision(text: str, expected: HubName | None) -> None:
    assert parse_name(text) == expected


def test_what_is_here_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    assert name_of("org/name") is None
    assert local_folder("org/name", "load") == Path("org/name")
    # the hub's is named by its scheme, and a folder that hides a downloaded model is noted
    assert name_of("hf://org/name") == HubName("org/name")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert hidden_name("org/name", "load") == []
    (tmp_path / "home/hub/models--org--name").mkdir(parents=True)
    (note,) = hidden_name("org/name", "load")
    assert "load=org/name is the folder here" in note
    assert "hf://org/name" in note


def test_a_name_is_downloaded_once_then_found_without_a_network(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("org/name", FILES)
    folder = local_folder("org/name", "load")
    assert folder.name == commit
    assert pinned(folder) == f"org/name@{commit}"
    assert repository_of(str(folder)) == repository_of("hf://org/name@v2") == "org/name"
    # neither code, nor weights before they are needed, nor the weights of other programs
    described = {"config.json", "tokenizer.json", "additional_chat_templates/tool_use.jinja"}
    assert held(folder) == described
    assert lacks_weights(folder)
    assert with_weights(folder, "load") == folder
    assert held(folder) == described | {"model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not lacks_weights(folder)
    asked = len(hub.requests)
    later = hub.add("org/name", {**FILES, "config.json": b"{}"})
    # the cache comes first: a run is not another one because the hub's model changed
    assert whole_folder("org/name", "load") == folder
    assert len(hub.requests) == asked
    assert local_folder(f"org/name@{later}", "load").name == later
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find(HubName("org/name")) == folder
    assert whole_folder(f"org/name@{commit}", "load") == folder


def test_weights_in_several_files_are_whole_by_their_index(hub: HubServer) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.dumps({"weight_map": {"a": names[0], "b": names[1]}}).encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index, names[0]: b"1", names[1]: b"2"}
    hub.add("org/name", files, reference="v1")
    folder = whole_folder("org/name@v1", "load")
    assert held(folder) == set(files)
    # as after an interrupted download
    (folder / names[1]).unlink()
    assert lacks_weights(folder)
    whole_folder("org/name@v1", "load")
    assert held(folder) == set(files)


def test_adapters_and_tokenizers_have_names_too(hub: HubServer) -> None:
    hub.add(
        "org/adapters", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a", "adapter_model.bin": b"b"}
    )
    # the options of a run follow from its tensors, which are few
    assert held(local_folder("org/adapters", "load")) == {"adapter_config.json", "adapter_model.safetensors"}
    assert held(whole_folder("org/adapters", "load")) == {"adapter_config.json", "adapter_model.safetensors"}
    hub.add("org/tokenizer", {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"})
    assert held(local_folder("org/tokenizer", "tokenizer_model", "tokenizer")) == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    with pytest.raises(HubError, match=r"load=org/tokenizer: .* holds none of config.json, adapter_config.json"):
        local_folder("org/tokenizer", "load")
    hub.add("org/empty", {"config.json": b"{}"})
    with pytest.raises(HubError, match=r"holds no model\*\.safetensors"):
        whole_folder("org/empty", "load")


def test_without_a_network_the_cache_and_the_remedy_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: HubServer
) -> None:
    hub.add("org/name", FILES, reference="v1")
    folder = local_folder("org/name@v1", "load")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    remedy = f"{tmp_path}/home/hub; HF_HUB_OFFLINE is set, .*run `hf download org/other` where there is a network"
    with pytest.raises(HubError, match=f"load=org/other is not here .*{remedy}"):
        local_folder("org/other", "load")
    # the description is there, the weights are not
    with pytest.raises(HubError, match="hf download org/name --revision"):
        with_weights(folder, "load")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    with pytest.raises(HubError, match=r"cannot be reached \(.*`hf download org/other`"):
        local_folder("org/other", "load")


def test_a_name_that_there_is_not_and_a_revision_and_a_gate_are_named(hub: HubServer) -> None:
    hub.add("org/name", FILES)
    with pytest.raises(
        HubError, match=r"load=org/nmae is neither a folder here nor a model that .* log in with `hf auth login`"
    ):
        local_folder("org/nmae", "load")
    with pytest.raises(HubError, match="org/name has no revision v9; give a branch, a tag or a commit"):
        local_folder("org/name@v9", "load")
    hub.repositories["model", "org/name"].gated = True
    with pytest.raises(HubError, match=rf"is gated: accept its terms at {hub.url}/org/name"):
        local_folder("org/name", "load")


def test_a_private_model_is_read_with_the_users_token_which_nothing_prints(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/name", FILES)
    hub.repositories["model", "org/name"].private = True
    with pytest.raises(HubError, match="if it is private, log in"):
        local_folder("org/name", "load")
    monkeypatch.setenv("HF_TOKEN", HubServer.TOKEN)
    assert whole_folder("org/name", "load").is_dir()
    assert HubServer.TOKEN not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, r"refuses it to you \(401\)"),
        (403, r"refuses it to you \(403\)"),
        (404, "shows to you"),
        (429, r"refused further requests for now \(429\)"),
        (500, "answered with status 500"),
    ],
)
@pytest.mark.parametrize("of", ["/api/", "/resolve/"])
def test_a_refusal_is_named(hub: HubServer, of: str, status: int, expected: str) -> None:
    hub.add("org/name", FILES)
    hub.override = lambda request: Answer.of_error(status) if of in request.path else None
    with pytest.raises(HubError, match=expected):
        local_folder("org/name", "load")


@pytest.mark.parametrize(
    "name", ["../../escaped.json", "/tmp/escaped.json", "a/../../escaped.json", "..\\escaped.json"]
)
def test_no_name_of_a_file_leads_out_of_the_cache(hub: HubServer, name: str, tmp_path: Path) -> None:
    hub.add("org/name", {**FILES, name: b"{}"})
    with pytest.raises(HubError, match="out of the repository; nothing is read"):
        local_folder("org/name", "load")
    assert not list(tmp_path.rglob("*escaped*"))
    assert not Path("/tmp/escaped.json").exists()


def test_a_commit_that_is_none_is_refused(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/name", FILES)
    hub.override = lambda request: (
        Answer.of_json({"id": "org/name", "sha": "../../../escaped", "siblings": []})
        if "/api/" in request.path
        else None
    )
    with pytest.raises(HubError, match="as its commit, which a hub does not"):
        local_folder("org/name", "load")


@pytest.mark.parametrize("etag", ["../../../../escaped", "0" * 40, ""])
def test_a_checksum_that_is_not_the_listed_one_is_refused_before_anything_is_written(
    hub: HubServer, etag: str, tmp_path: Path
) -> None:
    hub.add("org/name", FILES)

    def override(request: Request) -> Answer | None:
        if "/resolve/" not in request.path:
            return None
        right = hub.answer(request)
        return replace(right, headers={**right.headers, "ETag": f'"{etag}"'})

    hub.override = override
    with pytest.raises(HubError, match=r"the two must be equal, nothing is read"):
        local_folder("org/name", "load")
    assert not list(tmp_path.rglob("*escaped*"))
    assert not list((tmp_path / "home/hub/models--org--name").rglob("*.json"))


def test_content_of_the_right_length_and_another_checksum_is_removed(hub: HubServer) -> None:
    hub.add("org/name", FILES)
    wrong = b"x" * len(FILES["model.safetensors"])

    def override(request: Request) -> Answer | None:
        if request.method != "GET" or "model.safetensors" not in request.path:
            return None
        return replace(hub.answer(request), body=wrong)

    hub.override = override
    with pytest.raises(HubError, match=r"model.safetensors has another checksum than the hub lists"):
        whole_folder("org/name", "load")
    hub.override = lambda request: None
    assert (whole_folder("org/name", "load") / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_body_that_is_cut_off_is_named_and_nothing_of_it_stays(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/name", FILES)

    def override(request: Request) -> Answer | None:
        if request.method != "GET" or "model.safetensors" not in request.path:
            return None
        right = hub.answer(request)
        return Answer(200, right.body[:100], right.headers, length=len(right.body))

    hub.override = override
    with pytest.raises(HubError, match=r"repeat the command|cannot be reached"):
        whole_folder("org/name", "load")
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.override = lambda request: None
    assert not lacks_weights(whole_folder("org/name", "load"))


def test_a_redirect_elsewhere_is_followed_without_the_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", FILES)
    monkeypatch.setenv("HF_TOKEN", HubServer.TOKEN)
    with serving() as elsewhere:
        elsewhere.override = lambda request: Answer(200, FILES["model.safetensors"])

        def override(request: Request) -> Answer | None:
            if "model.safetensors" not in request.path:
                return None
            place = elsewhere.url.replace("127.0.0.1", "localhost")
            return Answer(302, b"", {**hub.answer(request).headers, "Location": f"{place}/blob"})

        hub.override = override
        folder = whole_folder("org/name", "load")
        assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
        assert elsewhere.asked("GET", "/blob") == 1
        assert all(HubServer.TOKEN not in str(request.headers) for request in elsewhere.requests)
    assert any(HubServer.TOKEN in str(request.headers) for request in hub.requests)


def test_a_server_that_does_not_answer_is_given_up(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", FILES)
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)

    def override(request: Request) -> Answer | None:
        time.sleep(1.0)
        return None

    hub.override = override
    began_s = time.monotonic()
    with pytest.raises(HubError, match="cannot be reached"):
        local_folder("org/name", "load")
    assert time.monotonic() - began_s < 5


def test_a_cache_that_cannot_be_written_is_named(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/name", FILES)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/hub").write_text("a file where the cache would be")
    with pytest.raises(HubError, match=r"cache .*/home/hub cannot be written .* set HF_HOME"):
        local_folder("org/name", "load")


def test_processes_of_a_host_download_once(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/name", FILES)

    def override(request: Request) -> Answer | None:
        # the first is still at it when the others come
        if request.method == "GET" and "model.safetensors" in request.path:
            time.sleep(1.0)
        return None

    hub.override = override
    code = "import sys; from megatron.hub.download import whole_folder; print(whole_folder('org/name', 'load'))"
    environment = {**os.environ, **hub_variables(hub, tmp_path / "home")}
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(folders) == 1
    for name in ("model.safetensors", "config.json"):
        assert hub.asked("GET", f"/resolve/.*{name}$") == 1


def test_a_run_without_names_does_not_import_the_package(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom megatron.settings.command_line import read_command_line\n"
        "read_command_line(['--config', 'tiny_llama', '--data-path', 'data/corpus', '--load', 'out/run', '--save',"
        " 'out/run', '--tokenizer-model', '/models/tokenizer.json'])\nassert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_folder_of_the_cache_is_known_by_its_place(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--meta-llama--Llama-2-7b-hf/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        found = snapshot_of(folder)
        assert found is not None
        assert found.name == HubName("meta-llama/Llama-2-7b-hf", "0123abcd")
        assert found.cache == tmp_path / "hub"
    assert snapshot_of(tmp_path) is None
