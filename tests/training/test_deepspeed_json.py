"""The user's DeepSpeed JSON: what DeepSpeed reads is accepted; what it ignores or the options contradict is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.options.config import ConfigError
from megatron.parallel.layout import Layout
from megatron.settings.command_line import load_config
from megatron.training.deepspeed.config import KEYS, UNUSED, check_values, deepspeed_config

Check = Callable[..., dict[str, Any]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Merge settings into a run of two data-parallel ranks, batch 8, micro-batch 2."""

    def merged(settings: dict[str, Any] | str, *flags: str) -> dict[str, Any]:
        path = tmp_path / "ds.json"
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        words = "--config tiny_bloom --data-path x --micro-batch-size 2 --global-batch-size 8 --deepspeed-config"
        return deepspeed_config(load_config([*words.split(), str(path), *flags], 2), Layout(num_batch_ranks=2))

    return merged


class Reads(dict[str, Any]):
    """A section that notes which keys are looked for in it."""

    def __init__(self, found: dict[str, set[str]], section: str, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.found, self.section = found, section
        found.setdefault(section, set())

    def note(self, key: Any) -> None:
        self.found[self.section].add(key)

    def __contains__(self, key: Any) -> bool:
        self.note(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.note(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return Keys(self)

    def __copy__(self) -> Reads:
        return self


class Keys:
    def __init__(self, section: Reads) -> None:
        self.section = section

    def __contains__(self, key: Any) -> bool:
        return key in self.section

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self.section)


def models(config: Any) -> dict[str, Any]:
    """The sections that DeepSpeed reads by a pydantic model."""
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    monitors = {name: type(getattr(config.monitor_config, name)) for name in ("comet", "csv_monitor", "tensorboard")}
    return monitors | {
        "wandb": type(config.monitor_config.wandb),
        "bf16": type(config.bfloat16_config),
        "fp16": type(config.float16_config),
        "timers.throughput": type(config.timers_config),
        "zero_optimization": type(config.zero_config),
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    }


def test_every_key_that_deepspeed_reads_is_known() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.config import DeepSpeedConfig

    found: dict[str, set[str]] = {}
    loose = ("aio", "checkpoint", "checkpoint.writer", "checkpoint.parallel_write", "data_types", "flops_profiler")
    settings = Reads(found, "", {"train_micro_batch_size_per_gpu": 1})
    for section in (*loose, "timers"):
        parent, _, name = section.rpartition(".")
        place = settings if not parent else dict.__getitem__(settings, parent)
        dict.__setitem__(place, name, Reads(found, section, {}))
    config = DeepSpeedConfig(settings)

    known = {path.partition(".")[0] for path in KEYS} | set(KEYS[""].split()) | set(UNUSED) | {"bfloat16"}
    assert found[""] - known == set()
    for section in loose:
        assert found[section] == set(KEYS[section].split()), section
    for section, model in {**models(config), "comms_logger": CommsLoggerConfig}.items():
        fields = model.model_fields
        names = {*fields, *(field.alias for field in fields.values() if field.alias)}
        nested = {path.rpartition(".")[2] for path in KEYS if path.rpartition(".")[0] == section}
        assert names == set(KEYS[section].split()) | nested, section


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"gradient_cliping": 1.0},
            "is not a key that DeepSpeed reads; did you mean gradient_clipping?",
        ),
        ({"zero_optimisation": {"stage": 0}}, "did you mean zero_optimization?"),
        ({"stage": 0}, "stage is not a key that DeepSpeed reads there; put it into zero_optimization"),
        ({"zero_optimization": {"steps_per_print": 3}}, "there; put it into the top level"),
        ({"zero_optimization": {"offload_optimizer": {"devices": "cpu"}}}, "did you mean device?"),
        ({"steps_per_print": "ten"}, "steps_per_print='ten' must be a number above 0"),
        ({"prescale_gradients": "yes"}, "prescale_gradients='yes' must be true or false"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "is not a key that DeepSpeed reads; use --num-replicas"),
        ({"quux": 1}, "quux is not a key that DeepSpeed reads; remove it"),
        ({"zero_optimization": True}, 'must be an object, "zero_optimization": {...}'),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel has no effect here: --tensor-model-parallel-size"),
        ({"curriculum_learning": {"enabled": True}}, "DeepSpeed has removed it"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler has no effect here: --lr-decay-style"),
        ('{"steps_per_print": 1, "steps_per_print": 2}', "steps_per_print stands there twice"),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "former name of bf16"),
        ("{", "is not JSON"),
        ("[]", "must be an object"),
    ],
)
def test_what_deepspeed_would_ignore_is_refused(check: Check, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(settings)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "flags", "option"),
    [
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "",
            "has 'none'; remove it, or change --offload-optimizer",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "--zero-stage 1 --offload-optimizer",
            "has 'cpu'",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            "--zero-stage 1 --offload-optimizer",
            "has 'cpu'",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "",
            "has 'none'; remove it, or change --offload-param",
        ),
        *(
            (
                {"zero_optimization": {"stage": 3, "offload_optimizer": {name: value}}},
                "--zero-stage 3 --offload-optimizer",
                f"{name}={value} contradicts this run, which has {ours}; remove it",
            )
            for name, value, ours in (("super_offload", True, False), ("ratio", 0.5, 1.0))
        ),
        ({"zero_optimization": {"compute_grad_norm": False}}, "--zero-stage 1", "has True; remove it"),
        ({"zero_optimization": {"cpu_offload": True}}, "", "has False; remove it, or change --offload-optimizer"),
        ({"zero_optimization": {"stage": 2}}, "--zero-stage 1", "has 1; remove it, or change --zero-stage"),
        ({"train_batch_size": 16}, "", "has 8; remove it, or change --global-batch-size"),
        ({"train_micro_batch_size_per_gpu": 1}, "", "has 2; remove it, or change --micro-batch-size"),
        ({"gradient_accumulation_steps": 4}, "", "has 2; remove it, or change --global-batch-size"),
        ({"gradient_clipping": 0.5}, "", "has 1.0; remove it, or change --clip-grad"),
        ({"bf16": {"enabled": True}}, "", "has False; remove it, or change --bf16"),
        ({"bfloat16": {"enabled": True}}, "", "has False; remove it, or change --bf16"),
        ({"fp16": {"enabled": True}}, "--bf16", "has False; remove it, or change --fp16"),
        ({"fp16": {"loss_scale": 128}}, "--fp16", "has 0; remove it"),
        ({"fp16": {"initial_scale_power": 12}}, "--fp16", "has 16; remove it, or change --initial-loss-scale"),
        ({"fp16": {"hysteresis": 1}}, "--fp16", "has 2; remove it, or change --hysteresis"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "--bf16", "has 'fp32'; remove it, or change --grad-accum-dtype"),
        ({"gradient_allreduce_op": "sum"}, "", "has 'mean'; remove it"),
        ({"wall_clock_breakdown": True}, "", "has False; remove it, or change --timing-log-level"),
        ({"sequence_parallel_size": 2}, "", "has 1; remove it, or change --context-parallel-size"),
        ({"pipeline": {"stages": 4}}, "", "has 1; remove it, or change --pipeline-model-parallel-size"),
        ({"optimizer": {"type": "Lamb"}}, "", "has 'Adam'; remove it, or change --optimizer"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1.0}}}, "--lr 1e-3", "has 0.001; remove it, or change --lr"),
        ({"optimizer": {"params": {"betas": [0.9, 0.5]}}}, "", "has [0.9, 0.95]; remove it, or change --adam-beta1"),
    ],
)
def test_contradictions_are_found_wherever_they_stand(check: Check, settings: Any, flags: str, option: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(settings, *flags.split())
    [fault] = refused.value.faults
    assert "contradicts" in fault
    assert option in fault


def test_every_fault_of_a_file_is_reported(check: Check) -> None:
    with pytest.raises(ConfigError) as refused:
        check({"train_batch_size": 7, "quux": 1, "zero_optimization": {"stage": 3, "stages": 3}})
    assert len(refused.value.faults) == 4


USUAL = """{
    // as transformers' documentation has it: "auto" leaves the value to the caller
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8, "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 1,
        "allgather_bucket_size": 2e8,
        "reduce_bucket_size": "auto",
        "offload_optimizer": null,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "activation_checkpointing": {"partition_activations": false, "number_checkpoints": null},
    "tensor_parallel": {"autotp_size": 1},
    "elasticity": {"enabled": false, "max_train_batch_size": 2000},
    "zero_allow_untested_optimizer": true,
    "wall_clock_breakdown": false,
}"""


def test_a_file_that_agrees_with_the_run_is_merged(check: Check) -> None:
    plain = check({}, "--bf16")
    found = check(USUAL, "--bf16")
    assert found.pop("steps_per_print") == 2000
    assert found["zero_optimization"].pop("allgather_bucket_size") == 2e8
    extra = {name: found["fp16"].pop(name) for name in ("loss_scale", "loss_scale_window", "initial_scale_power")}
    assert extra == {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16}
    assert found == plain
    check_values(found, "ds.json")


def test_an_agreement_in_the_options_words_is_not_refused(check: Check) -> None:
    """What is set for DeepSpeed may differ: fp32 without ZeRO is clipped here, bf16 always shards its optimizer."""
    assert check({"gradient_clipping": 1.0})["gradient_clipping"] == 0.0
    assert check({"zero_optimization": {"stage": 0}}, "--bf16")["zero_optimization"]["stage"] == 1
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    found = check(offload, "--zero-stage", "1", "--offload-optimizer", "--device", "cpu")["zero_optimization"]
    assert found["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    # which DeepSpeed would divide the ranks by once more
    ulysses = {"sequence_parallel_size": 2, "train_batch_size": 8}
    assert "sequence_parallel_size" not in check(ulysses, "--context-parallel-size", "2")
    # as optimum-habana's files have it
    timers = check({"timers": {"throughput": {"enabled": True, "synchronized": False}}})["timers"]
    assert timers["throughput"]["enabled"] is False


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, "reduce_bucket_size='big': Input should be a valid"),
        ({"checkpoint": {"tag_validation": "perhaps"}}, "DeepSpeed refuses it: Checkpoint config"),
        ({"tensorboard": {"enabled": [1]}}, "enabled=[1]: Input should be a valid boolean"),
    ],
)
def test_a_value_that_deepspeed_refuses_is_the_users_fault(check: Check, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_values(check(settings), "ds.json")
    assert said in str(refused.value)
