"""Products of linear layers in a pass: with adapters, weights in 4 bits and fp8, and what ranks exchange around them.

Roles and exchanges are those of parallel/linear.py and parallel/low_rank.py. n tokens of the layer on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.options.config import Config
from megatron.parallel.costs import MatrixProduct
from megatron.parallel.layout import Layout
from megatron.parallel.operators.fp8_weights import fp8_weights
from megatron.parallel.shards import LayerDeclaration, Shard
from megatron.plan.flops import held_numel
from megatron.plan.microbatch import BYTES, MicrobatchSizes
from megatron.plan.rates.rates import Collective, Role
from megatron.plan.timing.operations import AxisExchange, Hidden, LinearProduct, Move, Operation, Pointwise, Work
from megatron.plan.zero import adds_in_float32


@dataclass
class Passes:
    """Work of one microbatch in a layer."""

    forward: Work
    recomputed: Work
    """Before the gradients of the inputs."""
    input: Work
    """Gradients of inputs, and of what is not deferred by the zero-bubble schedule."""
    weight: Work
    """Gradients of the weights of linear layers, and their sums over microbatches."""

    @classmethod
    def empty(cls) -> Passes:
        return cls(Work(), Work(), Work(), Work())


@dataclass(frozen=True)
class LinearLayer:
    """A declared linear layer on one rank."""

    prefix: str
    weight: Shard
    cost: MatrixProduct
    bias: Shard | None
    added: dict[str, Shard]
    """Parameters that its method declares beside the weight, by local name."""
    dropout: float
    """Share of the inputs of its adapters that is dropped."""
    scales_weight: bool
    """DoRA scales the rows of the sum of weight and adapter."""
    in_fp8: bool
    """Its products run in fp8."""

    @property
    def is_column(self) -> bool:
        return self.weight.dim == 0

    def rank_of(self, start: str = "lora_A") -> int:
        """Return the ranks of its adapters together; 0: it has none."""
        return sum(shard.shape[0] for name, shard in self.added.items() if name.startswith(start))


def linear_layers(layer: LayerDeclaration, config: Config) -> Iterator[LinearLayer]:
    """Yield the linear layers; of experts, which are alike, those of the first."""
    in_fp8 = dict(fp8_weights(layer, config))
    for name, shard in layer.shards.items():
        if not isinstance(shard.cost, MatrixProduct) or shard.expert:
            continue
        prefix = name.removesuffix("weight")
        added = {
            local.removeprefix(prefix): each
            for local, each in layer.shards.items()
            if each.added and local.startswith(prefix)
        }
        method = layer.methods.get(prefix.removesuffix("."))
        yield LinearLayer(
            prefix,
            shard,
            shard.cost,
            layer.shards.get(f"{prefix}bias"),
            added,
            config.lora.lora_dropout,
            scales_weight=bool(added) and method is not None and method.scales_weight,
            in_fp8=name in in_fp8,
        )


class LinearWork:
    """Adds the operations of linear layers to the passes of a layer."""

    def __init__(self, sizes: MicrobatchSizes, layout: Layout, passes: Passes) -> None:
        self._sizes, self._layout, self._passes = sizes, layout, passes
        self._tensor = layout.tensor_size > 1
        self._precision = sizes.config.training.precision
        self._is_parallel = sizes.config.parallel.sequence_parallel
        self._adds_in_float32 = adds_in_float32(sizes.config)

    def add(self, linear: LinearLayer, tokens: float, count: float = 1.0, *, inside_experts: bool = False) -> Work:
        """Add a layer `count` times; return its forward part: what a recomputation does again."""
        exchanged = self._tensor and not inside_experts
        forward, passes = Work(), self._passes
        _, cut = self._layout.cut_of(linear.weight)
        outputs, inputs = linear.weight.local_shape(cut)
        precision = self._convert(linear, forward, tokens, outputs, inputs, count)
        if exchanged and linear.is_column:
            self._enter(linear, forward, tokens, inputs)
        forward.add(LinearProduct(precision, "forward", tokens, outputs, inputs), count)
        of_input = LinearProduct(precision, "input", tokens, outputs, inputs)
        by_weight = precision if self._sizes.config.fp8.fp8_wgrad else self._precision
        of_weight = LinearProduct(by_weight, "weight", tokens, outputs, inputs)
        passes.input.add(of_input, count)
        if linear.weight.trained:
            passes.weight.add(of_weight, count)
        if linear.added:
            self._add_adapters(linear, forward, tokens, outputs, inputs, count, exchanged=exchanged)
        if exchanged and linear.is_column:
            self._leave_backward(linear, of_input, of_weight, tokens, inputs)
        if linear.bias is not None:
            self._add_bias(linear, forward, tokens, outputs, count, exchanged=exchanged)
        if exchanged and not linear.is_column:
            self.leave(forward, tokens, outputs)
        self._accumulate(linear, count)
        passes.forward.extend(forward)
        return forward

    def _convert(
        self, linear: LinearLayer, forward: Work, tokens: float, outputs: int, inputs: int, count: float
    ) -> str:
        """Add conversions to and from fp8 or 4 bits; return the precision of the products."""
        passes, precision = self._passes, self._precision
        if linear.weight.quantized:
            numbers = Pointwise("quantized", "forward", precision, outputs * inputs)
            forward.add(numbers, count)
            passes.input.add(numbers, count)
        if not linear.in_fp8:
            return precision
        if self._is_scaled:
            self._scale(linear, forward, tokens, outputs, inputs, count)
        else:
            # of both operands, and of the gradient in the backward pass
            converted = tokens * inputs + self._converted_weight(outputs * inputs)
            forward.add(Pointwise("cast", "forward", precision, converted), count)
            passes.input.add(Pointwise("cast", "forward", precision, tokens * outputs), count)
        if self._tensor and self._exchanges_scales:
            # the largest value of what is cut: outputs' gradients of a column, inputs of a row
            work = passes.input if linear.is_column else forward
            work.add(AxisExchange("all_reduce", BYTES["fp32"], "tensor"), count)
        return "fp8"

    def _converted_weight(self, numbers: int) -> int:
        """Return the numbers of a weight that each microbatch converts; one that is kept is converted once a step."""
        if self._sizes.config.fp8.cache_fp8_weight_fwd:
            return 0
        return numbers

    def _scale(
        self, linear: LinearLayer, forward: Work, tokens: float, outputs: int, inputs: int, count: float
    ) -> None:
        """Add the passes over operands that are scaled by themselves, as the kernels of fp8_kernels.py read and write.

        The inputs are converted again, transposed, for the weight's gradient: they are kept in 16 bits.
        """
        passes, size = self._passes, self._sizes.number_bytes
        is_by_row = self._sizes.config.fp8_recipe == "rowwise"
        # a pass for the largest value, and one that reads again and writes a byte; rows need one reading for both
        one_pass, two_passes = size + 1, 2 * size + 1
        ahead = one_pass if is_by_row else two_passes
        converted = tokens * inputs + self._converted_weight(outputs * inputs)
        forward.add(Move(ahead * converted / 2), count)
        passes.input.add(Move(ahead * tokens * outputs / 2), count)
        if is_by_row:  # scales after the product, in place
            passes.input.add(Move(size * tokens * inputs), count)
        if not linear.weight.trained or not self._sizes.config.fp8.fp8_wgrad:
            return
        if is_by_row:
            passes.weight.add(Move(two_passes * tokens * (outputs + inputs) / 2 + size * outputs * inputs), count)
        else:
            # the gradient's transpose is written with it
            passes.weight.add(Move(tokens * outputs / 2 + one_pass * tokens * inputs / 2), count)

    @property
    def _is_scaled(self) -> bool:
        """Scales of fp8 follow from the operands."""
        return self._sizes.config.fp8_recipe != "delayed"

    @property
    def _exchanges_scales(self) -> bool:
        config = self._sizes.config
        return config.fp8_recipe == "tensorwise" and config.fp8.fp8_amax_reduce

    def enter(self, forward: Work, tokens: float, channels: float, number_bytes: int | None = None) -> None:
        """From the residual stream to what every tensor-parallel rank sees: mappings.enter_tensor_region."""
        size = tokens * channels * (number_bytes or self._sizes.number_bytes)
        if self._is_parallel:
            forward.add(AxisExchange("all_gather", size, "tensor"))
            self._passes.input.add(AxisExchange("reduce_scatter", size, "tensor"))
        else:
            self._passes.input.add(AxisExchange("all_reduce", size, "tensor"))

    def leave(self, forward: Work, tokens: float, channels: float) -> None:
        """From partial sums back to the residual stream: mappings.leave_tensor_region."""
        size = tokens * channels * self._sizes.number_bytes
        if self._is_parallel:
            forward.add(AxisExchange("reduce_scatter", size, "tensor"))
            self._passes.input.add(AxisExchange("all_gather", size, "tensor"))
        else:
            forward.add(AxisExchange("all_reduce", size, "tensor"))

    def _hides_exchanges(self, linear: LinearLayer) -> bool:
        """A column-parallel layer exchanges behind its products in the backward pass, but for some methods."""
        if linear.in_fp8:
            return self._is_scaled
        return not linear.weight.quantized

    def _enter(self, linear: LinearLayer, forward: Work, tokens: float, inputs: int) -> None:
        if not self._hides_exchanges(linear):
            self.enter(forward, tokens, inputs)
        elif self._is_parallel:
            forward.add(AxisExchange("all_gather", tokens * inputs * self._sizes.number_bytes, "tensor"))

    def _leave_backward(
        self, linear: LinearLayer, of_input: Operation, of_weight: Operation, tokens: float, inputs: int
    ) -> None:
        """Gather the rows again behind the product for the inputs, sum their gradient behind that for the weight."""
        if not self._hides_exchanges(linear):
            return
        passes, size = self._passes, tokens * inputs * self._sizes.number_bytes
        defers = self._sizes.config.parallel.schedule == "zero-bubble"
        behind: tuple[Operation, ...] = ()
        if linear.weight.trained and self._is_parallel:
            gathered = AxisExchange("all_gather", size, "tensor")
            if defers:
                passes.weight.add(gathered)
            else:
                passes.input.add(Hidden((gathered,), (of_input,)))
        if linear.weight.trained and not defers:
            behind = (of_weight,)
        kind: Collective = "reduce_scatter" if self._is_parallel else "all_reduce"
        passes.input.add(Hidden((AxisExchange(kind, size, "tensor"),), behind))

    def _add_bias(
        self, linear: LinearLayer, forward: Work, tokens: float, outputs: int, count: float, *, exchanged: bool
    ) -> None:
        assert linear.bias is not None
        if exchanged and not linear.is_column:
            # added after the sum; elsewhere in the product itself
            stream = self._sizes.own_tokens * outputs
            forward.add(Pointwise("residual", "forward", self._precision, stream), count)
        if linear.bias.trained:
            # its gradient reads that of the outputs, and writes next to nothing
            self._passes.weight.add(Move(tokens * outputs * self._sizes.number_bytes / 2), count)

    def _add_adapters(
        self,
        linear: LinearLayer,
        forward: Work,
        tokens: float,
        outputs: int,
        inputs: int,
        count: float,
        *,
        exchanged: bool,
    ) -> None:
        passes, precision, sizes = self._passes, self._precision, self._sizes
        rank, enters = linear.rank_of(), exchanged and linear.is_column
        # A sees a rank's own rows of the stream
        own = tokens / sizes.sequence_cut if enters else tokens
        if linear.dropout > 0:
            drop = Pointwise("residual_dropout", "forward", precision, own * inputs)
            forward.add(drop, count)
            passes.input.add(drop, count)
        roles: list[tuple[Role, Work]] = [("forward", forward), ("input", passes.input)]
        for role, work in (*roles, ("weight", passes.input)):
            work.add(LinearProduct(precision, role, own, rank, inputs), count)
            work.add(LinearProduct(precision, role, tokens, outputs, rank), count)
        if enters:
            self.enter(forward, tokens, rank)
        if start := linear.rank_of("lora_start_A"):
            for role, work in roles:
                work.add(LinearProduct(precision, role, own, start, inputs), count)
                work.add(LinearProduct(precision, role, tokens, outputs, start), count)
        if linear.scales_weight:
            # norms of the rows of weight and adapter together, and the output times gains
            forward.add(LinearProduct(precision, "forward", outputs, rank, inputs), count)
            forward.add(Move(outputs * inputs * sizes.number_bytes / 2), count)
            if linear.weight.quantized:
                forward.add(Pointwise("quantized", "forward", precision, outputs * inputs), count)
            scaled = Pointwise("residual", "forward", precision, tokens * outputs)
            forward.add(scaled, count)
            passes.input.add(scaled, 2 * count)
            if linear.dropout > 0:
                # the base's product again, of the dropped inputs
                for role, work in roles:
                    work.add(LinearProduct(precision, role, tokens, outputs, inputs), count)
                    work.add(scaled, count)

    def _accumulate(self, linear: LinearLayer, count: float) -> None:
        trained = [shard for shard in (linear.bias, *linear.added.values()) if shard is not None and shard.trained]
        # a scaled product adds to no sum
        if linear.weight.trained and (linear.in_fp8 or not self._adds_in_float32):
            trained.append(linear.weight)
        add_sums(self._passes.weight, trained, self._sizes, self._layout, count)


def add_sums(work: Work, trained: list[Shard], sizes: MicrobatchSizes, layout: Layout, count: float = 1.0) -> None:
    """Add the gradients of these parameters to their sums over microbatches."""
    numbers = sum(held_numel(shard, layout) for shard in trained)
    if numbers:
        work.add(Pointwise("accumulate", "forward", sizes.config.training.precision, numbers), count)
