"""Datasets by name, configuration and split, streamed from a stand-in for the hub into preprocessing."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron.cli.data import preprocess_chat, preprocess_data
from megatron.data.index.indexed import DataError
from megatron.data.read import archives
from megatron.data.read.hub_dataset import DatasetUrl, find_dataset, urls_of, with_split
from megatron.launch.dialects.spawn_requests import dataset_files
from megatron.options.config import ConfigError
from tests.finetuning_files import write_tokenizer
from tests.hub_server import Answer, HubServer, no_waits, serving, use_hub

NAME = "hf://datasets/org/corpus"
README = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: validation
    path: [data/held-out.jsonl]
- config_name: small
  data_files: small/*.jsonl
- config_name: other
  data_dir: other
---
# A corpus
"""


def lines(*numbers: int) -> bytes:
    return b"".join(json.dumps({"text": f"{number} {number + 1}"}).encode() + b"\n" for number in numbers)


def table(*numbers: int) -> bytes:
    file = io.BytesIO()
    texts = [f"{number} {number + 1}" for number in numbers]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=2)
    return file.getvalue()


FILES = {
    "README.md": README.encode(),
    ".gitattributes": b"",
    "data/train-00000-of-00002.parquet": table(*range(7)),
    "data/train-00001-of-00002.parquet": table(*range(7, 12)),
    "data/held-out.jsonl": lines(20),
    "small/a.jsonl": lines(30),
    "other/train.jsonl": lines(40),
    "other/test.jsonl": lines(41),
}
TRAIN = [name for name in FILES if "data/train" in name]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with serving() as server:
        use_hub(monkeypatch, server, tmp_path / "home")
        no_waits(monkeypatch)
        yield server


def paths(url: str) -> list[str]:
    return [file.relative_name for file, _ in find_dataset(url)]


def preprocess(source: str, prefix: Path, *flags: str) -> int:
    words = [
        "--input",
        source,
        "--output-prefix",
        str(prefix),
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "99",
    ]
    return preprocess_data.main([*words, "--workers", "1", *flags])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?split=train", TRAIN),
        ("?config=default&split=train", TRAIN),
        ("?split=dev", ["data/held-out.jsonl"]),
        ("?config=small", ["small/a.jsonl"]),
        ("?config=other&split=test", ["other/test.jsonl"]),
        ("/data/train-00001-of-00002.parquet", TRAIN[1:]),
        ("/data/train-*", TRAIN),
        ("/other?split=train", ["other/train.jsonl"]),
    ],
)
def test_configuration_split_and_path_choose_files(hub: HubServer, query: str, expected: list[str]) -> None:
    commit = hub.add("org/corpus", FILES, "dataset")
    assert paths(NAME + query) == expected
    # a name that does not change with the dataset
    assert urls_of(NAME + query) == [f"{NAME}@{commit}/{path}" for path in expected]
    hub.add("org/corpus", {"README.md": b""}, "dataset")
    name, _, rest = (NAME + query).partition("corpus")
    assert paths(f"{name}corpus@{commit}{rest}") == expected


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "its configuration default has several splits; give one of train, validation as split=NAME"),
        ("?split=test", "has no split test; give one of train, validation"),
        ("?config=large", "has no configuration large; give one of default, small, other"),
        ("?config=other", r"has the splits test, train; give one as \?split=NAME"),
        ("/absent.jsonl", "holds no absent.jsonl"),
        ("?split=train[:10]", "split=train.:10. is not a name"),
        ("?split=", "is not hf://datasets/ORGANISATION/NAME"),
        ("?name=x", "is not hf://datasets/ORGANISATION/NAME"),
        ("/data?config=small", "a path and config=... both choose files"),
        ("@v9?split=train", "has no revision v9"),
    ],
)
def test_a_wrong_choice_is_named_with_those_that_there_are(hub: HubServer, query: str, said: str) -> None:
    hub.add("org/corpus", FILES, "dataset")
    with pytest.raises(DataError, match=said):
        urls_of(NAME + query)


def test_a_dataset_that_there_is_not_and_one_that_is_refused_are_named(hub: HubServer) -> None:
    with pytest.raises(DataError, match="nor a dataset that"):
        urls_of(f"{NAME}?split=train")
    hub.override = lambda request: Answer.of_error(429) if "/api/" in request.path else None
    with pytest.raises(DataError, match="refused further requests"):
        urls_of(f"{NAME}?split=train")


