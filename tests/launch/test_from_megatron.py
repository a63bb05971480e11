"""Commands of Megatron's pretrain_gpt.py in our words: every flag has one outcome, and the result is a config."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from megatron.cli.foreign import from_megatron
from megatron.cli.launch import parse_command_line
from megatron.launch.dialects.megatron_flags import TRANSLATED, rows
from megatron.launch.dialects.megatron_requests import TranslatedCommand, grouped, translate
from megatron.launch.dialects.megatron_starters import Started, StartError, read_started
from megatron.options.config import Config
from megatron.options.dialect import Entry
from megatron.options.stored import from_dict
from megatron.settings.command_line import read_command_line
from megatron.settings.parser import megatron_answers

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
STEP = "--micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 10"
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"

# run_bloom13b.sh of HabanaAI/Model-References 1.10.0: the flags of pretrain_gpt.py and their values, for 32 HPUs
BLOOM13B = """--deepspeed --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 40
--hidden-size 5120
--ffn-hidden-size 20480 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
--global-batch-size 1024 --train-samples 300_000_000 --log-interval 10 --eval-iters 5 --eval-interval 100
--data-path data/meg-gpt2_text_document --data-impl mmap --split 949,50,1 --vocab-file data/gpt2-vocab.json
--merge-file data/gpt2-merges.txt --optimizer adamw --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8 --lr 1e-4
--min-lr 1e-5 --lr-decay-style cosine --lr-decay-samples 126_953_125 --lr-warmup-samples 216_320 --clip-grad 1.0
--weight-decay 0.1 --tensorboard-dir out/tensorboard --log-validation-ppl-to-tensorboard --log-batch-size-to-tensorboard
--log-timers-to-tensorboard --load out/checkpoints --deepspeed_config=out/ds_config.json --zero-stage=0 --seed 42
--exit-interval 0 --no-masked-softmax-fusion --bf16 --use_hpu --distributed-backend=hccl
--rampup-batch-size 16 16 5_000_000 --save out/checkpoints --save-interval 2000"""
DS_CONFIG = """{"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10,
"gradient_clipping": 1.0, "zero_optimization": {"stage": 0}, "bf16": {"enabled": true}, "fp16": {"enabled": false},
"wall_clock_breakdown": false}"""
# Llama 2 7B by pretrain_llama.sh of HabanaAI/Megatron-LM 1.24.0, and by Megatron-LM's own example of Llama 3
LLAMA2_7B = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 1024 --train-iters 500000
--position-embedding-type rope --rotary-base 10000 --no-rope-fusion --normalization RMSNorm --swiglu
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --lr 3e-4 --min-lr 3e-5
--lr-decay-style cosine --lr-warmup-iters 2000 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1
--clip-grad 1.0 --bf16 --use-mcore-models --transformer-impl local --use-distributed-optimizer
--distributed-backend nccl --make-vocab-size-divisible-by 128 --vocab-size 32000 --num-workers 2"""


def started(words: str, files: dict[str, str] | None = None) -> Started:
    return Started("pretrain_gpt.py", shlex.split(words), files=files or {})


def config_of(result: TranslatedCommand) -> Config:
    assert [row for row in result.rows if row.outcome == "refused"] == []
    assert result.command is not None
    return result.command.config


def refusals(words: str) -> dict[str, str]:
    return {row.given: row.text for row in translate(started(words)).refused}


def test_every_flag_of_the_page_is_translated_left_out_or_refused() -> None:
    outcome_of = {row.name: row.outcome for row in rows()}
    for answer in megatron_answers():
        if answer.is_refused:
            assert outcome_of[answer.name] == "refused", answer.name
        elif answer.ours and not answer.name.endswith("*"):
            assert outcome_of[answer.name] == "sets", f"{answer.name} has no conversion"
    names = [row.name for row in rows()]
    assert len(names) == len(set(names))
    assert {row.name for row in TRANSLATED} <= set(names)


