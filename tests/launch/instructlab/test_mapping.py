"""What each of InstructLab's arguments becomes, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.api import QuantizeDataType, TorchrunArgs, TrainingArgs
from megatron.data.splits import rows_of_split
from megatron.launch.instructlab.arguments import DeepSpeedOptions
from megatron.launch.instructlab.mapping import RunInputs, build_config, refusals, remarks
from megatron.options.config import Config
from tests.finetuning_files import REQUIRED

INPUTS = RunInputs(
    device="cuda",
    num_ranks=8,
    num_nodes=1,
    model={"architecture": "llama", "position_embedding_type": "rope", "vocab_size": 300},
    model_folder="model",
    data_path=("data/data",),
    num_samples=1000,
    tokenizer=None,
)


def arguments(**changed: Any) -> TrainingArgs:
    return TrainingArgs(**(REQUIRED | changed))


def config_of(inputs: RunInputs = INPUTS, **changed: Any) -> Config:
    return build_config(arguments(**changed), inputs)


def faults_of(torch_args: TorchrunArgs | None = None, **changed: Any) -> str:
    return "\n".join(refusals(torch_args or TorchrunArgs(), arguments(**changed)))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {"task": "sft", "packing": "step", "optimizer": "adamw", "clip_grad": 1.0, "bf16": True, "min_lr": 0.0}),
        ({}, {"lr_decay_style": "cosine", "results_dir": "out", "tensorboard_dir": "out", "log_interval": 1}),
        ({}, {"load": "model", "tokenizer_model": "model", "data_path": ("data/data",), "split": "1,0,0"}),
        ({}, {"save": "out/full_state", "save_interval": 1_000_000_000, "save_at_epoch": True, "keep_last": 1}),
        ({}, {"no_save_optim": False}),
        ({}, {"save_hf": "out/hf_format", "save_samples": None, "save_hf_last_only": False, "eval_iters": 0}),
        ({"max_seq_len": 200}, {"seq_length": 200}),
        ({"max_batch_len": 999}, {"max_batch_len": 999}),
        ({"effective_batch_size": 64}, {"global_batch_size": 64}),
        ({"num_epochs": 7}, {"num_epochs": 7, "train_samples": None, "train_iters": None}),
        ({"learning_rate": 3e-6}, {"lr": 3e-6}),
        ({"warmup_steps": 25}, {"lr_warmup_iters": 25, "lr_decay_style": "cosine"}),
        # 63 steps: the cosine would have nothing left to decay
        ({"warmup_steps": 63}, {"lr_warmup_iters": 63, "lr_decay_style": "constant"}),
        ({"adamw_weight_decay": 0.1}, {"weight_decay": 0.1}),
        ({"adamw_betas": (0.8, 0.99)}, {"adam_beta1": 0.8, "adam_beta2": 0.99}),
        ({"adamw_eps": 1e-6}, {"adam_eps": 1e-6}),
        ({"random_seed": 7}, {"seed": 7}),
        ({"save_samples": 250_000}, {"save_samples": 250_000}),
        ({"checkpoint_at_epoch": False}, {"save": None, "save_hf": None, "save_at_epoch": False}),
        # what exports are made of resumes wholly, unless the state is not wanted
        ({"checkpoint_at_epoch": False, "save_samples": 9}, {"no_save_optim": False, "save_hf": "out/hf_format"}),
        ({"accelerate_full_state_at_epoch": False}, {"no_save_optim": True, "save": "out/full_state"}),
        ({"accelerate_full_state_at_epoch": False}, {"save_hf": "out/hf_format", "save_at_epoch": True}),
        ({"accelerate_full_state_at_epoch": False, "on_demand_checkpointing": True}, {"no_save_optim": False}),
        ({"checkpoint_at_epoch": False, "on_demand_checkpointing": True}, {"save": "out/full_state"}),
        ({"keep_last_checkpoint_only": True}, {"save_hf_last_only": True}),
        # 100 samples are more than 6 steps of 16, and no save is to come late
        ({"deepspeed_options": {"save_samples": 100}}, {"save": "out/full_state", "save_interval": 6}),
        ({"deepspeed_options": {"save_samples": 3}}, {"save_interval": 1}),
        ({}, {"zero_stage": 3, "num_replicas": 1, "offload_optimizer": False, "offload_param": False}),
        ({"fsdp_options": {"sharding_strategy": "FULL_SHARD"}}, {"zero_stage": 3}),
        ({"fsdp_options": {"sharding_strategy": "SHARD_GRAD_OP"}}, {"zero_stage": 2}),
        ({"fsdp_options": {"sharding_strategy": "NO_SHARD"}}, {"zero_stage": 0}),
        ({"fsdp_options": {"cpu_offload_params": True}}, {"offload_optimizer": True, "offload_param": True}),
        (
            {"fsdp_options": {"cpu_offload_params": True, "sharding_strategy": "SHARD_GRAD_OP"}},
            {"zero_stage": 2, "offload_optimizer": True, "offload_param": False},
        ),
        (
            {"fsdp_options": {"cpu_offload_params": True, "sharding_strategy": "NO_SHARD"}},
            {"zero_stage": 1, "offload_optimizer": True},
        ),
        ({"distributed_backend": "deepspeed"}, {"zero_stage": 2, "offload_optimizer": False}),
        (
            {"distributed_backend": "deepspeed", "deepspeed_options": {"cpu_offload_optimizer": True}},
            {"zero_stage": 2, "offload_optimizer": True, "offload_param": False},
        ),
        ({"disable_flash_attn": True}, {"attention_backend": "sdpa"}),
        ({"validation_split": 0.1, "validation_frequency": 5}, {"split": "0.9,0.1,0", "eval_interval": 5}),
        # 100 held-out samples, all of them
        ({"validation_split": 0.1, "validation_frequency": 5}, {"eval_iters": 7}),
        ({"tensorboard_log_dir": "tb"}, {"tensorboard_dir": "tb", "results_dir": "out"}),
        ({"wandb_project": "p", "wandb_entity": "e"}, {"wandb_project": "p", "wandb_entity": "e"}),
        ({"wandb_project": "p", "wandb_run_name": "a{rank}{local_rank}"}, {"wandb_exp_name": "a00"}),
        (
            {"mlflow_tracking_uri": "http://h", "mlflow_experiment_name": "e", "mlflow_run_name": "a{rank}"},
            {"mlflow_tracking_uri": "http://h", "mlflow_experiment": "e", "mlflow_run_name": "a0"},
        ),
        ({"mlflow_run_name": "x"}, {"mlflow_experiment": "Default", "mlflow_tracking_uri": None}),
        ({}, {"mlflow_experiment": None, "mlflow_tracking_uri": None}),
        # their defaults; None: every `_proj` of a Llama, and merged models as exports
        ({"lora": {}}, {"lora_rank": 4, "lora_alpha": 32.0, "lora_dropout": 0.1, "save_hf_merged": True}),
        ({"lora": {}}, {"lora_target_modules": ("all-linear",), "quantize_base": "none"}),
        ({"lora": {"target_modules": ["q_proj"]}}, {"lora_target_modules": ("q_proj",)}),
        ({"lora": {"quantize_data_type": "nf4"}}, {"quantize_base": "nf4", "lora_rank": 4}),
        ({"lora": {"quantize_data_type": QuantizeDataType.NF4}}, {"quantize_base": "nf4"}),
        ({"lora": {"rank": 0}}, {"lora_rank": None, "save_hf_merged": False}),
        ({"pretraining_config": {"block_size": 64}}, {"seq_length": 64}),
        ({"engine_options": {"tensor_model_parallel_size": 2}}, {"tensor_model_parallel_size": 2}),
        ({"engine_options": {"zero_stage": 1, "lr_decay_style": "linear"}}, {"zero_stage": 1}),
    ],
)
def test_an_argument_becomes_options_of_ours(changed: dict[str, Any], expected: dict[str, Any]) -> None:
    options = {name: value for section in config_of(**changed).to_dict().values() for name, value in section.items()}
    found = {name: tuple(value) if isinstance(value := options[name], list) else value for name in expected}
    assert found == expected


def test_one_rank_shares_with_nobody_and_the_cpu_trains_in_float32() -> None:
    alone = dataclasses.replace(INPUTS, num_ranks=1, device="cpu")
    config = config_of(alone)
    assert (config.optimizer.zero_stage, config.training.bf16, config.parallel.device) == (0, False, "cpu")
    assert config_of(alone, fsdp_options={"cpu_offload_params": True}).optimizer.zero_stage == 3
    said = "\n".join(remarks(arguments(), alone, config))
    assert "fsdp with HYBRID_SHARD is DeepSpeed's ZeRO stage 0 over 1 ranks in fp32" in said
    assert "on the CPU the training is in float32" in said


def test_hybrid_shard_shards_within_a_node_and_replicates_over_nodes() -> None:
    nodes = dataclasses.replace(INPUTS, num_ranks=16, num_nodes=2)
    config = config_of(nodes)
    assert (config.optimizer.zero_stage, config.parallel.num_replicas) == (3, 2)
    said = next(remarks(arguments(), nodes, config))
    assert said.endswith(
        "fsdp with HYBRID_SHARD is DeepSpeed's ZeRO stage 3 within each of 2 replicas of 8 ranks in bf16"
    )
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        assert config_of(nodes, fsdp_options={"sharding_strategy": strategy}).parallel.num_replicas == 1
    assert config_of(nodes, distributed_backend="deepspeed").parallel.num_replicas == 1
    # a stage of this pipeline lies on one node; and what is named as ours wins
    pipeline = {"pipeline_model_parallel_size": 2, "zero_stage": 1}
    assert config_of(nodes, engine_options=pipeline).parallel.num_replicas == 1
    assert config_of(nodes, engine_options={"num_replicas": 4}).parallel.num_replicas == 4


def test_a_user_of_instructlabs_library_learns_what_its_options_become() -> None:
    unused = DeepSpeedOptions(cpu_offload_optimizer_pin_memory=True, cpu_offload_optimizer_ratio=0.5)
    args = arguments(use_liger=True, use_dolomite=True, is_padding_free=True, deepspeed_options=unused)
    said = list(remarks(args, INPUTS, build_config(args, INPUTS)))
    assert said[0] == "distributed_backend fsdp with HYBRID_SHARD is DeepSpeed's ZeRO stage 3 over 8 ranks in bf16"
    of_offload = ("cpu_offload_optimizer_pin_memory", "cpu_offload_optimizer_ratio")
    for name in ("use_liger", "use_dolomite", "is_padding_free", *of_offload):
        assert any(line.startswith(f"{name} changes nothing") for line in said)
    saves_nothing = arguments(checkpoint_at_epoch=False)
    assert "nothing will be saved" in "".join(remarks(saves_nothing, INPUTS, build_config(saves_nothing, INPUTS)))
    lora = {"target_modules": ["q_proj", "v_proj"], "quantize_data_type": "nf4"}
    for given, expected in (
        (lora, "adapters of rank 4 on q_proj v_proj, over a base in 4 bits; exports are whole models"),
        (lora | {"rank": 0}, "lora.quantize_data_type changes nothing: lora.rank is 0"),
    ):
        adapted = arguments(lora=given)
        assert expected in "".join(remarks(adapted, INPUTS, build_config(adapted, INPUTS)))
    weights = arguments(accelerate_full_state_at_epoch=False)
    assert "starts with a new optimizer" in "".join(remarks(weights, INPUTS, build_config(weights, INPUTS)))


# a value that is not the default, for arguments that neither `build_config` nor `refusals` need look at
READ_BY_OTHERS = {
    "data_path": "x",
    "process_data": False,
    "mock_data": True,
    "use_legacy_tmpl": True,
    "chat_tmpl_path": "x",
    "data_process_num_cpu_procs": 2,
    "log_level": "DEBUG",
    "data_output_dir": "x",
    "model_path": "x",
    "callbacks": [3],
}
CHANGED: dict[str, Any] = {
    "ckpt_output_dir": "x",
    "max_seq_len": 100,
    "max_batch_len": 999,
    "effective_batch_size": 32,
    "learning_rate": 1.0,
    "num_epochs": 2,
    "save_samples": 5,
    "warmup_steps": 3,
    "random_seed": 1,
    "adamw_weight_decay": 0.5,
    "adamw_betas": (0.1, 0.2),
    "adamw_eps": 0.1,
    "mock_data_len": 500,
    "pretraining_config": {"block_size": 64},
    "validation_split": 0.5,
    "validation_frequency": 3,
    "distributed_backend": "deepspeed",
    "deepspeed_options": {"save_samples": 5},
    "lora": {},
    "use_liger": True,
    "fsdp_options": {"sharding_strategy": "NO_SHARD"},
    "disable_flash_attn": True,
    "use_dolomite": True,
    "is_padding_free": True,
    "trust_remote_code": True,
    "checkpoint_at_epoch": False,
    "wandb_project": "x",
    "accelerate_full_state_at_epoch": False,
    "keep_last_checkpoint_only": True,
    "tensorboard_log_dir": "x",
    "wandb_entity": "x",
    "wandb_run_name": "x",
    "mlflow_tracking_uri": "x",
    "mlflow_experiment_name": "x",
    "mlflow_run_name": "x",
    "engine_options": {"log_interval": 7},
    "on_demand_checkpointing": True,
}


def outcome(**changed: Any) -> tuple[Any, ...]:
    # without the full state, or on_demand_checkpointing has nothing to add
    args = arguments(**({"accelerate_full_state_at_epoch": False} | changed))
    config = build_config(args, INPUTS)
    return list(refusals(TorchrunArgs(), args)), list(remarks(args, INPUTS, config)), config


@pytest.mark.parametrize("name", CHANGED)
def test_no_argument_goes_unread(name: str) -> None:
    before = outcome() if name != "accelerate_full_state_at_epoch" else outcome(accelerate_full_state_at_epoch=True)
    assert outcome(**{name: CHANGED[name]}) != before


def test_every_argument_is_among_those_that_are_read() -> None:
    assert set(TrainingArgs.model_fields) == set(CHANGED) | set(READ_BY_OTHERS)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_batch_len": 100}, "max_batch_len=100 is below max_seq_len=128"),
        ({"pretraining_config": {"block_size": 600}}, "max_batch_len=512 is below pretraining_config.block_size=600"),
        ({"trust_remote_code": True}, "trust_remote_code=True: code that comes with a model is never run"),
        ({"wandb_run_name": "x"}, "wandb_run_name=x has no effect without wandb_project"),
        ({"validation_split": 0.1}, "validation_split=0.1 needs validation_frequency"),
        ({"validation_frequency": 3}, "validation_frequency=3 has no effect without validation_split"),
        ({"use_legacy_tmpl": True, "chat_tmpl_path": "x"}, "are both given; keep one"),
        ({"mock_data_len": 9}, "mock_data_len=9 has no effect without mock_data"),
        ({"mock_data": True, "mock_data_len": 129}, "mock_data_len=129 is above max_seq_len=128"),
        (
            {"deepspeed_options": {"cpu_offload_optimizer": True}},
            "cpu_offload_optimizer has no effect with distributed_backend=fsdp",
        ),
        (
            {"distributed_backend": "deepspeed", "fsdp_options": {"cpu_offload_params": True}},
            "cpu_offload_params has no effect with distributed_backend=deepspeed",
        ),
        (
            {
                "distributed_backend": "deepspeed",
                "deepspeed_options": DeepSpeedOptions(cpu_offload_optimizer=True, cpu_offload_optimizer_ratio=0.5),
            },
            "cpu_offload_optimizer_ratio=0.5",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(changed: dict[str, Any], said: str) -> None:
    assert said in faults_of(**changed)


@pytest.mark.parametrize("changed", [{}, {"lora": {"rank": 0}}, {"validation_split": 0.1, "validation_frequency": 3}])
def test_what_can_be_done_is_not_refused(changed: dict[str, Any]) -> None:
    assert faults_of(**changed) == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rdzv_endpoint": "a:1", "master_addr": "a"}, "mean the same; give one of them"),
        ({"master_port": 29500}, "master_port=29500 belongs to master_addr"),
        ({"nnodes": 2}, "nnodes=2 need a rendezvous; give rdzv_endpoint"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, "node_rank=2 must be below nnodes=2"),
        ({"nnodes": 2, "master_addr": "a"}, "MEGATRON_RUN_SECRET is not set; give all nodes of the run the same"),
        ({"rdzv_endpoint": "node0"}, "rdzv_endpoint=node0: it is not HOST:PORT"),
    ],
)
def test_a_meeting_that_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    assert said in faults_of(TorchrunArgs(**given))


@pytest.mark.parametrize(("num_samples", "share"), [(17, 0.1), (26, 0.1), (999, 0.25), (1000, 0.3)])
def test_all_held_out_samples_are_validated(num_samples: int, share: float) -> None:
    inputs = dataclasses.replace(INPUTS, num_ranks=1, num_samples=num_samples)
    config = config_of(inputs, validation_split=share, validation_frequency=5, effective_batch_size=1)
    assert config.data.eval_iters == len(rows_of_split(num_samples, config, 1))
