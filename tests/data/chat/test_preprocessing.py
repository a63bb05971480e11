"""Chat files become two datasets that match each other, or none."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron.data.chat.preprocessing import ChatJob, ChatTotals, preprocess_chats
from megatron.data.chat.template import find_template
from megatron.data.chat.tokenizer import ChatTokenizer, load_tokenizer
from megatron.data.index.checksums import read_checksums
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.data.prepare import rows as row_preparation
from megatron.data.prepare import workers
from megatron.data.prepare.block_encoder import Counts
from megatron.data.prepare.pipeline import Silence
from tests.data.chat.test_conversation import bytes_json, turn
from tests.ranks import HANG_S

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

INSTRUCTLAB = """
import os
from instructlab.training.chat_templates.utils import SpecialTokens, TokenInfo

os.remove("this file is read and not run")
END = "<|end|>"
SPECIAL_TOKENS = SpecialTokens(
    user=TokenInfo("<|user|>", add_to_tokenizer=True),
    assistant=TokenInfo("<|assistant|>", add_to_tokenizer=True),
    eos=TokenInfo(END, add_to_tokenizer=True),
    pad=TokenInfo("<|pad|>"),
    tool=TokenInfo("<|tool|>"),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + END + "' }}"
    "{% endfor %}"
)
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(bytes_json(SPECIAL))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": {"content": "<s>"}}))
    return folder


def rows_of(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    return {"messages": turn(*contents), **more}


def job_of(inputs: Path, tokenizer: Path, **options: Any) -> ChatJob:
    prefix = inputs.parent / "out" / "chats"
    return ChatJob(**{"inputs": (str(inputs),), "output_prefix": str(prefix), "tokenizer": str(tokenizer),
                      "chat_template": "chatml", **options})  # fmt: skip


def samples(job: ChatJob) -> list[tuple[list[int], list[int]]]:
    tokens, mask = IndexedDataset(job.output_prefix), IndexedDataset(job.output_prefix + "_loss_mask")
    assert tokens.lengths.tolist() == mask.lengths.tolist()
    return [(tokens.read(i).tolist(), mask.read(i).tolist()) for i in range(len(tokens))]


def texts(job: ChatJob, tokenizer: ChatTokenizer | None = None) -> list[tuple[str, str]]:
    """Return the text of each sample, and its trained part."""
    known = tokenizer or load_tokenizer(job.tokenizer)[0]
    return [
        (known.decode(ids), known.decode([i for i, m in zip(ids, mask, strict=True) if m]))
        for ids, mask in samples(job)
    ]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_chats_become_tokens_and_a_mask_of_the_same_lengths(tmp_path: Path, tokenizer: Path) -> None:
    job = job_of(rows_of(tmp_path / "in.jsonl", chat("a", "b"), chat("c", "d", unmask=True)), tokenizer)
    totals = preprocess_chats(job)
    assert texts(job) == [
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n", "b<|im_end|>"),
        ("<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n", "cd<|im_end|>"),
    ]
    found = samples(job)
    assert totals.counts.num_rows == totals.num_samples == 2
    assert totals.num_tokens == sum(len(ids) for ids, _ in found)
    assert totals.counts.num_loss_tokens == sum(sum(mask) for _, mask in found) == 5
    assert totals.vocab_size == 260
    assert totals.length_percentiles[100] == max(len(ids) for ids, _ in found)
    assert IndexedDataset(job.output_prefix).dtype == np.uint16
    assert IndexedDataset(job.output_prefix + "_loss_mask").dtype == np.uint8
    endings = ("bin", "idx", "manifest.json", "sha256")
    assert names(tmp_path / "out") == [f"chats{kind}.{end}" for kind in ("", "_loss_mask") for end in endings]


def test_the_notes_name_the_tokenizer_the_template_and_the_rules(tmp_path: Path, tokenizer: Path) -> None:
    job = job_of(rows_of(tmp_path / "in.jsonl", chat("a", "b")), tokenizer, too_long="split", max_length=99)
    preprocess_chats(job)
    for prefix in (job.output_prefix, job.output_prefix + "_loss_mask"):
        checksums = read_checksums(prefix)
        assert checksums is not None
        assert checksums.notes["tokenizer"]["vocab_size"] == 260
        assert checksums.notes["chat_template"] == {
            "name": "preset chatml",
            "sha256": find_template("chatml", tmp_path).sha256,
        }
        assert checksums.notes["rules"]["too_long"] == "split"


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst"])
def test_compressed_files_are_read(name: str, tmp_path: Path, tokenizer: Path) -> None:
    content = rows_of(tmp_path / "plain.jsonl", chat("a", "b"), chat("c", "d")).read_bytes()
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(content))
    else:
        import zstandard

        (tmp_path / name).write_bytes(zstandard.compress(content))
    job = job_of(tmp_path / name, tokenizer)
    assert preprocess_chats(job).num_samples == 2


