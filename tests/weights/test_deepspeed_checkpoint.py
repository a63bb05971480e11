"""DeepSpeed's checkpoints, both ways, against its own tool and loader; damaged and hostile files."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from megatron.checkpoint.foreign import deepspeed_folder
from megatron.checkpoint.format import CheckpointError, Fragment
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.writer import write_checkpoint
from megatron.options.config import Config
from megatron.parallel.shards import Shard
from megatron.settings.command_line import parse_arguments
from megatron.weights.deepspeed.deepspeed_checkpoint import DeepSpeedCheckpoint, read
from megatron.weights.deepspeed.universal import point_latest, universal_info, write
from megatron.weights.huggingface import parameters_of
from tests.ranks import RankFailure, RankPools
from tests.training import layouts
from tests.weights import deepspeed_runs
from tests.weights.deepspeed_runs import TAG, Run

Full = dict[tuple[str, str], Tensor]


def config_of(model: str, *more: str) -> Config:
    config, _ = parse_arguments([*layouts.COMMON.split(), *layouts.MODELS[model].split(), *more])
    return config


def flags_of(model: str, layout: str, extra: str) -> tuple[int, str]:
    """World size and arguments of a pipeline, tensor and data-parallel size."""
    pp, tp, dp = map(int, layout)
    flags = f"--pipeline-model-parallel-size {pp} --tensor-model-parallel-size {tp} --micro-batch-size 4 {extra}"
    return pp * tp * dp, f"{layouts.MODELS[model]} {flags}"


def gathered(runs: list[Run]) -> Full:
    """The full tensors of every rank's state."""
    local: dict[tuple[str, str], list[Tensor]] = {}
    shards: dict[tuple[str, str], Shard] = {}
    for fragment in (fragment for run in runs for fragment in run.state):
        key, size = (fragment.name, fragment.kind), fragment.tensor_size
        shards[key] = fragment.shard
        whole = local.setdefault(key, [torch.full(fragment.shard.local_shape(size), torch.nan) for _ in range(size)])
        whole[fragment.tensor_rank].view(-1)[fragment.start :][: fragment.tensor.numel()] = fragment.tensor
    return {key: shards[key].assemble(tensors) for key, tensors in local.items()}


def assert_same(foreign: DeepSpeedCheckpoint, expected: Full) -> None:
    found = {
        (name, kind): foreign.read_full(name, kind).clone() for name in foreign.parameters for kind in foreign.kinds
    }
    assert found.keys() == expected.keys()
    wrong = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert not wrong


def convert_with_deepspeed(source: Path, target: Path) -> None:
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )


# ---------------------------------------------------------------------------------------------------------------------
# DeepSpeed's own files and tool


@pytest.mark.parametrize(
    ("model", "layout", "extra"),
    [
        pytest.param("llama_gqa", "221", "--zero-stage 1", marks=pytest.mark.slow),
        ("bloom_alibi", "122", "--zero-stage 1"),
        pytest.param("bloom_learned", "221", "--bf16", marks=pytest.mark.slow),
        ("llama_gqa_tied", "122", "--zero-stage 2 --bf16"),
        ("bloom_learned", "112", "--zero-stage 3"),
    ],
)
def test_deepspeed_shards_and_its_universal_folder_are_read_bit_for_bit(
    ranks: RankPools, tmp_path: Path, model: str, layout: str, extra: str
) -> None:
    world_size, flags = flags_of(model, layout, extra)
    expected = gathered(ranks(world_size)(deepspeed_runs.save_deepspeed, flags, str(tmp_path)))
    foreign = read(tmp_path / TAG, config_of(model))
    assert foreign.layout == "deepspeed"
    assert (foreign.facts["iteration"], foreign.facts["consumed_samples"], foreign.facts["step"]) == (2, 16, 2)
    assert_same(foreign, expected)

    convert_with_deepspeed(tmp_path / TAG, tmp_path / "universal")
    if (model, layout) == ("bloom_learned", "221"):
        let_the_last_stage_drift(tmp_path / TAG)
        with pytest.raises(CheckpointError, match=r"mp_rank_02_optim_states\.pt: weight of .*same tied weight"):
            read(tmp_path / TAG, config_of(model)).read_full("embedding.word.weight")
    universal = read(tmp_path / "universal", config_of(model))
    assert universal.layout == "universal"
    assert (universal.facts["iteration"], universal.facts["consumed_samples"]) == (2, 16)
    assert_same(universal, expected)
    if "--zero-stage 3" not in extra:  # of ZeRO-3, DeepSpeed's tool keeps the numbers alone
        assert universal.facts["step"] == 2
        alone = read(tmp_path / "universal")
        assert alone.parameters == foreign.parameters
        assert_same(alone, expected)


