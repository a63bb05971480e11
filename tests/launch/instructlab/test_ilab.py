"""`ilab model train`: every published key and flag has an outcome, and the values reach the arguments of the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.cli import ilab
from megatron.launch.instructlab.arguments import DistributedBackend, QuantizeDataType
from megatron.launch.instructlab.ilab import IlabTraining, read_ilab_config, read_training
from megatron.launch.instructlab.ilab_options import ADDITIONAL, DIALECT, IlabOptions, flag_of, flag_texts
from megatron.options.config import ConfigError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "instructlab.md"

# instructlab/instructlab at v0.26.1: the class _train of configuration.py, the defaults of defaults.py, and the options
# of cli/model/train.py
PUBLISHED_KEYS: dict[str, Any] = {
    "pipeline": "full",
    "model_path": "instructlab/granite-7b-lab",
    "device": "cpu",
    "data_path": "D/datasets",
    "ckpt_output_dir": "D/checkpoints",
    "data_output_dir": "D/internal",
    "max_seq_len": 4096,
    "max_batch_len": 5000,
    "num_epochs": 10,
    "effective_batch_size": 64,
    "save_samples": 250000,
    "checkpoint_at_epoch": True,
    "deepspeed_cpu_offload_optimizer": False,
    "fsdp_cpu_offload_optimizer": False,
    "distributed_backend": "fsdp",
    "lora_rank": 0,
    "lora_quantize_dtype": "nf4",
    "is_padding_free": False,
    "nproc_per_node": 1,
    "disable_flash_attn": False,
    "phased_phase1_num_epochs": 7,
    "phased_phase1_samples_per_save": 0,
    "phased_phase1_learning_rate": 2e-5,
    "phased_phase1_effective_batch_size": 128,
    "phased_phase2_num_epochs": 10,
    "phased_phase2_samples_per_save": 0,
    "phased_phase2_learning_rate": 6e-6,
    "phased_phase2_effective_batch_size": 3840,
    "phased_base_dir": "D/phased",
    "training_journal": None,
}
PUBLISHED_ADDITIONAL = {
    "learning_rate": 2e-5,
    "warmup_steps": 25,
    "random_seed": 42,
    "node_rank": 0,
    "nnodes": 1,
    "rdzv_id": 123,
    "deepspeed_cpu_offload_optimizer_ratio": 1,
    "deepspeed_cpu_offload_optimizer_pin_memory": False,
    "lora_alpha": 32,
    "lora_dropout": 0.1,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
PUBLISHED_FLAGS = """
--data-path --ckpt-output-dir --data-output-dir --input-dir --gguf-model-path --skip-preprocessing --tokenizer-dir
--model-path --model-id --iters --local --skip-quantize --num-epochs --device --4-bit-quant --max-seq-len
--max-batch-len --effective-batch-size --save-samples --learning-rate --warmup-steps --deepspeed-cpu-offload-optimizer
--deepspeed-cpu-offload-optimizer-ratio --deepspeed-cpu-offload-optimizer-pin-memory --fsdp-cpu-offload-optimizer
--distributed-backend --lora-rank --lora-alpha --lora-dropout --lora-target-modules --lora-quantize-dtype
--is-padding-free --gpus --nnodes --node-rank --rdzv-id --rdzv-endpoint --disable-flash-attn --strategy
--phased-base-dir --phased-phase1-data --phased-phase1-num-epochs --phased-phase1-samples-per-save
--phased-phase1-learning-rate --phased-phase1-effective-batch-size --phased-phase2-data --phased-phase2-num-epochs
--phased-phase2-samples-per-save --phased-phase2-learning-rate --phased-phase2-effective-batch-size
--phased-mt-bench-judge --skip-user-confirm --enable-serving-output --checkpoint-at-epoch --pipeline
--training-journal --force-clear-phased-cache --optimize-memory --disable-accelerate-full-state-at-epoch
"""


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "etc"))
    monkeypatch.chdir(tmp_path)
    for name in ("data", "knowledge", "skills"):
        (tmp_path / f"{name}.jsonl").touch()


def read(flags: str = "", **train: Any) -> IlabTraining:
    Path("config.yaml").write_text(yaml.safe_dump({"train": {"data_path": "data.jsonl"} | train}))
    return ilab.read_command(["--config", "config.yaml", "model", "train", *flags.split()])


def faults(flags: str = "", **train: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(flags, **train)
    return str(caught.value)


def test_names_and_defaults_are_the_published_ones(tmp_path: Path) -> None:
    expected = {
        name: value.replace("D/", f"{tmp_path}/share/instructlab/") if isinstance(value, str) else value
        for name, value in (PUBLISHED_KEYS | PUBLISHED_ADDITIONAL).items()
    }
    ours = IlabOptions().model_dump()
    assert {name: ours[name] for name in expected} == expected
    assert sorted(ADDITIONAL) == sorted([*PUBLISHED_ADDITIONAL, "rdzv_endpoint"])
    assert set(PUBLISHED_FLAGS.split()) <= {flag_of(name) for name in flag_texts()}


def test_every_key_and_flag_has_one_outcome_and_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w*]+)`", page)) | set(re.findall(r"`--([\w-]+)", page))
    for name in {*IlabOptions.model_fields, *flag_texts()}:
        assert DIALECT.row(name) is not None, name
        shown = (name, flag_of(name).removeprefix("--"))
        assert any(word in listed or _covered(word, listed) for word in shown), name


def _covered(name: str, listed: set[str]) -> bool:
    return any(word.endswith("*") and name.startswith(word[:-1]) for word in listed if len(word) > 3)


def test_the_published_config_is_a_run() -> None:
    published = """
