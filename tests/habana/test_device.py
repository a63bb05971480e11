"""The device `hpu` of the stand-in: what it computes, what it refuses, and what it notes."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.habana import devices
from tests.ranks import RankPools

HPU = torch.device("hpu")


def on(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def layer(device: torch.device) -> list[Tensor]:
    """Return loss, gradients and updated weights of a small layer."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 8).to(device)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1)
    inputs = on(device, 4, 8).requires_grad_()
    q, k, v = (linear(inputs).view(1, 2, 4, 4) for _ in range(3))
    loss = functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()
    loss = loss + functional.cross_entropy(linear(inputs), torch.arange(4, device=device))
    loss.backward()
    gradients = [p.grad.clone() for p in linear.parameters() if p.grad is not None]
    optimizer.step()
    return [loss, inputs.grad, *gradients, *linear.parameters()]  # type: ignore[list-item]


def operators(device: torch.device) -> list[Tensor]:
    x = on(device, 3, 4)
    grown = torch.empty(0, device=device)
    torch.add(x, x, out=grown)  # resizes it
    strided, base = x.t()[1:].contiguous(), x.clone()
    base.view(-1)[2:5].mul_(3)  # through a view
    base[:, 1] = 7.0
    base[base > 1] = 0.5
    torch._foreach_add_([base, strided], 1.0)
    indexed = base.index_select(0, torch.tensor([2, 0], device=device))
    storage = base.clone().untyped_storage()
    storage.resize_(0)
    storage.resize_(48)
    chunks, (values, places) = torch.stack(base.unbind(1)), torch.topk(base.flatten(), 3)
    scaled = base * torch.tensor(2.0)  # tensors without dimensions may stay on the CPU, as with CUDA
    return [grown, strided, base, indexed, chunks, values, places, scaled, torch.cat([x, base]).cumsum(0)]


def compute(function: Callable[[torch.device], list[Tensor]]) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Return the devices of a function's results, and the results there and on the CPU."""
    with devices.on_hpu():
        there, here = function(HPU), function(torch.device("cpu"))
        return [str(tensor.device) for tensor in there], [t.detach().cpu() for t in there], [t.detach() for t in here]


@pytest.mark.parametrize("function", [layer, operators])
def test_results_are_those_of_the_cpu_bit_for_bit(hpu_ranks: RankPools, function: Any) -> None:
    ((found, there, here),) = hpu_ranks(1)(compute, function)
    assert set(found) == {"hpu:0"}
    assert len(there) == len(here)
    for one, other in zip(there, here, strict=True):
        assert torch.equal(one, other)


def whole_numbers(lazy: bool, flag: str | None) -> dict[str, list[int]]:
    """Return numbers of int64 as they come back from the device; PT_ENABLE_INT64_SUPPORT=`flag`."""
    variables = {} if flag is None else {"PT_ENABLE_INT64_SUPPORT": flag}
    with devices.on_hpu(lazy=lazy), patch.dict(os.environ, variables):
        large = torch.tensor([2**31, 2**32 + 5, -(2**40) - 7, 2**31 - 1])
        ours = large.to(HPU)
        filled, grown = torch.zeros(4, dtype=torch.int64, device=HPU), torch.empty(0, dtype=torch.int64, device=HPU)
        torch.add(ours, ours, out=grown)
        part = ours.clone()
        part[2:].add_(1)
        found = {
            "copied": ours,
            "converted": torch.empty(4, dtype=torch.int64, device=HPU).copy_(large.double()),
            "from a type": large.to(HPU, torch.float32).long(),
            "sum": (ours[3:] + 1),
            "product": (ours[1:] * -7046029254386353131),
            "total": torch.ones(4, 2**10, dtype=torch.int32, device=HPU).mul_(2**20).sum(1),
            "filled": filled.fill_(2**33 + 1),
            "out": grown,
            "part": part,
            "range": torch.arange(2**31 - 1, 2**31 + 2, device=HPU),
        }
        return {name: tensor.tolist() for name, tensor in found.items()}


