"""Texts for a list of prompts, on any layout.

Each data-parallel rank's copy of the model (a replica) has a batch of rows, and a text leaves its row as soon as it has
ended. The rows are cut into a group for each pipeline stage, so that all stages have work. One rank, the first of the
last stage, chooses the tokens and sends them to the others; from the same tokens all of them derive the same next pass.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.generation.chooser import BeamResult, Chooser, IsFinished, chooser_of
from megatron.generation.graphs import uses_graphs
from megatron.generation.model import InferenceModel, sequence_faults
from megatron.generation.options import GenerationOptions
from megatron.generation.passes import KeptText, PromptPass, StagePasses, prompt_passes
from megatron.generation.requests import REASONS, Completion, MostTokens, Request, RowGroup, Unit, Verdict, units_of
from megatron.models.attention.kv_cache import KVCache, row_bytes
from megatron.models.attention.layer import SelfAttention
from megatron.options.config import ConfigError
from megatron.parallel.messages import Sends, receive
from megatron.resilience.errors import raise_on_all_ranks
from megatron.runtime.accelerator import free_memory_bytes
from megatron.runtime.devices import device_of

VERDICT_TAG = 5
TURNS_BETWEEN_EXCHANGES = 32
"""Passes of a replica between two collections of finished texts on rank 0."""

OnToken = Callable[[int, int, int], None]
"""(number of the request, sample, token)"""


@dataclass(frozen=True)
class BatchSettings:
    """Size of the batch, and how it runs."""

    batch_size: int = 16
    """Largest number of texts that a replica generates at once."""
    use_graphs: bool | None = None
    """Replay each token's pass as a graph of the device. None: on CUDA, unless ranks share layers."""


@dataclass
class GenerationStatistics:
    """Counts and times of this rank's replica."""

    prompt_tokens: int = 0
    """Those that were read."""
    kept_tokens: int = 0
    """Tokens of prompts whose keys and values were there."""
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cache_bytes: int = 0
    """Keys and values on this rank."""
    graphs: int = 0
    """Graphs of the device that were captured."""


def generate(
    model: InferenceModel,
    requests: Sequence[Request],
    options: GenerationOptions,
    *,
    eos_ids: Collection[int] = (),
    settings: BatchSettings | None = None,
    is_finished: IsFinished = lambda *text: None,
    on_token: OnToken = lambda *token: None,
    statistics: GenerationStatistics | None = None,
    kept: KeptText | None = None,
) -> Iterator[Completion]:
    """Yield the texts of all requests on rank 0, in their order and that of their samples; nothing on other ranks.

    Collective: every rank passes the same arguments, and takes all that is yielded. `is_finished` is called on the
    rank that decides, `on_token` on every rank of a replica. `statistics` is added to. `kept`: for one text of one
    prompt on one replica; the prompt's beginning is not read again where it is that of the text before.

    Raises ConfigError for requests that the model cannot take, before anything runs.
    """
    settings, statistics = settings or BatchSettings(), statistics or GenerationStatistics()
    faults = list(request_faults(model, requests, options, settings))
    if faults:
        raise ConfigError(faults)
    ctx = model.ctx
    texts_of_a_prompt = max(options.num_beams, options.num_samples)
    if kept is not None and len(requests) * texts_of_a_prompt * ctx.num_batch_ranks != 1:
        raise ValueError("keys and values are kept for one text of one prompt on one replica")
    chooser: Chooser | None = None
    if model.ctx.is_last_stage and model.ctx.tensor_rank == 0:
        chooser = chooser_of(options, model.vocab_size, eos_ids, is_finished)
    # dealt out in turn, so that the first results are complete while the last prompts still wait
    own = requests[ctx.batch_rank :: ctx.num_batch_ranks]
    replica = _Replica(model, own, options, settings, chooser, statistics, kept)
    # texts end in any order; they are held back until all before them are there
    order = deque(itertools.product([request.number for request in requests], range(options.num_samples)))
    finished: dict[tuple[int, int], Completion] = {}
    for completions in _of_all_replicas(model, replica.run(on_token)):
        finished |= {(each.request, each.sample): each for each in completions}
        while order and order[0] in finished:
            yield finished.pop(order.popleft())


