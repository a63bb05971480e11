"""python -m megatron.gaudi_spawn: the published commands are plans, each flag has an outcome, wrong ones are named."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import gaudi_spawn
from megatron.generation.options import GenerationOptions, read_command
from megatron.launch.dialects import published_scripts
from megatron.launch.dialects.hl_variables import VARIABLES
from megatron.launch.dialects.published_scripts import digest
from megatron.launch.dialects.spawn_flags import TABLES
from megatron.launch.dialects.spawn_requests import finetune_request, script_request
from megatron.launch.plan import LaunchPlan, RefusedError
from megatron.launch.preflight import preflight
from megatron.options.config import options
from megatron.options.flags import flag
from megatron.options.outputs import NEVER
from tests.finetuning_files import write_chats, write_config
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guides" / "optimum_habana.md").read_text(encoding="utf-8")
FLAGS_PAGE = (ROOT / "docs" / "reference" / "gaudi_spawn_flags.md").read_text(encoding="utf-8")
LLAMA, PAIRED = "meta-llama/Llama-2-70b-hf", "lvwerra/stack-exchange-paired"
# llama2_ds_zero3_config.json of optimum-habana's examples
ZERO3: dict[str, Any] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "steps_per_print": 64,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "contiguous_gradients": False,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "timers": {"throughput": {"enabled": True, "synchronized": False}},
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
FINETUNE = (
    f"model_id: {LLAMA}\nmodel_family: llama2-7b\ngaudi_config_name: Habana/llama\n"
    "LoRA: {r: 8, alpha: 32, dropout: 0.05}\n"
    "data_path: chats.jsonl\nsplit: full\nbatch_size: 4\ngradient_accumulation_steps: 1\nnum_epochs: 10\n"
    "save_dir: save_dir\nlr: 1e-4\nweight_decay: 0\nseed: 42\n"
)


@pytest.fixture
def trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the guides' commands are typed, with tiny models and data under their names."""
    folder = tmp_path / "trl"
    for name in (LLAMA, "sft/final_merged_checkpoint", "stack-llama-2"):
        path = write_config(folder / name) / "config.json"
        config = json.loads(path.read_text()) | {"num_attention_heads": 8, "num_key_value_heads": 8}
        path.write_text(json.dumps(config))
    mixtral = write_config(folder / "mistralai" / "Mixtral-8x7B-Instruct-v0.1") / "config.json"
    config = json.loads(mixtral.read_text()) | MIXTRAL
    mixtral.write_text(json.dumps(config))
    dolly = folder / "philschmid" / "dolly-15k-oai-style" / "data"
    dolly.mkdir(parents=True)
    write_chats(dolly / "train-00000-of-00001.jsonl")
    for number in range(2):
        for part in ("finetune", "rl"):
            path = folder / PAIRED / "data" / part / f"train-0000{number}-of-00002.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('{"question": "a", "response_j": "b", "response_k": "c"}\n')
    (tmp_path / "language-modeling").mkdir()
    (tmp_path / "language-modeling" / "llama2_ds_zero3_config.json").write_text(json.dumps(ZERO3))
    write_chats(folder / "chats.jsonl")
    (folder / "config").mkdir()
    (folder / "config" / "finetune_lora.yaml").write_text(FINETUNE)
    zero = {"stage": 1, "offload_optimizer": {"device": "none", "pin_memory": True}}
    (folder / "config" / "ds_config.json").write_text(json.dumps({"zero_optimization": zero}))
    monkeypatch.chdir(folder)
    for name, value in {"HL_DRY_RUN": "1", "HL_DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)
    return folder


def commands(text: str) -> list[list[str]]:
    """The words of each command in the bash blocks of a page, from the launcher's own flags or the script's name on."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    start = r".*?\bpython (?:-m megatron\.gaudi_spawn |\S*gaudi_spawn\.py |(?=merge_peft_adapter|finetune))"
    return [shlex.split(re.sub(start, "", line, count=1)) for line in lines if re.match(start, line)]


def planned(words: list[str] | str, **environment: str) -> LaunchPlan:
    """The plan of a command, with the variables of a dry run."""
    line = gaudi_spawn.read_line(words.split() if isinstance(words, str) else words)
    ranks, variables = gaudi_spawn.ranks_of(line), {"HL_DRY_RUN": "1", "HL_DEVICE": "cpu"} | environment
    if line.name == "finetune":
        return preflight(finetune_request(line.script or "", line.words, variables, ranks))
    return preflight(script_request("sft" if line.name == "sft" else "dpo", line.words, variables, ranks)[0])


def test_each_command_of_the_page_is_a_plan(trl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = commands(PAGE)
    assert len(found) == 7
    for words in found:
        if "merge_peft_adapter.py" not in words:  # which has no dry run
            assert gaudi_spawn.main(words) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    assert "8 ranks of megatron.generate" in shown.out
    assert "--use_hpu_graphs has no effect on the CPU" in shown.err
    assert "-graphs" not in shown.out.partition("ranks of megatron.generate")[2]


def test_each_published_command_is_a_plan(trl: Path, test_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = sorted((test_data.parent / "seeds").glob("00[24]_*"))
    if len(seeds) != 2:
        pytest.skip("needs the two published guides beside MEGATRON_TEST_DATA")
    (trl.parent / "trl" / "stack-llama-2" / "tokenizer.json").touch()
    found = [words for seed in seeds for words in commands(seed.read_text(encoding="utf-8"))]
    named = [next(word for word in words if word.endswith(".py")) for words in found]
    assert sorted(named) == sorted(
        [*["sft.py"] * 3, "dpo.py", *["merge_peft_adapter.py"] * 2, "run_generation.py", *["finetune.py"] * 2]
    )
    for words in found:
        if "merge_peft_adapter.py" in words:
            continue
        status, shown = gaudi_spawn.main(words), capsys.readouterr()
        assert status == 0, shown.err
    # and every flag of theirs is in the tables
    flags = {word.split("=")[0] for words in found for word in words if word.startswith("--")}
    assert len(flags) > 40
    assert [name for name in sorted(flags) if not re.search(rf"^\|[^|]* ?`{name}\b[^|]*\|", FLAGS_PAGE, re.M)] == []


def test_sft_py_trains_what_its_flags_and_defaults_say(trl: Path) -> None:
    plan = planned(commands(PAGE)[0])
    training, optimizer, lora = plan.config.training, plan.config.optimizer, plan.config.lora
    assert plan.devices_per_node == 8
    assert (training.train_iters, training.num_epochs, training.global_batch_size) == (500, None, 16)
    assert (training.seq_length, plan.config.sft.max_batch_len) == (1024, 1024)
    assert (optimizer.lr, optimizer.lr_decay_style, optimizer.lr_warmup_iters) == (1e-4, "cosine", 100)
    assert (optimizer.weight_decay, optimizer.zero_stage, optimizer.lr_warmup_fraction) == (0.05, 3, None)
    assert (optimizer.adam_beta2, optimizer.adam_eps, training.seed) == (0.999, 1e-6, 42)
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_dropout) == (8, 16, 0.05)
    assert plan.fine_tuning is not None
    assert plan.fine_tuning.chat_template == "question_answer"
    assert plan.fine_tuning.files == [f"{PAIRED}/data/finetune/train-0000{number}-of-00002.jsonl" for number in (0, 1)]
    # what is left out has transformers' defaults
    short = planned(f"sft.py --model_name_or_path {LLAMA} --dataset_name chats.jsonl")
    training, optimizer = short.config.training, short.config.optimizer
    assert (training.num_epochs, training.global_batch_size, optimizer.lr) == (3, 8, 5e-5)
    assert (optimizer.lr_decay_style, optimizer.lr_warmup_fraction, optimizer.weight_decay) == ("linear", None, 0)
    assert short.fine_tuning is not None
    assert short.fine_tuning.chat_template is None
    whole = planned(f"sft.py --model_name_or_path {LLAMA} --dataset_name chats.jsonl --use_peft False")
    assert whole.config.lora.lora_rank is None


def test_sft_py_trains_questions_too_unless_a_variable_says_otherwise(trl: Path) -> None:
    def trained(command: str, **variables: str) -> str:
        plan = planned(command, **variables)
        assert plan.fine_tuning is not None
        return plan.fine_tuning.train_on

    assert trained(SFT) == "all"
    assert trained(SFT, HL_TRAIN_ON="assistant") == "assistant"
    without = SFT.replace("--dataset_name chats.jsonl", "")
    assert trained(without, HL_DATA="chats.jsonl") == "all"
    assert trained(without, HL_DATA_OUTPUT_DIR="processed") == "assistant"  # which has no effect: they are processed


def test_sft_py_loses_no_long_row(trl: Path) -> None:
    def too_long(command: str, **variables: str) -> str:
        plan = planned(command, **variables)
        assert plan.fine_tuning is not None
        return plan.fine_tuning.too_long

    assert too_long(SFT) == too_long(f"{SFT} --packing True") == "split"
    assert too_long(f"{SFT} --packing False") == too_long(f"{SFT} --no_packing") == "truncate"
    assert too_long(SFT, HL_TOO_LONG="drop") == too_long(f"{SFT} --packing True", HL_TOO_LONG="drop") == "drop"
    without = SFT.replace("--dataset_name chats.jsonl", "")
    assert too_long(without, HL_DATA="chats.jsonl") == "split"
    assert too_long(without, HL_DATA_OUTPUT_DIR="processed") == "drop"  # which has no effect: they are processed


@pytest.mark.parametrize(
    # TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING of PEFT
    ("kind", "modules"),
    [("llama", ("q_proj", "v_proj")), ("bloom", ("query_key_value",)), ("gpt2", ("c_attn",))],
)
def test_adapters_have_pefts_modules_of_the_model_unless_they_are_named(
    trl: Path, kind: str, modules: tuple[str, ...]
) -> None:
    if kind != "llama":
        config = {"model_type": kind, "vocab_size": 278, "n_head": 4, "n_layer": 2}
        config |= {"hidden_size": 64} if kind == "bloom" else {"n_embd": 64, "n_positions": 2048}
        (trl / LLAMA / "config.json").write_text(json.dumps(config))
    for command in (SFT, f"dpo.py --model_name_or_path {LLAMA}"):
        plan = planned(command)
        assert plan.config.lora.lora_target_modules == modules
        assert "matches no" not in " ".join(plan.warnings)
    assert planned(SFT, HL_LORA_TARGET_MODULES="all-linear").config.lora.lora_target_modules == ("all-linear",)


def test_dpo_py_trains_what_its_flags_and_defaults_say(trl: Path) -> None:
    plan = planned(commands(PAGE)[2])
    training, lora, preference = plan.config.training, plan.config.lora, plan.config.preference
    assert (training.task, training.train_iters, training.num_epochs, training.seq_length) == (
        *("preference", 1000),
        *(None, 511),
    )
    assert (training.global_batch_size, plan.config.sft.max_batch_len, training.seed) == (32, 1022, 0)
    optimizer = plan.config.optimizer
    assert (optimizer.lr, optimizer.lr_warmup_iters, optimizer.weight_decay) == (5e-4, 100, 0)
    assert (optimizer.zero_stage, optimizer.optimizer) == (3, "paged_adamw_32bit")
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_dropout) == (8, 16, 0.05)
    assert (preference.beta, preference.max_prompt_length, preference.preference_loss) == (0.1, 256, "sigmoid")
    unmatched = re.findall(r"lora_target_modules=(\w+) matches no", " ".join(plan.warnings))
    assert unmatched == ["out_proj", "fc_in", "fc_out", "wte"]
    assert plan.fine_tuning is not None
    assert plan.fine_tuning.files[0].startswith(f"{PAIRED}/data/rl/")
    assert planned(f"{SFT} --label_smoothing_factor 0.1").config.training.label_smoothing_factor == 0.1
    by_epochs = planned("dpo.py --model_name_or_path stack-llama-2 --max_steps -1").config.training
    assert (by_epochs.train_iters, by_epochs.num_epochs) == (None, 3)


def test_defaults_are_those_of_gaudi_training_arguments(trl: Path) -> None:
    """What the commands leave out: transformers' own values, but for two that optimum-habana changes."""
    arguments = pytest.importorskip("transformers").TrainingArguments
    theirs: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(arguments)}
    theirs |= {"adam_epsilon": 1e-6, "optim": "adamw_torch"}
    of_dpo = {"learning_rate": 5e-4, "lr_scheduler_type": "cosine", "warmup_steps": 100, "seed": 0, "save_steps": 100}
    finetune = "--world_size 7 --use_deepspeed finetune.py --config-name=finetune_lora.yaml"
    for command, own in ((SFT, {}), ("dpo.py --model_name_or_path stack-llama-2", of_dpo), (finetune, None)):
        config = planned(command).config
        optimizer, expected = config.optimizer, theirs | (own or {})
        adam = (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps, optimizer.clip_grad)
        names = ("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")
        assert adam == tuple(expected[name] for name in names), command
        if own is None:  # its file has the rest
            continue
        assert (optimizer.lr, optimizer.min_lr, optimizer.weight_decay) == (
            *(expected["learning_rate"], 0),
            expected["weight_decay"],
        )
        assert optimizer.lr_decay_style == expected["lr_scheduler_type"]
        assert (optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction) == (expected["warmup_steps"], None)
        assert (config.training.seed, config.checkpoint.save_interval) == (expected["seed"], expected["save_steps"])
        assert config.training.bf16
    training = planned(SFT).config.training
    assert (training.num_epochs, training.global_batch_size) == (
        theirs["num_train_epochs"],
        theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"],
    )


