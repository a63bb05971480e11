"""Checkpoints of megatron-core 0.16, in and out: its own models, trained and saved on TP2 x PP2, are the oracle."""

from __future__ import annotations

import argparse
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron.checkpoint.foreign import megatron_core_folder
from megatron.checkpoint.format import CheckpointError
from megatron.cli import convert_checkpoint
from megatron.weights import conversion
from megatron.weights.distributed.folder import DistributedFolder
from megatron.weights.folder_formats import recognise
from megatron.weights.megatron_core.flat import unflattened
from megatron.weights.megatron_core.source import CoreSource, open_megatron_core
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_layouts import arguments
from tests.weights import megatron_core_peer
from tests.weights.dcp_files import Chunked

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

STEPS, MORE = 3, 10
TOKENS = torch.from_numpy(np.random.default_rng(3).integers(0, megatron_core_peer.VOCABULARY, (2, 32)))
SHARED = (
    # its padding of the vocabulary too is in megatron-core's softmax
    f"--vocab-size {megatron_core_peer.PADDED} --num-layers {megatron_core_peer.LAYERS} "
    f"--hidden-size {megatron_core_peer.HIDDEN} --num-attention-heads 4 "
    "--weight-decay 0 --clip-grad 0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8"
)
ROTARY = f"{SHARED} --position-embedding-type rope --num-query-groups 2 --ffn-hidden-size {megatron_core_peer.FFN} "
FLAGS = {
    "gpt": f"{SHARED} --architecture bloom --position-embedding-type learned",
    "llama": f"{ROTARY} --architecture llama --untie-embeddings-and-output-weights",
    "mixtral": f"{ROTARY} --architecture mixtral --untie-embeddings-and-output-weights --num-experts 4 "
    "--moe-router-topk 2",
}
"""Our options of the peer's models."""
Saved = Callable[[str, bool, tuple[int, int]], tuple[Path, torch.Tensor]]
TP2_PP2 = (2, 2)
TRAINED = {"gpt": TP2_PP2, "llama": TP2_PP2, "mixtral": (1, 2)}
"""Sizes at which the peer trains. Of experts on tensor-parallel ranks without sequence parallelism, which it has not on
a CPU, it computes other gradients, and refuses to train them; logits are right."""


def batches(first: int, count: int) -> torch.Tensor:
    """Token ids [steps, samples, LENGTH + 1] of these steps, as `layouts` gives them."""
    return torch.from_numpy(np.stack([layouts.step_tokens(first + step, 8, 32) for step in range(count)]))


@pytest.fixture(scope="module")
def peers() -> Iterator[RankPools]:
    pools = RankPools(megatron_core_peer.prepare)
    yield pools
    pools.stop()