def test_without_configurations_splits_are_names_of_files(hub: HubServer) -> None:
    files = {"train.jsonl": lines(1), "test.jsonl": lines(2), "LICENSE": b""}
    hub.add("org/corpus", files, "dataset")
    assert paths(f"{NAME}?split=test") == ["test.jsonl"]
    with pytest.raises(DataError, match="has the splits test, train"):
        paths(NAME)
    hub.add("org/corpus", {"all.jsonl": lines(1), "README.md": b"# no header"}, "dataset")
    assert paths(NAME) == ["README.md", "all.jsonl"]  # of which the search passes the first over
    assert paths(f"{NAME}?split=train") == ["all.jsonl"]
    # as datasets reads a folder
    hub.add("org/corpus", {"en/a.jsonl": lines(1), "fr/a.jsonl": lines(2)}, "dataset")
    assert paths(f"{NAME}?config=fr") == ["fr/a.jsonl"]


@pytest.mark.parametrize(
    "readme",
    [
        "---\nconfigs: [1]\n---\n",
        "---\nconfigs:\n- data_files:\n  - split: train\n---\n",
        "---\na: [\n---\n",
        "---\n- x\n---\n",
    ],
)
def test_a_readme_that_cannot_be_read_is_named(hub: HubServer, readme: str) -> None:
    hub.add("org/corpus", {"README.md": f"---\n{readme}\n---\n".encode(), "a.jsonl": lines(1)}, "dataset")
    with pytest.raises(DataError, match=r"README\.md cannot be read"):
        paths(NAME)
    assert paths(f"{NAME}/a.jsonl") == ["a.jsonl"]


def test_what_the_hub_has_made_parquet_of_is_read_as_that(hub: HubServer) -> None:
    hub.add("org/corpus", {"corpus.py": b"raise SystemExit", "README.md": b""}, "dataset")
    with pytest.raises(DataError, match=r"holds no .* and the hub has not made Parquet of it"):
        paths(f"{NAME}?split=train")
    files = {
        f"en/{split}/{number:04d}.parquet": table(number) for split in ("train", "partial-test") for number in (0, 1)
    }
    hub.add("org/corpus", files, "dataset", "refs/convert/parquet")
    assert paths(f"{NAME}?split=train") == ["en/train/0000.parquet", "en/train/0001.parquet"]
    with pytest.raises(DataError, match="only the first 5 GB of partial-test"):
        paths(f"{NAME}?split=partial-test")


def test_a_numbered_file_that_is_missing_is_named(hub: HubServer) -> None:
    hub.add("org/corpus", {name: data for name, data in FILES.items() if name != TRAIN[0]}, "dataset")
    with pytest.raises(DataError, match=r"lacks data/train-00000-of-00002\.parquet"):
        paths(f"{NAME}?split=train")