def let_the_last_stage_drift(folder: Path) -> None:
    """Change one number of its copy of the tied embedding."""
    (path,) = folder.glob("*zero_pp_rank_0_mp_rank_02_optim_states.pt")
    content = torch.load(path, weights_only=False)
    state = content["optimizer_state_dict"]
    for flat, places in zip(state["single_partition_of_fp32_groups"], state["param_slice_mappings"], strict=True):
        for name, place in places.items():
            if "embedding_word" in name:
                flat.data[place.start] += 1.0
    torch.save(content, path)


@pytest.fixture(scope="module")
def native(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Run]]]:
    """A native checkpoint of PP2 TP2 written as a universal folder beside it, once a model."""
    made: dict[str, tuple[Path, list[Run]]] = {}

    def make(model: str) -> tuple[Path, list[Run]]:
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            precision = "--bf16" if model == "bloom_learned" else "--zero-stage 1"
            runs = ranks(4)(deepspeed_runs.save_native, flags_of(model, "221", precision)[1], str(folder))
            write(Checkpoint(folder / TAG), folder / "universal")
            made[model] = folder, runs
        return made[model]

    return make


def test_our_universal_folder_is_read_back(native: Callable[[str], tuple[Path, list[Run]]]) -> None:
    folder, runs = native("llama_gqa")
    checkpoint, universal = Checkpoint(folder / TAG), read(folder / "universal")
    assert universal.parameters == checkpoint.parameters
    assert universal.facts["metadata"] == checkpoint.metadata
    assert_same(universal, gathered(runs))


@pytest.mark.parametrize(
    ("model", "layout", "extra"),
    [
        ("llama_gqa", "112", "--zero-stage 1"),
        pytest.param("llama_gqa", "121", "--zero-stage 2", marks=pytest.mark.slow),
        # under ZeRO-3, DeepSpeed's loader takes tensors as they are, so that the vocabulary must be padded as here
        ("llama_gqa", "112", "--zero-stage 3"),
        pytest.param("bloom_learned", "112", "--bf16", marks=pytest.mark.slow),
        ("bloom_learned", "211", "--bf16"),
        pytest.param("bloom_alibi", "141", "--zero-stage 1", marks=pytest.mark.slow),
    ],
)
def test_deepspeed_loader_resumes_our_universal_folder_on_another_layout(
    ranks: RankPools,
    native: Callable[[str], tuple[Path, list[Run]]],
    tmp_path: Path,
    model: str,
    layout: str,
    extra: str,
) -> None:
    folder, saved = native(model)
    settings = tmp_path / "load_universal.json"
    settings.write_text(json.dumps({"checkpoint": {"load_universal": True}}))
    world_size, flags = flags_of(model, layout, f"{extra} --deepspeed-config {settings}")
    resumed = ranks(world_size)(deepspeed_runs.resume_universal, flags, str(folder), "universal")
    expected, found = gathered(saved), gathered(resumed)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    # bf16 rounds the same numbers in other orders on other layouts
    assert resumed[0].next_loss == pytest.approx(saved[0].next_loss, rel=1e-3 if "--bf16" in extra else 1e-6)


@pytest.mark.parametrize(
    ("layout", "extra", "fault"),
    [
        # alone it would read 54 of 54 tensors wrongly, without an error
        (
            "112",
            "--zero-stage 3 --make-vocab-size-divisible-by 300",
            r"gives each rank 8192 elements, but the model has 9600",
        ),
        # alone it would take the whole vocabulary for each rank's part, without an error
        (
            "121",
            "--zero-stage 1 --make-vocab-size-divisible-by 256",
            r"has the shape \(256, 64\) of each .* rank's part",
        ),
    ],
    ids=["another padding under ZeRO-3", "a vocabulary of a rank's size"],
)
def test_deepspeeds_loader_refuses_what_it_would_read_wrongly(
    ranks: RankPools,
    native: Callable[[str], tuple[Path, list[Run]]],
    tmp_path: Path,
    layout: str,
    extra: str,
    fault: str,
) -> None:
    folder, _ = native("llama_gqa")
    settings = tmp_path / "load_universal.json"
    settings.write_text(json.dumps({"checkpoint": {"load_universal": True}}))
    world_size, flags = flags_of("llama_gqa", layout, f"{extra} --deepspeed-config {settings}")
    with pytest.raises(RankFailure, match=rf"/0\.weight/fp32\.pt {fault}"):
        ranks(world_size)(deepspeed_runs.resume_universal, flags, str(folder), "universal")