def warm_up(words: str) -> tuple[str, int, float | None]:
    """Style of the learning rate, steps and fraction of the warm-up that a command of sft.py sets."""
    optimizer = planned(f"{SFT} --max_steps 100 {words}").config.optimizer
    return optimizer.lr_decay_style, optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # transformers' get_warmup_steps: steps above 0, else the ratio, in any order
        ("--warmup_steps 9 --warmup_ratio 0.1", ("linear", 9, None)),
        ("--warmup_ratio 0.1 --warmup_steps 9", ("linear", 9, None)),
        ("--warmup_ratio 0.1 --warmup_steps 0", ("linear", 0, 0.1)),
        # its get_constant_schedule has none
        ("--lr_scheduler_type constant --warmup_steps 9", ("constant", 0, None)),
        ("--lr_scheduler_type constant --warmup_ratio 0.1", ("constant", 0, None)),
        ("--warmup_ratio 0.1 --lr_scheduler_type constant", ("constant", 0, None)),
        ("--lr_scheduler_type constant_with_warmup --warmup_steps 9", ("constant", 9, None)),
        ("--warmup_steps 9 --lr_scheduler_type constant --lr_scheduler_type linear", ("linear", 9, None)),
    ],
)
def test_the_warm_up_is_transformers_own_in_any_order(
    trl: Path, words: str, expected: tuple[str, int, float | None]
) -> None:
    assert warm_up(words) == expected


