"""A model that continues texts and answers chats for programs and notebooks: `megatron.api.load`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.data.index.indexed import DataError
from megatron.generation.jsonl import ids_of
from megatron.generation.loading import load_model
from megatron.generation.model import InferenceModel
from megatron.generation.options import (
    OF_TRAINING,
    GenerateCommand,
    GenerationOptions,
    LoadOptions,
    PromptOptions,
)
from megatron.generation.requests import Request
from megatron.generation.saved_model import parallel_options
from megatron.generation.session import Session
from megatron.options.config import ConfigError
from megatron.options.dialect import nearest, suggestion
from megatron.options.flags import KEYWORD, flag, read_values
from megatron.parallel.context import ParallelContext
from megatron.runtime.accelerator import choose_device
from megatron.runtime.devices import find_device
from megatron.weights.model_folder import fetch_weights

Chat = Sequence[Mapping[str, Any]]
"""Messages: [{"role": "user", "content": "Hello"}, ...]."""
Prompt = str | Chat

OF_PROMPTS = ("system", "chat_template", "as_chat", "keep_special_tokens", "batch_size")
OF_TEXTS = tuple(field.name for field in dataclasses.fields(GenerationOptions) if field.name != "logprobs")

log = logging.getLogger("megatron.api")


class TextModel:
    """A loaded model with its tokenizer."""

    def __init__(self, model: InferenceModel, load: LoadOptions) -> None:
        self.model = model
        self._load = load

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> Any:
        """Return the text that follows a prompt, or for a list of prompts a list of texts.

        A prompt is a text to continue, or the messages of a chat to answer. `options`: those of GenerationOptions, such
        as max_new_tokens, temperature and stop, and of PromptOptions those for prompts. With num_samples above 1 there
        is a list of texts for each prompt. Collective where there are several ranks, and the same on each.

        Raises ConfigError with every fault of the options, or DataError for a prompt.
        """
        # a str is a Sequence too, and the messages of one chat look like a list of prompts: both are one prompt
        is_one = isinstance(prompts, str) or _is_chat(prompts)
        listed: list[Any] = [prompts] if is_one else list(prompts)
        rows = [{"messages" if _is_chat(each) else "prompt": each} for each in listed]
        session = Session(self.model, self._command(options, has_chats=any("messages" in row for row in rows)))
        # all prompts are read before any text is generated: a wrong one costs nothing, and is named by its number
        texts = self._texts(session, list(_requests(session, rows, names_prompts=not is_one)))
        line = session.out_of_positions()
        if line:
            log.warning("%s", line)
        # a text for each prompt; with several samples a list of texts for each
        if session.options.num_samples == 1:
            results: list[Any] = [text for of_prompt in texts for text in of_prompt]
        else:
            results = [*texts]
        return results[0] if is_one else results

    def _texts(self, session: Session, requests: Sequence[Request]) -> list[list[str]]:
        """Return the texts of each request, on all ranks."""
        texts: list[list[str]] = [[] for _ in requests]
        for completion in session.generate(requests):  # on rank 0
            texts[completion.request].append(session.text_of(requests[completion.request], completion))
        # only rank 0 is given the completions; callers on other ranks need the same return value
        of_rank_0: list[list[str]] = self.model.ctx.broadcast_object(texts)
        return of_rank_0

    def _command(self, options: Mapping[str, Any], *, has_chats: bool) -> GenerateCommand:
        given = dict(options)
        # one string is a usual way to give one; pydantic takes tuples and lists alone
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        faults = _unknown(given, (*OF_TEXTS, *OF_PROMPTS))
        texts = read_values(GenerationOptions, _of(given, OF_TEXTS), faults, KEYWORD)
        prompts = read_values(PromptOptions, _of(given, OF_PROMPTS), faults, KEYWORD)
        if texts is not None:
            faults += texts.faults()
        if prompts is not None and not has_chats and not prompts.as_chat:
            unused = [name for name in ("system", "chat_template") if getattr(prompts, name) is not None]
            faults += [
                f"{name} is for chats, and the prompt is a text; set as_chat, or leave it out" for name in unused
            ]
        # texts and prompts are None where _read has found a fault; repeated for the type checker
        if faults or texts is None or prompts is None:
            raise ConfigError(faults)
        return GenerateCommand(self._load, prompts, texts)


def _requests(session: Session, rows: Sequence[dict[str, Any]], *, names_prompts: bool) -> Iterator[Request]:
    """Yield the request of each row. Raises DataError; `names_prompts`: with the number of the prompt."""
    as_chat = session.command.prompts.as_chat
    for number, row in enumerate(rows):
        try:
            ids = ids_of(row, session.encoder, as_chat=as_chat)
        except DataError as error:
            raise DataError(f"prompt {number}: {error}" if names_prompts else str(error)) from None
        yield Request(number, ids, is_chat=as_chat or "messages" in row)


def load_text_model(folder: str | Path, options: Mapping[str, Any]) -> TextModel:
    """Load the model in a folder, on this process alone or on the ranks that a launcher has started. Collective.

    `options`: those of LoadOptions. Raises ConfigError, CheckpointError, DataError, DeviceError or
    HubError.
    """
    names = [field.name for field in dataclasses.fields(LoadOptions) if field.name != "load"]
    faults = _unknown(options, names)
    load = read_values(LoadOptions, {"load": str(folder), **_of(options, names)}, faults, KEYWORD)
    if load is not None:
        load = load.with_local_folders(faults)
    if faults or load is None:
        raise ConfigError(faults)
    fetch_weights(load.load, lora_base=load.lora_base)
    device = choose_device(load.device)  # before anything imports deepspeed
    # WORLD_SIZE is what a launcher sets for its ranks
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        ctx = ParallelContext.build(parallel_options(load), device)
    else:  # a notebook keeps no process group
        ctx = dataclasses.replace(ParallelContext.single(), device=_this_device(device))
    return TextModel(load_model(load, ctx, log.info), load)


def _this_device(device: str) -> torch.device:
    if find_device(device).is_host:
        return torch.device("cpu")
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def _is_chat(prompt: Any) -> bool:
    """Return True for a list of messages; a list of prompts has none."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _of(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _unknown(given: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    use = f"use {', '.join(known)}"
    return [
        f"{name} is not an option here; {OF_TRAINING.get(flag(name)) or suggestion(nearest(name, known), use)}"
        for name in given
        if name not in known
    ]
