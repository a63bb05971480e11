"""The identity of a base: equal on every layout and in every format, another for every other model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint.folders import CheckpointError
from megatron.checkpoint.source import Slice
from megatron.parallel.shards import Shard
from megatron.weights.base_identity import (
    MASK,
    BaseIdentity,
    BaseSums,
    check_identity,
    joined,
    matrix_sums,
    own_parts,
    stored_sums,
)
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface import MappedTensor
from megatron.weights.huggingface_files import open_safetensors


def sum_of(values: Tensor) -> int:
    rows, columns = torch.arange(values.shape[0]), torch.arange(values.shape[1])
    return matrix_sums(values, rows, columns, rounded=False)[0]


def mixed(number: int, seed: int) -> int:
    """Return splitmix64 of a number, in Python's integers."""
    state = ((number + 1) * 0x9E3779B97F4A7C15 + seed) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ state >> shift) * factor & MASK
    return (state ^ state >> 31) | 1


def test_the_sum_is_that_of_its_definition() -> None:
    values = torch.randn(5, 7)
    bits = values.view(torch.int32).tolist()
    total = sum(bits[row][column] * mixed(row, 1) * mixed(column, 2) for row in range(5) for column in range(7))
    assert sum_of(values) == total & MASK


def wrong_models(w: Tensor, i: int, j: int) -> dict[str, Tensor]:
    """Return models that have the same numbers in other places, or other numbers: [n, n] each."""
    n, swapped, column, corners = len(w), w.clone(), w.clone(), w.clone()
    swapped.view(-1)[[i, j]] = w.view(-1)[[j, i]]
    column[:, [i % n, j % n]] = w[:, [j % n, i % n]]
    a, b = divmod(i, n)
    c, d = divmod(j, n)
    corners.view(torch.int32)[[a, c, a, c], [b, d, d, b]] += torch.tensor([1, 1, -1, -1], dtype=torch.int32) << 16
    bit = w.clone()
    bit.view(torch.int32).view(-1)[i] ^= 1 << j % 32
    return {
        "transposed": w.t().contiguous(),
        "flipped rows": w.flip(0),
        "flipped columns": w.flip(1),
        "flipped": w.flip(0, 1),
        "rolled by a row": w.roll(1, 0),
        "rolled by a column": w.roll(1, 1),
        "rolled by one": w.view(-1).roll(1).view_as(w),
        "sorted": w.view(-1).sort().values.view_as(w),
        "rotary rows permuted": w.view(2, n // 2, n).transpose(0, 1).reshape(n, n),
        "two numbers swapped": swapped,
        "two columns swapped": column,
        "two added, two taken away": corners,
        "one bit": bit,
        "negated": -w,
        "doubled": 2 * w,
        "row averaged": w.mean(0, keepdim=True).expand_as(w).contiguous(),
    }


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 16).map(lambda half: 2 * half),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.data(),
)
def test_another_order_or_number_has_another_sum(n: int, seed: int, dtype: torch.dtype, data: Any) -> None:
    w = torch.randn(n, n, generator=torch.Generator().manual_seed(seed)).to(dtype).float()
    i, j = (data.draw(st.integers(0, n * n - 1)) for _ in range(2))
    others = wrong_models(w, i, j)
    sums = {what: sum_of(other) for what, other in others.items() if not torch.equal(other, w)}
    assert [what for what, found in sums.items() if found == sum_of(w)] == []


def test_tensors_that_change_places_have_other_sums(tmp_path: Path) -> None:
    one, other = torch.randn(6, 4), torch.randn(6, 4)
    vector = torch.randn(6)
    save_file({"a": one, "b": other, "v": vector}, tmp_path / "x.safetensors")
    save_file({"a": other, "b": one, "v": vector.flip(0)}, tmp_path / "y.safetensors")
    x, y = (stored_sums(open_safetensors(tmp_path / f"{name}.safetensors", ForeignFiles())) for name in "xy")
    assert x["a"] == y["b"] != y["a"] == x["b"]
    assert x["v"] != y["v"]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.sampled_from([None, 0, 1]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 3),
    st.lists(st.integers(0, 400), max_size=4),
)
def test_parts_of_every_layout_add_up_to_the_whole(
    dim: int | None, pieces: int, size: int, padding: int, cuts: list[int]
) -> None:
    length = 8 * pieces
    shape = (length, 8) if dim != 1 else (8, length)
    padding = padding * size if dim == 0 else 0
    shard = Shard(shape, dim, (8,) * pieces if dim is not None else (), padding, used_on="stream")
    full = torch.randn(shape, generator=torch.Generator().manual_seed(length))
    found = []
    size = size if dim is not None else 1
    for rank in range(size):
        local = shard.take(full, rank, size).view(-1)
        ends = sorted({0, local.numel(), *(cut for cut in cuts if cut < local.numel())})  # stretches of ZeRO-3
        for start, end in itertools.pairwise(ends):
            sums = BaseSums(own_parts({"w": shard}))
            sums.add(Slice("w", shard, start, end - start, rank, size), local[start:end])
            found.append(sums.totals)
    assert joined(found)["w"] == matrix_sums(full, torch.arange(shape[0]), torch.arange(shape[1]))