@pytest.fixture(scope="module")
def saved(peers: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """(kind, a tensor for each layer, sizes) -> the folder of a run of three steps, and its logits."""

    @functools.cache
    def save(kind: str, singleton: bool, sizes: tuple[int, int]) -> tuple[Path, torch.Tensor]:
        root = tmp_path_factory.mktemp(kind)
        folder = root / f"iter_{STEPS:07d}"
        metadata = {"singleton_local_shards": True} if singleton else None
        _, logits = peers(4)(megatron_core_peer.save, str(folder), kind, sizes, batches(0, STEPS), TOKENS, metadata)[-1]
        (root / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
        return root, logits

    return save


@pytest.mark.parametrize("singleton", [False, True], ids=["stacked", "apart"])
@pytest.mark.parametrize("kind", ["gpt", "llama", "mixtral"])
def test_logits_are_those_of_megatron_core(saved: Saved, kind: str, singleton: bool) -> None:
    """The model as its own arguments describe it."""
    folder, expected = saved(kind, singleton, TP2_PP2)
    assert recognise(folder).name == "megatron-core"
    model = conversion.open_model(conversion.Opening(folder))
    assert model.source.kinds == ("weight", "exp_avg", "exp_avg_sq")
    assert model.source.metadata["progress"] == {"iteration": STEPS, "consumed_samples": STEPS * 8}
    assert model.source.metadata["optimizer"] == {"step": STEPS}
    logits = conversion.our_logits(model, TOKENS, "fp32")[..., : megatron_core_peer.VOCABULARY]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def resume(arguments: str, load: str, steps: int) -> tuple[int, list[float]]:
    """The step to go on with, and the losses of so many more. Runs inside the ranks."""
    engine, task = layouts.build(f"{arguments} --load {load} --save {load}-saved")
    step = layouts.resume(engine)
    return step, [layouts.loss_of_step(engine, task, step + number) for number in range(steps)]


@pytest.mark.parametrize(
    ("kind", "layout", "zero"),
    [
        ("llama", "121", 1),
        pytest.param("gpt", "221", 0, marks=pytest.mark.slow),
        pytest.param("mixtral", "112", 0, marks=pytest.mark.slow),
        pytest.param("llama", "112", 3, marks=pytest.mark.slow),
        pytest.param("gpt", "111", 0, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_as_megatron_core_does(
    saved: Saved, peers: RankPools, ranks: RankPools, kind: str, layout: str, zero: int
) -> None:
    sizes = TRAINED[kind]
    folder, _ = saved(kind, False, sizes)
    at = str(folder / f"iter_{STEPS:07d}")
    more = batches(STEPS, MORE)
    expected, _ = peers(4)(megatron_core_peer.load, at, kind, sizes, more, TOKENS, resumes=True)[-1]
    world_size, flags = arguments(layout, zero=zero)
    step, losses = ranks(world_size)(resume, f"{FLAGS[kind]} {flags}", str(folder), MORE)[0]
    assert step == STEPS
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt", marks=pytest.mark.slow), "mixtral"])
def test_megatron_core_opens_ours_and_trains_on(saved: Saved, peers: RankPools, tmp_path: Path, kind: str) -> None:
    folder, logits = saved(kind, False, TP2_PP2)
    written = tmp_path / "written"
    # from our native format, so that nothing of theirs is left
    assert convert_checkpoint.main(["--load", str(folder), "--save", str(tmp_path / "native"), "--to", "native"]) == 0
    assert _convert(tmp_path / "native", written) == 0
    more = batches(STEPS, 2)
    at = str(written / "iter_0000000")
    losses, found = peers(4)(megatron_core_peer.load, at, kind, (2, 2), more, TOKENS, resumes=False)[-1]
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-6)
    theirs = str(folder / f"iter_{STEPS:07d}")
    expected, _ = peers(4)(megatron_core_peer.load, theirs, kind, (2, 2), more, TOKENS, resumes=False)[-1]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)


def _convert(load: Path, save: Path) -> int:
    return convert_checkpoint.main(["--load", str(load), "--save", str(save), "--to", "megatron-core"])


def test_a_flat_optimizer_is_read(tmp_path: Path) -> None:
    """As megatron-core up to 0.13 saved fully_sharded_model_space: each rank's part of [X, Y] is a row of its own."""
    matrix = torch.randn(3, 8, 6)
    # two ranks by rows and two by columns, of each layer
    parts = matrix.view(3, 2, 4, 2, 3).transpose(2, 3).reshape(3, 2, 2, 12)
    state = {"flat": Chunked.of(parts, [1, 2], [1], [1], [5, 7]), "plain": matrix}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    files = DistributedFolder(tmp_path)
    for layer in range(3):
        stored = unflattened(files, "flat", (3, 8, 6), (layer,))
        assert stored is not None
        assert torch.equal(stored.rows(0, 8), matrix[layer])
        assert torch.equal(stored.matrix(3, 7, (2, 5)), matrix[layer, 3:7, 2:5])
    cut = unflattened(files, "flat", (3, 8, 6), (1,), rows=(1, 6))
    assert cut is not None
    assert torch.equal(cut.rows(2, 5), matrix[1, 3:6])
    assert unflattened(files, "flat", (3, 8, 8), (0,)) is None


# ---------------------------------------------------------------------------------------------------------------------
# Faults


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama in their format, as we write it."""
    options = "--architecture llama --position-embedding-type rope --num-layers 2 --hidden-size 16 --vocab-size 30 "
    config = layouts.parse_arguments([*layouts.COMMON.split(), *options.split()])[0]
    generator = torch.Generator().manual_seed(1)
    shards = conversion.parameters_of(config)
    tensors = {name: torch.randn(shard.shape, generator=generator) for name, shard in shards.items()}
    native = conversion.write_native(_Model(config, tensors), tmp_path / "native", lambda _: None)  # type: ignore[arg-type]
    assert _convert(native.folder, tmp_path / "core") == 0
    return tmp_path / "core" / "iter_0000000"


class _Model:
    """What `write_native` needs of a whole model."""

    def __init__(self, config: Any, tensors: dict[str, torch.Tensor]) -> None:
        self.config, self._tensors = config, tensors
        self.huggingface = None
        self.source = argparse.Namespace(holds_run=False)

    def tensors(self, *_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    edit(common)
    torch.save(common, folder / "common.pt")


def with_argument(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda common: setattr(common["args"], name, value)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda common: common.pop("args"), r"common\.pt holds no args.*--config PRESET"),
        (with_argument("multi_latent_attention", True), "multi_latent_attention=True"),
        (with_argument("num_layers", 3), r"holds 2 of .*layer_norm_weight, not the 3 of its layers"),
        (with_argument("num_layers", 1), r"holds 2 of .*layer_norm_weight, not the 1 of its layers"),
        (with_argument("hidden_size", 32), r"is \[30, 16\], not \[30, 32\]"),
        (with_argument("normalization", "LayerNorm"), "no family computes"),
    ],
)
def test_arguments_of_another_model_are_named(folder: Path, edit: Callable[[dict[str, Any]], None], fault: str) -> None:
    open_megatron_core(folder)
    change(folder, edit)
    with pytest.raises(CheckpointError, match=fault):
        open_megatron_core(folder)


def test_nothing_in_common_is_executed(folder: Path, tmp_path: Path) -> None:
    proof = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (proof,)

    torch.save({"args": Bomb()}, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt is refused: it names"):
        open_megatron_core(folder)
    assert not proof.exists()


def test_the_newest_iteration_is_that_of_the_record(folder: Path) -> None:
    root = folder.parent
    assert megatron_core_folder(root) == folder
    shutil.copytree(folder, root / "iter_0000005")
    assert megatron_core_folder(root) == folder
    assert megatron_core_folder(root, 5) == root / "iter_0000005"
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    assert megatron_core_folder(root) == root / "iter_0000005"
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CheckpointError, match="iter_0000007 is not there"):
        megatron_core_folder(root)
    (root / "latest_checkpointed_iteration.txt").write_text("../../elsewhere")
    with pytest.raises(CheckpointError, match="must be a number of steps"):
        megatron_core_folder(root)


def test_an_optimizer_by_its_buffers_is_named(folder: Path) -> None:
    """A run that would go on from it says why it cannot; the weights are read."""
    source = CoreSource(folder)
    weights = {name: source.read_full(name) for name in source.parameters}
    state = {f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.{kind}": torch.ones(9) for kind in ("param", "exp_avg")}
    tensors = {name: DistributedFolder(folder).read(name) for name in DistributedFolder(folder).tensors}
    shutil.rmtree(folder / "more", ignore_errors=True)
    for path in (*folder.glob("*.distcp"), folder / ".metadata"):
        path.unlink()
    dcp.save({**tensors, **state}, checkpoint_id=folder, no_dist=True)
    found = CoreSource(folder)
    assert found.kinds == ("weight",)
    assert found.optimizer_fault is not None
    assert "dp_reshardable" in found.optimizer_fault
    assert all(torch.equal(found.read_full(name), tensor) for name, tensor in weights.items())
