"""Every command of the five documents that this project answers to: run on CPU ranks, or named with the reason.

They lie in the folder that MEGATRON_TEST_SEEDS names, or beside that of MEGATRON_TEST_DATA; without them the tests are
skipped. Models and datasets are tiny ones under the documents' own names in a cache of the hub, which is offline.
A command that none of the rows below covers fails the first test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import gaudi_spawn
from tests import runs
from tests.cli.test_gaudi_spawn import PAIRED, ZERO3
from tests.cli.test_gaudi_spawn_runs import made_up, with_values
from tests.finetuning_files import write_chats, write_model
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:python|pip|git|hl-smi|ilab|torchrun|deepspeed|docker|sudo|bash|find|source)\b"
)
SHELLS, PYTHON = ("bash", "sh", ""), ("py", "python")
REVISION = "0" * 40


@dataclass(frozen=True)
class Found:
    """A command as a document has it."""

    seed: str
    kind: str
    """`shell`, `python` for a block of it, or the language of a file that a command reads."""
    text: str


@dataclass(frozen=True)
class Row:
    """What becomes of the commands of a document that begin so."""

    seed: str
    pattern: str
    shown_by: str = ""
    """Test that runs it, as file::function."""
    reason: str = ""
    """Why it is not run here."""
    is_planned: bool = False
    """Its plan is made of the command as it stands, with the document's own sizes."""


INSTALLS = "installs the vendor's software: this project takes its place (docs/start)"
CLONES = "downloads the vendor's sources: this project takes their place"
PART = "a part of the command that is shown above it"
API_RUNS = "test_api_runs.py::"
SPAWN = r"(?:DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP_REQUIRED=1 )?python \.\./gaudi_spawn\.py "
PIPELINE = "test_seeds.py::test_the_dpo_guide_runs_as_it_stands"
ROWS = (
    # InstructLab on HPU
    Row(
        "000",
        r"from optimum\.habana\.transformers",
        reason="patches the vendor's models; ours choose their kernels by the device",
    ),
    Row(
        "000", r"FROM vault\.habana\.ai", reason="builds the vendor's image; the Dockerfile of this project is its own"
    ),
    Row("000", r"train:\n", "cli/test_ilab_runs.py::test_the_published_command_trains"),
    Row(
        "000", r"ilab --config=\./config\.yaml model train", "cli/test_ilab_runs.py::test_the_published_command_trains"
    ),
    # BLOOM
    Row("001", r"git clone", reason=CLONES),
    Row("001", r"export (MODEL_REFERENCES_ROOT|PYTHONPATH)=", reason="names the vendor's sources, which are not used"),
    Row("001", r"cd Model-References", reason="a folder of the vendor's sources"),
    Row("001", r"pip install", reason=INSTALLS),
    Row("001", r"hl-smi$", reason="lists the devices of a Gaudi machine"),
    Row("001", r"HL_DATA_DIR_ROOT=/data/bigscience/oscar-en$", "test_seeds.py::test_bloom_runs_as_the_document_has_it"),
    Row(
        "001",
        r"HL_HOSTSFILE=.* scripts/run_bloom13b\.sh",
        "test_seeds.py::test_bloom_runs_as_the_document_has_it",
        is_planned=True,
    ),
    # DPO
    Row("002", r"git clone", reason=CLONES),
    Row("002", r"pip install", reason=INSTALLS),
    Row("002", SPAWN + r"--world_size 4 --use_deepspeed sft\.py ", PIPELINE, is_planned=True),
    Row("002", SPAWN + r"--world_size 8 --use_(deepspeed|mpi) sft\.py ", PIPELINE, is_planned=True),
    Row("002", SPAWN + r"--world_size 8 --use_deepspeed dpo\.py ", PIPELINE, is_planned=True),
    Row("002", SPAWN + r"--world_size 8 --use_deepspeed run_generation\.py ", PIPELINE),
    Row("002", r"python merge_peft_adapter\.py ", PIPELINE),
    Row("002", r"python \.\./gaudi_spawn\.py --world_size 8 --use_deepspeed$", reason=PART),
    Row("002", r"DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP_REQUIRED=1$", reason=PART),
    # InstructLab's library
    Row("003", r"(DS_BUILD_CPU_ADAM=1 DS_BUILD_UTILS=1 )?pip ", reason=INSTALLS),
    Row("003", r"pip$", reason=PART),
    Row("003", r"find / -name", reason="searches the machine for a library of CUDA, which the CPU does without"),
    Row("003", r"sudo ", reason="changes the system"),
    Row("003", r"torchrun$", reason=PART),
    Row(
        "003",
        r"from instructlab\.training import \(.*dp\.main\(",
        API_RUNS + "test_the_readmes_separate_data_processing_works",
    ),
    Row(
        "003",
        r"from instructlab\.training import \(\n    run_training,\n.*\n\)\n$",
        API_RUNS + "test_the_readmes_example_run_trains_and_exports",
    ),
    Row(
        "003",
        r"from instructlab\.training import LoraOptions",
        API_RUNS + "test_the_readmes_shorter_examples_run_adapters_included",
    ),
    Row(
        "003",
        r"run_training\(\n    torchrun_args=TorchrunArgs\(\)",
        API_RUNS + "test_the_readmes_shorter_examples_run_adapters_included",
    ),
    Row("003", r"MASTER_ADDR = ", API_RUNS + "test_the_readmes_two_machines_train_together"),
    Row("003", r"# define training-specific arguments", API_RUNS + "test_the_readmes_example_run_trains_and_exports"),
    Row("003", r"torchrun_args = TorchrunArgs\(", API_RUNS + "test_the_readmes_example_run_trains_and_exports"),
    Row(
        "003",
        r"run_training\(\n    torchrun_args=torchrun_args",
        API_RUNS + "test_the_readmes_example_run_trains_and_exports",
    ),
    # LoRA
    Row("004", r"pip install", reason=INSTALLS),
    Row(
        "004",
        r"PT_HPU_LAZY_MODE=0 python (gaudi_spawn\.py --world_size 7 --use_deepspeed )?finetune\.py --config-name",
        "test_seeds.py::test_the_lora_guide_runs_as_it_stands",
        is_planned=True,
    ),
    Row("004", r"PT_HPU_LAZY_MODE=0$", reason=PART),
    Row("004", r"(LoRA:|model_id:|\{)", "test_seeds.py::test_the_lora_guide_runs_as_it_stands"),
    Row(
        "004",
        r"training_args = GaudiTrainingArguments|# LoRA configuration|# Training using CustomTrainer",
        reason="parts of finetune.py, which the command above replaces",
    ),
    Row(
        "004",
        r"import torch\nfrom optimum\.habana import GaudiTrainer",
        "test_unlearning.py::test_the_trainer_is_fine_tuning",
    ),
)


