"""A Llama as torchtitan trains and saves it: its names, FSDP2 with tensor parallelism, AdamW, and torch's checkpoints.

Runs inside the ranks of tests/ranks.py. Shares no code with the reading.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.training import layouts

WIDTH, HEADS, GROUPS, FFN, LAYERS, VOCABULARY, THETA = 64, 8, 4, 256, 2, 250, 500000.0
FLAGS = (
    f"--architecture llama --position-embedding-type rope --num-query-groups {GROUPS} --num-attention-heads {HEADS} "
    f"--untie-embeddings-and-output-weights --num-layers {LAYERS} --ffn-hidden-size {FFN} --rotary-base 500000"
)
"""Our options of the model."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH * GROUPS // HEADS, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH * GROUPS // HEADS, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        rows, length, _ = x.shape

        def heads(projected: Tensor, *, is_turned: bool) -> Tensor:
            split = projected.view(rows, length, -1, WIDTH // HEADS)
            if is_turned:
                pairs = torch.view_as_complex(split.unflatten(-1, (-1, 2)))
                split = torch.view_as_real(pairs * turn).flatten(3)
            return split.transpose(1, 2)

        q, k, v = (
            heads(self.wq(x), is_turned=True),
            heads(self.wk(x), is_turned=True),
            heads(self.wv(x), is_turned=False),
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, FFN, bias=False)
        self.w2 = nn.Linear(FFN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, FFN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        result: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.dim() == 1))

    def forward(self, tokens: Tensor) -> Tensor:
        pairs = torch.arange(0, WIDTH // HEADS, 2)
        angles = torch.outer(torch.arange(tokens.shape[1]), THETA ** (-pairs / (WIDTH // HEADS)))
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        hidden = self.tok_embeddings(tokens)
        for block in self.layers.values():
            hidden = block(hidden, turn)
        result: Tensor = self.output(self.norm(hidden))
        return result


def _distributed(model: Transformer, tensor_size: int) -> DeviceMesh:
    """Cut the model over tensor-parallel ranks, and what each of these has over the others."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // tensor_size, tensor_size), mesh_dim_names=("dp", "tp"))
    if tensor_size > 1:
        for block in model.layers.values():
            plan = {name: ColwiseParallel() for name in ("attention.wq", "attention.wk", "attention.wv")}
            plan |= {name: ColwiseParallel() for name in ("feed_forward.w1", "feed_forward.w3")}
            parallelize_module(
                block, mesh["tp"], plan | {"attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}
            )
        parallelize_module(model, mesh["tp"], {"output": ColwiseParallel(output_layouts=Replicate())})
    for block in model.layers.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return mesh["dp"]


class Peer:
    """A run of torchtitan."""

    def __init__(self, tensor_size: int) -> None:
        self.model = Transformer()
        self.mesh = _distributed(self.model, tensor_size)
        named = dict(self.model.named_parameters())
        # a pattern of parameter groups: norms do not decay
        self.groups = [[name for name in named if is_norm == (named[name].dim() == 1)] for is_norm in (False, True)]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [named[name] for name in names], "weight_decay": decay}
                for names, decay in zip(self.groups, (0.1, 0.0), strict=True)
            ],
            lr=1e-3,
            betas=(0.9, 0.999),
            eps=1e-8,
        )
        self.step = 0

    def train_step(self) -> float:
        tokens = torch.from_numpy(layouts.step_tokens(self.step, 8, 32))
        own = tokens.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        loss = nn.functional.cross_entropy(self.model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        grads: list[Any] = [parameter.grad for parameter in self.model.parameters()]
        norm = math.sqrt(sum(float(_whole(grad).double().square().sum()) for grad in grads))
        for grad in grads:
            grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return float(total) / self.mesh.size()

    def _named(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                yield name, parameter, group

    def state_dict(self, prefix: str) -> dict[str, Any]:
        """As torchtitan's checkpoint manager flattens it; `prefix`: before the names of the model."""
        optimizer: dict[str, Any] = {}
        for name, parameter, group in self._named():
            optimizer |= {f"state.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
            optimizer |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
        return {
            **{f"{prefix}{name}": tensor for name, tensor in self.model.state_dict().items()},
            "optimizer": optimizer,
            "lr_scheduler": {"last_epoch": self.step, "_step_count": self.step + 1},
            "dataloader": {f"dp_rank_{dist.get_rank()}": pickle.dumps({"offset": self.step}), "world_size": 1},
            "train_state": {"step": torch.tensor(self.step), "ntokens_seen": torch.tensor(self.step * 256)},
        }

    def load(self, folder: str, prefix: str) -> None:
        # AdamW has no state before its first step
        for _, parameter, _ in self._named():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        state = self.state_dict(prefix)
        dcp.load(state, checkpoint_id=folder)
        # in place: the loaded tensors are those of the model
        for name, parameter, _ in self._named():
            for key, value in self.optimizer.state[parameter].items():
                value.copy_(state["optimizer"][f"state.{name}.{key}"])
        self.step = int(state["train_state"]["step"])


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_save_resume(
    folder: str, steps: int, further: int, tensor_size: int = 1, prefix: str = ""
) -> tuple[list[float], dict[str, Any]]:
    """Train, save, and resume in another run: its losses, and the weights that were saved, whole."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    peer = Peer(tensor_size)
    for _ in range(steps):
        peer.train_step()
    dcp.save(peer.state_dict(prefix), checkpoint_id=str(Path(folder, f"step-{steps}")))
    weights = {name: _whole(tensor).detach().numpy().copy() for name, tensor in peer.model.named_parameters()}
    resumed = Peer(tensor_size)
    resumed.load(str(Path(folder, f"step-{steps}")), prefix)
    assert resumed.step == steps
    return [resumed.train_step() for _ in range(further)], weights
