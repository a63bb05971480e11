"""Checkpoints of Megatron-LM's legacy format: files by the published layout, and files that megatron-core wrote.

Transformers' models and megatron-core's own GPTModel and optimizers are the references.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.source import Slice
from megatron.launch.checks import check_start
from megatron.options.config import CheckpointConfig, Config, ModelConfig
from megatron.options.progress import Progress
from megatron.settings.command_line import parse_arguments
from megatron.training.resume import plan_restore, read_progress
from megatron.weights import conversion, formats
from megatron.weights.huggingface import parameters_of
from megatron.weights.megatron_lm.source import open_megatron_lm
from megatron.weights.model import whole_model
from tests.ranks import RankPools
from tests.training import layouts
from tests.weights import megatron_lm_files as files
from tests.weights import megatron_lm_peer as peer

FILE = "model_optim_rng.pt"


def tokens() -> Tensor:
    return torch.randint(0, files.GPT["vocab"], (2, 16), generator=torch.Generator().manual_seed(1))


def difference(model: nn.Module, source: Any) -> float:
    with torch.no_grad():
        expected = model(tokens()).logits
    # the files have no size of the vocabulary apart from its padding
    ours = conversion.our_logits(whole_model(source), tokens(), "fp32")[..., : files.GPT["vocab"]]
    return float((ours - expected).abs().max())


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    return files.gpt2()


@pytest.fixture(scope="module")
def written(gpt2: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 at TP 2 x PP 2."""
    folder = tmp_path_factory.mktemp("gpt2")
    files.write_gpt2(gpt2, folder, 2, 2, 3.0)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Files by the published layout


@pytest.mark.parametrize(("tp", "pp", "version"), [(2, 1, 0), (2, 1, 1), (1, 2, 2.0), (2, 2, 3.0)])
def test_every_version_gives_the_logits_of_gpt2(
    gpt2: nn.Module, tmp_path: Path, tp: int, pp: int, version: float
) -> None:
    files.write_gpt2(gpt2, tmp_path, tp, pp, version)
    source = open_megatron_lm(tmp_path)
    assert difference(gpt2, source) <= 1e-5
    assert source.metadata["progress"] == {"iteration": 100, "consumed_samples": 800}


def test_grouped_queries_gates_and_an_output_of_its_own(tmp_path: Path) -> None:
    model = files.llama()
    files.write_llama(model, tmp_path, 2, 2)
    assert difference(model, open_megatron_lm(tmp_path)) <= 1e-5


def test_any_slice_is_that_of_the_whole(tmp_path: Path) -> None:
    files.write_llama(files.llama(), tmp_path, 2, 2)
    source = open_megatron_lm(tmp_path)
    assert source.config is not None
    for name, shard in parameters_of(source.config).items():
        full = source.read_full(name)
        for size in (1, 2):
            for rank in range(size):
                local = shard.take(full, rank, size).flatten()
                # as ZeRO cuts them: anywhere
                for start, stop in [(0, len(local)), (5, len(local) - 3), (len(local) // 2, len(local) // 2 + 7)]:
                    at = Slice(name, shard, start, stop - start, rank, size)
                    assert torch.equal(source.read(at), local[start:stop]), (name, size, rank)


def test_a_given_model_is_compared_and_drops_the_padding(written: Path) -> None:
    given: dict[str, Any] = {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 101, "ffn_hidden_size": 128,
        "make_vocab_size_divisible_by": 8, "max_position_embeddings": 24,
    }  # fmt: skip
    source = open_megatron_lm(written, Config(model=ModelConfig(**given)))
    assert source.parameters["embedding.word.weight"].shape == (101, 32)
    with pytest.raises(CheckpointError, match=r"112 rows of embedding\.word\.weight .* vocab_size=60"):
        open_megatron_lm(written, Config(model=ModelConfig(**given | {"vocab_size": 60})))
    with pytest.raises(CheckpointError, match=r"norm_epsilon=0\.01 here, 1e-05 there"):
        open_megatron_lm(written, Config(model=ModelConfig(**given, norm_epsilon=1e-2)))


def test_conversion_and_the_launcher_know_the_folder(written: Path, tmp_path: Path) -> None:
    assert formats.recognise(written) is formats.MEGATRON_LM
    assert formats.recognise(written / "iter_0000100") is formats.MEGATRON_LM
    model = conversion.open_model(conversion.Opening(written))
    result = whole_model(conversion.write_native(model, tmp_path / "native", lambda _: None))
    assert conversion.compare_tensors(model, result, "fp32", lambda _: None) == len(model.source.parameters)
    sizes = "--architecture bloom --num-layers 4 --hidden-size 32 --num-attention-heads 4 --vocab-size 112"
    command = [*sizes.split(), "--data-path", "none", "--load", str(written), "--save", str(tmp_path / "run")]
    config, _ = parse_arguments(command)
    assert list(check_start(config)) == []
    config, _ = parse_arguments([*command, "--ckpt-step", "7"])
    assert "iter_0000007 is not there" in " ".join(check_start(config))


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], rank: str = "mp_rank_00_000") -> None:
    """Change the content of a rank's file."""
    path = folder / "iter_0000100" / rank / FILE
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def flattened(model: Any) -> list[Tensor]:
    if isinstance(model, Tensor):
        return [model]
    return [tensor for part in model.values() for tensor in flattened(part)]


