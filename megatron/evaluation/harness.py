"""A model of this project behind lm-eval's interface, and a run of lm-eval's tasks.

Imported late: it needs lm-eval. Nothing is downloaded unless the user's environment says so: tasks and their data are
local files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.base import Added
from megatron.evaluation.commands import Commands
from megatron.evaluation.options import EvaluationOptions
from megatron.evaluation.scoring import Continuation
from megatron.generation.options import GenerationOptions
from megatron.generation.prompts import PromptEncoder
from megatron.options.config import ConfigError

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
_hub = sys.modules.get("huggingface_hub.constants")
if _hub is not None and "HF_HUB_OFFLINE" not in os.environ:  # it was imported for the name of the model
    _hub.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
for _name in OFFLINE:  # before datasets and huggingface_hub are imported; =0 allows downloads
    os.environ.setdefault(_name, "1")

try:
    from lm_eval import evaluator, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ConfigError(
        [f"tasks need lm-eval, which cannot be imported ({error}); install the extra: pip install '.[eval]'"]
    ) from None

MAX_NEW_TOKENS = 256
"""Longest answer of a task that says nothing else, as of lm-eval's own models."""
NO_CACHED_DATASET = "Couldn't find cache for"
"""Message of the datasets library, offline, for a dataset that has not been downloaded."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_beams", "length_penalty")


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """lm-eval's interface, on rank 0. Tokens and metrics are those of its `hf` model."""

    def __init__(self, commands: Commands, encoder: PromptEncoder, options: EvaluationOptions) -> None:
        super().__init__()
        self._commands, self._encoder, self._options = commands, encoder, options
        self._tokenizer = encoder.tokenizer
        model = commands.model
        # without learned positions a model has no last one: then the length of its training counts
        self.max_length = options.max_length or model.max_positions or model.config.training.seq_length
        if model.max_positions is not None:
            self.max_length = min(self.max_length, model.max_positions)

    @property
    def eot_token_id(self) -> int:
        if self._tokenizer.eod is None:
            raise DataError("the tokenizer has no end-of-text token, with which lm-eval begins texts; give --eod-token")
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        # as `hf`: BOS if there is one, else the end-of-text token
        bos: int | None = getattr(self._tokenizer, "bos", None)
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self._tokenizer.identity["sha256"])

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._encoder.template.source.text if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self._encoder.template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        # the last message is to be continued: what the template writes behind it is left out
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        ids: list[int] = self._tokenizer.encode_plain([string]).ids.tolist()
        # a chat template may have written BOS already: `hf` looks for it in the text, this in the ids
        if add_special_tokens is None:
            add_special_tokens = ids[:1] != [self.prefix_token_id]
        if not add_special_tokens:
            return ids
        added: Added = getattr(self._tokenizer, "added", Added())
        return [*added.before, *ids, *added.after]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **ignored: Any
    ) -> list[tuple[float, bool]]:
        sent = []
        for (context, continuation), before, ids in requests:
            if not ids or len(ids) > self.max_length:
                raise DataError(
                    f"the continuation {continuation[:40]!r} of {context[-40:]!r} has {len(ids)} tokens; "
                    f"lm-eval scores 1 to max_length={self.max_length}"
                )
            # as lm-eval's (context + continuation)[-(max_length + 1):][:-1]: the last id is predicted, never read
            room = self.max_length + 1 - len(ids)
            sent.append(Continuation(tuple(before[-room:]), tuple(ids)))
        found = [(score.total, score.is_greedy) for score in self._commands.score(sent)]
        for (arguments, _, _), result in zip(requests, found, strict=True):
            # lm-eval's own cache of requests, which every model has to fill
            self.cache_hook.add_partial("loglikelihood", arguments, result)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[Continuation] = []
        counts: list[int] = []
        for request in requests:
            (text,) = request.args
            found = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            # all windows of all texts in one call: packed into rows together
            pairs = list(map(utils.make_disjoint_window, found))
            windows += [Continuation(tuple(context), tuple(ids)) for context, ids in pairs]
            counts.append(len(pairs))
        scores = iter(self._commands.score(windows))
        return [sum(next(scores).total for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        results: list[str] = [""] * len(requests)
        # a batch has one set of options; requests of one task usually share theirs
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        for numbers in groups.values():
            until, options = self._generation_options(requests[numbers[0]].args[1])
            room = self.max_length - options.max_new_tokens
            if room < 1:
                raise DataError(
                    f"a task generates {options.max_new_tokens} tokens, but max_length={self.max_length} leaves no "
                    "room for its prompt; raise --max-length, or lower the task's max_gen_toks"
                )
            # a prompt loses its beginning, as in lm-eval: the question is at its end
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            found = self._commands.generate(prompts, options, sorted(self._encoder.ends(of_chats=False).ids))
            hidden = self._tokenizer.special_ids
            for number, ids in zip(numbers, found, strict=True):
                # skip_special_tokens, as `hf` decodes
                text = self._tokenizer.decode([token for token in ids if token not in hidden])
                results[number] = postprocess_generated_text(text, until, None)
                self.cache_hook.add_partial("generate_until", requests[number].args, results[number])
        return results

    def _generation_options(self, given: Mapping[str, Any]) -> tuple[list[str], GenerationOptions]:
        """Return the strings that end a text, and the options of a task's generation_kwargs."""
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), MAX_NEW_TOKENS))
        until, length = list(wanted.pop("until", [])), wanted.pop("max_gen_toks")
        # lm-eval's own rule: without do_sample any temperature is 0
        if not wanted.pop("do_sample", False):
            wanted["temperature"] = 0.0
        values = {name: wanted.pop(name) for name in SAMPLING if name in wanted}
        # an unknown option would change the task's results in silence
        if wanted:
            raise ConfigError(
                [
                    f"a task's generation_kwargs has {', '.join(sorted(wanted))}, which this project does not have; "
                    f"use {', '.join(('until', 'max_gen_toks', 'do_sample', *SAMPLING))}"
                ]
            )
        # a beam search has no stop strings here; postprocess_generated_text cuts its text at them afterwards
        stop = () if values.get("num_beams", 1) > 1 else tuple(each for each in until if each)
        options = GenerationOptions(max_new_tokens=length, stop=stop, **values)
        if faults := list(options.faults()):
            raise ConfigError([f"a task's generation_kwargs: {fault}" for fault in faults])
        return until, options