def test_a_streamed_dataset_is_that_of_the_files(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add("org/corpus", FILES, "dataset")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in TRAIN:
        (folder / name.rpartition("/")[2]).write_bytes(FILES[name])
    assert preprocess(str(folder), tmp_path / "local") == 0
    assert preprocess(f"{NAME}?split=train", tmp_path / "streamed") == 0
    for ending in (".bin", ".idx"):
        local, streamed = (tmp_path / f"{name}_text_document{ending}" for name in ("local", "streamed"))
        assert streamed.read_bytes() == local.read_bytes()
    manifest = json.loads((tmp_path / "streamed_text_document.manifest.json").read_text())
    counts = {file["name"]: file["documents"] for file in manifest["files"]}
    assert counts == {f"{NAME}@{commit}/{TRAIN[0]}": 7, f"{NAME}@{commit}/{TRAIN[1]}": 5}
    # nothing of it stays in the cache
    assert not list((tmp_path / "home").rglob("*.parquet"))


def test_a_downloaded_dataset_is_read_without_a_network(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = pytest.importorskip("huggingface_hub")
    commit = hub.add("org/corpus", FILES, "dataset")
    # a part of it is not the dataset
    package.snapshot_download(
        "org/corpus", repo_type="dataset", endpoint=hub.url, allow_patterns=[TRAIN[0], "README.md"]
    )
    monkeypatch.setattr(package.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="hf download org/corpus --repo-type dataset"):
        paths(f"{NAME}?split=train")
    monkeypatch.setattr(package.constants, "HF_HUB_OFFLINE", False)
    assert paths(f"{NAME}?split=train") == TRAIN
    package.snapshot_download("org/corpus", repo_type="dataset", endpoint=hub.url)
    monkeypatch.setattr(package.constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert preprocess(f"{NAME}?split=train", tmp_path / "offline") == 0
    assert len(hub.requests) == asked
    manifest = json.loads((tmp_path / "offline_text_document.manifest.json").read_text())
    assert [file["name"] for file in manifest["files"]] == [f"{NAME}@{commit}/{name}" for name in TRAIN]


def test_a_stream_resumes_where_it_ended(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MOST_BLOCKS_OF_A_BATCH", 1)  # the first file is done before the second is read
    files = {"a.jsonl": lines(*range(5)), "b.jsonl": lines(*range(5, 9))}
    hub.add("org/corpus", files, "dataset")
    assert preprocess(NAME, tmp_path / "whole") == 0
    prefix, flags = tmp_path / "resumed", ("--resume-interval", "0")
    bad = files["b.jsonl"].replace(b"{", b"[")
    commit = hub.add("org/corpus", {**files, "b.jsonl": bad}, "dataset")
    assert preprocess(NAME, prefix, *flags) == 1
    said = capsys.readouterr().err
    assert f"{NAME}@{commit}/b.jsonl:1" in said
    assert "--resume continues from there" in said
    # what was begun with one commit is not continued with another
    hub.add("org/corpus", files, "dataset")
    assert preprocess(NAME, prefix, *flags, "--resume") == 1
    assert "--resume: --input had 2 files" in capsys.readouterr().err
    asked = hub.asked("GET", f"/resolve/{commit}/a.jsonl")
    hub.repositories["dataset", "org/corpus"].commits[commit]["b.jsonl"] = files["b.jsonl"]
    assert preprocess(f"{NAME}@{commit}", prefix, *flags, "--resume") == 0
    assert hub.asked("GET", f"/resolve/{commit}/a.jsonl") == asked
    for ending in (".bin", ".idx"):
        resumed, whole = (tmp_path / f"{name}_text_document{ending}" for name in ("resumed", "whole"))
        assert resumed.read_bytes() == whole.read_bytes()


def test_chats_take_the_split_of_the_flag(hub: HubServer, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "the sum?"}, {"role": "assistant", "content": "it is"}]
    rows = b"".join(json.dumps({"messages": turns}).encode() + b"\n" for _ in range(3))
    splits = "{split: sft, path: a.jsonl}, {split: test, path: b.jsonl}"
    readme = f"---\nconfigs:\n- config_name: x\n  data_files: [{splits}]\n---\n".encode()
    hub.add("org/chats", {"README.md": readme, "a.jsonl": rows, "b.jsonl": rows[: len(rows) // 3]}, "dataset")
    write_tokenizer(tmp_path / "tokenizer")
    words = ["--input", "hf://datasets/org/chats", "--tokenizer-model", str(tmp_path / "tokenizer"), "--workers", "1"]
    assert preprocess_chat.main([*words, "--split", "sft", "--output-prefix", str(tmp_path / "sft")]) == 0
    assert preprocess_chat.main([*words, "--split", "test", "--output-prefix", str(tmp_path / "test")]) == 0
    documents = [
        json.loads((tmp_path / f"{name}.manifest.json").read_text())["counts"]["documents"] for name in ("sft", "test")
    ]
    assert documents == [3, 1]
    assert with_split(["a.jsonl", "hf://datasets/org/chats"], "sft") == (["a.jsonl", "hf://datasets/org/chats"], "sft")
    assert str(DatasetUrl.parse("hf://datasets/org/chats@v1/a.jsonl")) == "hf://datasets/org/chats@v1/a.jsonl"


def test_a_script_names_its_dataset_with_subset_and_split(hub: HubServer) -> None:
    commit = hub.add("org/corpus", FILES, "dataset")
    place = f"{NAME}@{commit}"
    assert dataset_files("org/corpus", "small", is_given=True, split="train") == [f"{place}/small/a.jsonl"]
    # the default of the script is a folder that other datasets do not have
    found = dataset_files("org/corpus", "data/finetune", is_given=False, split="train")
    assert found == [f"{place}/{name}" for name in TRAIN]
    with pytest.raises(ConfigError, match="has no configuration data/finetune"):
        dataset_files("org/corpus", "data/finetune", is_given=True, split="train")