def test_the_forms_of_hugging_face_have_the_sums_of_their_files() -> None:
    """Fused q, k and v in three tensors, the same by head in one, and transposed; tokens added beyond the files."""
    full, heads, size = torch.randn(3 * 8, 5), 4, 2
    shard = Shard(tuple(full.shape), 0, (8, 8, 8))

    def sums(parts: tuple[MappedTensor, ...], rank_count: int = 2) -> dict[str, list[int]]:
        found = []
        for rank in range(rank_count):
            one = BaseSums({"w": parts})
            one.add(Slice.of_rank("w", shard, rank, rank_count), shard.take(full, rank, rank_count).view(-1))
            found.append(one.totals)
        return joined(found)

    apart = sums(tuple(MappedTensor(name, (8, 5), 8 * i, 8) for i, name in enumerate("qkv")))
    assert [apart[name][0] for name in "qkv"] == [sum_of(full[8 * i : 8 * i + 8]) for i in range(3)]
    by_head = full.view(3, heads, size, 5).transpose(0, 1).reshape(24, 5)
    assert sums((MappedTensor("qkv", (24, 5), 0, 24, heads=(heads, heads)),))["qkv"][0] == sum_of(by_head)
    assert sums((MappedTensor("c", (5, 24), 0, 24, transposed=True),))["c"][0] == sum_of(full.t().contiguous())
    assert sums((MappedTensor("e", (20, 5), 0, 20),))["e"][0] == sum_of(full[:20])


def identity(values: Tensor, *, rounded: bool = True) -> BaseIdentity:
    found = matrix_sums(values, torch.arange(values.shape[0]), torch.arange(values.shape[1]), rounded=rounded)
    return BaseIdentity({"w": found, "unread": found})


def test_a_copy_in_16_bits_is_said_to_be_rounded_and_every_other_is_refused() -> None:
    w, here = torch.randn(4, 6), Path("adapters")

    def lines(found: BaseIdentity, expected: BaseIdentity | None = None, allowed: bool = False) -> list[str]:
        expected = expected or identity(w)
        return check_identity(here, expected, "models/base", found, option="--lora-base", allowed=allowed)

    assert lines(identity(w)) == []
    assert lines(BaseIdentity({"w": identity(w).tensors["w"]})) == []  # of fewer tensors
    assert lines(identity(w.bfloat16().float())) == ["models/base is the base of adapters, rounded to bfloat16"]
    assert lines(identity(w.half().float())) == ["models/base is the base of adapters, rounded to float16"]
    assert lines(identity(w.half().float(), rounded=False), identity(w.half().float())) == []
    with pytest.raises(CheckpointError, match=r"another base model, \w{12}, than models/base, \w{12}: 2 of 2 ten"):
        lines(identity(w.flip(0)))
    with pytest.raises(CheckpointError, match="Give the folder of their base as --lora-base, or pass --allow-other"):
        lines(identity(w), identity(w.bfloat16().float()))
    (warning,) = lines(identity(w.flip(0)), allowed=True)
    assert warning.startswith("WARNING: adapters holds adapters of another base model")
    found = BaseIdentity({"w": identity(w).tensors["w"]})
    with pytest.raises(CheckpointError, match="1 of 2 tensors differ: unread"):
        check_identity(here, identity(w), "base", found, option="the base", allowed=False, is_whole=True)
    (unknown,) = check_identity(here, None, "base", identity(w), option="x", allowed=False)
    assert "was not verified" in unknown


def test_what_is_written_is_read_again_and_a_damaged_one_is_refused() -> None:
    found = BaseIdentity(identity(torch.randn(3, 3)).tensors, "org/model", "abc")
    content = json.loads(json.dumps(found.to_json()))
    assert BaseIdentity.from_json(content, Path("x")) == found
    assert BaseIdentity.from_json({**content, "algorithm": "of the future"}, Path("x")) is None
    assert BaseIdentity.from_json({"w": "0123"}, Path("x")) is None
    for damage in ({"w": "xyz"}, {"w": "01 02"}, {"w": 3}, None):
        with pytest.raises(CheckpointError, match="damaged identity"):
            BaseIdentity.from_json({**content, "tensors": damage}, Path("x"))


def test_a_snapshot_of_the_hub_has_the_name_that_was_given(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--meta-llama--Llama-2-7b-hf/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    named = BaseIdentity.of_base(snapshot, {})
    assert named == BaseIdentity.of_base(tmp_path / "link", {})
    assert (named.name, named.revision) == ("meta-llama/Llama-2-7b-hf", "0123abcd")
    assert BaseIdentity.of_base(tmp_path, {}).name is None
    assert named.label([]).startswith("meta-llama/Llama-2-7b-hf (")