train:
  device: hpu
  distributed_backend: fsdp
  fsdp_cpu_offload_optimizer: false
  is_padding_free: true
  pipeline: accelerated
  disable_flash_attn: true
"""
    Path("config.yaml").write_text(published)
    words = "--config=./config.yaml model train --pipeline accelerated --data-path ./data.jsonl"
    training = ilab.read_command(words.split())
    args = training.train_args
    assert args.engine_options == {"device": "hpu"}
    assert (args.data_path, args.disable_flash_attn, args.is_padding_free) == ("./data.jsonl", True, True)
    assert args.distributed_backend is DistributedBackend.FSDP
    assert (args.num_epochs, args.effective_batch_size, args.learning_rate, args.warmup_steps) == (10, 64, 2e-5, 25)
    assert args.lora is None
    assert training.torch_args.nproc_per_node == 1
    assert training.phases is None


# intel/gaudi/gaudi_3.yaml of the published profiles
GAUDI_3: dict[str, Any] = {
    "additional_args": {"learning_rate": "2e-5", "lora_alpha": 32, "lora_dropout": 0.1, "warmup_steps": 25},
    "ckpt_output_dir": "~/checkpoints",
    "deepspeed_cpu_offload_optimizer": False,
    "device": "hpu",
    "distributed_backend": "fsdp",
    "effective_batch_size": 128,
    "fsdp_cpu_offload_optimizer": True,
    "is_padding_free": True,
    "lora_quantize_dtype": None,
    "lora_rank": 0,
    "max_batch_len": 60000,
    "nproc_per_node": 8,
    "phased_mt_bench_judge": "~/judge",
    "pipeline": "accelerated",
    "save_samples": 1000,
}


def test_the_published_profile_of_gaudi_3_is_a_run() -> None:
    training = read(**GAUDI_3)
    args = training.train_args
    assert args.fsdp_options.cpu_offload_params is True
    assert (args.learning_rate, args.save_samples, args.max_batch_len) == (2e-5, 1000, 60000)
    assert args.ckpt_output_dir == str(Path.home() / "checkpoints")
    assert training.torch_args.nproc_per_node == 8
    assert training.notes == []


def test_a_flag_counts_before_its_key_and_the_key_before_the_default() -> None:
    training = read("--num-epochs 3 --gpus 2", num_epochs=5, max_seq_len=77, additional_args={"warmup_steps": 1})
    args = training.train_args
    assert (args.num_epochs, args.max_seq_len, args.warmup_steps, args.random_seed) == (3, 77, 1, 42)
    assert training.torch_args.nproc_per_node == 2


def test_options_of_a_group_reach_it() -> None:
    lora = read("--lora-rank 4 --lora-alpha 8 --lora-target-modules q_proj --lora-target-modules up_proj").train_args
    assert lora.lora is not None
    assert (lora.lora.rank, lora.lora.alpha, lora.lora.target_modules) == (4, 8, ["q_proj", "up_proj"])
    assert lora.lora.quantize_data_type is QuantizeDataType.NF4
    plain = read("--lora-rank 4 --lora-quantize-dtype None").train_args
    assert plain.lora is not None
    assert plain.lora.quantize_data_type is QuantizeDataType.NONE
    offloaded = read("--distributed-backend deepspeed --deepspeed-cpu-offload-optimizer true").train_args
    assert offloaded.deepspeed_options.cpu_offload_optimizer is True
    nodes = read("--nnodes 2 --node-rank 1 --rdzv-endpoint h:1 --rdzv-id 7").torch_args
    assert (nodes.nnodes, nodes.node_rank, nodes.rdzv_endpoint, nodes.rdzv_id) == (2, 1, "h:1", "7")
    assert read("--disable-accelerate-full-state-at-epoch").train_args.accelerate_full_state_at_epoch is False
    assert read(pipeline="full").train_args.disable_flash_attn is True


def test_additional_args_take_further_arguments_of_the_library() -> None:
    more = {"mlflow_tracking_uri": "http://h", "mlflow_run_name": "x", "use_liger": True, "validation_split": 0.1}
    args = read(additional_args=more | {"engine_options": {"log_interval": 3}}).train_args
    assert (args.mlflow_tracking_uri, args.mlflow_run_name, args.use_liger) == ("http://h", "x", True)
    assert args.engine_options == {"device": "cpu", "log_interval": 3}


def test_general_and_models_are_read() -> None:
    config = {
        "version": "1.0.0",
        "serve": {"anything": 1},
        "general": {"student_model_id": "s", "use_legacy_tmpl": True, "log_level": "warn", "debug_level": 0},
        "models": [{"id": "s", "family": "granite", "path": "$HOME/student"}, {"id": "t", "path": "teacher"}],
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    read = read_ilab_config("config.yaml")
    args = read_training(read, {"data_path": "data.jsonl"}).train_args
    assert (args.model_path, args.use_legacy_tmpl, args.log_level) == (str(Path.home() / "student"), True, "WARNING")
    assert read_training(read, {"data_path": "data.jsonl", "model_id": "t"}).train_args.model_path == "teacher"


def test_without_a_config_the_defaults_hold_or_the_file_of_ilab_config_init(tmp_path: Path) -> None:
    words = ["model", "train", "--data-path", "data.jsonl"]
    assert ilab.read_command(words).train_args.max_seq_len == 4096
    (tmp_path / "etc" / "instructlab").mkdir(parents=True)
    (tmp_path / "etc" / "instructlab" / "config.yaml").write_text("train: {max_seq_len: 9}")
    assert ilab.read_command(words).train_args.max_seq_len == 9
    assert ilab.read_command(["--config", "DEFAULT", *words]).train_args.max_seq_len == 4096


NOTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "of the other backend": (
        "",
        {"deepspeed_cpu_offload_optimizer": True},
        "deepspeed_cpu_offload_optimizer has no effect with distributed_backend=fsdp",
    ),
    "fsdp's": (
        "--distributed-backend deepspeed --fsdp-cpu-offload-optimizer true",
        {},
        "fsdp_cpu_offload_optimizer has no effect with distributed_backend=deepspeed",
    ),
    "a meeting of one": ("--rdzv-endpoint h:1", {}, "rdzv_endpoint has no effect with nnodes=1"),
    "a question": ("-y", {}, "skip_user_confirm=True has no effect: there are no questions"),
    "memory": ("--optimize-memory", {}, "optimize_memory=True has no effect: weights are trained in float32"),
    "a judge": (
        "--strategy lab-skills-only --phased-phase2-data skills.jsonl",
        {"phased_mt_bench_judge": "judge"},
        "phased_mt_bench_judge=judge has no effect: MT-Bench is not run",
    ),
    "epochs of one training": (
        "--strategy lab-skills-only --phased-phase2-data skills.jsonl --num-epochs 3",
        {},
        "num_epochs has no effect with --strategy lab-skills-only, whose phases have their own",
    ),
}


@pytest.mark.parametrize("case", NOTES)
def test_what_has_no_effect_is_named(case: str) -> None:
    flags, train, expected = NOTES[case]
    notes = read(flags, pipeline="accelerated", **train).notes
    assert any(note.startswith(expected) for note in notes), notes


def test_what_a_phase_takes_from_the_training_is_not_said_to_have_no_effect() -> None:
    flags = "--strategy lab-multiphase --phased-phase1-data data.jsonl --phased-phase2-data skills.jsonl"
    named = {"num_epochs": 3, "effective_batch_size": 32, "phased_phase1_num_epochs": None}
    training = read(flags, pipeline="accelerated", **named)
    said = [note.split()[0] for note in training.notes]
    assert training.phases is not None
    changes = [phase.changes for phase in (training.phases.first, training.phases.second)]
    assert [(each["num_epochs"], each["effective_batch_size"]) for each in changes] == [(3, 128), (10, 3840)]
    assert "effective_batch_size" in said
    assert "num_epochs" not in said
    skills = "--strategy lab-skills-only --phased-phase2-data skills.jsonl"
    notes = read(skills, **named).notes
    assert any(note.startswith("num_epochs has no effect") for note in notes), "phase 2 has its own"


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown flag": ("--num-epoch 3", {}, "unknown flag --num-epoch; did you mean --num-epochs?"),
    "an unknown key": ("", {"num_epoch": 3}, "train.num_epoch is unknown; did you mean num_epochs?"),
    "a key of additional_args": ("", {"learning_rate": 1}, "train.learning_rate belongs in train.additional_args"),
    "a key of train": ("", {"additional_args": {"num_epochs": 3}}, "additional_args.num_epochs belongs in train"),
    "an unknown argument": (
        "",
        {"additional_args": {"warmup_step": 3}},
        "warmup_step is unknown; did you mean warmup_steps",
    ),
    "arguments that are none": ("", {"additional_args": [3]}, "train.additional_args is a list; it must be a mapping"),
    "a wrong type": ("", {"num_epochs": "many"}, "num_epochs='many': input should be a valid integer"),
    "a wrong type of a flag": ("--num-epochs many", {}, "--num-epochs='many': input should be a valid integer"),
    "a number out of range": ("--num-epochs 0", {}, "--num-epochs='0': input should be greater than 0"),
    "a wrong word": ("--device tpu", {}, "--device='tpu': input should be 'cpu', 'mps', 'cuda' or 'hpu'"),
    "a wrong type of the library's": (
        "",
        {"additional_args": {"use_liger": "maybe"}},
        "use_liger='maybe': input should",
    ),
    "mps": ("--device mps", {}, "device=mps is not supported; use cpu, cuda or hpu"),
    "simple": ("--pipeline simple", {}, "pipeline=simple trains in llama.cpp's and MLX's formats"),
    "a flag of simple": ("--iters 3", {}, "iters=3 is not supported: it belongs to the pipeline simple"),
    "a switch of simple": ("-sq", {}, "skip_quantize=True is not supported"),
    "bitsandbytes": ("--4-bit-quant", {}, "use lora_rank with lora_quantize_dtype=nf4"),
    "data that is not there": ("--data-path none.jsonl", {}, "data_path=none.jsonl is not a file"),
    "a folder of data": ("--data-path .", {}, "data_path=. is not a file; give the .jsonl file"),
    "a model without a path": ("--model-id s", {}, "model_id=s is not among the models of the config; it has none"),
    "nodes that cannot meet": ("--nnodes 2", {}, "nnodes=2 need a rendezvous; give rdzv_endpoint"),
    "an unknown strategy": ("--strategy lab", {}, "--strategy='lab': input should be 'lab-multiphase'"),
    "data of no phase": (
        "--phased-phase1-data data.jsonl",
        {},
        "--phased-phase1-data has no effect without --strategy",
    ),
    "a phase without data": (
        "--strategy lab-multiphase --phased-phase1-data data.jsonl",
        {},
        "--phased-phase2-data is not given; give the .jsonl file",
    ),
    "a phase whose data is not there": (
        "--strategy lab-skills-only --phased-phase2-data none.jsonl",
        {},
        "--phased-phase2-data none.jsonl is not a file",
    ),
    "a replay without data": (
        "--strategy lab-skills-only --phased-phase2-data data.jsonl --phased-phase2-replay 0.5",
        {},
        "--phased-phase1-data is not given",
    ),
    "a phase without a result": (
        "--strategy lab-skills-only --phased-phase2-data data.jsonl",
        {"checkpoint_at_epoch": False},
        "phase 2 would export nothing; set checkpoint_at_epoch, or phased_phase2_samples_per_save",
    ),
    "the best of none": (
        "--strategy lab-skills-only --phased-phase2-data data.jsonl --phased-checkpoint best",
        {},
        "phased_checkpoint=best needs a validation; give validation_split",
    ),
    "the best of the last": (
        "--strategy lab-skills-only --phased-phase2-data data.jsonl --phased-checkpoint best",
        {"additional_args": {"validation_split": 0.1, "keep_last_checkpoint_only": True}},
        "phased_checkpoint=best needs all exports",
    ),
    "a journal that is a folder": (
        "--strategy lab-skills-only --phased-phase2-data data.jsonl --training-journal .",
        {},
        "training_journal=. is a folder; give a file",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_cannot_be_is_refused_by_name(case: str) -> None:
    flags, train, expected = FAULTS[case]
    assert expected in faults(flags, **train)


CONFIGS: dict[str, tuple[Any, str]] = {
    "an unknown section": ({"trains": {}}, "has an unknown section trains; did you mean train?"),
    "a section that is none": ({"train": [3]}, "train is a list; it must be a mapping of keys"),
    "an unknown key": ({"general": {"log_levl": 1}}, "general.log_levl is unknown; did you mean log_level?"),
    "a model that is none": ({"models": [{"id": "x"}]}, "lacks id or path; give both"),
    "no mapping": ([3], "is a list; it must be a mapping of sections"),
    "a level": ({"general": {"log_level": "LOUD"}}, "log_level='LOUD': input should be"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_is_refused(case: str) -> None:
    config, expected = CONFIGS[case]
    Path("config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as caught:
        ilab.read_command(["--config", "config.yaml", "model", "train", "--data-path", "data.jsonl"])
    assert expected in str(caught.value)


def test_the_value_of_an_unknown_flag_is_no_fault_of_its_own() -> None:
    assert faults("--num-epoch 3 --gpu 2").count("unknown flag") == 2
    assert "unknown flag --gpu; did you mean --gpus?" in faults("--num-epoch 3 --gpu 2")


def test_every_fault_is_named_at_once() -> None:
    said = faults("--pipeline simple --device mps --iters 3")
    assert all(text in said for text in ("pipeline=simple", "device=mps", "iters=3"))


@pytest.mark.parametrize(
    ("text", "said"),
    [("train: {", "is not valid YAML"), ("train: {a: 1, a: 2}", "'a' is given twice"), (None, "cannot be read")],
)
def test_a_file_that_cannot_be_read_is_named(text: str | None, said: str) -> None:
    if text is not None:
        Path("config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_ilab_config("config.yaml")


def test_the_command_reports_faults_and_a_failed_run_by_their_statuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["model", "train", "--data-path", "data.jsonl", "--device"]
    assert ilab.main([*words, "mps"]) == 2
    assert "device=mps is not supported" in capsys.readouterr().err

    def fails(*given: Any) -> None:
        raise ilab.RunFailedError(3, "the training ended with status 3")

    monkeypatch.setattr("megatron.launch.instructlab.run.run_training", fails)
    assert ilab.main([*words, "cpu", "-y"]) == 3
    assert "note: skip_user_confirm=True has no effect" in capsys.readouterr().err
