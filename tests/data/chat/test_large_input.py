"""Input of any size: constant memory, and what is too long counted, in the manifest too, or refused as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from megatron.cli.data.inspect_dataset import main as inspect
from megatron.cli.data.merge_datasets import main as merge
from megatron.cli.data.preprocess_chat import main
from megatron.data.chat.preprocessing import preprocess_chats
from megatron.data.index.indexed import DataError
from megatron.data.prepare.manifest import read_manifest
from megatron.runtime.files import IMPORT_ROOT
from tests.data.chat.test_conversation import bytes_json
from tests.data.chat.test_preprocessing import SPECIAL, chat, job_of, names, rows_of

PEAK = """
import contextlib, io, sys
from pathlib import Path
from megatron.cli.data import preprocess_chat, preprocess_preferences
from megatron.data.chat.preprocessing import ChatJob
from megatron.data.prepare.block_encoder import find_input
from megatron.data.read.archives import read_batches

folder, tokenizer, how = sys.argv[1:]

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))

def read(path):
    job = ChatJob((str(path),), "none", tokenizer)
    for batch in read_batches(find_input(job).sources, job.reading_rules()):
        pass

def preprocess(path):
    tool, template = preprocess_chat, ["--chat-template", "chatml"]
    if "pairs" in path.name:
        tool, template = preprocess_preferences, []
    with contextlib.redirect_stdout(io.StringIO()):
        flags = ["--input", str(path), "--output-prefix", folder + "/out", "--overwrite", "--workers", "1"]
        assert tool.main([*flags, "--tokenizer-model", tokenizer, *template]) == 0

def run(stem):
    for path in sorted(Path(folder).glob(stem + "*")):
        read(path) if how == "read" else preprocess(path)

run("small")
before = peak()
run("large")
print(peak() - before)
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (folder := tmp_path / "tokenizer").mkdir()
    (folder / "tokenizer.json").write_text(bytes_json(SPECIAL))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.mark.parametrize(("how", "groups"), [("read", 45), pytest.param("preprocess", 60, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_input(tmp_path: Path, tokenizer: Path, how: str, groups: int) -> None:
    """JSONL, a JSON array, Parquet, Arrow, and preferences: several times the input takes no more memory."""
    (folder := tmp_path / "data").mkdir()
    row, group = {"messages": chat("question " * 200, "answer " * 1200)["messages"]}, 100  # 1 MB
    table = pyarrow.Table.from_pylist([row] * group)
    pair = json.dumps({"prompt": "question " * 200, "chosen": "yes " * 1000, "rejected": "no " * 1200}) + "\n"
    for name, count in (("small", groups // 5), ("large", groups)):
        path = folder / name
        path.with_suffix(".jsonl").write_text((json.dumps(row) + "\n") * (group * count))
        path.with_suffix(".json").write_text("[" + ",\n".join([json.dumps(row, indent=1)] * (group * count)) + "]")
        if how != "read":
            path.with_suffix(".pairs.jsonl").write_text(pair * (group * count))
        with (
            pyarrow.parquet.ParquetWriter(path.with_suffix(".parquet"), table.schema) as parquet,
            pyarrow.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as arrow,
        ):
            for _ in range(count):
                parquet.write_table(table)
                arrow.write_table(table)
    environment = {**os.environ, "PYTHONPATH": str(IMPORT_ROOT)}
    words = [sys.executable, "-c", PEAK, str(folder), str(tokenizer), how]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    added = (folder / "large.jsonl").stat().st_size - (folder / "small.jsonl").stat().st_size
    assert int(ended.stdout) * 1024 < added / 2, ended.stdout


def rows(folder: Path) -> Path:
    lengths = (3, 40, 5, 90, 6)
    return rows_of(folder / "in.jsonl", *(chat("a", "x" * length) for length in lengths))


def test_what_is_too_long_may_be_refused_with_all_of_it_counted(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(rows(tmp_path), tokenizer, too_long="error", max_length=60)
    with pytest.raises(DataError) as raised:
        preprocess_chats(job)
    message = str(raised.value)
    assert message.startswith("2 of 5 conversations have more than max_length=60 tokens; the first is ")
    assert f"{tmp_path}/in.jsonl:2, " in message
    assert "raise --max-length, or choose what becomes of them: --too-long drop, truncate or split" in message
    longest = int(message.split("the longest has ")[1].split()[0])
    assert names(tmp_path / "out") == []
    enough = job_of(rows(tmp_path), tokenizer, too_long="error", max_length=longest)
    assert preprocess_chats(enough).num_samples == 5
    flags = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "cli"), "--bad-rows", "skip"]
    flags += ["--tokenizer-model", str(tokenizer), "--chat-template", "chatml", "--too-long", "error"]
    assert main([*flags, "--max-length", "60"]) == 1  # too long is not bad: it is not skipped
    assert "2 of 5 conversations" in capsys.readouterr().err
    assert main(flags) == 1
    assert "too_long=error needs max_length" in capsys.readouterr().err


def test_the_manifest_counts_what_was_cut_and_left_out(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefixes = []
    for name, too_long in (("a", "drop"), ("b", "drop"), ("c", "truncate")):
        (tmp_path / name).mkdir()
        job = job_of(rows(tmp_path / name), tokenizer, too_long=too_long, max_length=60, min_length=15)
        preprocess_chats(job)
        prefixes.append(job.output_prefix)
    manifests = [read_manifest(prefix) for prefix in prefixes]
    outcomes = [manifest.header["outcomes"] for manifest in manifests if manifest]
    assert outcomes == [{"dropped, longer than 60 tokens": 2}] * 2 + [{"truncated": 2}]
    assert merge(["--input", *prefixes, "--output-prefix", str(tmp_path / "all")]) == 0
    merged = read_manifest(tmp_path / "all")
    assert merged is not None
    assert merged.header["outcomes"] == {"dropped, longer than 60 tokens": 4, "truncated": 2}
    capsys.readouterr()
    assert inspect([prefixes[0]]) == 0
    assert "dropped, longer than 60 tokens: 2" in capsys.readouterr().out
