"""Generation for the prompts of a command: encoding, texts as they grow, results, and what it took.

Rank 0 reads the prompts and writes the results. The rank that decides when a text ends may be another one.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.generation.generator import BatchSettings, GenerationStatistics, OnToken, generate, request_faults
from megatron.generation.graphs import check_graphs
from megatron.generation.jsonl import Prompt, PromptSource, ResultFile, as_line, as_result
from megatron.generation.model import InferenceModel, sequence_faults
from megatron.generation.options import GenerateCommand, GenerationOptions
from megatron.generation.passes import KeptText
from megatron.generation.prompts import Ends, PromptEncoder
from megatron.generation.requests import Completion, Reason, Request
from megatron.generation.text import GeneratedText, GrowingTexts
from megatron.options.config import ConfigError
from megatron.resilience.errors import raise_on_all_ranks
from megatron.runtime.accelerator import MAX_ALLOCATED, memory_stats
from megatron.runtime.commands import counted

PROMPTS_AT_ONCE = 64
"""Prompts that are read ahead, for each row of the batch of a copy of the model."""

OnText = Callable[[str], object]


class Session:
    """A loaded model with the options of a command. Raises ConfigError or DataError on all ranks alike."""

    def __init__(self, model: InferenceModel, command: GenerateCommand):
        self.model, self.command, self.options = model, command, command.generation
        prompts = command.prompts
        if prompts.use_graphs:
            check_graphs(model.ctx)
        self.encoder = PromptEncoder(model, prompts.chat_template, command.load.tokenizer_model, prompts.system)
        faults = list(_unknown_ids(self.options, model))
        if faults:
            raise ConfigError(faults)
        self.settings = BatchSettings(batch_size=prompts.batch_size, use_graphs=prompts.use_graphs)
        self.statistics = GenerationStatistics()
        self._ends: dict[bool, Ends] = {}
        self._ends_of(is_chat=prompts.chat or prompts.as_chat)  # its faults come first
        self.num_out_of_positions = 0
        """Texts that ended at the last of the model's learned positions, before max_new_tokens. On rank 0."""
        self.is_interrupted = False
        """Set, on every rank, to end the texts under way after their next token."""

    def faults(self, request: Request) -> list[str]:
        """Describe what is wrong with a request, without its number."""
        faults = request_faults(self.model, [request], self.options, self.settings)
        return [fault.removeprefix(f"prompt {request.number} ") for fault in faults]

    def show(self, request: Request, on_text: OnText, kept: KeptText | None = None) -> list[Completion]:
        """Generate one text, whose pieces `on_text` receives on rank 0 while it grows. Returns it there. Collective.

        `kept`: what a chat keeps between its turns.
        """
        shown = self._text(request)

        def on_token(number: int, sample: int, token: int) -> None:
            # the text is decoded where it is printed; the other ranks have nothing to show
            if self.model.ctx.rank == 0:
                on_text(shown.add(token))

        done = list(self._generate([request], request.is_chat, on_token, kept))
        if self.model.ctx.rank == 0:
            on_text(shown.finish())
        return done

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yield the texts on rank 0, in order. Collective."""
        kinds = {request.is_chat for request in requests}
        if len(kinds) == 1:
            yield from self._generate(requests, kinds.pop())
            return
        # a batch has one set of final ids, so texts and chats are generated one after the other
        by_request: dict[int, list[Completion]] = defaultdict(list)
        # sorted: every rank has to generate the kinds in one order. Texts come first
        for is_chat in sorted(kinds):
            of_kind = [request for request in requests if request.is_chat == is_chat]
            for completion in self._generate(of_kind, is_chat):
                by_request[completion.request].append(completion)
        for request in requests:
            yield from by_request[request.number]

    def _generate(
        self,
        requests: Sequence[Request],
        is_chat: bool,
        on_token: OnToken = lambda *token: None,
        kept: KeptText | None = None,
    ) -> Iterator[Completion]:
        ends = self._ends_of(is_chat=is_chat)
        by_number = {request.number: request for request in requests}
        of_beams = self.options.num_beams > 1
        texts = GrowingTexts(ends.strings, lambda number: self._text(by_number[number]), of_beams=of_beams)

        def is_finished(number: int, sample: int, ids: Sequence[int]) -> Reason | None:
            # checked at each token, so an interruption ends after the token under way and no rank is left in a
            # collective
            if self.is_interrupted:
                return "interrupted"
            return texts.reason(number, sample, ids)

        for completion in generate(
            self.model,
            requests,
            self.options,
            eos_ids=ends.ids,
            settings=self.settings,
            is_finished=is_finished,
            on_token=on_token,
            statistics=self.statistics,
            kept=kept,
        ):
            self.num_out_of_positions += self.is_out_of_positions(completion)
            yield completion

    def _text(self, request: Request) -> GeneratedText:
        keep_special = self.command.prompts.keep_special_tokens
        options = dataclasses.replace(self.options, stop=self._ends_of(is_chat=request.is_chat).strings)
        return GeneratedText(self.encoder.tokenizer, request.prompt, options, keep_special=keep_special)

    def _ends_of(self, *, is_chat: bool) -> Ends:
        """Return what ends a text, or an answer of a chat. Raises DataError."""
        if is_chat not in self._ends:
            own = self.encoder.ends(of_chats=is_chat)
            self._ends[is_chat] = Ends(own.ids, (*self.options.stop, *own.strings))
        return self._ends[is_chat]

    def text_of(self, request: Request, completion: Completion) -> str:
        """Return the text of a completion, up to a stop string."""
        text = self._text(request)
        return "".join([text.add(token) for token in completion.ids]) + text.finish()

    def is_out_of_positions(self, completion: Completion) -> bool:
        """Return True for a text that ended where the model has no further learned position."""
        return completion.reason == "length" and len(completion.ids) < self.options.max_new_tokens

    def out_of_positions(self) -> str:
        """Describe the texts that ended at the last learned position; "" if there are none."""
        if not self.num_out_of_positions:
            return ""
        texts = counted(self.num_out_of_positions, "text")
        return (
            f"{texts} ended before max_new_tokens={self.options.max_new_tokens}: the model has "
            f"{self.model.max_positions:,} learned positions, for prompt and text together"
        )

    def summary(self) -> str:
        """Describe what all copies of the model have generated, in what time, and the memory of rank 0. Collective."""
        ctx = self.model.ctx
        of_ranks = ctx.gather_objects(asdict(self.statistics))
        if ctx.rank != 0:
            return ""
        # a rank of each replica: of the first stage, which comes first
        replicas = of_ranks[: ctx.tensor_size * ctx.num_batch_ranks : ctx.tensor_size]
        parts = [_throughput("prefill", replicas, "prompt_tokens", "prefill_s")]
        if self.statistics.kept_tokens:
            parts.append(f"{self.statistics.kept_tokens:,} tokens of earlier turns kept")
        parts.append(_throughput("decode", replicas, "new_tokens", "decode_s"))
        if self.statistics.graphs:
            parts.append(f"{self.statistics.graphs:,} graphs captured")
        gib = 2.0**30
        weights, cache = self.model.weight_bytes / gib, self.statistics.cache_bytes / gib
        peak = memory_stats()[MAX_ALLOCATED]
        return (
            f"{'; '.join(parts)}; memory of a rank: weights {weights:.2f} GB, cache {cache:.2f} GB, peak {peak:.2f} GB"
        )


def _throughput(name: str, replicas: Sequence[dict[str, Any]], tokens: str, seconds: str) -> str:
    """Describe what all replicas have done of one kind, and in what time: the longest of theirs."""
    # replicas work side by side: their tokens add up, their seconds do not
    count, time_s = sum(each[tokens] for each in replicas), max(each[seconds] for each in replicas)
    text = f"{name} {count:,} tokens in {time_s:.2f} s"
    if time_s:
        text += f" ({count / time_s:,.0f}/s)"
    return text


def _unknown_ids(options: GenerationOptions, model: InferenceModel) -> Iterator[str]:
    """Describe the ids of options that the model does not have."""
    ids_of = {"stop_token_ids": options.stop_token_ids, "logit_bias": [token for token, _ in options.logit_bias]}
    for name, ids in ids_of.items():
        for fault in sequence_faults(model, ids, 0):
            yield f"{name} {fault}"


def run_prompts(session: Session) -> None:
    """Generate for every prompt of the command, and write the results in their order. Collective."""
    ctx = session.model.ctx
    source = PromptSource(session.command, session.encoder, session.faults)
    prompts, writer = raise_on_all_ranks(ctx, lambda: _opened(session, source))
    num_texts = 0
    try:
        for block, requests in _blocks(session, prompts):
            num_texts += _run_block(session, block, requests, writer, is_first=not num_texts)
        if writer is not None:
            writer.finish()
    finally:
        if writer is not None:
            writer.close()
    if ctx.rank == 0:
        print(_account(session, source, writer, num_texts), file=sys.stderr)
    for line in (session.out_of_positions(), session.summary()):
        if line and num_texts:
            print(line, file=sys.stderr)


def _opened(session: Session, source: PromptSource) -> tuple[Iterator[Prompt], ResultFile | None]:
    """Return the prompts that are left to do, and the file of results. On rank 0; the others have neither."""
    if session.model.ctx.rank != 0:
        return iter(()), None
    output = session.command.prompts.output
    if output is None:
        return iter(source), None
    writer = ResultFile(Path(output), session.command, session.model)
    return writer.missing(iter(source)), writer


def _blocks(session: Session, prompts: Iterator[Prompt]) -> Iterator[tuple[list[Prompt], list[Request]]]:
    """Yield prompts, on rank 0, and their requests, on all ranks. Collective."""
    ctx = session.model.ctx
    # an input of any size is read in blocks: at the end of a block rows run empty, so it has many batches
    size = PROMPTS_AT_ONCE * session.settings.batch_size * ctx.num_batch_ranks
    while True:
        # the other ranks' iterator is empty; an error of the reader on rank 0 must end them too
        block = raise_on_all_ranks(ctx, lambda: list(itertools.islice(prompts, size)))
        requests: list[Request] = ctx.broadcast_object([prompt.request for prompt in block])
        if not requests:
            return
        yield block, requests


def _account(session: Session, source: PromptSource, writer: ResultFile | None, num_texts: int) -> str:
    """Describe what was written, was there before, and was left out."""
    output = session.command.prompts.output
    line = counted(num_texts, "text")
    if output:
        line += f" in {output}"
    if writer and writer.num_present:
        line += f", beside {writer.num_present:,} that were there"
    if source.num_bad:
        line += f"; {source.num_bad:,} bad lines left out"
    return line


def _run_block(
    session: Session, block: Sequence[Prompt], requests: list[Request], writer: ResultFile | None, *, is_first: bool
) -> int:
    """Generate for some prompts; return the number of texts. Collective."""
    options, prompts = session.options, session.command.prompts
    # texts of --prompt on a terminal, not JSON lines
    is_plain = writer is None and prompts.input is None
    # only a single text can be printed while it grows: several would be interleaved
    is_single = len(requests) == 1 and options.num_samples == 1 and options.num_beams == 1 and is_first
    if is_plain and is_single and len(prompts.prompt) == 1:
        # on rank 0, which alone has the prompt
        if block and not prompts.as_chat:
            _print(block[0].row["prompt"])
        done = session.show(requests[0], _print)
        if block:
            _print("\n")
        return len(done)
    num_texts = 0
    completions: list[Completion] = []
    waiting = iter(block)
    for completion in session.generate(requests):
        num_texts += 1
        completions.append(completion)
        # completions come in the order of prompts and samples, so a full list belongs to the next prompt
        if len(completions) == options.num_samples:
            _write(session, next(waiting), completions, writer, is_plain=is_plain)
            completions = []
    return num_texts


def _write(
    session: Session, prompt: Prompt, completions: list[Completion], writer: ResultFile | None, *, is_plain: bool
) -> None:
    decode = session.encoder.tokenizer.decode
    result = as_result(
        prompt,
        completions,
        partial(session.text_of, prompt.request),
        lambda token: decode([token]),
        with_ids=session.command.prompts.token_ids,
    )
    if writer is not None:
        writer.write(result)
    elif not is_plain:
        _print(as_line(result))
    else:
        for number, completion in enumerate(completions, start=1):
            name, text = f"prompt {prompt.request.number + 1}", session.text_of(prompt.request, completion)
            if len(completions) > 1:
                name += f", text {number}"
            if not session.command.prompts.as_chat:
                text = prompt.row["prompt"] + text
            _print(f"--- {name}\n{text}\n")


def _print(text: str) -> None:
    # stdout may be a pipe: each result is written at once, for a program that reads along
    sys.stdout.write(text)
    sys.stdout.flush()


COLUMNS = ("batch", "prompt", "new", "prefill tok/s", "decode tok/s", "ms/token", "first token ms", "cache GB")


def print_throughput(model: InferenceModel, command: GenerateCommand) -> None:
    """Measure every batch size with every length, and print a line for each. Collective. Raises ConfigError.

    Sequences of one length with random ids, as many as the batches of all copies hold; the first run of a shape is not
    counted.
    """
    # every text must have all max_new_tokens, whatever is generated: else the figures would depend on the weights
    options = replace(command.generation, ignore_eos=True, stop=(), stop_token_ids=())
    options = replace(options, min_new_tokens=options.max_new_tokens)
    prompts = command.prompts
    cases = [
        _Case(model, options, BatchSettings(batch_size=size, use_graphs=prompts.use_graphs), length)
        for length in prompts.benchmark_prompt_lengths
        for size in prompts.benchmark_batch_sizes
    ]
    # all cases are checked before the first one runs: measuring takes minutes
    faults = [fault for case in cases for fault in request_faults(model, case.requests, options, case.settings)]
    faults += [fault for length in prompts.benchmark_prompt_lengths for fault in _too_long(model, options, length)]
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    if model.ctx.rank == 0:
        print("  ".join(COLUMNS), flush=True)
    for case in cases:
        # loads kernels in little time: at most two texts a copy
        case.run(case.requests[: 2 * model.ctx.num_batch_ranks])
        statistics, first_token_s = case.run(case.requests)
        if model.ctx.rank == 0:
            print(case.line(statistics, first_token_s), flush=True)


def _too_long(model: InferenceModel, options: GenerationOptions, length: int) -> Iterator[str]:
    """Describe prompts whose texts would end at the last learned position: shorter than the figures say."""
    needed = length + options.max_new_tokens - 1  # the last token is never read
    positions = model.max_positions
    if positions is not None and length <= positions < needed:
        yield (
            f"prompts of {length} tokens with max_new_tokens={options.max_new_tokens} need {needed} positions, but "
            f"the model has {positions} learned ones; lower benchmark_prompt_lengths or max_new_tokens"
        )


class _Case:
    """A batch size and a length of prompts."""

    def __init__(self, model: InferenceModel, options: GenerationOptions, settings: BatchSettings, length: int):
        self._model, self._options, self.settings, self._length = model, options, settings, length
        self.requests = [
            _random_request(model, number, length) for number in range(settings.batch_size * model.ctx.num_batch_ranks)
        ]

    def run(self, requests: Sequence[Request]) -> tuple[GenerationStatistics, float]:
        """Generate; return the statistics, and the seconds to the first token. Collective."""
        statistics = GenerationStatistics()
        began = time.perf_counter()
        first_s: list[float] = []

        def on_token(number: int, sample: int, token: int) -> None:
            if not first_s:
                first_s.append(time.perf_counter() - began)

        completions = generate(
            self._model, requests, self._options, settings=self.settings, on_token=on_token, statistics=statistics
        )
        list(completions)
        return statistics, first_s[0]

    def line(self, statistics: GenerationStatistics, first_token_s: float) -> str:
        """Return the line of the table: this rank's figures, for all copies."""
        copies, new = self._model.ctx.num_batch_ranks, self._options.max_new_tokens
        # the first token of each text is of the pass over its prompt
        decoded = statistics.new_tokens - len(self.requests) // copies
        values = (
            f"{self.settings.batch_size}",
            f"{self._length}",
            f"{new}",
            _rate(copies * statistics.prompt_tokens, statistics.prefill_s),
            _rate(copies * decoded, statistics.decode_s),
            f"{1000 * statistics.decode_s / max(1, new - 1):,.1f}",
            f"{1000 * first_token_s:,.0f}",
            f"{statistics.cache_bytes / 2**30:.3f}",
        )
        return "  ".join(value.rjust(len(name)) for value, name in zip(values, COLUMNS, strict=True))


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}" if seconds else "-"


def _random_request(model: InferenceModel, number: int, length: int) -> Request:
    generator = torch.Generator().manual_seed(number)
    return Request(number, tuple(torch.randint(model.vocab_size, (length,), generator=generator).tolist()))