def _of_all_replicas(model: InferenceModel, turns: Iterator[list[Completion]]) -> Iterator[list[Completion]]:
    """Yield the texts that ended in all replicas, on rank 0, until all are done. Collective.

    `turns`: the texts that end in this rank's replica.
    """
    # one copy has nothing to exchange: its texts are given as they end. The collection over several is a collective,
    # too slow for each token
    count = 1 if model.ctx.num_batch_ranks == 1 else TURNS_BETWEEN_EXCHANGES
    is_done = False
    while not is_done:
        taken = list(itertools.islice(turns, count))
        own = [completion for turn in taken for completion in turn]
        # a copy that is done goes on exchanging nothing: the collective needs it until all are
        completions, is_done = _exchange(model, own, len(taken) < count)
        yield completions


def request_faults(
    model: InferenceModel, requests: Sequence[Request], options: GenerationOptions, settings: BatchSettings
) -> Iterator[str]:
    """Yield what is wrong with the requests, each by its number, and with the batch."""
    for request in requests:
        for fault in _faults_of(request, model, options):
            yield f"prompt {request.number} {fault}"
    if settings.batch_size < options.num_beams:
        yield (
            f"batch_size={settings.batch_size} is too small for num_beams={options.num_beams}, whose beams are in one "
            f"batch; set batch_size to {options.num_beams} or more"
        )


def _faults_of(request: Request, model: InferenceModel, options: GenerationOptions) -> Iterator[str]:
    if not request.prompt:
        yield "has no tokens; give at least one, such as the tokenizer's begin-of-text token"
        return
    needed = len(request.prompt)
    if options.num_beams > 1:
        needed += options.max_new_tokens - 1  # a beam search compares texts of one largest length
    yield from sequence_faults(model, request.prompt, needed)


def _exchange(model: InferenceModel, completions: list[Completion], is_done: bool) -> tuple[list[Completion], bool]:
    """Return the texts that ended in all replicas, on rank 0, and whether all replicas are done. Collective."""
    ctx = model.ctx
    # all ranks of a replica have the same texts
    if not (ctx.is_first_stage and ctx.tensor_rank == 0):
        completions = []
    if ctx.num_batch_ranks == 1:
        return completions, is_done
    parts = ctx.gather_objects({"done": is_done, "found": [asdict(each) for each in completions]})
    everything = []
    if ctx.rank == 0:
        everything = [_completion(fields) for part in parts for fields in part["found"]]
    return everything, all(part["done"] for part in parts)


def _completion(fields: dict[str, Any]) -> Completion:
    """Return a completion whose tuples have become lists on the way."""
    return Completion(**{name: _tuples(value) for name, value in fields.items()})


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return value


def attention_layers(module: nn.Module) -> list[SelfAttention]:
    """Return the attention of every transformer layer of a stage. Raises ConfigError for a layer without one."""
    attentions = []
    for layer in module.children():
        # embedding, final norm and output have no attention, and need none; a family's own layer without ours would
        # compute without a cache in silence
        names = [getattr(parameter, "full_name", "") for parameter in layer.parameters()]
        own = [each for each in layer.modules() if isinstance(each, SelfAttention)]
        is_transformer = bool(names) and names[0].startswith("layers.")
        if is_transformer and not own:
            name = ".".join(names[0].split(".")[:2])
            raise ConfigError(
                [f"{name} has no SelfAttention of models/attention/layer.py, whose keys and values can be kept"]
            )
        attentions += own
    return attentions


def check_memory(layers: Sequence[SelfAttention], num_rows: int, length: int, dtype: torch.dtype) -> None:
    """Raise ConfigError if the cache of a batch does not fit in what is free."""
    free, one = free_memory_bytes(), row_bytes(layers, length, dtype)
    if num_rows * one <= free:
        return
    most = free // one
    remedy = f"set batch_size to {most} or less" if most else "shorten the prompts, or lower max_new_tokens"
    raise ConfigError(
        [
            f"a batch of {num_rows} texts of up to {length} tokens needs {num_rows * one / 2**30:.2f} GB on a rank for "
            f"keys and values, but {free / 2**30:.2f} GB are free; {remedy}"
        ]
    )