def in_bf16(model: Any) -> Any:
    if isinstance(model, Tensor):
        return model.bfloat16()
    return {name: in_bf16(part) for name, part in model.items()}


def add_optimizer(content: dict[str, Any], *, bf16: bool = False) -> None:
    """Give each parameter moments that say whose they are: 2 and 3 times its weights."""
    tensors = flattened(content["model"])
    groups = [[each for each in tensors if each.dim() > 1], [each for each in tensors if each.dim() == 1]]
    ordered = [tensor for group in groups for tensor in group]
    numbers = [list(range(len(groups[0]))), list(range(len(groups[0]), len(ordered)))]
    state = {
        number: {"exp_avg": 2 * tensor, "exp_avg_sq": 3 * tensor, "step": torch.tensor(40.0)}
        for number, tensor in enumerate(ordered)
    }
    inner = {"state": state, "param_groups": [{"params": each, "lr": 1e-3} for each in numbers]}
    content["optimizer"] = inner
    if bf16:
        content["optimizer"] = {"optimizer": inner, "fp32_from_fp16_params": groups}
        content["model"] = in_bf16(content["model"])


def add_flat_optimizer(folder: Path, rank: str, *, shared: bool) -> None:
    """Write distrib_optim.pt by the published layout: parameters from the last on, each at a multiple of 64."""

    def change(content: dict[str, Any]) -> None:
        tensors = flattened(content["model"])
        is_first = rank.endswith("_000")
        embedding = tensors[0] if is_first else tensors[-1]
        flat, bucket = [], torch.empty(0)
        for tensor in reversed(tensors):
            bucket = torch.cat([bucket, torch.zeros(-len(bucket) % 64)])
            if shared and tensor is embedding:
                flat.append(bucket)
                bucket = torch.empty(0)
            bucket = torch.cat([bucket, tensor.flatten()])
            if shared and tensor is embedding:
                flat.append(bucket)
                bucket = torch.empty(0)
        whole = torch.cat([*flat, bucket])
        held = {"param": whole, "exp_avg": 2 * whole, "exp_avg_sq": 3 * whole, "numel_unpadded": len(whole)}
        state = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): held}}
        torch.save(state, folder / "iter_0000100" / rank / "distrib_optim.pt")
        content["optimizer"] = {"optimizer": {"param_groups": [{"step": 40}]}}
        content["model"] = in_bf16(content["model"])

    edit(folder, change, rank)


def each_rank(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "iter_0000100").iterdir())


def assert_moments(folder: Path, plain: Any) -> None:
    source = open_megatron_lm(folder)
    assert source.kinds == ("weight", "exp_avg", "exp_avg_sq")
    assert source.metadata["optimizer"]["step"] == 40
    for name in source.parameters:
        weight = plain.read_full(name)
        # in float32, also where the model's are rounded
        assert torch.equal(source.read_full(name), weight), name
        assert torch.equal(source.read_full(name, "exp_avg"), 2 * weight), name
        assert torch.equal(source.read_full(name, "exp_avg_sq"), 3 * weight), name


@pytest.mark.parametrize("bf16", [False, True])
def test_numbered_states_are_those_of_their_parameters(written: Path, tmp_path: Path, bf16: bool) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "run"))
    for rank in each_rank(folder):
        edit(folder, lambda content: add_optimizer(content, bf16=bf16), rank)
    assert_moments(folder, open_megatron_lm(written))


def test_the_distributed_optimizers_states_are_those_of_their_parameters(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "run"))
    for rank in each_rank(folder):
        add_flat_optimizer(folder, rank, shared=True)
    assert_moments(folder, open_megatron_lm(written))