def test_processes_give_the_same_as_one(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BYTES_WORTH_A_PROCESS", 1 << 10)
    monkeypatch.setattr(row_preparation, "BLOCK_BYTES", 1 << 12)
    rows = [chat(f"question {i} " + "x" * (i % 50), f"answer {i}") for i in range(400)]
    rows[7] = {"messages": []}
    started: list[None] = []
    start = workers._WorkerProcess.start
    monkeypatch.setattr(workers._WorkerProcess, "start", lambda self: started.append(start(self)))
    source = rows_of(tmp_path / "in.jsonl", *rows)
    expected = preprocess_chats(alone := job_of(source, tokenizer, bad_rows="skip"))
    assert not started
    prefix = str(tmp_path / "many" / "chats")
    found = preprocess_chats(many := job_of(source, tokenizer, bad_rows="skip", workers=3, output_prefix=prefix))
    assert len(started) == 2  # beside this one
    assert found == expected
    assert samples(many) == samples(alone)


def test_a_bad_row_stops_all_processes_and_leaves_nothing(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "BYTES_WORTH_A_PROCESS", 1 << 10)
    monkeypatch.setattr(row_preparation, "BLOCK_BYTES", 1 << 12)
    rows = [chat(f"question {i} " + "x" * 30, f"answer {i}") for i in range(300)]
    rows[250] = {"messages": []}
    job = job_of(rows_of(tmp_path / "in.jsonl", *rows), tokenizer, workers=2)
    with pytest.raises(DataError, match=r"in.jsonl:251: 'messages' is empty"):
        preprocess_chats(job)
    assert names(tmp_path / "out") == []


def test_a_killed_worker_is_an_error_that_names_the_place(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "BYTES_WORTH_A_PROCESS", 1 << 10)
    monkeypatch.setattr(row_preparation, "BLOCK_BYTES", 1 << 10)
    rows = [chat(f"question {i} " + "x" * 30, f"answer {i}") for i in range(2000)]
    job = job_of(rows_of(tmp_path / "in.jsonl", *rows), tokenizer, workers=2)
    others = set(multiprocessing.active_children())  # such as the session's pools of ranks

    class Killer(Silence):
        def show(self, counts: Counts) -> None:  # the first block is done, by the worker
            for child in set(multiprocessing.active_children()) - others:
                child.kill()

    with pytest.raises(DataError, match=r"a worker process died at .*in.jsonl:\d+ or after it; .*fewer --workers"):
        preprocess_chats(job, Killer())
    assert names(tmp_path / "out") == []


UNGUARDED = """
import sys
from megatron.data.chat.preprocessing import ChatJob, preprocess_chats
from megatron.data.prepare import rows, workers
from megatron.data.prepare.pipeline import Silence

print("started", flush=True)
workers.BYTES_WORTH_A_PROCESS = rows.BLOCK_BYTES = 1 << 10
job = ChatJob((sys.argv[1],), sys.argv[2], sys.argv[3], chat_template="chatml", workers=2)
report = Silence()
if len(sys.argv) > 4:
    report.show = lambda counts: sys.stdin.read()
print(preprocess_chats(job, report).num_samples)
"""


def unguarded_script(tmp_path: Path, tokenizer: Path, *more: str) -> list[str]:
    """Return the command of a script that calls preprocess_chats without `if __name__ == "__main__"`."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    source = rows_of(tmp_path / "in.jsonl", *[chat(f"question {i}", f"answer {i}") for i in range(300)])
    return [sys.executable, str(tmp_path / "script.py"), str(source), str(tmp_path / "chats"), str(tokenizer), *more]


def test_workers_do_not_run_the_callers_script(tmp_path: Path, tokenizer: Path) -> None:
    run = subprocess.run(unguarded_script(tmp_path, tokenizer), capture_output=True, text=True, timeout=HANG_S)
    assert run.stdout == "started\n300\n", run.stderr


def test_workers_end_with_a_killed_parent(tmp_path: Path, tokenizer: Path) -> None:
    command = unguarded_script(tmp_path, tokenizer, "wait after the first block")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        deadline_s = time.monotonic() + HANG_S
        while not (children := psutil.Process(parent.pid).children(recursive=True)):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert alive == []


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def test_the_first_bad_row_is_an_error_that_names_it_and_nothing_is_written(tmp_path: Path, tokenizer: Path) -> None:
    job = job_of(rows_of(tmp_path / "in.jsonl", chat("a", "b"), chat("a"), {"messages": []}), tokenizer)
    with pytest.raises(DataError, match=r"in.jsonl:2: no token of the conversation is trained.*--bad-rows skip"):
        preprocess_chats(job)
    assert names(tmp_path / "out") == []


def test_skipped_rows_are_counted_by_reason_and_listed(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "in.jsonl"
    bad = [{"messages": []}, chat("a"), {"messages": [{"role": "bot", "content": "x"}]}, chat("a", " ")]
    rows_of(source, chat("a", "b"), *bad)
    with source.open("ab") as file:
        file.write(b'\n\xff{"messages"\n{"messages": [{"role": "user", "content": "half wri')
    job = job_of(source, tokenizer, bad_rows="skip")
    totals = preprocess_chats(job)
    assert (totals.counts.num_rows, totals.num_samples, totals.counts.num_blank) == (7, 1, 1)
    assert totals.counts.bad == {
        "no messages": 1,
        "nothing trained": 1,
        "unknown role": 1,
        "missing content": 1,
        "not JSON": 2,
    }
    lines = [fault.split(": ")[0].rpartition(":")[2] for fault in totals.counts.faults]
    assert lines == ["2", "3", "4", "5", "7", "8"]


def test_a_failing_template_is_named_with_the_row(tmp_path: Path, tokenizer: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text("{% for m in messages %}{{ m.content + m.nothing }}{% endfor %}")
    job = job_of(rows_of(tmp_path / "in.jsonl", chat("a", "b")), tokenizer, chat_template=str(template))
    with pytest.raises(
        DataError, match=r"in.jsonl:1: chat template .*strict.jinja does not take this conversation: .*"
    ):
        preprocess_chats(job)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_conversations_is_an_error(content: str, tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"no conversation in .*in.jsonl.*give a file with a JSON object a line"):
        preprocess_chats(job_of(tmp_path / "in.jsonl", tokenizer))


def test_an_empty_output_is_an_error_with_the_reasons(tmp_path: Path, tokenizer: Path) -> None:
    job = job_of(rows_of(tmp_path / "in.jsonl", chat("a", "b"), chat("a")), tokenizer, max_length=5, bad_rows="skip")
    with pytest.raises(DataError, match=r"no sample is left of 2 rows: 1 longer than 5 tokens, 1 nothing trained"):
        preprocess_chats(job)
    assert names(tmp_path / "out") == []


def test_a_truncated_file_is_an_error(tmp_path: Path, tokenizer: Path) -> None:
    content = gzip.compress(
        rows_of(tmp_path / "plain.jsonl", *[chat(f"a {i}", f"b {i}") for i in range(99)]).read_bytes()
    )
    (tmp_path / "in.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="gzip file is cut off"):
        preprocess_chats(job_of(tmp_path / "in.jsonl.gz", tokenizer))
    assert names(tmp_path / "out") == []


def test_other_kinds_of_files_are_refused_with_the_remedy(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    with pytest.raises(DataError, match=r"in.txt holds no rows; rows are in .jsonl, .*convert it"):
        preprocess_chats(job_of(tmp_path / "in.txt", tokenizer))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_length": 0}, "max_length=0 must be at least 1"),
        ({"max_length": 5, "min_length": 6}, "max_length=5 is below min_length=6; no sample fits both"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"turns": "as_prompted", "too_long": "split"}, "turns=as_prompted cuts .* which too_long=split would undo"),
        ({"turns": "as_prompted", "train_on": "all_but_system"}, "which train_on=all_but_system would undo; drop one"),
    ],
)
def test_impossible_jobs_are_refused(options: dict[str, Any], said: str, tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(DataError, match=said):
        job_of(tmp_path / "in.jsonl", tokenizer, **options)


def test_an_older_dataset_is_replaced_only_when_the_new_one_succeeds(tmp_path: Path, tokenizer: Path) -> None:
    old = job_of(rows_of(tmp_path / "in.jsonl", chat("a", "b")), tokenizer)
    preprocess_chats(old)
    before = samples(old)
    bad = job_of(rows_of(tmp_path / "bad.jsonl", chat("c", "d"), {}), tokenizer, overwrite=True)
    with pytest.raises(DataError):
        preprocess_chats(bad)
    assert samples(old) == before
    new = job_of(rows_of(tmp_path / "new.jsonl", chat("c", "d")), tokenizer)
    with pytest.raises(DataError, match="exists already; pass --overwrite"):
        preprocess_chats(new)
    preprocess_chats(replace(new, overwrite=True))
    assert samples(old) != before


# ---------------------------------------------------------------------------------------------------------------------
# Templates and tokenizers


def test_a_template_is_found_beside_the_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    source = rows_of(tmp_path / "in.jsonl", chat("a", "b"))
    with pytest.raises(DataError, match=r"has no chat template.*give a chat template.*chatml"):
        preprocess_chats(job_of(source, tokenizer, chat_template=None))
    written = {"eos_token": "</s>", "chat_template": [{"name": "tools", "template": "x"}]}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(written))
    with pytest.raises(DataError, match="has the chat templates tools, and none is named default"):
        preprocess_chats(job_of(source, tokenizer, chat_template=None))
    bare = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    written["chat_template"] += [{"name": "default", "template": bare}]  # type: ignore[operator]
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(written))
    job = job_of(source, tokenizer, chat_template=None)
    preprocess_chats(job)
    assert texts(job) == [("a</s>b</s>", "b</s>")]
    (tokenizer / "chat_template.jinja").write_text("{% for m in messages %}-{{ m.content + eos_token }}{% endfor %}")
    preprocess_chats(replace(job, overwrite=True))
    assert texts(job) == [("a</s>b</s>".replace("a", "-a").replace("b", "-b"), "-b</s>")]


def test_an_unknown_preset_is_an_error_with_the_nearest(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(DataError, match="'chat-ml' is neither a file nor a preset; did you mean 'chatml'"):
        preprocess_chats(job_of(rows_of(tmp_path / "in.jsonl", chat("a", "b")), tokenizer, chat_template="chat-ml"))


def test_a_python_file_is_read_but_not_run_and_its_tokens_are_added(tmp_path: Path, tokenizer: Path) -> None:
    template = tmp_path / "template.py"
    template.write_text(INSTRUCTLAB)
    source = rows_of(tmp_path / "in.jsonl", chat("a", "b"))
    job = job_of(source, tokenizer, chat_template=str(template), add_special_tokens=True)
    with pytest.raises(DataError, match=r"lacks <\|user\|>, <\|assistant\|>, <\|end\|>, <\|pad\|>; name a folder"):
        preprocess_chats(job)
    job = job_of(source, tokenizer, chat_template=str(template))
    with pytest.raises(DataError, match=r"eos_token '<\|end\|>' is not in the vocabulary.*--add-special-tokens"):
        preprocess_chats(job)
    copy = tmp_path / "copy"
    job = job_of(source, tokenizer, chat_template=str(template), add_special_tokens=True, tokenizer_output=str(copy))
    totals = preprocess_chats(job)
    assert totals.added_tokens == ("<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
    assert totals.vocab_size == 264
    new, lacking = load_tokenizer(str(copy))
    assert not lacking
    assert texts(job, new) == [("<|user|>a<|end|><|assistant|>b<|end|>", "<|assistant|>b<|end|>")]
    again = job_of(source, copy, chat_template=None, output_prefix=str(tmp_path / "again" / "chats"))
    assert preprocess_chats(again).counts.num_loss_tokens == totals.counts.num_loss_tokens
    assert samples(again) == samples(job)


def test_another_tokenizer_is_replaced_on_request_alone(tmp_path: Path, tokenizer: Path) -> None:
    copy = tmp_path / "copy"
    source = rows_of(tmp_path / "in.jsonl", chat("a", "b"))
    options: dict[str, Any] = {"chat_template": "granite", "add_special_tokens": True, "tokenizer_output": str(copy)}
    preprocess_chats(job_of(source, tokenizer, **options))
    # a second dataset of the same tokenizer
    preprocess_chats(job_of(source, tokenizer, **options, output_prefix=str(tmp_path / "b")))
    config = copy / "tokenizer_config.json"
    for path in (config, copy / "additional_chat_templates" / "tool_use.jinja"):
        path.parent.mkdir(exist_ok=True)
        before = path.read_bytes() if path.exists() else None
        path.write_text("{}")
        prefix = tmp_path / path.stem
        job = job_of(source, tokenizer, **options, output_prefix=str(prefix))
        with pytest.raises(DataError, match=rf"{path.name} exists already and is of another.*another --tokenizer-out"):
            preprocess_chats(job)
        assert path.read_text() == "{}"
        assert not prefix.with_suffix(".bin").exists()
        preprocess_chats(replace(job, overwrite=True))
        assert (path.read_bytes() if path.exists() else None) == before


def test_the_written_tokenizer_loads_in_transformers_and_writes_the_same_ids(tmp_path: Path, tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    row, copy = chat("a b", "c", "d", "e"), tmp_path / "copy"
    job = job_of(
        rows_of(tmp_path / "in.jsonl", row),
        tokenizer,
        chat_template="granite",
        add_special_tokens=True,
        tokenizer_output=str(copy),
    )
    preprocess_chats(job)
    loaded = transformers.AutoTokenizer.from_pretrained(copy)
    assert loaded.eos_token == "</s>"
    expected = loaded.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
    assert samples(job)[0][0] == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("X = 1", "sets no CHAT_TEMPLATE"),
        ("CHAT_TEMPLATE = open('x').read()", "is not a literal string; the file is read, not run"),
        ("CHAT_TEMPLATE = (", "is not Python"),
        ("CHAT_TEMPLATE = ''\nSPECIAL_TOKENS = build()\nSPECIAL_TOKENS = 3", "SPECIAL_TOKENS must be SpecialTokens"),
        ("CHAT_TEMPLATE = CHAT_TEMPLATE + 'x'", "is not a literal string"),
    ],
)
def test_python_files_with_more_than_literals_are_refused(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "template.py"
    path.write_text(content)
    with pytest.raises(DataError, match=said):
        find_template(str(path), tmp_path)


def test_an_invalid_jinja_template_is_refused_with_its_line(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}\n{% endif %}")
    job = job_of(rows_of(tmp_path / "in.jsonl", chat("a", "b")), tokenizer, chat_template=str(tmp_path / "bad.jinja"))
    with pytest.raises(DataError, match=r"bad.jinja:2 is not Jinja"):
        preprocess_chats(job)


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{{ messages.__class__.__base__.__subclasses__() }}")
    job = job_of(rows_of(tmp_path / "in.jsonl", chat("a", "b")), tokenizer, chat_template=str(tmp_path / "bad.jinja"))
    with pytest.raises(DataError, match="unsafe"):
        preprocess_chats(job)


def test_tokenizers_of_other_libraries_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(b"x")
    for path, said in (
        (tmp_path / "x.model", r"x.model is not a tokenizer.json"),
        (tmp_path, "holds no tokenizer.json"),
    ):
        with pytest.raises(DataError, match=said + ".*AutoTokenizer"):
            load_tokenizer(str(path))
    source = rows_of(tmp_path / "in.jsonl", chat("a", "b"))
    with pytest.raises(DataError, match=r"does not exist; give a tokenizer.json"):
        preprocess_chats(job_of(source, tmp_path / "nothing"))


def test_long_input_is_encoded_by_gigatoken_with_the_same_ids(test_data: Path, tmp_path: Path) -> None:
    lines = (test_data / "sft_messages.jsonl").read_bytes().splitlines(keepends=True)[:600]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    job = job_of(tmp_path / "in.jsonl", test_data / "tokenizers" / "bloom_format_trained")
    expected = totals_and_samples(job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.data.chat.tokenizer.BYTES_WORTH_GIGATOKEN", 0)
        assert totals_and_samples(job) == expected


def totals_and_samples(job: ChatJob) -> tuple[ChatTotals, list[tuple[list[int], list[int]]]]:
    return preprocess_chats(replace(job, overwrite=True)), samples(job)


# ---------------------------------------------------------------------------------------------------------------------
# Tools


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
CALLS = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {}}}]}
WRITES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
WRITES_TOOLS = (
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_tokenizers_own_template_for_tools_is_used_and_kept(is_file: bool, tmp_path: Path, tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if is_file:
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        (tokenizer / "chat_template.jinja").write_text(WRITES)
        (tokenizer / "additional_chat_templates").mkdir()
        (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text(WRITES_TOOLS)
    else:
        named = [{"name": "default", "template": WRITES}, {"name": "tool_use", "template": WRITES_TOOLS}]
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": named}))
    with_tools = {"messages": [*turn("a"), CALLS, *turn("b", "c")], "tools": [TOOL]}
    source = rows_of(tmp_path / "in.jsonl", chat("a", "b"), with_tools)
    job = job_of(source, tokenizer, chat_template=None, tokenizer_output=str(tmp_path / "copy"))
    preprocess_chats(job)
    call = '{"name": "look_up", "arguments": {}}<|im_end|>'
    assert [trained for _, trained in texts(job)] == ["<|im_start|>assistant\nb<|im_end|>", f"{call}c<|im_end|>"]
    for folder in (tokenizer, tmp_path / "copy"):
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        expected = loaded.apply_chat_template(with_tools["messages"], tools=[TOOL], return_dict=False)
        assert samples(job)[1][0] == expected


def test_tool_calls_without_a_template_for_them_are_counted_and_reported(tmp_path: Path, tokenizer: Path) -> None:
    rows = [chat("a", "b"), {"messages": [*turn("a"), CALLS]}, chat("a", "b", tools=[TOOL])]
    rows += [{"messages": [{**message, "thinking": "Hm."} for message in turn("a", "b")]}]
    job = job_of(rows_of(tmp_path / "in.jsonl", *rows), tokenizer, bad_rows="skip")
    totals = preprocess_chats(job)
    assert totals.num_samples == 2
    assert totals.counts.bad == {"left out by the template": 2}
    assert totals.counts.left_out == {"reasoning": 1}
    assert (
        "in.jsonl:2: chat template preset chatml does not write the tool calls of message 2" in totals.counts.faults[0]
    )
    assert "in.jsonl:3: chat template preset chatml does not write the tool look_up" in totals.counts.faults[1]