def test_under_zero_3_deepspeed_reads_no_folder_that_it_would_read_wrongly(universal: Path) -> None:
    """It stops without its model states; of a model without a config, the padding of the vocabulary is unknown."""
    zero_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    assert not (universal / zero_3).exists()
    for vocab_size, rows in ((250, 256), (256, 256), (100, 100), (128, 128)):
        config = config_of("llama_gqa", "--vocab-size", str(vocab_size), "--make-vocab-size-divisible-by", "128")
        fragments = (
            Fragment(name, "weight", shard, 0, 1, 0, torch.ones(shard.shape).flatten())
            for name, shard in parameters_of(config).items()
        )
        place = universal.parent / str(vocab_size)
        native = write_checkpoint(place, "global_step1", fragments, {"config": config.to_dict()})
        write(Checkpoint(native), place / "universal")
        for name in ("0.weight", "7.weight"):
            saved = torch.load(place / "universal/zero" / name / "fp32.pt", weights_only=False)
            assert saved["param"].shape[0] == rows
            assert saved["param"].sum() == vocab_size * 64
        assert (place / "universal" / zero_3).exists() == (vocab_size != 100)
        assert read(place / "universal").read_full("output.weight").shape == (vocab_size, 64)


def test_patterns_are_few_and_match_their_parameters() -> None:
    shards = {
        "embedding.word.weight": Shard((20, 8), dim=0, pieces=(20,)),
        "embedding.position.weight": Shard((4, 8)),
        **{f"layers.{layer}.attention.qkv.weight": Shard((16, 8), dim=0, pieces=(8, 4, 4)) for layer in range(38)},
        **{f"layers.{layer}.mlp.down.weight": Shard((8, 32), dim=1, pieces=(32,)) for layer in range(38)},
    }
    info = universal_info(shards, 2)
    (parts,) = info["parameter_with_sub_params"]
    assert re.match(parts["patterns"][0], "17.attention.qkv.weight")
    assert not re.match(parts["patterns"][0], "17.attention.qkv.weight_scale")
    assert parts["shape"] == ((8, 4, 4), 8)
    assert info["sub_param_shard_widths"] == {parts["patterns"][0]: [[4, 4], [2, 2], [2, 2]]}
    assert len(info["parameter_with_row_parallelism_patterns"]) == 1
    assert info["original_vocab_size"] == 20
    (vocabulary,) = info["vocabulary_parameter_patterns"]
    assert re.match(vocabulary, "tied_modules.embedding_word.weight")
    assert info["tp_replicated_parameter_patterns"] == [r"\d+\.position\.weight$"]


# ---------------------------------------------------------------------------------------------------------------------
# Bad files


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    """A small universal folder of ours."""
    shards = {
        "embedding.word.weight": Shard((6, 4), dim=0, pieces=(6,)),
        "layers.0.attention.qkv.weight": Shard((8, 4), dim=0, pieces=(4, 2, 2)),
        "layers.0.attention_norm.weight": Shard((4,)),
        "final_norm.weight": Shard((4,)),
        "output.weight": Shard((6, 4), dim=0, pieces=(6,)),
    }
    fragments = [
        Fragment(name, kind, shard, 0, 1, 0, torch.randn(shard.shape).flatten())
        for name, shard in shards.items()
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    ]
    metadata = {"progress": {"iteration": 9, "consumed_samples": 72}, "optimizer": {"step": 8.0}}
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "native", "global_step9", fragments, metadata))
    write(checkpoint, tmp_path / "universal")
    return tmp_path / "universal"