def test_states_in_another_order_are_refused_and_weights_are_not(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "run"))
    for rank in each_rank(folder):
        edit(folder, add_optimizer, rank)

    def swap(content: dict[str, Any]) -> None:
        states = content["optimizer"]["state"]
        states[0], states[1] = states[1], states[0]

    edit(folder, swap)
    source = open_megatron_lm(folder)
    assert source.kinds == ("weight",)
    assert source.config is not None
    progress, _ = read_progress(source, CheckpointConfig(load=str(folder)))
    with pytest.raises(
        CheckpointError, match=r"mp_rank_00_000/model_optim_rng.pt: parameter group 0 .* --no-load-optim"
    ):
        plan_restore(source, progress, source.config, CheckpointConfig(load=str(folder)))
    plan = plan_restore(source, progress, source.config, CheckpointConfig(load=str(folder), no_load_optim=True))
    assert plan.optimizer is None
    assert progress == Progress(iteration=100, consumed_samples=800)


def test_float32_weights_that_are_not_the_models_are_refused(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "run"))
    for rank in each_rank(folder):
        edit(folder, lambda content: add_optimizer(content, bf16=True), rank)

    def move(content: dict[str, Any]) -> None:
        content["optimizer"]["fp32_from_fp16_params"][0][0][3, 3] += 1

    edit(folder, move)
    source = open_megatron_lm(folder)
    with pytest.raises(CheckpointError, match=r"mp_rank_00_000.*float32 weights .* of .*word_embeddings.weight"):
        source.read_full("embedding.word.weight")


# ---------------------------------------------------------------------------------------------------------------------
# Damage, lies and code


def of_layers(content: dict[str, Any]) -> dict[str, Tensor]:
    layers: dict[str, Tensor] = content["model"]["language_model"]["encoder"]
    return layers


def argument(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda content: setattr(content["args"], name, value))


def in_all(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def in_each(folder: Path) -> None:
        for rank in each_rank(folder):
            edit(folder, change, rank)

    return in_each


def moved_rank(folder: Path) -> None:
    edit(folder, lambda content: content.update(iteration=90), "mp_rank_01_000")


def short(folder: Path) -> None:
    path = folder / "iter_0000100" / "mp_rank_01_001" / FILE
    os.truncate(path, path.stat().st_size // 2)


def flipped(folder: Path) -> None:
    path = folder / "iter_0000100" / "mp_rank_01_001" / FILE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def half(folder: Path) -> None:
    for stage in (0, 1):
        shutil.rmtree(folder / "iter_0000100" / f"mp_rank_01_00{stage}")


class Command:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def other_tied_copy(folder: Path) -> None:
    edit(folder, lambda content: content["model"]["word_embeddings_for_head"]["weight"].add_(1), "mp_rank_00_001")


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no rank": (
        lambda folder: shutil.rmtree(folder / "iter_0000100" / "mp_rank_01_001"),
        "lacks mp_rank_01_001/model_optim_rng.pt",
    ),
    "half of the ranks": (
        half,
        "folders of 1 tensor-parallel ranks, but .* was saved by 2",
    ),
    "no file": (
        lambda folder: (folder / "iter_0000100" / "mp_rank_01_000" / FILE).unlink(),
        "mp_rank_01_000.* not there",
    ),
    "cut short": (short, "mp_rank_01_001/model_optim_rng.pt is damaged or truncated"),
    "a changed bit": (flipped, "mp_rank_01_001/model_optim_rng.pt is damaged"),
    "another save": (moved_rank, "mp_rank_01_000.* has iteration 90, but .*mp_rank_00_000.* 100"),
    "another folder": (
        in_all(lambda content: content.update(iteration=90)),
        "is of iteration 90, which is not that of its folder",
    ),
    "other arguments of a rank": (argument("num_layers", 6), "num_layers 4, but .* 6"),
    "more layers": (in_all(lambda content: setattr(content["args"], "num_layers", 6)), "holds 4 layers .* has 6"),
    "another width": (argument("ffn_hidden_size", 64), r"is \[64, 32\], its model makes it \[32, 32\]"),
    "no layer": (
        lambda folder: edit(folder, lambda content: of_layers(content).pop("layers.1.mlp.dense_4h_to_h.weight")),
        "layers.1.mlp.down.weight is not there on tensor-parallel rank 0",
    ),
    "an unknown tensor": (
        lambda folder: edit(folder, lambda content: of_layers(content).update({"layers.0.extra": torch.ones(2)})),
        "tensors that a model of these options does not have: .*layers.0.extra",
    ),
    "another version": (
        lambda folder: edit(folder, lambda content: content.update(checkpoint_version=7)),
        "checkpoint_version 7; versions 0 to 3 are known",
    ),
    "another activation": (argument("squared_relu", True), r"squared_relu=True \(its activation is ReLU squared\)"),
    "an exact GELU": (argument("bias_gelu_fusion", False), "its GELU is exact"),
    "experts": (argument("num_experts", 8), "8 experts.*torch_dist"),
    "no arguments": (in_all(lambda content: content.pop("args")), "holds no args.*--config"),
    "a copy that drifted": (other_tied_copy, "word_embeddings_for_head.*the same tied weight"),
    "code": (
        lambda folder: edit(folder, lambda content: content.update(rng_state=Command())),
        "refused: it names posix.system",
    ),
    "no model": (lambda folder: edit(folder, lambda content: content.pop("model")), "holds the models none"),
    "a record that leads out": (
        lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("../../etc"),
        "must be a number of steps, or release",
    ),
    "a record of nothing": (
        lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("7"),
        "iter_0000007 is not there",
    ),
}