WIDE = {
    "copied": [2**31, 2**32 + 5, -(2**40) - 7, 2**31 - 1],
    "converted": [2**31, 2**32 + 5, -(2**40) - 7, 2**31 - 1],
    "from a type": [2**31, 2**32, -(2**40), 2**31],
    "sum": [2**31],
    "product": [(n * -7046029254386353131 + 2**63) % 2**64 - 2**63 for n in (2**32 + 5, -(2**40) - 7, 2**31 - 1)],
    "total": [2**30] * 4,
    "filled": [2**33 + 1] * 4,
    "out": [2**32, 2**33 + 10, -(2**41) - 14, 2**32 - 2],
    "part": [2**31, 2**32 + 5, -(2**40) - 6, 2**31],
    "range": [2**31 - 1, 2**31, 2**31 + 1],
}


def low_bits(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize(
    ("lazy", "flag", "is_wide"), [(True, None, False), (True, "1", True), (False, None, True), (False, "0", False)]
)
def test_int64_has_32_bits_where_the_bridge_gives_it_no_more(
    hpu_ranks: RankPools, lazy: bool, flag: str | None, is_wide: bool
) -> None:
    (found,) = hpu_ranks(1)(whole_numbers, lazy, flag)
    narrow = {name: [low_bits(number) for number in numbers] for name, numbers in WIDE.items()}
    # rounded to float32 before, on the host or on the device
    narrow["from a type"] = [low_bits(int(torch.tensor(low_bits(n)).float())) for n in WIDE["copied"]]
    narrow["converted"] = [low_bits(int(torch.tensor(n).float())) for n in WIDE["copied"]]
    wide = WIDE | {"converted": [int(torch.tensor(n).float()) for n in WIDE["copied"]]}
    assert found == (wide if is_wide else narrow)


def float64() -> dict[str, str]:
    """Return what each use of float64 raises."""
    with devices.on_hpu():
        ours, doubles = on(HPU, 4), on(torch.device("cpu"), 4).double()
        tries: dict[str, Callable[[], Any]] = {
            "made": lambda: torch.zeros(4, dtype=torch.float64, device=HPU),
            "strided": lambda: torch.empty_strided((2, 2), (1, 2), dtype=torch.float64, device=HPU),
            "moved": lambda: doubles.to(HPU),
            "converted": ours.double,
            "sum": lambda: ours.sum(dtype=torch.float64),
            "bits": lambda: ours.view(torch.float64),
            "bits of 64": lambda: _ones().view(torch.int32),
            "norm": lambda: torch.linalg.vector_norm(ours, dtype=torch.float64),
            # the host has it, and a Python number is not a tensor's
            "read": lambda: ours.to("cpu", torch.float64),
            "written": lambda: doubles.to(HPU, torch.float32),
            "number": lambda: ours * 0.1,
        }
        raised = {}
        for name, action in tries.items():
            try:
                action()
            except RuntimeError as error:
                raised[name] = str(error).splitlines()[0]
            else:
                raised[name] = ""
        return raised


def test_float64_is_refused(hpu_ranks: RankPools) -> None:
    (raised,) = hpu_ranks(1)(float64)
    assert raised.pop("bits of 64") == "hpu holds int64 as int32: its bits cannot be viewed as another type"
    assert {name for name, text in raised.items() if not text} == {"read", "written", "number"}
    assert {text for text in raised.values() if text} == {"hpu has no float64: the bridge would compute it in float32"}


def refusals() -> dict[str, str]:
    """Return what each mixture of devices raises."""
    with devices.on_hpu():
        ours, theirs = on(HPU, 4, 4), on(torch.device("cpu"), 4, 4)
        linear, rows = torch.nn.Linear(4, 4), torch.tensor([0])
        tries: dict[str, Callable[[], Any]] = {
            "sum": lambda: ours + theirs,
            "product": lambda: ours @ theirs,
            "layer": lambda: linear(ours),
            "out": lambda: torch.add(ours, ours, out=theirs),
            "into": lambda: theirs.add_(ours),
            "index": lambda: ours[rows],
            "embedding": lambda: functional.embedding(rows, ours),
            "cat": lambda: torch.cat([ours, theirs]),
            "stack": lambda: torch.stack([ours.sum(), theirs.sum()]),
            "foreach": lambda: torch._foreach_add_([ours], [theirs]),
            "numpy": lambda: ours.numpy(),
            "generator": lambda: ours.normal_(generator=torch.Generator()),
        }
        raised = {}
        for name, action in tries.items():
            try:
                action()
            except (RuntimeError, TypeError) as error:
                raised[name] = str(error)
            else:
                raised[name] = ""
        return raised


def test_tensors_of_two_devices_are_refused(hpu_ranks: RankPools) -> None:
    (raised,) = hpu_ranks(1)(refusals)
    assert "can't convert hpu:0 device type tensor to numpy" in raised.pop("numpy")
    assert "Expected a 'hpu' device type for generator but found 'cpu'" in raised.pop("generator")
    for name, text in raised.items():
        assert [word in text for word in ("device", "hpu", "cpu")] == [True] * 3, (name, text)


def notes() -> dict[str, dict[str, int]]:
    """Return the notes of each operation."""
    with devices.on_hpu() as device:
        ours, mask = on(HPU, 4, 4), on(HPU, 4, 4) > 0
        pinned = torch.zeros(4, 4).pin_memory()
        tries: dict[str, Callable[[], Any]] = {
            "nothing": lambda: (ours.square() @ ours).softmax(-1).sum(),
            "item": lambda: ours.sum().item(),
            "bool": lambda: bool(ours.sum() > 0),
            "list": lambda: ours[0].tolist(),
            "cpu": ours.cpu,
            "equal": lambda: torch.equal(ours, ours),
            "nonzero": mask.nonzero,
            "mask": lambda: ours[mask],
            "set_by_mask": lambda: ours.index_put_((mask,), ours.new_ones(())),
            "repeat": lambda: torch.repeat_interleave(_ones()),
            "behind": lambda: pinned.copy_(ours, non_blocking=True),
            "not_pinned": lambda: torch.zeros(4, 4).copy_(ours, non_blocking=True),
            "write": lambda: torch.tensor([1.0]).to(HPU),
            "write_behind": lambda: torch.tensor([1.0]).to(HPU, non_blocking=True),
        }
        found, before = {}, device.counts()
        for name, action in tries.items():
            action()
            after = device.counts()
            found[name], before = dict(after - before), after
        return found


def _ones() -> Tensor:
    return torch.ones(3, dtype=torch.int64, device=HPU)


def test_what_a_host_would_wait_for_is_noted(hpu_ranks: RankPools) -> None:
    (found,) = hpu_ranks(1)(notes)
    reads = "item bool list cpu equal nonzero mask set_by_mask repeat not_pinned".split()
    assert found == {name: {"host_read": 1} for name in reads} | {
        "nothing": {},
        "behind": {"read_behind": 1},
        "write": {"host_write": 1},
        "write_behind": {"write_behind": 1},
    }


def where() -> str:
    with devices.on_hpu() as device:
        _ones().sum().item()
        (call,) = device.stand_in.called("host_read")
        return str(call["where"])


def test_a_note_has_the_line_that_called(hpu_ranks: RankPools) -> None:
    (found,) = hpu_ranks(1)(where)
    line = where.__code__.co_firstlineno + 2
    assert found == f"{__file__}:{line}"


def saved() -> list[str]:
    """Return the devices of a saved tensor, loaded as it was and on the CPU."""
    with devices.on_hpu():
        file = io.BytesIO()
        torch.save(_ones(), file)
        found = []
        for place in (None, "cpu"):
            file.seek(0)
            found.append(str(torch.load(file, map_location=place).device))
        return found


def test_a_file_keeps_the_device(hpu_ranks: RankPools) -> None:
    assert hpu_ranks(1)(saved) == [["hpu:0", "cpu"]]


def collectives() -> dict[str, Any]:
    """Return the results of collectives over hccl, or what they raise."""
    with devices.on_hpu():
        dist.init_process_group("hccl")
        rank = dist.get_rank()
        own = torch.tensor([1.0 + rank], device=HPU)
        gathered, parts = torch.empty(2, device=HPU), [torch.empty_like(own) for _ in range(2)]
        scattered, total = torch.empty(1, device=HPU), own.clone()
        dist.all_reduce(total)
        dist.all_gather_into_tensor(gathered, own)
        dist.all_gather(parts, own)
        dist.reduce_scatter_tensor(scattered, gathered)
        received = own.clone()
        if rank:
            dist.recv(received, 0)
        else:
            dist.send(received, 1)
        dist.broadcast(own, src=1)
        dist.barrier()
        whole = torch.tensor([2**24 + 1, -3], device=HPU) * (1 - rank)
        dist.all_reduce(whole)
        found: dict[str, Any] = {
            name: tensor.tolist()
            for name, tensor in (
                *(("sum", total), ("gathered", gathered), ("parts", torch.cat(parts))),
                *(("scattered", scattered), ("received", received), ("broadcast", own)),
                ("sum of whole numbers", whole),
            )
        }
        control = dist.new_group(backend="gloo")
        on_host = torch.ones(1)
        dist.all_reduce(on_host, group=control)
        found["on the host"] = on_host.tolist()
        for name, tensor, group in (("host's", on_host, None), ("device's", own, control)):
            try:
                dist.all_reduce(tensor, group=group)
            except RuntimeError as error:
                found[name] = str(error).splitlines()[0]
        return found


def test_hccl_computes_on_the_device_alone(hpu_ranks: RankPools) -> None:
    for rank, found in enumerate(hpu_ranks(2)(collectives)):
        assert found == {
            "sum": [3.0],
            "gathered": [1.0, 2.0],
            "parts": [1.0, 2.0],
            "scattered": [2.0 + 2.0 * rank],
            "received": [1.0],
            "broadcast": [2.0],
            "sum of whole numbers": [2**24, -3],  # in float32, as hccl sums them
            "on the host": [2.0],
            "host's": "No backend type associated with device type cpu",
            "device's": "No backend type associated with device type hpu",
        }


def refused_keywords() -> list[str]:
    """Return what groups raise for keywords of torch that the published package does not have."""
    with devices.on_hpu():
        raised = []
        for function, options in (
            (dist.init_process_group, {"backend": "hccl", "device_id": HPU}),
            (dist.new_group, {"backend": "hccl", "group_desc": "a name"}),
            (dist.new_group, {"use_local_synchronization": True}),
        ):
            with pytest.raises(TypeError) as error:
                function(**options)
            raised.append(str(error.value).partition(" got ")[2])
    return raised


def test_groups_refuse_keywords_that_the_package_does_not_have(hpu_ranks: RankPools) -> None:
    names = ("device_id", "group_desc", "use_local_synchronization")
    expected = [f"an unexpected keyword argument '{name}'" for name in names]
    assert hpu_ranks(1)(refused_keywords) == [expected]


def modules() -> dict[str, str]:
    """Return the variables that the package of hccl sets."""
    with devices.on_hpu():
        return {name: os.environ[name] for name in ("HLS_MODULE_ID", "ID")}


def test_each_rank_chooses_its_module(hpu_ranks: RankPools) -> None:
    assert hpu_ranks(2)(modules) == [{"HLS_MODULE_ID": str(rank), "ID": str(rank)} for rank in range(2)]


def compiled() -> tuple[list[Tensor], Counter[str]]:
    """Return the results of a layer that torch.compile gives the device's backend."""
    with devices.on_hpu(lazy=False) as device:
        linear = torch.nn.Linear(4, 4)
        expected = linear(on(torch.device("cpu"), 2, 4))
        linear = linear.to(HPU)
        step = torch.compile(lambda x: linear(x).relu() + x.sum(), backend="hpu_backend", fullgraph=True)
        before = device.counts()
        found = step(on(HPU, 2, 4))
        counts = device.counts() - before
        expected = expected.relu() + on(torch.device("cpu"), 2, 4).sum()
        return [found.detach().cpu(), expected.detach()], counts


def test_layers_can_be_compiled_for_it(hpu_ranks: RankPools) -> None:
    (((found, expected), counts),) = hpu_ranks(1)(compiled)
    assert torch.equal(found, expected)
    assert counts["host_read"] == 0