class Payload:
    """A pickle that creates a file when an ordinary loader opens it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize(
    "place", ["zero/2.attention_norm.weight/fp32.pt", "zero/0.weight/step.pt", "mp_rank_00_model_states.pt"]
)
def test_a_malicious_pickle_is_refused_and_not_executed(universal: Path, place: str) -> None:
    marker = universal.parent / "executed"
    torch.save({"param": torch.ones(4), "args": Payload(marker)}, universal / place)
    with pytest.raises(CheckpointError, match=rf"{re.escape(place)} is refused: it names .*open"):
        read(universal)
    assert not marker.exists()


def test_a_malicious_pickle_among_deepspeeds_shards_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    for place in ("layer_00-model_00-model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        folder = tmp_path / place
        folder.mkdir()
        torch.save({"module": None}, folder / "mp_rank_00_model_states.pt")
        torch.save({"weight": Payload(marker)}, folder / place)
        with pytest.raises(CheckpointError, match=rf"{place} is refused"):
            read(folder)
    assert not marker.exists()


def test_the_config_in_a_universal_folder_is_compared(universal: Path) -> None:
    native = Checkpoint(universal.parent / "native" / "global_step9")
    native.metadata["config"] = config_of("llama_mha").to_dict()
    write(native, universal.parent / "described")
    said = r"num_attention_heads=2 here, 4 there; .*norm_epsilon=0\.01 here, 1e-05 there"
    with pytest.raises(CheckpointError, match=said):
        read(
            universal.parent / "described",
            config_of("llama_mha", *"--norm-epsilon .01 --num-attention-heads 2".split()),
        )


def test_a_sparse_or_integer_tensor_is_refused(universal: Path) -> None:
    path = universal / "zero" / "2.attention_norm.weight" / "fp32.pt"
    for tensor in (torch.eye(4).to_sparse(), torch.ones(4, dtype=torch.int64)):
        torch.save({"param": tensor}, path)
        with pytest.raises(CheckpointError, match=r"2\.attention_norm\.weight/fp32\.pt holds .* dense floating point"):
            read(universal)


def test_a_truncated_file_is_named(universal: Path) -> None:
    path = universal / "zero" / "0.weight" / "exp_avg.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"0\.weight/exp_avg\.pt is damaged or truncated"):
        read(universal).read_full("embedding.word.weight", "exp_avg")


def test_a_flipped_bit_anywhere_in_a_tensor_is_found(universal: Path) -> None:
    path = universal / "zero" / "0.weight" / "exp_avg.pt"
    content = path.read_bytes()
    place = content.index(torch.load(path, weights_only=True)["param"].numpy().tobytes())
    read(universal).verify()
    for byte in range(place, place + 6 * 4 * 4, 5):
        path.write_bytes(content[:byte] + bytes([content[byte] ^ 4]) + content[byte + 1 :])
        with pytest.raises(CheckpointError, match=r"0\.weight/exp_avg\.pt is damaged"):
            read(universal).verify()


@pytest.mark.parametrize(
    "content",
    [{"param": torch.tensor(1.0)}, {"param": torch.ones(6)}, {"param": torch.ones(6, 4), "cat_dim": 7}, [1, 2], None],
)
def test_a_file_of_another_structure_is_refused(universal: Path, content: Any) -> None:
    foreign = read(universal)
    torch.save(content, universal / "zero" / "2.attention.qkv.weight" / "fp32.pt")
    with pytest.raises(CheckpointError, match=r"2\.attention\.qkv\.weight/fp32\.pt"):
        foreign.read_full("layers.0.attention.qkv.weight")


def test_shards_of_another_structure_are_refused(tmp_path: Path) -> None:
    optimizer = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"module": None, "param_shapes": [{"0.weight": (6, 4)}]}, tmp_path / "mp_rank_00_model_states.pt")
    flat, places = torch.ones(24), {"0.weight": fragment_address(numel=24, start=0)}
    states: list[Any] = [
        None,
        {},
        {"base_optimizer_state": [], "single_partition_of_fp32_groups": [flat], "param_slice_mappings": [places]},
        {"base_optimizer_state": {}, "single_partition_of_fp32_groups": [flat], "param_slice_mappings": [[1]]},
        {"base_optimizer_state": {}, "single_partition_of_fp32_groups": [flat[:9]], "param_slice_mappings": [places]},
        {"base_optimizer_state": {}, "single_partition_of_fp32_groups": [flat, flat], "param_slice_mappings": [places]},
        {"optimizer_state_dict": {}, "fp32_flat_groups": [flat, flat]},
    ]
    for state in states:
        torch.save({"optimizer_state_dict": state}, optimizer)
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            read(tmp_path)


def test_a_missing_moment_is_named(universal: Path) -> None:
    (universal / "zero" / "0.weight" / "exp_avg.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks exp_avg of embedding\.word\.weight"):
        read(universal)


def test_a_moment_of_another_shape_is_named(universal: Path) -> None:
    torch.save({"param": torch.ones(3, 4), "cat_dim": 0}, universal / "zero" / "0.weight" / "exp_avg.pt")
    with pytest.raises(CheckpointError, match=r"exp_avg\.pt holds exp_avg of 0\.weight as \(3, 4\)"):
        read(universal).read_full("embedding.word.weight", "exp_avg")


def test_missing_parameters_and_kinds_are_named(universal: Path) -> None:
    foreign = read(universal)
    with pytest.raises(CheckpointError, match=r"no weight of layers\.9\.norm\.weight"):
        foreign.read_full("layers.9.norm.weight")
    with pytest.raises(CheckpointError, match="no momentum_buffer of"):
        foreign.read_full("embedding.word.weight", "momentum_buffer")


def test_a_universal_folder_of_the_first_release_is_read(universal: Path) -> None:
    expected = {name: read(universal).read_full(name, "exp_avg").clone() for name in read(universal).parameters}
    (universal / "zero" / "3.weight").rename(universal / "zero" / "3.norm.weight")
    first = read(universal)
    assert first.parameters.keys() == expected.keys()
    assert all(torch.equal(first.read_full(name, "exp_avg"), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("tag", ["../universal", "/etc", ".", "", "gone"])
def test_a_pointer_that_leads_elsewhere_is_not_followed(universal: Path, tag: str) -> None:
    folder = universal.parent / "run"
    folder.mkdir()
    (folder / "latest_universal").write_text(tag)
    with pytest.raises(CheckpointError, match="latest_universal"):
        read(folder)


def test_the_newest_universal_folder_is_found_by_its_pointer(universal: Path) -> None:
    point_latest(universal)
    foreign = read(universal.parent)
    assert foreign.folder == universal
    assert (foreign.facts["iteration"], foreign.facts["consumed_samples"], foreign.facts["step"]) == (9, 72, 8)


def test_a_folder_of_something_else_is_not_recognised(tmp_path: Path) -> None:
    assert deepspeed_folder(tmp_path) is None
    assert deepspeed_folder(tmp_path / "missing") is None
    with pytest.raises(CheckpointError, match="holds no DeepSpeed checkpoint"):
        read(tmp_path)


def test_a_folder_that_exists_is_not_overwritten(universal: Path) -> None:
    before = sorted(universal.rglob("*"))
    with pytest.raises(CheckpointError, match="is there already; give a new or empty folder"):
        write(read(universal), universal)
    assert sorted(universal.rglob("*")) == before


def test_a_write_that_fails_leaves_nothing(universal: Path) -> None:
    foreign = read(universal)
    shutil.rmtree(universal / "zero" / "4.weight")
    with pytest.raises(CheckpointError, match="is not there"):
        write(foreign, universal.parent / "copy")
    assert {path.name for path in universal.parent.iterdir()} == {"native", "universal"}


def test_shards_without_their_config_or_with_another_are_refused(ranks: RankPools, tmp_path: Path) -> None:
    _, flags = flags_of("llama_gqa", "112", "--zero-stage 1")
    ranks(2)(deepspeed_runs.save_deepspeed, flags, str(tmp_path))
    folder = tmp_path / TAG
    with pytest.raises(CheckpointError, match=r"progress\.json"):
        read(folder)
    with pytest.raises(CheckpointError, match="another model or vocabulary"):
        read(folder, config_of("llama_mha"))
    smaller = read(folder, config_of("llama_gqa", "--vocab-size", "240"))
    with pytest.raises(CheckpointError, match="behind the 240 of this model"):
        smaller.read_full("embedding.word.weight")
    (folder / "progress.json").write_text(json.dumps({"config": config_of("llama_gqa").to_dict()}))
    assert read(folder).kinds == ("weight", "exp_avg", "exp_avg_sq")
    other = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other, folder / f"bf16_{other.name}")
    with pytest.raises(CheckpointError, match=r"are of the same rank, so of two checkpoints"):
        read(folder)
    (folder / f"bf16_{other.name}").unlink()
    content = other.read_bytes()
    other.write_bytes(content[:4000] + bytes([content[4000] ^ 8]) + content[4001:])
    with pytest.raises(CheckpointError, match=rf"{other.name} is damaged"):
        read(folder).verify()
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"hold .* elements of"):
        read(folder)