def check_tasks(options: EvaluationOptions) -> None:
    """Read the tasks and their data as `run_tasks` does. Raises DataError."""
    with _named_faults(options):
        _manager(options).load(list(options.tasks))


def run_tasks(commands: Commands, options: EvaluationOptions, *, bootstrap_iters: int = 1000) -> dict[str, Any]:
    """Return lm-eval's results of the tasks. On rank 0 alone. Raises ConfigError or DataError.

    `bootstrap_iters` 0: without standard errors, and without the processes that lm-eval forks for them.
    """
    encoder = PromptEncoder(commands.model, options.chat_template, None, None)
    if options.apply_chat_template:
        encoder.template  # noqa: B018  # its faults come before the tasks are read
    limit = options.limit
    if limit is not None and limit >= 1:
        limit = int(limit)
    with _named_faults(options):
        results: dict[str, Any] | None = evaluator.simple_evaluate(
            model=HarnessModel(commands, encoder, options),
            tasks=list(options.tasks),
            task_manager=_manager(options),
            num_fewshot=options.num_fewshot,
            limit=limit,
            log_samples=options.log_samples,
            system_instruction=options.system_instruction,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=options.fewshot_as_multiturn and options.apply_chat_template,
            bootstrap_iters=bootstrap_iters,
        )
    assert results is not None  # they are on rank 0
    return results


def _manager(options: EvaluationOptions) -> TaskManager:
    # lm-eval's own tasks are more than 10,000 YAML files: they are listed only where a name may be one of them
    has_names = any(not task.endswith((".yaml", ".yml")) for task in options.tasks)
    return TaskManager(include_path=list(options.task_path) or None, include_defaults=has_names)


@contextmanager
def _named_faults(options: EvaluationOptions) -> Iterator[None]:
    """Turn lm-eval's and datasets' errors of tasks and their files into a DataError."""
    try:
        yield
    except (DataError, ConfigError):
        raise
    except (KeyError, ValueError, OSError) as error:
        named = f"lm-eval cannot run {' '.join(options.tasks)}: {type(error).__name__}: {error}"
        if _lacks_a_file(error):
            named += "; nothing is downloaded unless HF_HUB_OFFLINE=0 and HF_DATASETS_OFFLINE=0 are set"
        raise DataError(named) from error


def _lacks_a_file(error: BaseException | None) -> bool:
    """Return True for an error whose cause is that a file is neither here nor may be downloaded."""
    # datasets wraps the reason in errors of its own, by `from` or while handling another
    while error is not None:
        if isinstance(error, FileNotFoundError | ConnectionError):
            return True
        if isinstance(error, ValueError) and str(error).startswith(NO_CACHED_DATASET):
            return True
        error = error.__cause__ or error.__context__
    return False


def table(results: dict[str, Any]) -> str:
    """Return lm-eval's table of results, and that of groups."""
    text: str = utils.make_table(results)
    return text + ("\n" + utils.make_table(results, "groups") if results.get("groups") else "")


def as_json(results: dict[str, Any]) -> str:
    return json.dumps(results, indent=2, ensure_ascii=False, default=utils.handle_non_serializable)
