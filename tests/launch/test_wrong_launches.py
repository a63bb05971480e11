"""Wrong launches, each with two to five faults of different kinds: all of them in one message, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli import launch
from megatron.runtime.files import IMPORT_ROOT
from tests.finetuning_files import write_tokens

TINY = "HL_CONFIG=tiny_bloom HL_DEVICE=cpu HL_DP=1 HL_TP=1 HL_PP=1 "
# (launcher, variables, arguments) -> a part of each fault, in order
WRONG: list[tuple[str, str, str, list[str]]] = [
    (
        "bloom13b",
        TINY + "HL_SEQ_LEN=long HL_TP=3",
        "--data-path corpus",
        [
            "HL_SEQ_LEN='long'",
            "3 does not divide num_attention_heads=4",
            "3 neither divides num_query_groups",
            "3 does not divide ffn_hidden_size",
        ],
    ),
    (
        "bloom13b",
        TINY,
        "--data-path corpus --lora-rank 999 --lora-rank-pattern dense=x --lora-modules-to-save lm_haed "
        "--freeze layers.*",
        [
            "freeze=layers.* is given with lora_rank=999",
            "lora_rank_pattern='dense=x' is not NAME=NUMBER",
            "lora_modules_to_save=lm_haed matches no module",
        ],
    ),
    (
        "bloom13b",
        TINY + "HL_GBS=7",
        "--data-path corpus --lr fast --split x",
        ["optimizer.lr='fast'", "global_batch_size=7 is not", "split='x'"],
    ),
    (
        "bloom13b",
        TINY + "HL_GBS=many HL_MICRO_BATCH=3",
        "--data-path corpus --min-lr 9",
        ["HL_GBS='many'", "min_lr=9.0 is above"],
    ),
    (
        "bloom13b",
        TINY + "HL_DP=two HL_PP=9 HL_GSB=4",
        "--data-path nothing --pipeline-partition-method 3,1",
        [
            "HL_DP='two'",
            "unknown variable HL_GSB=4; did you mean HL_GBS",
            "pipeline_model_parallel_size=9 is larger",
            "pipeline_partition_method=3,1 has 2 numbers",
            "dataset nothing lacks",
        ],
    ),
    (
        "bloom13b",
        TINY + "HL_FP8=1 HL_FP8_FORMAT=e4m3 HL_TENSOR_LOGGER=1",
        "--data-path corpus --num-laers 3",
        [
            "HL_TENSOR_LOGGER=1 is not supported",
            "HL_FP8_FORMAT='e4m3' must be hybrid or e5m2",
            "unknown flag --num-laers",
        ],
    ),
    (
        "bloom13b",
        TINY + "HL_RESULTS_DIR=corpus.bin/out HL_SAVE=yes",
        "--data-path corpus",
        ["HL_SAVE='yes'", "results_dir=corpus.bin/out cannot be created"],
    ),
    (
        "bloom13b",
        TINY + "HL_LOAD_DIR=corpus.bin",
        "--data-path corpus.bin",
        ["load=corpus.bin is not a folder", "data_path=corpus.bin is a file"],
    ),
    (
        "bloom13b",
        TINY + "HL_USE_HPU=1 HL_CKP_ACT=7",
        "--data-path corpus",
        ["HL_CKP_ACT='7'", "HL_USE_HPU=1 contradicts HL_DEVICE=cpu"],
    ),
    (
        "bloom13b",
        TINY + "HL_NUM_NODES=2",
        "--data-path corpus --fp16",
        ["data-parallel 1 x tensor-parallel 1", "2 nodes need a hostsfile"],
    ),
    (
        "bloom13b",
        TINY + "HL_HOSTSFILE=hosts HL_NUM_NODES=2 HL_DP=2 HL_NGPU_PER_NODE=1",
        "--data-path corpus --adam-beta1 2",
        ["optimizer.adam_beta1='2'", "hosts, line 2: 'node1'", "hosts, line 3"],
    ),
    (
        "bloom13b",
        TINY + "HL_HOSTSFILE=nowhere",
        "--data-path corpus --zero-stage 5",
        ["zero_stage='5'", "1 ranks, but nodes x devices = 1 x 8", "hostsfile nowhere does not exist"],
    ),
    (
        "bloom13b",
        TINY,
        "--data-path corpus --attention-backend fused_hpu --seq-length 0",
        ["training.seq_length='0'", "attention_backend=fused_hpu runs on hpu only"],
    ),
    (
        "bloom13b",
        TINY + "HL_USE_LAZY_MODE=2 HL_PROFILE=hltv",
        "--data-path corpus",
        ["HL_PROFILE='hltv'", "HL_USE_LAZY_MODE='2'"],
    ),
    (
        "bloom13b",
        TINY + "HL_RAMPUP_BS=1 HL_GBS=8",
        "--data-path corpus --micro-batch-size x",
        ["training.micro_batch_size='x'", "rampup_batch_size=16 16 5000000 starts above"],
    ),
    (
        "bloom13b",
        TINY + "HL_TOKENIZER_TYPE=Bert HL_NUM_LAYERS=none",
        "--data-path corpus",
        ["HL_NUM_LAYERS='none'", "HL_TOKENIZER_TYPE='Bert'"],
    ),
    (
        "bloom13b",
        TINY + "HL_KILL_SWITCH=a HL_KILL_SWITCH_FILE=b HL_ZERO_STAGE=2 HL_PP=2",
        "--data-path corpus",
        ["HL_KILL_SWITCH=a and HL_KILL_SWITCH_FILE=b", "zero_stage=2 runs without a pipeline"],
    ),
    (
        "bloom13b",
        TINY + "HL_MAX_RESTARTS=2 HL_SAVE=0 HL_MIN_NODES=3",
        "--data-path corpus",
        ["max_restarts=2: a restart", "min_nodes=3 is more than the 1 nodes"],
    ),
    (
        "bloom13b",
        TINY + "HL_RENDEZVOUS=node0 HL_TRAIN_ITERS=0",
        "--data-path corpus",
        ["HL_TRAIN_ITERS='0'", "rendezvous=node0: it is not HOST:PORT", "would name the results folder"],
    ),
    (
        "bloom13b",
        TINY + "HL_RENDEZVOUS=node0 HL_DP=two HL_MAX_RESTARTS=1 HL_SAVE=0",
        "--data-path corpus",
        [
            "HL_DP='two'",
            "rendezvous=node0: it is not HOST:PORT",
            "would name the results folder",
            "max_restarts=1: a restart resumes",
        ],
    ),
    (
        "bloom13b",
        TINY + "HL_TRAIN_ITERS=5 HL_QNPU_DIR=none",
        "--data-path corpus --train-samples 90 --train-iters 5",
        [
            "warm-up of 320 samples",
            "train_samples=90 and train_iters=5 are both given",
            "HL_QNPU_DIR=none holds no file",
        ],
    ),
    (
        "bloom13b",
        "HL_CONFIG=tiny_blom HL_DEVICE=cpu HL_TP=0",
        "--data-path corpus --split x",
        ["HL_TP='0'", "config 'tiny_blom' not found; did you mean 'tiny_bloom'", "split='x'"],
    ),
    (
        "llama",
        "HL_LLAMA_VER=5 HL_DEVICE=cpu HL_DP=x",
        "--data-path corpus --lr 1 --min-lr 2",
        ["HL_LLAMA_VER=5 must be", "HL_DP='x'", "min_lr=2.0 is above lr=1.0"],
    ),
    (
        "llama",
        "HL_LLAMA_VER=13 HL_MODEL=x",
        "--data-path corpus --device cpu",
        ["HL_MODEL=x does not apply", "HL_LLAMA_VER=13 must be 1, 2, 3.1 or 3.2; for the size"],
    ),
    (
        "llama",
        "HL_LLAMA_VER=2 HL_LLAMA_MODEL_SIZE=8 HL_MOE_EP=2",
        "--data-path corpus --device cpu --seed -1",
        [
            "HL_MOE_EP=2 does not apply to this script",
            "HL_LLAMA_MODEL_SIZE=8 must be 7, 13, 34 or 70",
            "training.seed='-1'",
        ],
    ),
    ("llama", "HL_DEVICE=gpu HL_TP=8 HL_PP=x HL_DP=1", "--data-path corpus", ["HL_PP='x'", "HL_DEVICE='gpu'"]),
    (
        "llama",
        "HL_CONFIG=tiny_llama HL_DEVICE=cpu HL_USE_FUSED_SDPA=maybe",
        "--data-path corpus --position-embedding-type roap",
        ["HL_USE_FUSED_SDPA='maybe'", "position_embedding_type='roap'"],
    ),
    (
        "llama",
        "HL_CONFIG=tiny_llama HL_DEVICE=hpu HL_USE_LAZY_MODE=1 HL_USE_TORCH_COMPILE=1 "
        "HL_NGPU_PER_NODE=1 HL_DEVICES_PER_NODE=2 HL_DRY_RUN=1",
        "",
        ["HL_NGPU_PER_NODE=1 and HL_DEVICES_PER_NODE=2", "exclude each other"],
    ),
    (
        "llama",
        "HL_CONFIG=tiny_llama HL_DEVICE=hpu HL_USE_FAST_SOFTMAX=1 HL_DRY_RUN=1 HL_NGPU_PER_NODE=1",
        "--reset-attention-mask",
        ["use_fast_softmax works with the causal mask alone", "reset_attention_mask needs the end-of-document id"],
    ),
    (
        "llama",
        "HL_CONFIG=tiny_llama HL_DEVICE=cpu HL_TOKENIZER_TYPE=SentencePieceTokenizer HL_HNIC=1",
        "--data-path corpus",
        ["HL_HNIC=1 connects several nodes", "tokenizer_type=SentencePieceTokenizer needs tokenizer_model"],
    ),
    ("sft", "HL_DEVICE=cpu", "--bucketing x", ["HL_DATA is not set", "HL_MODEL is not set", "sft.bucketing='x'"]),
    (
        "sft",
        "HL_DEVICE=cpu HL_DATA=none.jsonl HL_NUM_EPOCHS=0 HL_LLAMA_VER=2",
        "--data-path corpus",
        [
            "HL_LLAMA_VER=2 does not apply",
            "data_path=corpus: the tokenized data are a dataset named data",
            "HL_DATA=none.jsonl is not a file",
            "HL_MODEL is not set",
            "HL_NUM_EPOCHS='0'",
        ],
    ),
    (
        "",
        "",
        "--device cpu -- --config tiny_bloom --data-path corpus --tensor-model-parallel-size x --split x",
        ["tensor_model_parallel_size='x'", "split='x'"],
    ),
    (
        "",
        "",
        "--device cpu --nodes 2 -- --config tiny_bloom --data-path corpus --lr 0",
        ["optimizer.lr='0'", "global_batch_size=16 is not", "2 nodes need a hostsfile"],
    ),
    (
        "",
        "",
        "--device cpu -- --config tiny_bloom --data-path 1 a 2 --log-straggler --zero-stage 3",
        ["data_path='1 a 2' must be", "log_straggler measures"],
    ),
    (
        "",
        "",
        "--device cpu -- --config wrong.yaml --data-path corpus --clip-grad x",
        ["config wrong.yaml is not valid YAML", "optimizer.clip_grad='x'"],
    ),
    (
        "",
        "",
        "--device cpu -- --config section.yaml --data-path corpus --split x",
        [
            "unknown option 'num_layer' in section 'model'; did you mean 'num_layers'",
            "unknown section 'traning'",
            "split='x'",
        ],
    ),
    (
        "",
        "",
        "--device cpu -- --config tiny_bloom --data-path corpus --task nothing --split x --save",
        ["--save needs a value", "split='x'", "task='nothing' is unknown"],
    ),
    (
        "",
        "",
        "--device cpu -- --config tiny_bloom --data-path corpus --architecture gpt5 stray --seed",
        ["'stray' does not follow a flag", "--seed needs a value", "architecture='gpt5' is unknown"],
    ),
    (
        "",
        "",
        "--device cuda --devices-per-node 4 -- --config tiny_bloom --data-path corpus --tensor-model-parallel-size 3",
        [
            "3 x pipeline_model_parallel_size=1 = 3 does not divide the 4 ranks",
            "3 does not divide num_attention_heads",
            "3 neither divides",
            "3 does not divide ffn_hidden_size",
            "4 cuda devices are needed, but this machine has 0",
        ],
    ),
    (
        "",
        "",
        "--device cpu -- --config tiny_bloom --data-path corpus --save corpus.bin --keep-last 0",
        ["checkpoint.keep_last='0'", "save=corpus.bin cannot be created"],
    ),
    (
        "",
        "",
        "--device cpu -- --config tiny_bloom --data-path corpus --bf16 --fp16 --offload-optimizer "
        "--watchdog-timeout-s 0.5",
        ["bf16 and fp16 are both on", "offload_optimizer needs zero_stage", "watchdog_timeout_s=0.5 leaves"],
    ),
    (
        "",
        "",
        "--device cpu -- --config tiny_bloom --data-path corpus --deepspeed-config extra.json --split x",
        ["split='x'", "zero_optimisation"],
    ),
    (
        "",
        "",
        "--device cpu -- --config tiny_bloom --data-path corpus --fp16 --initial-loss-scale 1000 "
        "--deepspeed-config no.json",
        ["initial_loss_scale=1000.0 must be a power of two", "no.json"],
    ),
    (
        "",
        "",
        "--device gpu --devices-per-node x --env A --master-port 99999 --max-restarts -1 -- "
        "--config tiny_bloom --data-path corpus",
        [
            "--device gpu: must be auto, hpu, cuda, cpu, or your own as package.module:RECORD",
            "--devices-per-node x: input should be a valid integer",
            "--env='A' must be NAME=VALUE",
            "--master-port 99999: input should be less than or equal to 65535",
            "--max-restarts -1: input should be greater than or equal to 0",
        ],
    ),
    (
        "",
        "",
        "--hostfile hosts --nodes 0 -- --config tiny_bloom --data-path corpus --device cpu",
        ["--nodes 0: input should be greater than 0", "unknown flag --hostfile; did you mean --hostsfile"],
    ),
    (
        "",
        "",
        "--hostfile hosts --nodes 2 --foo 1 --bar 2 -- --config tiny_bloom --data-path corpus --device cpu "
        "--global-batch-size 128 --split x",
        ["unknown flag --hostfile; did you mean --hostsfile", "unknown flag --foo", "unknown flag --bar", "split='x'"],
    ),
    (
        "",
        "",
        "--nodez 2 --data-parallel-size 4 --devices-per-node 2 --env DS_ACCELERATOR=cuda -- --config tiny_bloom "
        "--data-path corpus --device cpu --global-batch-size 32",
        ["unknown flag --nodez; did you mean --nodes", "DS_ACCELERATOR=cuda: the launcher sets it"],
    ),
    (
        "bloom13b",
        TINY + "HL_HOSTFILE=hosts HL_NUM_NODES=2 HL_DP=8 HL_NGPU_PER_NODE=4 HL_GBS=64 HL_USE_TORCH_COMPILE=1 "
        "HL_TORCH_COMPILE_DISABLE=1",
        "--data-path corpus",
        ["unknown variable HL_HOSTFILE=hosts; did you mean HL_HOSTSFILE", "set --torch-compile differently"],
    ),
    (
        "",
        "",
        "--no-save-at-epoch --nodes 0 -- --config tiny_bloom",
        ["--nodes 0: input should be greater than 0", "--no-save-at-epoch is a flag of megatron.train"],
    ),
    (
        "llama",
        TINY,
        "--data-path corpus --dry-run --nodes 2 --master-port=5 --lr x",
        [
            "--dry-run is a flag of the launcher, not of megatron.train; set HL_DRY_RUN=1",
            "--nodes is a flag of the launcher, not of megatron.train; set HL_NUM_NODES",
            "--master-port is a flag of the launcher, not of megatron.train; leave it out",
            "lr='x'",
        ],
    ),
    (
        "",
        "",
        "--device cpu -- --config tiny_bloom --data-path corpus --dry-run --lr x",
        ["--dry-run is a flag of the launcher, not of megatron.train; write it before `--`", "lr='x'"],
    ),
    (
        "",
        "",
        "--nodes 0 --config tiny_bloom --lr x",
        ["--nodes 0: input should be", "--config is a flag of megatron.train"],
    ),
    (
        "",
        "",
        "--nodes 0 stray --dry-run -- --train-iters 5",
        ["--nodes 0: input should be greater than 0", "'stray' does not follow a flag"],
    ),
    (
        "",
        "",
        "--dry-run stray -- --train-iters 5 --data-path corpus --split x",
        ["--dry-run stray: input should be a valid boolean", "split='x'"],
    ),
    (
        "",
        "",
        "--variables bloom13b --nodes 3 --dry-run -- --config tiny_bloom --device cpu --data-path corpus",
        ["--dry-run has no effect beside --variables", "--nodes has no effect beside --variables"],
    ),
    (
        "bloom13b",
        TINY + "HL_TP=3 HL_BF16=2",
        "--data-path corpus --fp16 --deepspeed-config half.json",
        [
            "HL_BF16='2'",
            "half.json' is not JSON",
            "3 does not divide num_attention_heads=4",
            "3 neither divides num_query_groups",
            "3 does not divide ffn_hidden_size",
        ],
    ),
]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokens(Path("corpus"))
    Path("hosts").write_text("node0 slots=8\nnode1\nnode2 slots=none\n")
    Path("wrong.yaml").write_text("model: {num_layers: 2, num_layers: 3}\n")
    Path("section.yaml").write_text("model: {num_layer: 4}\ntraning: {seed: 1}\ntraining: {train_iters: 5}\n")
    Path("half.json").write_text('{"fp16": {"enabled": true}')
    Path("extra.json").write_text('{"zero_optimisation": {"stage": 1}}')
    for name in [name for name in os.environ if name.startswith("HL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("megatron.runtime.device_cpu.missing_products", frozenset)


def words_of(launcher: str, arguments: str) -> list[str]:
    return ["--variables", launcher, "--", *arguments.split()] if launcher else arguments.split()


def faults_in(text: str) -> list[str]:
    count, *lines = text.splitlines()
    faults = [line[4:] for line in lines if line.startswith("  - ") and not line.startswith("  - warning: ")]
    assert re.fullmatch(rf"refused, {len(faults)} faults?; nothing was started or written:", count)
    return faults


@pytest.mark.parametrize(("launcher", "variables", "arguments", "said"), WRONG, ids=range(len(WRONG)))
def test_all_faults_and_no_others_are_in_one_message(
    launcher: str,
    variables: str,
    arguments: str,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    # a machine without it would have one fault more
    (tmp_path / "pdsh").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for word in variables.split():
        monkeypatch.setenv(*word.split("=", 1))
    assert 2 <= len(said) <= 5
    before = sorted(Path().iterdir())
    assert launch.main(words_of(launcher, arguments)) == 2
    shown = capsys.readouterr()
    faults = faults_in(shown.err)
    missing = [part for part in said if not any(part in fault for fault in faults)]
    assert (missing, len(faults)) == ([], len(said)), shown.err
    assert shown.out == ""
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("number", [0, 22, 33])
def test_a_refused_process_says_the_same(number: int) -> None:
    launcher, variables, arguments, said = WRONG[number]
    environment = os.environ | {"PYTHONPATH": str(IMPORT_ROOT)} | dict(word.split("=", 1) for word in variables.split())
    command = [sys.executable, str(IMPORT_ROOT / "tools" / "launch.py"), *words_of(launcher, arguments)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert len(faults_in(ran.stderr)) == len(said)
