"""Layouts that a search tries: the options that it varies, level by level, and their values.

A layout is a choice on each level. Which values the rules of the project refuse is not repeated here: each value of
an axis is checked once, with all other axes at values that no rule refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.options.config import Config, options, sections
from megatron.runtime.devices import planned_device
from megatron.tasks.registry import load_task

Values = Mapping[str, Any]
"""Options and their values: a choice on a level, or a whole layout."""
Changes = tuple[tuple[str, Any], ...]
"""Options that differ from those of the run, with their values."""
Rules = Callable[[Config, int], Sequence[str]]
"""Returns the faults of a config on a number of ranks: megatron/settings/validation.py, check."""

NEUTRAL: Values = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "context_parallel_exchange": "auto",
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "num_replicas": 1,
    "sequence_parallel": False,
    "pipeline_partition_method": "cost",
    "pipeline_schedule": None,
    "num_virtual_stages_per_pipeline_rank": 1,
    "micro_batch_size": 1,
    "recompute_granularity": "none",
    "recompute_modules": (),
    "offload_activations": False,
    "zero_stage": 1,
    "offload_optimizer": False,
    "offload_param": False,
}
"""The axes, with values that no rule refuses for the sake of another axis."""
OF_STAGE = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Sizes that divide the ranks of a stage."""
MOST_CHUNKS = 8
"""Virtual stages of a rank, beyond which none are tried: each sends its own messages."""
LEAST_TOKENS = 1_024
"""Tokens of a row that each of the ranks that share it has: shorter rows are cut faster in other ways."""
MOST_NODES = 2
"""Nodes over which the ranks that share a layer may lie."""
METHODS = ("cost", "parameters", "uniform", "type:TransformerLayer")
PARTS = (("core_attn",), ("layernorm",), ("mlp", "mlp_act"))
"""Parts that selective recomputation may drop; of those in a group one at most, as the first has all of the other."""


def changed(config: Config, values: Values) -> tuple[Config, Changes]:
    """Return the config with these values, and those that differ from its own."""
    changes: list[tuple[str, Any]] = []
    sections_of: dict[str, Any] = {}
    for section, names in _names_by_section().items():
        own = getattr(config, section)
        differing = {name: values[name] for name in names & values.keys() if getattr(own, name) != values[name]}
        if differing:
            sections_of[section] = _replaced(own, tuple(sorted(differing.items())))
            changes += sorted(differing.items())
    if sections_of:
        config = dataclasses.replace(config, **sections_of)
    return config, tuple(changes)


# thousands of layouts of a search have the same few sections, and each new one is validated
@functools.lru_cache(maxsize=4096)
def _replaced(own: Any, differing: Changes) -> Any:
    return dataclasses.replace(own, **dict(differing))


@functools.cache
def _names_by_section() -> dict[str, frozenset[str]]:
    return {name: frozenset(field.name for field in dataclasses.fields(cls)) for name, cls in sections().items()}