def seeds_folder() -> Path:
    given = os.environ.get("MEGATRON_TEST_SEEDS")
    beside = os.environ.get("MEGATRON_TEST_DATA")
    folder = Path(given) if given else Path(beside or ".").parent / "seeds"
    if not (given or beside) or not folder.is_dir():
        pytest.skip(
            "needs the folder of documents that MEGATRON_TEST_SEEDS names, or that lies beside MEGATRON_TEST_DATA"
        )
    return folder


def found_in(text: str, seed: str) -> list[Found]:
    """Return a document's commands: lines of its shell blocks, blocks of Python and of files, programs in its text."""
    found = []
    for _, language, body in FENCE.findall(text):
        if language.lower() in PYTHON:
            found.append(Found(seed, "python", body))
        elif language.lower() not in SHELLS:
            found.append(Found(seed, language.lower(), body))
        else:
            lines = [" ".join(line.split()) for line in body.replace("\\\n", " ").splitlines()]
            found += [Found(seed, "shell", line) for line in lines if line and not line.startswith("#")]
    for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        if PROGRAM.match(code) or re.fullmatch(r"[A-Z][A-Z0-9_]+=\S+", code):
            found.append(Found(seed, "shell", code))
    return found


@pytest.fixture(scope="module")
def found() -> list[Found]:
    """The commands of all documents."""
    files = sorted(seeds_folder().glob("*.txt"))
    assert [file.name[:3] for file in files] == ["000", "001", "002", "003", "004"]
    return [each for file in files for each in found_in(file.read_text(encoding="utf-8"), file.name[:3])]


def row_of(command: Found) -> Row | None:
    """Return the first row that covers a command."""
    rows = [row for row in ROWS if row.seed == command.seed]
    return next((row for row in rows if re.match(row.pattern, command.text, re.DOTALL)), None)


def commands(found: list[Found], seed: str, pattern: str) -> list[str]:
    return [each.text for each in found if each.seed == seed and re.match(pattern, each.text, re.DOTALL)]


def test_every_command_is_run_or_named_with_the_reason(found: list[Found]) -> None:
    assert [each for each in found if row_of(each) is None] == []
    covering = {row_of(each) for each in found}
    assert [row for row in ROWS if row not in covering] == [], "no document has these any more"
    for row in ROWS:
        assert bool(row.shown_by) != bool(row.reason), row
        if row.shown_by:
            file, _, function = row.shown_by.partition("::")
            assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), row


def test_a_command_that_no_row_covers_is_seen() -> None:
    text = "Run `python other.py` or\n\n```bash\n# a comment\npython gaudi_spawn.py \\\n  --world_size 2 new.py\n```\n"
    texts = [each.text for each in found_in(text, "002")]
    assert texts == ["python gaudi_spawn.py --world_size 2 new.py", "python other.py"]
    assert [row_of(each) for each in found_in(text, "002")] == [None, None]