def test_a_conversion_sets_what_the_page_names() -> None:
    """The two are written by hand, so they are compared."""
    ours = {answer.name: set(re.findall(r"--[\w-]+", answer.ours)) for answer in megatron_answers() if answer.ours}
    differing = {}
    for row in TRANSLATED:
        named = {target for target in row.targets if target.startswith("--")}
        # a target without dashes is joined with others
        if row.name in ours and len(named) == len(row.targets) and not named & ours[row.name]:
            differing[row.name] = (named, ours[row.name])
    assert differing == {}


def test_the_published_command_of_bloom_is_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = translate(started(BLOOM13B, {"out/ds_config.json": DS_CONFIG}))
    found = config_of(result)
    preset = read_command_line(["--config", "bloom_13b"]).config
    assert dataclasses.replace(found.model, max_position_embeddings=None) == preset.model
    assert found.optimizer == preset.optimizer
    assert found.training.rampup_batch_size == (16, 16, 5_000_000)
    assert dataclasses.replace(found.training, rampup_batch_size=None) == preset.training
    assert (found.data.split, found.data.eval_iters, found.data.eval_interval) == ("949,50,1", 5, 100)
    assert (found.checkpoint.save_interval, found.logging.log_interval) == (2000, 10)
    assert (result.device, found.parallel.tensor_model_parallel_size) == ("hpu", 4)
    idle = {row.given: row.text for row in result.idle}
    assert idle["--deepspeed"] == "always"
    assert {"--data-impl mmap", "--no-masked-softmax-fusion", "--log-timers-to-tensorboard"} <= idle.keys()


def test_the_published_command_of_llama_is_the_preset() -> None:
    found = config_of(translate(started(LLAMA2_7B)))
    preset = read_command_line(["--config", "llama2_7b"]).config
    assert dataclasses.replace(found.model, num_query_groups=preset.model.num_query_groups) == preset.model
    assert dataclasses.replace(found.optimizer, zero_stage=0, adam_beta2=0.95) == dataclasses.replace(
        preset.optimizer, zero_stage=0
    )
    assert found.optimizer.zero_stage == 1
    assert (found.training.global_batch_size, found.training.seq_length) == (1024, 4096)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"architecture": "bloom", "lr_decay_style": "linear", "eval_iters": 100, "global_batch_size": 8}),
        ("--position-embedding-type rope", {"architecture": "starcoder2", "max_position_embeddings": None}),
        (LLAMA, {"architecture": "llama", "ffn_hidden_size": 128, "num_query_groups": None}),
        (f"{LLAMA} --group-query-attention --num-query-groups 2", {"num_query_groups": 2}),
        # Megatron reads the number with the switch alone, whose own default is 1
        (f"{LLAMA} --num-query-groups 2", {"num_query_groups": None}),
        (f"{LLAMA} --group-query-attention", {"num_query_groups": 1}),
        (f"{LLAMA} --add-qkv-bias", {"architecture": "qwen2"}),
        (f"{LLAMA} --qk-layernorm", {"architecture": "qwen3"}),
        (f"{LLAMA} --window-size 31,0", {"architecture": "mistral", "attention_window": 32}),
        (f"{LLAMA} --use-rope-scaling", {"rope_scaling_factor": 8.0, "rope_scaling_type": "llama3"}),
        (f"{LLAMA} --rope-scaling-factor 4", {"rope_scaling_factor": None}),
        (
            f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-layer-freq ([1]*3+[0])",
            {"architecture": "mixtral", "num_experts": 8, "moe_layer_freq": (1, 1, 1, 0)},
        ),
        (f"{LLAMA} --num-experts 8 --moe-layer-freq 2", {"moe_layer_freq": (1, 0)}),
        ("--deepspeed --num-experts 1", {"num_experts": None}),
        (f"--deepspeed {LLAMA} --num-experts 4", {"moe_router_topk": 1, "moe_aux_loss_coeff": 0.1}),
        ("--tokenizer-type NullTokenizer --vocab-size 100", {"vocab_size": 101, "eod_token_id": 100}),
        ("--vocab-size 1000 --vocab-extra-ids 24", {"vocab_size": 1024}),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            {"num_virtual_stages_per_pipeline_rank": 2},
        ),
        (
            "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2",
            {"pipeline_partition_method": "2,1,1"},
        ),
        ("--train-tokens 6400", {"train_samples": 100}),
        (
            "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16",
            {"fp8_format": "e4m3", "fp8_recipe": "tensorwise", "fp8_first_last_layers_bf16": 1},
        ),
        (
            "--checkpoint-activations --checkpoint-activations-granularity selective",
            {"recompute_granularity": "selective"},
        ),
        ("--checkpoint-activations --deepspeed-activation-checkpointing", {"recompute_granularity": "full"}),
        ("--fp16", {"fp16": True, "initial_loss_scale": 2.0**32}),
        ("--profile pt-full --profile-steps 3,4", {"profile_step_end": 5, "pytorch_profiler_collect_shapes": True}),
        ("--ds-sequence-parallel-size 2", {"context_parallel_size": 2, "context_parallel_exchange": "all-to-all"}),
        ("--data-path 0.3 a 0.7 b --split 90, 8, 2", {"data_path": ("0.3", "a", "0.7", "b"), "split": "90,8,2"}),
        ("--adam_beta2=0.5 --hidden_dropout 0.2", {"adam_beta2": 0.5, "hidden_dropout": 0.2}),
        ("--use-fused-sdpa false --use-fused-sdpa-with-recompute 0", {"attention_backend": "sdpa"}),
        (
            "--optimizer muon --muon-tp-mode blockwise",
            {"optimizer": "muon", "muon_momentum": 0.9, "muon_nesterov": False, "muon_coefficient_type": "quintic"},
        ),
        ("--optimizer muon --muon-use-nesterov --muon-momentum 0.95", {"muon_nesterov": True, "muon_momentum": 0.95}),
        (
            "--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode duplicated",
            {"tensor_model_parallel_size": 2, "muon_lr": None},
        ),
        ("--tensor-model-parallel-size 2 --muon-tp-mode blockwise", {"optimizer": "adamw"}),
        # the last one counts, as with argparse
        ("--seed 1 --seed 2", {"seed": 2}),
    ],
)
def test_flags_together(words: str, expected: dict[str, Any]) -> None:
    step = STEP.replace("--train-iters 10", "") if "--train-tokens" in words else STEP
    found = {name: value for section in config_sections(config_of(translate(started(f"{MODEL} {step} {words}")))) for
             name, value in section.items()}  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_what_muon_does_otherwise_is_noted() -> None:
    result = translate(started(f"{MODEL} {STEP} --optimizer muon"))
    assert "# note: Muon takes the gate and the up projection apart here" in from_megatron.shown(result, [], None)
    assert translate(started(f"{MODEL} {STEP}")).notes == []