@dataclass
class _Pending:
    """Verdicts of a pass on some rows, to be applied at the group's next turn."""

    rows: list[int]
    verdicts: list[Verdict] | None = None
    """None on ranks that still have to receive them."""
    results: list[BeamResult] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """(source, target, length): rows of the cache to copy before the next pass, of samples and beams of a prompt."""


class _Replica:
    """The batch of one copy of the model, as each of its ranks sees it."""

    def __init__(
        self,
        model: InferenceModel,
        requests: Sequence[Request],
        options: GenerationOptions,
        settings: BatchSettings,
        chooser: Chooser | None,
        statistics: GenerationStatistics,
        kept: KeptText | None,
    ) -> None:
        self._model, self._options, self._chooser, self._statistics = model, options, chooser, statistics
        self._kept = kept
        ctx, beams = model.ctx, options.num_beams
        self._most = MostTokens(options.max_new_tokens, model.max_positions)
        # LongRoPE: all tokens of a longer text have other angles, as in transformers, which then reads it again too.
        # With dynamic NTK it does not: a token keeps the angles that it was read with
        self._border = model.config.model.rotary_border
        if model.config.model.rope_scaling_type != "longrope":
            self._border = None
        # no more rows than there are texts: each costs keys and values for a whole sequence
        num_rows = min(settings.batch_size, len(requests) * max(beams, options.num_samples))
        # a group for each stage keeps all stages at work; a group must hold the beams of one prompt
        num_groups = max(1, min(ctx.num_stages, num_rows // beams))
        size = -(-num_rows // num_groups)
        size = max(beams, size // beams * beams)  # the beams of a prompt are in one group
        self._groups = [RowGroup(index * size, size) for index in range(num_groups)]
        self._waiting: deque[Unit] = units_of(requests, options, size)
        self._pending: dict[int, list[_Pending]] = {group.first: [] for group in self._groups}
        length = max((len(request.prompt) + self._most(request) for request in requests), default=1)
        attentions, num_rows = attention_layers(model.module), num_groups * size

        def new_passes(length: int) -> StagePasses:
            raise_on_all_ranks(ctx, lambda: check_memory(attentions, num_rows, length, model.dtype))
            cache = KVCache(attentions, num_rows, length, model.dtype, ctx.device)
            return StagePasses(model, cache, use_graphs=uses_graphs(settings.use_graphs, ctx))

        self._few_shapes = device_of(ctx.device.type).compiles_shapes
        self._num_kept = 0
        if kept is None:
            self._passes = new_passes(length)
        else:
            # before passes: a larger cache takes over only what the new prompt shares with the last text
            kept.begin(requests[0].prompt, model.config.model, few_shapes=self._few_shapes)
            self._passes = kept.passes(model, attentions, length, new_passes)
            self._num_kept = len(kept.ids)
        self._cache = self._passes.cache
        self._graphs_before = self._passes.num_graphs
        statistics.kept_tokens += self._num_kept
        statistics.cache_bytes = self._cache.num_bytes
        self._others = self._model_ranks()
        # the oldest have been received by then: their rows have had a turn since
        self._sends = Sends(most=16 * len(self._groups) * len(self._others))

    def run(self, on_token: OnToken) -> Iterator[list[Completion]]:
        """Yield the texts that ended, turn by turn of the groups."""
        with torch.no_grad():
            while self._waiting or any(group.active for group in self._groups):
                for group in self._groups:
                    yield self._turn(group, on_token)
        self._statistics.graphs += self._passes.num_graphs - self._graphs_before
        self._passes.end_sends()
        self._sends.end()

    def _turn(self, group: RowGroup, on_token: OnToken) -> list[Completion]:
        # first the verdicts of the last turn: they free rows for prompts that wait. With several groups they have
        # travelled while the others computed
        finished = self._apply(group, on_token)
        began = time.perf_counter()
        placed = group.place(self._waiting, self._most, self._options.num_beams)
        # prompts go first, and the group's texts wait a turn: a decode pass costs the same however few rows are in use
        if placed:
            self._prefill(group, placed)
            self._statistics.prefill_s += time.perf_counter() - began
        elif crossing := group.at(self._border):
            self._read_again(group, crossing)
            self._statistics.prefill_s += time.perf_counter() - began
        elif group.active:
            self._decode(group)
            self._statistics.decode_s += time.perf_counter() - began
        return finished

    def _prefill(self, group: RowGroup, placed: list[tuple[Unit, list[int]]]) -> None:
        # a prompt is read once, in the first row of its unit; the cache copies it for further samples and beams
        by_first = {rows[0]: (unit, rows) for unit, rows in placed}
        if self._chooser is not None:
            for unit, rows in placed:
                self._chooser.add(unit, rows, self._model.ctx.device)
        prompts = [unit.request.prompt for unit, _ in placed]
        for chunk in prompt_passes(list(by_first), prompts, few_shapes=self._few_shapes, first=self._num_kept):
            logits = self._passes.prefill(chunk)
            self._statistics.prompt_tokens += chunk.num_tokens
            if chunk.ends:
                self._judge_prompts(group, chunk, by_first, logits)

    def _judge_prompts(
        self,
        group: RowGroup,
        chunk: PromptPass,
        by_first: dict[int, tuple[Unit, list[int]]],
        logits: Tensor | None,
    ) -> None:
        """Choose the first tokens of all texts of the prompts that end in this chunk."""
        ended = [by_first[chunk.rows[index]] for index, _ in chunk.ends]
        rows = [row for _, own in ended for row in own]
        # logits [ends, V] -> [rows, V]: the samples of a prompt draw from the same distribution, each with its key
        copies = [(own[0], row, len(unit.request.prompt)) for unit, own in ended for row in own[1:]]
        if logits is not None and self._chooser is not None and copies:
            logits = logits.repeat_interleave(torch.tensor([len(own) for _, own in ended]).to(logits.device), dim=0)
        self._judge(group, rows, logits, copies)

    def _read_again(self, group: RowGroup, rows: list[int]) -> None:
        """Read the whole texts of these rows, whose earlier tokens have been encoded as those of shorter ones."""
        texts = [(*group.active[row].request.prompt, *group.active[row].ids) for row in rows]
        found: dict[int, Tensor] = {}
        for chunk in prompt_passes(rows, texts, few_shapes=self._few_shapes):
            logits = self._passes.prefill(chunk)
            self._statistics.prompt_tokens += chunk.num_tokens
            if logits is not None:
                found |= {chunk.rows[index]: row for (index, _), row in zip(chunk.ends, logits, strict=True)}
        # once for all rows: the beams of a prompt are compared
        self._judge(group, rows, torch.stack([found[row] for row in rows]) if found else None, [])

    def _decode(self, group: RowGroup) -> None:
        rows = list(group.rows)
        # rows without a text compute with any token: the shape of a pass never changes
        ids, positions = [0] * len(rows), [0] * len(rows)
        for row, text in group.active.items():
            ids[row - group.first] = text.ids[-1]
            positions[row - group.first] = text.position
        self._judge(group, rows, self._passes.decode(group.first, ids, positions), [])

    def _judge(
        self, group: RowGroup, rows: list[int], logits: Tensor | None, copies: list[tuple[int, int, int]]
    ) -> None:
        """Decide, or expect the decision."""
        pending = _Pending(rows, copies=copies)
        # the other ranks know only that a verdict is due; they receive it at the group's next turn, not now
        if self._chooser is not None:
            assert logits is not None
            pending.verdicts, pending.results = self._chooser.choose(logits, rows, group.active)
            self._send(pending)
        self._pending[group.first].append(pending)

    def _apply(self, group: RowGroup, on_token: OnToken) -> list[Completion]:
        """Take over the tokens of the group's last turn. Returns the texts that ended with them."""
        finished: list[Completion] = []
        for pending in self._pending[group.first]:
            verdicts = pending.verdicts
            if verdicts is None:
                verdicts = self._receive(pending)
            # copies come before the rows change: a source is named by the row that it was in
            self._copy_rows(group, pending, verdicts)
            results = iter(pending.results)
            for row, verdict in group.apply(pending.rows, verdicts):
                self._statistics.new_tokens += 1
                if self._options.num_beams > 1:
                    # the first beam stands for all of a prompt, which end together
                    if verdict.reason is not None and row.sample == 0:
                        finished += self._best(row.request, results)
                    continue
                on_token(row.request.number, row.sample, verdict.token)
                if verdict.reason is not None:
                    finished.append(row.completion(verdict.reason))
                    if self._kept is not None:  # the last token has not been read
                        self._kept.ids = (*row.request.prompt, *row.ids[:-1])
        self._pending[group.first].clear()
        return finished

    def _best(self, request: Request, results: Iterator[BeamResult]) -> Iterator[Completion]:
        """Take the texts of a request from the results of beam searches, which are in the order of their rows."""
        for sample, result in enumerate(itertools.islice(results, self._options.num_samples)):
            yield Completion(request.number, sample, result.ids, result.reason, result.score)

    def _copy_rows(self, group: RowGroup, pending: _Pending, verdicts: list[Verdict]) -> None:
        """Give the rows of samples and beams the keys and values of the row that they continue."""
        copies = list(pending.copies)
        # beams of one prompt that has just been read are all the same
        if not copies:
            copies = [
                (verdict.source, row, group.active[row].position + 1)
                for row, verdict in zip(pending.rows, verdicts, strict=True)
                # + 1: with the newest token, whose keys and values the last pass has written
                if verdict.source != row and row in group.active
            ]
        if copies:
            sources, targets, lengths = zip(*copies, strict=True)
            device = self._model.ctx.device
            self._cache.copy_rows(
                torch.tensor(sources, device=device), torch.tensor(targets, device=device), max(lengths)
            )

    # Messages

    def _model_ranks(self) -> list[int]:
        """Return the other ranks of this replica, or the deciding one alone on those that do not decide."""
        ctx = self._model.ctx
        coordinates = [(ctx.num_stages - 1, 0)]
        if self._chooser is not None:
            coordinates = list(itertools.product(range(ctx.num_stages), range(ctx.tensor_size)))
        ranks = [ctx.rank_at(stage=stage, tensor_rank=tensor_rank) for stage, tensor_rank in coordinates]
        return [rank for rank in ranks if rank != ctx.rank]

    def _send(self, pending: _Pending) -> None:
        if not self._others:
            return
        assert pending.verdicts is not None
        # on the host: no rank waits for its device to read a decision
        messages = [torch.tensor([verdict.encode() for verdict in pending.verdicts], dtype=torch.float64)]
        if pending.results:
            # a fixed width, since the receiver has to allocate the message before it knows the lengths
            message = torch.zeros(len(pending.results), 3 + self._options.max_new_tokens, dtype=torch.float64)
            for row, each in zip(message, pending.results, strict=True):
                numbers = [len(each.ids), REASONS.index(each.reason), each.score, *each.ids]
                row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
            messages.append(message)
        group = self._model.ctx.control_group
        for rank, message in itertools.product(self._others, messages):
            self._sends.send(message, rank, group=group, tag=VERDICT_TAG)

    def _receive(self, pending: _Pending) -> list[Verdict]:
        verdicts = [Verdict.decode(row) for row in self._received(len(pending.rows), 4 + 2 * self._num_alternatives)]
        beams = self._options.num_beams
        # the second message exists only if a search has ended, which the first one shows
        num_ended = sum(verdict.reason is not None for verdict in verdicts) // beams  # beam searches
        if beams == 1 or not num_ended:
            return verdicts
        rows = self._received(num_ended * self._options.num_samples, 3 + self._options.max_new_tokens)
        for length, code, score, *ids in rows:
            reason = REASONS[int(code)]
            assert reason is not None
            pending.results.append(BeamResult(tuple(map(int, ids[: int(length)])), score, reason))
        return verdicts

    def _received(self, rows: int, columns: int) -> list[list[float]]:
        message = torch.empty(rows, columns, dtype=torch.float64)
        receive(message, self._others[0], group=self._model.ctx.control_group, tag=VERDICT_TAG)
        return message.tolist()  # type: ignore[no-any-return]

    @property
    def _num_alternatives(self) -> int:
        return min(self._options.logprobs or 0, self._model.vocab_size)