def read_all(folder: Path) -> None:
    source = open_megatron_lm(folder)
    for name in source.parameters:
        source.read_full(name)


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_and_nothing_is_executed(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(written, tmp_path / "run"))
    change, said = WRONG[what]
    change(folder)
    with pytest.raises(CheckpointError, match=said):
        read_all(folder)
    assert not (tmp_path / "executed").exists()


def test_copies_of_norms_that_drifted_a_little_are_averaged(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "run"))
    name = "layers.0.input_layernorm.weight"
    edit(folder, lambda content: of_layers(content)[name].mul_(1 + 2**-8), "mp_rank_01_000")
    whole = open_megatron_lm(written).read_full("layers.0.attention_norm.weight")
    read = open_megatron_lm(folder).read_full("layers.0.attention_norm.weight")
    assert torch.allclose(read, whole * (1 + 2**-9))
    edit(folder, lambda content: of_layers(content)[name].mul_(2), "mp_rank_01_000")
    with pytest.raises(CheckpointError, match="the ranks trained apart"):
        open_megatron_lm(folder).read_full("layers.0.attention_norm.weight")


def test_keys_that_are_not_read_are_listed(written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "run"))
    edit(folder, lambda content: content.update(ema={"a": torch.ones(2)}, rng_state=[{"a": 1}]))
    open_megatron_lm(folder)
    assert [record.message for record in caplog.records] == [
        f"{folder / 'iter_0000100' / 'mp_rank_00_000' / FILE} holds ema, which is not read"
    ]


# ---------------------------------------------------------------------------------------------------------------------
# megatron-core

OURS = (
    "--vocab-size 256 --make-vocab-size-divisible-by 16 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 "
    "--max-position-embeddings 32"
)
MODELS = {
    "gpt": "--architecture bloom --position-embedding-type learned",
    "llama": "--architecture llama --position-embedding-type rope --num-query-groups 2 "
    "--untie-embeddings-and-output-weights --ffn-hidden-size 256",
}
TWO_BY_TWO = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


def from_last_stage(results: list[tuple[Tensor | None, list[float]]]) -> tuple[Tensor, list[float]]:
    return next((logits, losses) for logits, losses in results if logits is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "layout"),
    [
        ("gpt", {}, "--tensor-model-parallel-size 2"),
        ("llama", {}, "--pipeline-model-parallel-size 2 --zero-stage 1"),
        ("llama", {"tp": 1, "vpp": 2}, TWO_BY_TWO),
        ("gpt", {"tp": 1, "distributed": True}, "--zero-stage 1"),
        ("llama", {"bf16": True, "tp": 1, "distributed": True}, "--bf16"),
        ("gpt", {"bf16": True}, "--bf16 --tensor-model-parallel-size 2"),
    ],
)
def test_ten_steps_are_those_of_megatron_core(
    ranks: RankPools, tmp_path: Path, name: str, options: dict[str, Any], layout: str
) -> None:
    sizes = {"tp": 2, "pp": 2, "more": 10, **options}
    logits, expected = from_last_stage(ranks(4)(peer.save, name, str(tmp_path), **sizes))
    source = open_megatron_lm(tmp_path)
    assert source.optimizer_fault is None
    held_out = torch.from_numpy(layouts.step_tokens(layouts.HELD_OUT, 4, peer.LENGTH)[:, :-1])
    ours = conversion.our_logits(whole_model(source), held_out, "fp32")
    # in bf16 each side rounds in other places
    assert float((ours - logits).abs().max()) <= (2e-2 if options.get("bf16") else 1e-5)
    world_size = math.prod(2 for word in layout.split() if word.endswith("-parallel-size")) or 1
    flags = f"{OURS} {MODELS[name]} {layout} --load {tmp_path}"
    losses = ranks(max(world_size, 2 if "zero" in layout else 1))(peer.resume, flags, 10)[0]
    assert losses == pytest.approx(expected, abs=5e-3 if options.get("bf16") else 1e-5)