def config_sections(config: Config) -> list[dict[str, Any]]:
    return [vars(getattr(config, field.name)) for field in dataclasses.fields(config)]


@pytest.mark.parametrize("mode", ["disabled", "validate_results"])
def test_reruns_of_what_looks_wrong_request_nothing(mode: str) -> None:
    """The second is Megatron's default: a script that says so runs as one that does not, without rechecks."""
    result = translate(started(f"{MODEL} {STEP} --rerun-mode {mode}"))
    assert result.refused == []
    assert result.flags == translate(started(f"{MODEL} {STEP}")).flags
    assert "--rerun-mode" in [row.given.split()[0] for row in result.idle]


@pytest.mark.parametrize(
    ("words", "given", "reason"),
    [
        ("--swiglu", "--swiglu", "--normalization RMSNorm and --disable-bias-linear is not given"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1", "there is none"),
        ("--no-position-embedding", "--no-position-embedding", "give the encoding"),
        ("--dataloader-type cyclic", "--dataloader-type cyclic", "like single"),
        ("--rerun-mode report_stats", "--rerun-mode report_stats", "--recheck-interval N compares ranks"),
        ("--error-injection-rate 1000", "--error-injection-rate 1000", "there is none"),
        ("--moe-token-drop-policy position", "--moe-token-drop-policy position", "probs"),
        ("--learning-rate 1", "--learning-rate 1", "no flag of Megatron's"),
        ("--num-layer 3", "--num-layer 3", "did you mean --num-layers?"),
        ("--optimizer lion", "--optimizer lion", "adamw"),
        (
            "--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode blockwise",
            "--muon-tp-mode blockwise",
            "give duplicated or distributed",
        ),
        ("--optimizer dist_muon --tensor-model-parallel-size 2", "--muon-tp-mode", "its default is blockwise"),
        ("--muon-no-split-qkv", "--muon-no-split-qkv", "apart"),
        ("--seed", "--seed", "needs a value"),
        ("--seed 1 2", "--seed 1 2", "takes one value"),
        ("--window-size 5,5", "--window-size 5,5", "sees none behind it"),
        ("--num-experts 4", "--num-experts 4", "only blocks with"),
        (
            "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2",
            "--num-layers-at-start-in-bf16",
            "at either end, not 2 and 1",
        ),
        ("--fp8-recipe mxfp8", "--fp8-recipe mxfp8", "rowwise"),
        (
            "--pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 1",
            "--num-layers-per-virtual-pipeline-stage 1",
            "do not divide 4 layers",
        ),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model gone", "--tokenizer-type", "gone"),
        ("--deepspeed_config gone.json", "--deepspeed_config gone.json", "cannot be read"),
        ("--moe-layer-freq __import__('os').getpid()", "--moe-layer-freq", "must be a number, or a list of 0 and 1"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(words: str, given: str, reason: str) -> None:
    (found,) = [text for name, text in refusals(f"{MODEL} {STEP} {words}").items() if name.startswith(given)]
    assert reason in found


def test_a_deepspeed_file_that_contradicts_the_flags_is_refused(tmp_path: Path) -> None:
    file = {"ds.json": '{"train_batch_size": 16, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "a": 1}}'}
    result = translate(started(f"{MODEL} {STEP} --deepspeed --deepspeed_config ds.json", file))
    assert {row.given for row in result.refused} == {"ds.json: train_batch_size", "ds.json: zero_optimization.a"}
    assert "--zero-stage 2" in " ".join(result.flags)
    # a file that is there stays with what only it says
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}')
    result = translate(started(f"{MODEL} {STEP} --deepspeed_config {path}"))
    assert config_of(result).training.deepspeed_config == str(path)


def test_what_megatron_requires_is_required() -> None:
    assert set(refusals("--num-layers 2")) == {
        *("--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size", "--lr"),
    }


# a value that each row's conversion takes, where it is not one of the types below
VALUES = {
    "--window-size": "31,0",
    "--normalization": "LayerNorm",
    "--hidden-dropout": "0.3",
    "--seed": "7",
    "--clip-grad": "0.5",
    "--lr-decay-style": "cosine",
    "--optimizer": "sgd",
    "--data-path": "0.3 a 0.7 b",
    "--rampup-batch-size": "2 2 1_000",
    "--num-workers": "0",
    "--save": "out/x",
    "--cp-comm-type": "a2a",
    "--distributed-backend": "gloo",
    "--train-samples": "1_000",
    "--fp8-coverage": "mlp_row_parallel=True attention=False",
    "--profile-steps": "2,3",
    "--moe-layer-freq": "([1]*3+[0])",
    "--recompute-modules": "core_attn mlp",
    "--position-embedding-type": "learned_absolute",
    "--pp-partition-method": "type:transformer|embedding",
    "--split": "90,8,2",
}
WORDS = st.sampled_from(["1", "2", "0", "1e-3", "0.5", "true", "false", "auto", "cosine", "rope", "fp32", "a b", "x/y"])


@st.composite
def commands(draw: st.DrawFn) -> list[list[str]]:
    """Draw flags of the table, in any order; their values may be wrong in half of the draws."""
    is_right = draw(st.booleans())
    of_table = [row for row in rows() if not is_right or _stands_alone(row)]
    words = []
    for row in draw(st.lists(st.sampled_from(of_table), max_size=12, unique_by=lambda row: row.name)):
        name = row.name.replace("*", "any")
        spelled = draw(st.sampled_from([name, "--" + name[2:].replace("-", "_")]))
        value = draw(WORDS) if not is_right else VALUES.get(row.name, "")
        words.append([spelled] if row.takes == "switch" or not value else [spelled, *value.split()])
    return words


def _stands_alone(row: Entry) -> bool:
    """A row whose flag can be drawn with the others, without being refused."""
    if row.name in VALUES or row.outcome == "no effect":
        return True
    # what a block has together, and what excludes others
    return row.takes == "switch" and row.outcome == "sets" and row.name not in JOINED


JOINED = ("--swiglu", "--disable-bias-linear", "--add-qkv-bias", "--qk-layernorm", "--no-position-embedding")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=commands())
@example(drawn=[["--num-query-groups", "a", "b"]])
@example(drawn=[["--train-tokens", "a", "b"]])
def test_every_flag_has_one_outcome_and_the_result_reads_back(tmp_path_factory: Any, drawn: list[list[str]]) -> None:
    words = [*shlex.split(f"{MODEL} {STEP}"), *(word for flag in drawn for word in flag)]
    result = translate(Started("pretrain_gpt.py", words))
    named = [row.given for row in result.rows]
    for flag in drawn:
        # what its value says, or what it is joined with, may add a row
        assert " ".join(flag) in named or any(flag[0] in each for each in named), flag
    for row in result.rows:
        assert row.text, row
    event("refused" if result.refused else "translated")
    if result.refused:
        return
    config = config_of(result)
    assert from_dict(result.preset()) == config
    # as the printed command says, by the launcher's own parser
    printed = shlex.split(from_megatron.command_text(result, result.flags).replace("\\\n", " "))
    request, _ = parse_command_line(printed[2:])
    assert request.faults == []
    assert read_command_line(request.train_flags).config == config


def test_a_translation_is_written_as_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "preset.yaml"
    words = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} {STEP} --bf16 --use-flash-attn"
    assert from_megatron.main(["--output", str(file), *shlex.split(words)]) == 0
    shown = capsys.readouterr().out
    assert f"--config {file}" in shown
    assert "--devices-per-node 8" in shown
    tree = yaml.safe_load(file.read_text())
    assert tree["training"]["bf16"] is True
    direct = config_of(translate(started(f"{MODEL} {STEP} --bf16 --use-flash-attn")))
    assert read_command_line(["--config", str(file)]).config == direct


def test_a_refused_flag_ends_with_2_and_nothing_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    words = f"--run --output {file} pretrain_gpt.py {MODEL} {STEP} --eval-only"
    assert from_megatron.main(shlex.split(words)) == 2
    assert "--eval-only: --skip-train" in capsys.readouterr().out
    assert not file.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("deepspeed --num_nodes 4 --num_gpus 8 --hostfile=hosts pretrain_gpt.py", {"nodes": 4, "hostsfile": "hosts"}),
        (
            "torchrun --nnodes=2 --nproc-per-node=8 --rdzv_endpoint=h:29400 pretrain_gpt.py",
            {"nodes": 2, "devices_per_node": 8, "rendezvous": "h:29400"},
        ),
        (
            "python -u -m torch.distributed.run --standalone --nproc_per_node 2 x/pretrain_gpt.py",
            {"devices_per_node": 2},
        ),
        (
            "OMP_NUM_THREADS=1 python3 ./pretrain_gpt.py",
            {"devices_per_node": None, "environment": {"OMP_NUM_THREADS": "1"}},
        ),
        ("mpirun -n 8 --allow-run-as-root python pretrain_gpt.py", {"devices_per_node": 8}),
        ("srun -N 2 --ntasks-per-node=8 -l bash -c 'python pretrain_gpt.py'", {"nodes": 2, "devices_per_node": 8}),
    ],
)
def test_what_starts_the_ranks_is_read(words: str, expected: dict[str, Any]) -> None:
    found = read_started(shlex.split(f"{words}"), {})
    assert found.faults == []
    request = TranslatedCommand(started=found).request([])
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("python train.py --lr 1", "starts none of pretrain_gpt.py"),
        ("python pretrain_bert.py --lr 1", "does not train a decoder of text"),
    ],
)
def test_another_command_is_refused(words: str, rule: str) -> None:
    with pytest.raises(StartError, match=rule):
        read_started(shlex.split(words), {})


def test_words_behind_a_flag_are_its_values() -> None:
    words = "--a 1 -2 --b=x y --c --d_e=".split()
    assert list(grouped(words)) == [("--a", ["1", "-2"]), ("--b", ["x", "y"]), ("--c", "true"), ("--d_e", "")]