# ---------------------------------------------------------------------------------------------------------------------
# The cache of the hub.


class HubCache:
    """A cache of the hub with tiny models and datasets under their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, kind: str, name: str) -> Path:
        """Return a new folder for the files of a name."""
        parent = self.folder / f"{kind}s--{name.replace('/', '--')}"
        (parent / "refs").mkdir(parents=True)
        (parent / "refs" / "main").write_text(REVISION)
        snapshot = parent / "snapshots" / REVISION
        snapshot.mkdir(parents=True)
        return snapshot

    @property
    def variables(self) -> dict[str, str]:
        return {"HF_HUB_CACHE": str(self.folder), "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def cache(tmp_path: Path) -> HubCache:
    """What the documents' commands name, with models of two layers."""
    cache = HubCache(tmp_path / "hub")
    llama = cache.add("model", "meta-llama/Llama-2-70b-hf")
    write_model(llama, num_key_value_heads=4, max_position_embeddings=1024)
    # a base model has no chat template
    config = llama / "tokenizer_config.json"
    config.write_text(re.sub(r', "chat_template": "(\\.|[^"])*"', "", config.read_text()))
    assert "chat_template" not in config.read_text()
    write_mixtral(cache.add("model", "mistralai/Mixtral-8x7B-Instruct-v0.1"), llama)
    write_model(cache.add("model", "NousResearch/Llama-2-7b-chat-hf"), max_position_embeddings=4096)
    write_chats(cache.add("dataset", "philschmid/dolly-15k-oai-style") / "data" / "train-00000-of-00001.jsonl", 24)
    paired = cache.add("dataset", PAIRED)
    for part in ("finetune", "rl"):
        for number in range(2):
            path = paired / "data" / part / f"train-0000{number}-of-00002.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in made_up(24)[number::2]))
    return cache


def write_mixtral(folder: Path, tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_model(folder)
    (folder / "config.json").unlink()
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=1024,
        sliding_window=None,
        vocab_size=transformers.AutoConfig.from_pretrained(tokenizer).vocab_size,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(folder)


def write_trl(folder: Path) -> Path:
    """The folder of the DPO guide's commands, with the DeepSpeed JSON that they name."""
    trl = folder / "trl"
    trl.mkdir()
    (folder / "language-modeling").mkdir()
    (folder / "language-modeling" / "llama2_ds_zero3_config.json").write_text(json.dumps(ZERO3))
    return trl


def words_of(command: str) -> list[str]:
    """Return the words of a command behind the name of its program, which a module of ours replaces."""
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z0-9_]+=.*", words[0]):
        words.pop(0)
    assert words.pop(0) == "python"
    if words[0].endswith("gaudi_spawn.py"):
        words.pop(0)
    return words


def run(folder: Path, cache: HubCache, words: list[str], **changed: str) -> str:
    """Run a command with some values changed, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    environment |= {"HL_DEVICE": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | cache.variables
    environment["DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP_REQUIRED"] = "1"
    return printed([sys.executable, "-m", "megatron.gaudi_spawn", *with_values(words, changed)], folder, environment)


def printed(words: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# The commands.


def test_every_training_is_a_plan_as_it_stands(
    found: list[Found], cache: HubCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """All values of the documents stand: 8 ranks, 500 steps, the names of the hub."""
    planned = [each for each in found if (row := row_of(each)) is not None and row.is_planned]
    assert len(planned) == 8
    for name, value in (cache.variables | {"HL_DEVICE": "cpu", "HL_DRY_RUN": "1"}).items():
        monkeypatch.setenv(name, value)
    # the variable is read when the library is imported, which the models here were made by
    monkeypatch.setattr(pytest.importorskip("huggingface_hub").constants, "HF_HUB_CACHE", str(cache.folder))
    trl = write_trl(tmp_path)
    # of the merge of the step before
    shutil.copytree(
        cache.folder / "models--meta-llama--Llama-2-70b-hf" / "snapshots" / REVISION,
        trl / "sft" / "final_merged_checkpoint",
    )
    write_lora_guide(found, trl)
    monkeypatch.chdir(trl)
    for each in [each for each in planned if each.seed != "001"]:
        assert gaudi_spawn.main(words_of(each.text)) == 0, capsys.readouterr().err
        shown = capsys.readouterr()
        ranks = re.search(r"--world_size (\d)", each.text)
        assert f"--devices-per-node {ranks[1] if ranks else 1} " in shown.out, shown.out
    environment = os.environ | {"HL_DEVICE": "hpu", "PYTHON": sys.executable}
    for each in [each for each in planned if each.seed == "001"]:
        done = printed(["bash", "-c", f"HL_DATA_DIR_ROOT=/data/bigscience/oscar-en {each.text}"], ROOT, environment)
        nodes = each.text.partition("HL_NUM_NODES=")[2][0]
        assert f"PP 2 x TP 4 x DP {nodes}" in done
        assert "/data/bigscience/oscar-en/meg-gpt2_text_document" in done


SHORT = {"max_steps": "2", "warmup_steps": "1", "logging_steps": "1"}
"""Steps of the fine-tunings here, in place of 500."""


@pytest.mark.slow
def test_the_dpo_guide_runs_as_it_stands(found: list[Found], cache: HubCache, tmp_path: Path) -> None:
    """In the guide's order, each step on what the one before has left; 2 ranks and 2 steps for 4 or 8 and 500."""
    trl = write_trl(tmp_path)
    mixtral, deepspeed, mpi = map(words_of, commands(found, "002", SPAWN + r".* sft\.py "))
    (dpo,) = map(words_of, commands(found, "002", SPAWN + r".* dpo\.py "))
    merge_sft, merge_dpo = map(words_of, commands(found, "002", r"python merge_peft_adapter\.py "))
    (generate,) = map(words_of, commands(found, "002", SPAWN + r".* run_generation\.py "))
    run(trl, cache, mixtral, world_size="2", max_seq_length="128", **SHORT)
    assert len(runs.rows(trl / "model_mixtral")) == 2
    run(trl, cache, deepspeed, world_size="2", **SHORT)
    run(trl, cache, merge_sft)
    if shutil.which("mpirun"):
        run(trl, cache, mpi, world_size="2", output_dir="./sft-mpi", **SHORT)
    run(trl, cache, [*dpo, "--max_steps", "2", "--warmup_steps", "1"], world_size="2")
    # the base of the adapters is the merged model
    run(trl, cache, merge_dpo, base_model_name="sft/final_merged_checkpoint")
    texts = tmp_path / "text-generation"
    texts.mkdir()
    assert re.search(r"^Here is my prompt.+", run(texts, cache, generate, world_size="2", max_new_tokens="8"), re.M)