def test_a_warm_up_that_does_not_count_is_named(trl: Path) -> None:
    notes = " ".join(planned(f"{SFT} --max_steps 100 --warmup_steps 9 --warmup_ratio 0.1").notes)
    assert "--warmup_ratio 0.1 has no effect beside --warmup_steps 9" in notes
    notes = " ".join(planned(f"{SFT} --lr_scheduler_type constant --warmup_steps 9").notes)
    assert "--warmup_steps 9 has no effect beside --lr_scheduler_type constant; use constant_with_warmup" in notes


def test_of_a_flag_given_twice_nothing_of_the_first_remains(trl: Path) -> None:
    training = planned(f"{SFT} --max_steps 100 --max_steps -1").config.training
    assert (training.train_iters, training.num_epochs) == (None, 3)
    assert planned(f"{SFT} --save_strategy epoch --save_strategy steps").config.checkpoint.save_at_epoch is False
    assert "--num-buckets" not in script_flags(f"{SFT} --num_buckets 8 --num_buckets -1")
    assert planned(f"{SFT} --seed 1 --seed=2").config.training.seed == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (500, False)),
        ("--save_strategy steps --save_steps 9", (9, False)),
        ("--save_strategy epoch", (NEVER, True)),
        ("--save_strategy epoch --save_steps 9", (NEVER, True)),
        ("--save_steps 9 --save_strategy epoch", (NEVER, True)),
    ],
)
def test_a_run_saves_by_steps_or_by_epochs_as_transformers_does(
    trl: Path, words: str, expected: tuple[int, bool]
) -> None:
    plan = planned(f"{SFT} {words}")
    assert (plan.config.checkpoint.save_interval, plan.config.checkpoint.save_at_epoch) == expected
    assert planned("dpo.py --model_name_or_path stack-llama-2").config.checkpoint.save_at_epoch is False
    is_ignored = "--save_steps 9 has no effect beside --save_strategy epoch" in " ".join(plan.notes)
    assert is_ignored == (expected[1] and "--save_steps" in words)