@functools.cache
def divisors_of(number: int) -> list[int]:
    """Return all divisors, in order."""
    lower = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*lower, *(number // divisor for divisor in lower)})


@dataclass
class Space:
    """All layouts of a run on a number of devices."""

    config: Config
    num_devices: int
    devices_per_node: int
    check: Rules
    fixed: frozenset[str] = frozenset()
    """Options that keep the run's own value."""
    refused: Counter[str] = field(default_factory=Counter)
    """Faults of the values of axes that are left out, and how many divisions of the devices have them."""

    def __post_init__(self) -> None:
        self._known: dict[tuple[Any, ...], str | None] = {}
        self._neutral, _ = changed(self.config, NEUTRAL)
        logging = dataclasses.replace(self._neutral.logging, profile_ranks=(0,))  # which fewer ranks have too
        self._neutral = dataclasses.replace(self._neutral, logging=logging)

    # Divisions of the devices

    def divisions(self) -> Iterator[Values]:
        """Yield the sizes of all axes that divide the devices, with their experts."""
        tensors = [size for size in divisors_of(self.num_devices) if size <= MOST_NODES * self.devices_per_node]
        most_context = max(1, load_task(self.config).data.row_length // LEAST_TOKENS)
        for tensor in self._values("tensor_model_parallel_size", tensors):
            if self._is_refused(tensor, tensor_model_parallel_size=tensor):
                continue
            contexts = [size for size in divisors_of(self.num_devices // tensor) if size <= most_context]
            for context in self._values("context_parallel_size", contexts):
                own_ranks = tensor * context
                sizes = {"tensor_model_parallel_size": tensor, "context_parallel_size": context}
                # of an option that is given the size may not divide what is left
                if self.num_devices % own_ranks or self._is_refused(own_ranks, **sizes):
                    continue
                yield from self._with_stages(sizes, self.num_devices // own_ranks)

    def _with_stages(self, sizes: Values, ranks: int) -> Iterator[Values]:
        for stages in self._values("pipeline_model_parallel_size", divisors_of(ranks)):
            if ranks % stages or self._is_refused(stages, pipeline_model_parallel_size=stages):
                continue
            if self._is_refused(ranks // stages):  # batches, which as many data-parallel ranks share
                continue
            yield from self._with_experts({**sizes, "pipeline_model_parallel_size": stages})

    def _with_experts(self, sizes: Values) -> Iterator[Values]:
        tensor, num_experts = sizes["tensor_model_parallel_size"], self.config.model.num_experts
        whole = [None, 1] if num_experts and tensor > 1 else [None]
        for expert_tensor in self._values("expert_tensor_parallel_size", whole):
            for experts in self._values("expert_model_parallel_size", divisors_of(num_experts or 1)):
                own = {"expert_model_parallel_size": experts, "expert_tensor_parallel_size": expert_tensor}
                # the rules of experts count the ranks of a stage
                if num_experts:
                    ranks = self.num_devices // sizes["pipeline_model_parallel_size"]
                    of_stage = {**sizes, **own, "pipeline_model_parallel_size": 1}
                    if self._is_refused(ranks, **of_stage):
                        continue
                yield {**sizes, **own}

    # What a division may have beside

    def passes(self, division: Values) -> Iterator[Values]:
        """Yield how the passes of a microbatch are cut."""
        data = load_task(self.config).data
        sizes = [self.config.training.micro_batch_size]
        if data.num_microbatches(1) is not None:  # else the data decides what a microbatch holds
            sizes = divisors_of(max(1, self.config.training.global_batch_size // self._batch_ranks(division)))
        tensor, context = division["tensor_model_parallel_size"], division["context_parallel_size"]
        exchanges = ["ring", "all-to-all"] if context > 1 else ["auto"]
        for shares in self._values("sequence_parallel", [False, True] if tensor > 1 else [False]):
            for exchange in self._values("context_parallel_exchange", exchanges):
                own = {"sequence_parallel": shares, "context_parallel_exchange": exchange}
                of_rows = {"tensor_model_parallel_size": tensor, "context_parallel_size": context}
                if self._is_refused(tensor * context, **of_rows, **own):
                    continue
                for size in self._values("micro_batch_size", sizes):
                    yield {**own, "micro_batch_size": size}

    def orders(self, division: Values) -> list[Values]:
        """Return the schedules of the pipeline."""
        stages, num_layers = division["pipeline_model_parallel_size"], self.config.model.num_layers
        schedules: list[tuple[str | None, int]] = [(None, 1)]
        if stages > 1:
            schedules.append(("zero-bubble", 1))
            # of numbers that cut alike the smallest: the largest chunk has as many layers
            # one more chunk of as many layers would only send more
            by_size = {-(-num_layers // (stages * chunks)): chunks for chunks in range(MOST_CHUNKS, 1, -1)}
            schedules += [("interleaved", chunks) for chunks in sorted(by_size.values())]
        names = ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank")
        return self._agreeing([dict(zip(names, schedule, strict=True)) for schedule in schedules])

    def states(self, division: Values) -> list[Values]:
        """Return where weights, gradients and optimizer states are."""
        own = self.config.optimizer.zero_stage
        # in 16 bits 0 is 1
        low = [0, 1] if self.config.training.precision == "fp32" else [own if own <= 1 else 1]
        names = ("zero_stage", "offload_optimizer", "offload_param", "num_replicas")
        choices = []
        for replicas in self._replicas(division):
            choices += [(stage, False, False, replicas) for stage in low]
            if division["pipeline_model_parallel_size"] > 1:  # the pipeline's engine has no more
                continue
            choices += [(stage, False, False, replicas) for stage in (2, 3)]
            choices += [(stage, True, False, replicas) for stage in (1, 2, 3)]
            choices += [(3, offloads, True, replicas) for offloads in (False, True)]
        agreeing = self._agreeing([dict(zip(names, choice, strict=True)) for choice in choices])
        return [choice for choice in agreeing if not self._refuses_replicas(division, choice["num_replicas"])]

    def _refuses_replicas(self, division: Values, replicas: int) -> bool:
        """Return whether the ranks that sum a gradient are not divisible: by a number that was given."""
        if replicas == 1:
            return False
        ranks = self.num_devices // division["pipeline_model_parallel_size"]
        sizes = {name: division[name] for name in OF_STAGE}
        return self._is_refused(ranks, **sizes, num_replicas=replicas)

    def _replicas(self, division: Values) -> list[int]:
        """Return one, and as many as there are nodes: ZeRO then shards within each."""
        tensor, stages = division["tensor_model_parallel_size"], division["pipeline_model_parallel_size"]
        summing = self.num_devices // (tensor * stages)
        # of other numbers none has its shards nearer
        in_node = self.devices_per_node // tensor
        if in_node > 1 and summing > in_node and summing % in_node == 0:
            return [1, summing // in_node]
        return [1]

    def kept(self) -> list[Values]:
        """Return what of the activations is kept, and where."""
        selections = itertools.product(*([(), *((name,) for name in group)] for group in PARTS))
        parts = [tuple(itertools.chain(*selection)) for selection in selections]
        choices: list[tuple[str, tuple[str, ...]]] = [("none", ())]
        choices += [("selective", names) for names in parts if names]
        choices.append(("full", ()))
        # its memory is the host's already
        is_host = planned_device(self.config.parallel.device).is_host
        names = ("recompute_granularity", "recompute_modules", "offload_activations")
        offloads = [False] if is_host else [False, True]
        together = [(*choice, offload) for offload in offloads for choice in choices]
        return self._agreeing([dict(zip(names, choice, strict=True)) for choice in together])

    def cuts(self, division: Values) -> list[Values]:
        """Return how the layers are cut into stages."""
        methods = METHODS if division["pipeline_model_parallel_size"] > 1 else METHODS[:1]
        return [{"pipeline_partition_method": method} for method in self._values("pipeline_partition_method", methods)]

    # Values

    def _values(self, name: str, tried: Iterable[Any]) -> list[Any]:
        """Return the values of an axis: those to try, or the run's own where it is fixed."""
        if name in self.fixed:
            return [self._own(name)]
        return list(tried)

    def _own(self, name: str) -> Any:
        section, _ = options()[name]
        return getattr(getattr(self.config, section), name)

    def _agreeing(self, choices: Sequence[Values]) -> list[Values]:
        """Return the choices that have the run's own values where these are fixed; its own if none has."""
        fixed = {name: self._own(name) for name in choices[0].keys() & self.fixed}
        agreeing = [choice for choice in choices if all(choice[name] == value for name, value in fixed.items())]
        return agreeing or [{name: self._own(name) for name in choices[0]}]

    def _batch_ranks(self, division: Values) -> int:
        names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        return self.num_devices // math.prod(division[name] for name in names)

    # Rules

    def _is_refused(self, ranks: int, **values: Any) -> bool:
        """Return whether the rules refuse these values, whatever those of other axes are."""
        key = (ranks, *values.items())
        if key not in self._known:
            # by the rules themselves, which therefore are written once
            config, _ = changed(self._neutral, values)
            faults = [fault for fault in self.check(config, ranks) if fault not in self._always]
            self._known[key] = faults[0] if faults else None
        fault = self._known[key]
        if fault is not None:
            self.refused[fault] += 1
        return fault is not None

    def always_broken(self) -> list[str]:
        """Return the faults of the run that no layout changes."""
        # on one rank and on all: what both break is not the layout's
        plain, _ = changed(self.config, NEUTRAL)
        return [fault for fault in self.check(plain, self.num_devices) if fault in self._always]

    @functools.cached_property
    def _always(self) -> frozenset[str]:
        """Faults of the run that no layout changes."""
        return frozenset(self.check(self._neutral, 1))
