"""Ids of prompts and chats, and the ids that end an answer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.chat.template import TEMPLATE_NAME, ChatTemplate, find_template
from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.base import KNOWN_EOD_TOKENS, Tokenizer, named_tokens, read_config
from megatron.data.tokenizers.library import LibraryTokenizer
from megatron.generation.model import InferenceModel, ModelOrigin

log = logging.getLogger(__name__)

ANSWER = "\ufdd2"
"""Stands for an answer where a template shows how it ends one. It is not a character."""


def tokenizer_of(model: InferenceModel) -> Tokenizer:
    """Return the tokenizer of a model. Raises DataError."""
    if model.tokenizer is None:
        raise DataError(
            f"{model.origin.folder if model.origin else 'the model'} has no tokenizer; name its file with "
            "--tokenizer-model and, unless that is a tokenizer.json, its kind with --tokenizer-type"
        )
    return model.tokenizer


class Ends(NamedTuple):
    """Ids and strings that end a text."""

    ids: Collection[int]
    strings: tuple[str, ...] = ()


class PromptEncoder:
    """Encoder of the prompts of a model.

    Args:
        chat_template: a preset or a file; None: the tokenizer's.
        tokenizer_model: the tokenizer's file or folder, where it is not the model's own.
        system: system message of chats without one.
    """

    def __init__(
        self,
        model: InferenceModel,
        chat_template: str | None = None,
        tokenizer_model: str | None = None,
        system: str | None = None,
    ):
        self.tokenizer = tokenizer_of(model)
        self._model, self._template_name, self._system = model, chat_template, system
        self._folder = Path()
        if tokenizer_model is not None:
            self._folder = Path(tokenizer_model)
            if not self._folder.is_dir():
                self._folder = self._folder.parent
        elif model.origin is not None and model.origin.tokenizer is not None:
            self._folder = model.origin.tokenizer

    def text(self, prompt: str) -> tuple[int, ...]:
        """Return the ids of a text to continue. Raises DataError."""
        if not prompt:
            raise DataError("the prompt is empty; give at least a word to continue")
        ids = tuple(self.tokenizer.encode_plain([prompt]).ids.tolist())
        if not ids:
            raise DataError(f"the prompt {prompt[:40]!r} has no tokens in this tokenizer; give a word to continue")
        # BOS as in training, but not what the tokenizer adds behind a text: after an EOS there is nothing to continue
        return (*self.tokenizer.added.before, *ids)

    def chat(self, messages: object) -> tuple[int, ...]:
        """Return the ids of a chat up to where its answer begins. Raises DataError."""
        checked = _checked(messages)
        if self._system is not None and checked[0]["role"] != "system":
            checked = [{"role": "system", "content": self._system}, *checked]
        # the template writes BOS itself, so none is added to its ids, as in transformers
        text = self.template.render(checked, add_generation_prompt=True)
        ids = tuple(self.tokenizer.encode_plain([text]).ids.tolist())
        if not ids:
            raise DataError(f"chat template {self.template.source.origin} writes no text for this chat")
        return ids

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises DataError."""
        # else <|im_end|> in a rendered chat would become the ids of its characters, which no model was trained on
        if not (isinstance(self.tokenizer, LibraryTokenizer) and self.tokenizer.parse_special_tokens):
            raise DataError(
                "chats need a tokenizer.json, whose special tokens a template writes as text; name its folder with "
                "--tokenizer-model and --tokenizer-type HFTokenizer"
            )
        source = find_template(self._template_name, self._folder)
        tokens = named_tokens(read_config(self._folder)) | source.named_tokens
        known = [token for token in KNOWN_EOD_TOKENS if self.tokenizer.token_id(token) is not None]
        # templates write eos_token by name; a config that names none would have them write an empty text
        if known:
            tokens.setdefault("eos_token", known[0])
        template = ChatTemplate(source, tokens)
        # a model's own template may well write markers as plain text: it was trained so
        if self._template_name is not None:
            self._check_markers(template)
        return template

    def _check_markers(self, template: ChatTemplate) -> None:
        """Check a template that is not the model's own, whose markers this tokenizer may know as plain text alone."""
        lacking = [token for token in template.source.tokens_to_add() if self.tokenizer.token_id(token) is None]
        if not lacking:
            return
        writes = (
            f"chat template {template.source.origin} writes {', '.join(lacking)}, of which this tokenizer has no ids"
        )
        end = _end_marker(template)
        if end in lacking:
            raise DataError(
                f"{writes}, and {end} ends its answers; choose the model's own with --chat-template. If it was trained "
                f"with this one, its markers as plain text, write it as {TEMPLATE_NAME} into {self._folder}"
            )
        if self._model.ctx.rank == 0:
            log.warning("%s: they are read as plain text, as a model has to be trained to expect", writes)

    def ends(self, *, of_chats: bool) -> Ends:
        """Return what ends an answer, or a text to continue. Raises DataError."""
        # several: chat models often end turns with another token than documents
        ids, strings = [self.tokenizer.eod], tuple[str, ...]()
        if self._model.origin is not None:
            ids += _configured_ids(self._model.origin)
        marker = _end_marker(self.template) if of_chats else None
        if marker is not None:
            ids.append(self.tokenizer.token_id(marker))
            # the marker may be plain text to this tokenizer
            if ids[-1] is None:
                strings = (marker,)
        # a tokenizer may have ids beyond the model's vocabulary
        return Ends(frozenset(token for token in ids if token is not None and token < self._model.vocab_size), strings)


def _end_marker(template: ChatTemplate) -> str | None:
    """Return the marker that a template writes behind an answer; None if there is none."""
    # a user first: many templates refuse a chat that begins with the assistant
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER}]
    _, _, behind = template.render(messages).partition(ANSWER)
    mark = template.end_marker.match(behind.lstrip())
    if mark is None:
        return None
    return mark[0]


def _configured_ids(origin: ModelOrigin) -> list[int]:
    """Return the ids that the model's own files say end a text. Raises DataError."""
    given = (origin.generation_config or {}).get("eos_token_id")
    if given is None:
        return []
    ids = given
    if not isinstance(given, list):
        ids = [given]
    # bool is a subclass of int
    wrong = [each for each in ids if not isinstance(each, int) or isinstance(each, bool) or each < 0]
    if wrong:
        raise DataError(
            f"the model in {origin.folder} has eos_token_id={given!r} in its generation_config.json or config.json, "
            f"and {wrong[0]!r} is not an id; write the number of the token that ends a text, or a list of such numbers"
        )
    return ids


def _checked(messages: Any) -> list[Mapping[str, Any]]:
    """Return messages that a template can render. Raises DataError."""
    is_list = isinstance(messages, list) and bool(messages)
    if not is_list or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise DataError('messages must be a list of objects such as {"role": "user", "content": "Hello"}')
    if messages[-1]["role"] == "assistant":
        raise DataError("messages end with the assistant's; leave the last one out, and it is generated")
    return messages