def script_flags(words: str) -> list[str]:
    line = gaudi_spawn.read_line(words.split())
    return script_request("sft", line.words, {"HL_DEVICE": "cpu"}, gaudi_spawn.ranks_of(line))[0].train_flags


def test_all_checkpoints_are_kept_unless_a_limit_is_given(trl: Path) -> None:
    """As transformers does without save_total_limit, where run_sft.sh keeps the newest."""
    assert planned(SFT).config.checkpoint.keep_last is None
    assert planned("dpo.py --model_name_or_path stack-llama-2").config.checkpoint.keep_last is None
    assert planned(f"{SFT} --save_total_limit 2").config.checkpoint.keep_last == 2


def test_an_empty_subset_is_none_as_in_published_commands(trl: Path) -> None:
    words = ["sft.py", "--model_name_or_path", LLAMA, "--dataset_name", f"{PAIRED}/data/rl", "--subset", ""]
    line = planned(words)
    assert line.fine_tuning is not None
    assert str(line.fine_tuning.data).count("data/rl/train-0000") == 2


def test_graphs_of_validations_are_for_hpus_that_validate(trl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, hpu = f"{SFT} --use_lazy_mode --use_hpu_graphs_for_inference", {"HL_DEVICE": "hpu"}
    plan = planned(command, HL_EVAL_ITERS="2", **hpu)
    assert plan.config.data.eval_graphs
    for environment, why in (
        (hpu, "the run has no validation; set HL_EVAL_ITERS"),
        ({"HL_EVAL_ITERS": "2"}, "cpu has no HPU graphs"),
    ):
        plan = planned(command, **environment)
        assert not plan.config.data.eval_graphs
        assert any(note.startswith(f"--use_hpu_graphs_for_inference has no effect: {why}") for note in plan.notes)
    with pytest.raises(RefusedError) as refused:
        planned(f"{SFT} --use_hpu_graphs_for_training")
    assert "--use_hpu_graphs_for_training=True is not supported: the passes of training" in refused.value.faults[0]


def test_sft_py_says_that_its_steps_have_samples_and_not_rows(trl: Path) -> None:
    note = "a step has 8 samples for each data-parallel rank; sft.py --packing, its default, fills as many rows of 1024"
    assert any(each.startswith(note) for each in planned(SFT).notes)
    for silent in (planned(f"{SFT} --packing False"), planned(SFT, HL_GBS="16")):
        assert not any("fills as many rows" in each for each in silent.notes)


def test_finetune_py_finds_its_file_as_hydra_does(trl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("--world_size 7 --use_deepspeed finetune.py --config-name=finetune_lora.yaml")
    assert (plan.devices_per_node, plan.config.training.global_batch_size, plan.config.optimizer.zero_stage) == (
        7,
        28,
        1,
    )
    assert plan.train_flags == planned("--world_size 7 finetune.py -cn finetune_lora").train_flags
    assert planned("finetune.py --config-name=finetune_lora.yaml").devices_per_node == 1
    (trl / "config").rename(trl / "other")
    assert planned("finetune.py --config-path other --config-name finetune_lora").config.training.num_epochs == 10


def test_variables_count_where_the_command_says_nothing(trl: Path) -> None:
    command = f"--world_size 4 sft.py --model_name_or_path {LLAMA} --dataset_name chats.jsonl"
    plan = planned(command, HL_TP="2", HL_GBS="12", HL_SEQ_LEN="256", HL_TRAIN_ITERS="7")
    training = plan.config.training
    assert plan.config.parallel.tensor_model_parallel_size == 2
    assert (training.global_batch_size, training.seq_length, training.train_iters) == (12, 256, 7)
    plan = planned(f"{command} --per_device_train_batch_size 3 --max_seq_length 512", HL_TP="2", HL_SEQ_LEN="256")
    assert (plan.config.training.global_batch_size, plan.config.training.seq_length) == (6, 512)
    plan = planned(f"{command} -- --eval-interval 5 --global-batch-size 20")
    assert plan.config.data.eval_interval == 5
    assert plan.config.training.global_batch_size == 20


def test_trackers_are_those_that_the_flag_names(trl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    logging = planned(f"{SFT} --report_to wandb mlflow --run_name try").config.logging
    assert (logging.wandb_project, logging.wandb_exp_name) == ("huggingface", "try")
    assert (logging.mlflow_experiment, logging.mlflow_run_name) == ("ours", "try")
    logging = planned(f"{SFT} --report_to tensorboard --run_name try").config.logging
    assert (logging.wandb_project, logging.mlflow_experiment, logging.mlflow_run_name) == (None, None, None)


def test_use_mpi_chooses_the_launcher_unless_a_variable_does(trl: Path) -> None:
    command = f"--world_size 2 --use_mpi sft.py --model_name_or_path {LLAMA} --dataset_name chats.jsonl"
    assert planned(command).launcher == "mpirun"
    assert planned(command, HL_LAUNCHER_TYPE="pdsh").launcher == "pdsh"
    assert planned(command.replace("mpi", "deepspeed")).launcher == "pdsh"


def test_a_hostfile_gives_the_ranks(trl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gaudi_spawn.MARK_STEPS, "1")
    (trl / "hosts").write_text("10.0.0.1 slots=4\n10.0.0.2 slots=4\n")
    command = f"--hostfile hosts --use_deepspeed sft.py --model_name_or_path {LLAMA} --dataset_name chats.jsonl"
    plan = planned(command)
    assert (plan.nodes, plan.devices_per_node, plan.config.training.global_batch_size) == (2, 4, 64)
    assert plan.environment[gaudi_spawn.MARK_STEPS] == "1"
    assert any(note.startswith(f"{gaudi_spawn.MARK_STEPS}=1 goes to every rank") for note in plan.notes)
    noted = planned(f"--world_size 3 {command}").notes
    assert "--world_size 3: the 8 slots of hosts count" in noted


def test_a_dataset_is_found_where_hf_download_puts_it(trl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(trl / "hub"))
    cached = trl / "hub" / "datasets--org--chats"
    files = [cached / "snapshots" / "0a1b" / "data" / f"{split}-00000-of-00001.jsonl" for split in ("test", "train")]
    (cached / "blobs").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0a1b")
    files[0].parent.mkdir(parents=True)
    for number, path in enumerate(files):
        write_chats(cached / "blobs" / f"{number}")
        path.symlink_to(f"../../../blobs/{number}")
    plan = planned(f"sft.py --model_name_or_path {LLAMA} --dataset_name org/chats --subset data/ --streaming False")
    assert plan.fine_tuning is not None
    assert plan.fine_tuning.files == [str(files[1])]


SFT = f"sft.py --model_name_or_path {LLAMA} --dataset_name chats.jsonl"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--world_size 2", "no script is given; give sft.py, dpo.py"),
        ("--world_size two sft.py", "--world_size='two' must be a whole number, 1 or more"),
        ("--wrld_size 2 sft.py", "unknown flag --wrld_size; did you mean --world_size?"),
        ("--use_mpi --use_deepspeed sft.py", "--use_mpi and --use_deepspeed exclude each other"),
        (f"--hostfile hosts {SFT}", "--hostfile hosts needs --use_deepspeed; add it"),
        ("run_lora_clm.py", "run_lora_clm.py is not run here; use sft.py, with its flags"),
        ("examples/trl/dp0.py", "examples/trl/dp0.py is not one of the scripts; did you mean dpo.py?"),
        (f"{SFT} --max_step 5", "unknown flag --max_step of sft.py; did you mean --max_steps?"),
        (f"{SFT} --max_steps many", "--max_steps='many' must be a whole number"),
        (f"{SFT} --learning_rate fast", "optimizer.lr='fast'"),
        (f"{SFT} --learning_rate fast", "(--learning_rate sets lr)"),
        (f"{SFT} --max_steps 5 --warmup_steps 9", "lower lr_warmup_iters=9\n  (--warmup_steps sets lr_warmup_iters)"),
        (f"{SFT} --max_grad_norm -1", "(--max_grad_norm sets clip_grad)"),
        (f"{SFT} --lr_scheduler_type constant --warmup_ratio x", "--warmup_ratio='x' must be a number from 0 to 1"),
        (f"{SFT} --logging_steps 0", "--logging_steps='0' must be a whole number, 1 or more"),
        (f"{SFT} --per_device_train_batch_size 0", "--per_device_train_batch_size='0' must be a whole number"),
        (f"{SFT} --optim adafactor", "--optim='adafactor' must be paged_adamw_32bit, adamw_torch"),
        (f"{SFT} --bf16 maybe", "--bf16='maybe' must be True or False"),
        (f"{SFT} --bf16 True False", "'False' does not follow a flag"),
        (f"{SFT} --output_dir", "--output_dir needs a value"),
        (f"{SFT} --fp16", "--fp16=True is not supported: Gaudi trains in bfloat16; use --bf16"),
        (f"{SFT} --do_eval", "a validation needs its part of the data"),
        (f"{SFT} --report_to comet_ml", "has comet_ml, which is not supported; use none, tensorboard, wandb or mlflow"),
        (f"{SFT} --use_peft False --lora_r 4", "--use_peft False trains no adapters; leave --lora_r out"),
        (f"{SFT} --deepspeed none.json", "deepspeed_config='none.json' cannot be read"),
        ("sft.py --dataset_name chats.jsonl", "--model_name_or_path=meta-llama/Llama-2-7b-hf is not here as a folder"),
        (f"sft.py --model_name_or_path {LLAMA}", "--dataset_name is not given"),
        (
            f"sft.py --model_name_or_path {LLAMA} --dataset_name org/none",
            "--dataset_name=hf://datasets/org/none?split=train is not here as a folder",
        ),
        (f"sft.py --model_name_or_path {LLAMA} --dataset_name {PAIRED} --subset no", f"{PAIRED} has no folder no"),
        (f"sft.py --model_name_or_path {LLAMA} --dataset_name {PAIRED} --split test", "--split test: no file of"),
        ("dpo.py --model_name_or_path stack-llama-2 --loss_type aot", "preference_loss='aot'"),
        ("dpo.py --model_name_or_path stack-llama-2 --max_length 1", "--max_length='1' must be a whole number, 2"),
        ("finetune.py", "--config-name is not given"),
        ("finetune.py --config-name=none.yaml", "there is no file config/none.yaml or none.yaml"),
        ("finetune.py --config-name=finetune_lora.yaml rl=1", "'rl=1' is not a key of the file; write +rl=1 to add it"),
        ("finetune.py --config-nam=finetune_lora.yaml", "did you mean --config-name?"),
        (
            "run_generation.py --model_name_or_path stack-llama-2 --prompt a --max_input_tokens 5",
            "prompts are read whole",
        ),
    ],
)
def test_a_wrong_command_is_refused_under_the_names_that_were_written(
    trl: Path, line: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (trl / "hosts").write_text("10.0.0.1 slots=4\n10.0.0.2 slots=4\n")
    before = sorted(trl.rglob("*"))
    assert gaudi_spawn.main(line.split()) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert "Traceback" not in shown.err
    assert sorted(trl.rglob("*")) == before


def test_the_page_of_flags_is_what_the_tool_prints() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "document_gaudi_spawn.py")]
    printed = subprocess.run(tool, capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    assert printed == FLAGS_PAGE, "run `python tools/document_gaudi_spawn.py > docs/reference/gaudi_spawn_flags.md`"


@pytest.mark.parametrize("script", TABLES)
def test_every_flag_has_one_row_whose_targets_exist(script: str) -> None:
    names = [entry.name for entry in TABLES[script]]
    assert len(names) == len(set(names))
    text = " ".join(entry.text for entry in TABLES[script])
    variables = set(re.findall(r"HL_[A-Z0-9_]+(?<!_)", text)) - {"HL_LORA"}
    assert variables <= {variable.name for variable in VARIABLES}
    flags = set(re.findall(r"`(--[a-z-]+)[` ]", text)) - {"--packing", "--deepspeed", "--"}
    assert flags <= {flag(name) for name in options()} | set(names)
    for entry in TABLES[script]:
        targets = {target for target, _ in entry.convert(entry.default)} if entry.default is not None else set()
        named = {target for target in targets if target.startswith("HL_")}
        assert named <= {variable.name for variable in VARIABLES}
        assert {target for target in targets if target.startswith("--")} <= {flag(name) for name in options()}


def test_help_fits_into_100_columns_and_names_every_flag() -> None:
    shown = [gaudi_spawn.help_text(name) for name in (None, "sft", "dpo")]
    assert max(len(line) for text in shown for line in text.splitlines()) <= 100
    for name in gaudi_spawn.SCRIPTS:
        assert f"{name}.py" in shown[0]
    for text, script in zip(shown[1:], ("sft", "dpo"), strict=True):
        assert all(f"  {entry.name} " in text for entry in TABLES[script])


PUBLISHED_LIKE = "import torch\n\n\nclass CustomTrainer:\n    def compute_loss(self, loss):\n        return loss\n"


def test_scripts_with_code_of_their_own_are_refused_by_name(
    trl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["finetune.py", "--config-name=finetune_lora.yaml"]
    ascent = PUBLISHED_LIKE.replace("return loss", "return -loss")
    (trl / "finetune.py").write_text("from dataloader import CustomTrainer\n")
    (trl / "dataloader.py").write_text(ascent)
    assert gaudi_spawn.main(command) == 2
    said = capsys.readouterr().err
    assert "refused, 2 faults" in said
    for name in ("finetune.py", "dataloader.py"):
        assert f"{name} has code of its own, which is not run here: this command does what the published {name}" in said
    # what is published runs, however it is laid out
    own = {name: (digest((trl / f"{name}.py").read_text()),) for name in ("finetune", "dataloader")}
    monkeypatch.setattr(published_scripts, "PUBLISHED", published_scripts.PUBLISHED | own)
    documented = ascent.replace("    def", '    """Ascends."""\n\n    # as published\n    def').replace("\n", "\r\n")
    (trl / "dataloader.py").write_text(documented)
    assert gaudi_spawn.main(command) == 0, capsys.readouterr().err
    for changed in (PUBLISHED_LIKE, ascent + "        print(loss)\n"):
        (trl / "dataloader.py").write_text(changed)
        assert gaudi_spawn.main(command) == 2
    (trl / "dataloader.py").write_bytes(b"\xff\xfe(")
    assert gaudi_spawn.main(command) == 2


def test_words_that_stand_apart_are_other_code_than_one_word() -> None:
    assert digest("x = not found\n") != digest("x = notfound\n")
    assert digest("x = not found\n") == digest("# y\nx  =  not  found\n\n")


def test_a_digest_is_one_on_every_python() -> None:
    # Python 3.12 and later cut an f-string into tokens; computed by 3.11 and 3.14
    assert digest("""name = f"{a + b!r:>{width}} {{}} {f'{c}'}" "d"\n""") == "b278f8c58231de6f"


@pytest.mark.parametrize("script", ["sft", "dpo", "merge_peft_adapter", "run_generation"])
def test_other_scripts_with_code_of_their_own_are_refused_too(
    trl: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (trl / "mine").mkdir()
    (trl / "mine" / f"{script}.py").write_text("print('mine')\n")
    assert gaudi_spawn.main([f"mine/{script}.py", "--model_name_or_path", LLAMA]) == 2
    assert f"mine/{script}.py has code of its own, which is not run here" in capsys.readouterr().err


def test_the_published_trainer_is_known(trl: Path, test_data: Path) -> None:
    guides = sorted((test_data.parent / "seeds").glob("004_*"))
    if not guides:
        pytest.skip("needs the published guide beside MEGATRON_TEST_DATA")
    blocks = re.findall(r"```python\n(.*?)```", guides[0].read_text(encoding="utf-8"), re.S)
    (trainer,) = (block for block in blocks if "class CustomTrainer" in block)
    (trl / "dataloader.py").write_text(trainer)
    (trl / "finetune.py").unlink(missing_ok=True)
    assert published_scripts.check_script("finetune.py") == published_scripts.ScriptCheck()
    (trl / "dataloader.py").write_text(trainer.replace("loss = outputs.loss", "loss = -outputs.loss"))
    assert published_scripts.check_script("finetune.py").trainer == "dataloader.py:CustomTrainer"


GENERATE = "run_generation.py --model_name_or_path stack-llama-2 --prompt"


def test_run_generation_py_has_the_published_flags_and_defaults() -> None:
    lines = (ROOT / "tests" / "cli" / "run_generation_flags.txt").read_text(encoding="utf-8").splitlines()[1:]
    published = dict(line.split(" ", 1) for line in lines)
    table = {entry.name: entry for entry in gaudi_spawn.FLAGS["run_generation"]}
    assert len(published) == 81
    assert set(table) == set(published)
    for name, entry in table.items():
        default = published[name]
        if entry.default is not None:
            assert entry.default == default, name
        elif entry.outcome == "refused" and default not in ("None", "True", "False"):
            assert default in entry.accepts, name


def generated(trl: Path, command: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Return what megatron.generate reads of the command, and the notes."""
    (trl / "stack-llama-2" / "tokenizer.json").touch()
    assert gaudi_spawn.main(shlex.split(command)) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    words = shlex.split(shown.out.splitlines()[-1])
    return read_command(words[words.index("megatron.generate") + 1 :])[0], shown.err


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("", {}),
        ("--temperature 0.7", {}),
        ("--do_sample", {"temperature": 0.6, "top_p": 0.9}),
        ("--do_sample --temperature 0.7 --top_k 5", {"temperature": 0.7, "top_p": 0.9, "top_k": 5}),
        ("--top_p 0.5 --top_k 3", {}),
        ("--no-ignore_eos --max_new_tokens 7 --seed 3", {"ignore_eos": False, "max_new_tokens": 7, "seed": 3}),
        ("--num_beams 4", {"num_beams": 4}),
        ("--use_chat_template --use_flash_attention --warmup 1 --n_iterations 2 --bucket_size 128", {}),
    ],
)
def test_run_generation_py_chooses_tokens_as_the_script_does(
    trl: Path, flags: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    configured = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "do_sample": True}
    (trl / "stack-llama-2" / "generation_config.json").write_text(json.dumps(configured))
    command, notes = generated(trl, f'{GENERATE} "a b" "c" {flags}', capsys)
    expected = {"max_new_tokens": 100, "ignore_eos": True, "seed": 27, "repetition_penalty": 1.1} | options
    assert command.generation == GenerationOptions(**expected)
    assert (command.prompts.prompt, command.prompts.batch_size) == (("a b", "c"), 1)
    assert command.prompts.as_chat == ("--use_chat_template" in flags)
    assert "all 2 prompts are continued" in notes
    assert ("has no effect without --do_sample" in notes) == (
        "--do_sample" not in flags and ("temperature" in flags or "top_p" in flags)
    )


def test_run_generation_py_has_the_scripts_precision(trl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for before, flags, precision in (
        ("", "", "fp32"),
        ("", "--bf16", "bf16"),
        ("--world_size 2 --use_deepspeed ", "", "bf16"),
    ):
        command, _ = generated(trl, f"{before}{GENERATE} a {flags}", capsys)
        assert command.load.precision == precision, before + flags
    command, _ = generated(trl, f"{GENERATE} a --quantize_with_bnb -- --max-new-tokens 3", capsys)
    assert (command.load.quantize_base, command.generation.max_new_tokens) == ("nf4", 3)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("a --repetition_penalty 2", "unknown flag --repetition_penalty of run_generation.py"),
        ("a --fp8", "unknown flag --fp8 of run_generation.py"),
        ("a --do_sample --temperature 0", "--temperature=0 must be above 0 with --do_sample"),
        ("a --parallel_strategy ep", "--parallel_strategy=ep is not supported: ranks share each layer"),
        ("a --bad_words x y", "--bad_words=x y is not supported: tokens cannot be forbidden"),
        ("a --output_dir out", "use -- --output FILE.jsonl at the end of the command"),
        ("a --save_quantized_model_with_inc", "weights that other tools have quantised are not read"),
    ],
)
def test_what_run_generation_py_cannot_do_here_is_named(
    trl: Path, flags: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gaudi_spawn.main(shlex.split(f"{GENERATE} {flags}")) == 2
    assert expected in capsys.readouterr().err


def test_run_generation_py_needs_a_prompt_and_no_quantisation_by_a_variable(
    trl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUANT_CONFIG", "maxabs.json")
    assert gaudi_spawn.main("run_generation.py --model_name_or_path stack-llama-2".split()) == 2
    said = capsys.readouterr().err
    assert "--prompt is not given" in said
    assert "QUANT_CONFIG=maxabs.json is not supported" in said