def write_lora_guide(found: list[Found], folder: Path) -> None:
    """The files of the LoRA guide's folder config as it prints them, and its data."""
    (yaml,) = commands(found, "004", r"model_id:")
    (folder / "config").mkdir()
    data = folder / "chats.jsonl"
    write_chats(data, 24)
    changed = yaml.replace("../path/to/finetune/data", str(data)).replace("/save_dir", str(folder / "save_dir"))
    assert changed.count(str(folder)) == 2
    (folder / "config" / "finetune_lora.yaml").write_text(changed)
    # complete in the text, shortened by `...` at its end
    json_text, _ = commands(found, "004", r"\{")
    (folder / "config" / "ds_config.json").write_text(json_text)


@pytest.mark.slow
def test_the_lora_guide_runs_as_it_stands(found: list[Found], cache: HubCache, tmp_path: Path) -> None:
    """On one rank, and on 2 in place of 7, with one epoch in place of 10."""
    for name, command in zip(("one", "more"), commands(found, "004", r"PT_HPU_LAZY_MODE=0 python "), strict=True):
        folder = tmp_path / name
        folder.mkdir()
        write_lora_guide(found, folder)
        file = folder / "config" / "finetune_lora.yaml"
        file.write_text(file.read_text().replace("num_epochs: 10", "num_epochs: 1"))
        run(folder, cache, words_of(command), **({"world_size": "2"} if name == "more" else {}))
        assert list((folder / "save_dir" / "hf_format").glob("samples_*/adapter_model.safetensors"))


@pytest.mark.slow
def test_bloom_runs_as_the_document_has_it(found: list[Found], tmp_path: Path) -> None:
    """On 2 CPU ranks of this machine: HL_NUM_NODES, HL_TP and HL_DP 1, no hostsfile, and the preset tiny_bloom."""
    from tests.launch.test_from_megatron_runs import write_data

    write_data(tmp_path / "oscar-en")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    environment |= {"HL_DEVICE": "cpu", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HL_CONFIG": "tiny_bloom"}
    for number, command in enumerate(commands(found, "001", r"HL_HOSTSFILE=")):
        results = tmp_path / str(number)
        text = re.sub(r"HL_(HOSTSFILE|NUM_NODES)=\S+ ", "", command)
        text = re.sub(r"HL_(TP|DP)=\d", r"HL_\1=1", text)
        own = (
            f"HL_DATA_DIR_ROOT={tmp_path}/oscar-en HL_DATA_FILE_PREFIX=meg-gpt2_text_document HL_RESULTS_DIR={results}"
        )
        flags = "--vocab-size 50257 --train-samples 32 --lr-warmup-samples 0 --eval-iters 0 --log-interval 1"
        printed(["bash", "-c", f"{own} {text} {flags}"], ROOT, environment)
        assert len(runs.rows(results)) == 2
