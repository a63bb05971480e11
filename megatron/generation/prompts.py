"""Ids of prompts and chats, and the ids that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.data.chat.template import ChatTemplate, find_template, named_tokens, read_config
from megatron.data.indexed import DataError
from megatron.data.tokenizers.base import KNOWN_EOD_TOKENS, Tokenizer
from megatron.data.tokenizers.library import LibraryTokenizer
from megatron.generation.model import InferenceModel

Messages = Sequence[Mapping[str, Any]]
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
        folder = None if model.origin is None else model.origin.tokenizer
        if tokenizer_model is not None:
            path = Path(tokenizer_model)
            folder = path if path.is_dir() else path.parent
        self._folder = folder or Path()

    def text(self, prompt: str) -> tuple[int, ...]:
        """Return the ids of a text to continue. Raises DataError."""
        if not prompt:
            raise DataError("the prompt is empty; give at least a word to continue")
        ids = tuple(self.tokenizer.encode_plain([prompt]).ids.tolist())
        if not ids:
            raise DataError(f"the prompt {prompt[:40]!r} has no tokens in this tokenizer; give a word to continue")
        return (*self.tokenizer.added.before, *ids)

    def chat(self, messages: object) -> tuple[int, ...]:
        """Return the ids of a chat up to where its answer begins. Raises DataError."""
        checked = _checked(messages)
        if self._system is not None and checked[0]["role"] != "system":
            checked = [{"role": "system", "content": self._system}, *checked]
        text = self.template.render(checked, add_generation_prompt=True)
        ids = tuple(self.tokenizer.encode_plain([text]).ids.tolist())
        if not ids:
            raise DataError(f"chat template {self.template.source.origin} writes no text for this chat")
        return ids

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises DataError."""
        if not (isinstance(self.tokenizer, LibraryTokenizer) and self.tokenizer.parse_special_tokens):
            raise DataError(
                "chats need a tokenizer.json, whose special tokens a template writes as text; name its folder with "
                "--tokenizer-model and --tokenizer-type HFTokenizer"
            )
        source = find_template(self._template_name, self._folder)
        tokens = named_tokens(read_config(self._folder)) | source.named_tokens
        if "eos_token" not in tokens:
            known = [token for token in KNOWN_EOD_TOKENS if self.tokenizer.token_id(token) is not None]
            tokens |= {"eos_token": known[0]} if known else {}
        lacking = [token for token in source.tokens_to_add() if self.tokenizer.token_id(token) is None]
        if lacking:
            raise DataError(
                f"chat template {source.origin} writes {', '.join(lacking)}, of which this tokenizer has no ids: the "
                "model was not trained with it; choose its own with --chat-template"
            )
        return ChatTemplate(source, tokens)

    def final_ids(self, *, of_chats: bool) -> frozenset[int]:
        """Return the ids that end a text: those of generation_config.json and of the tokenizer, and of a turn."""
        found = set[int]()
        if self.tokenizer.eod is not None:
            found.add(self.tokenizer.eod)
        configured = (self._model.origin.generation_config or {}).get("eos_token_id") if self._model.origin else None
        found.update(configured if isinstance(configured, list) else [] if configured is None else [configured])
        if of_chats and (turn := self._end_of_turn()) is not None:
            found.add(turn)
        return frozenset(token for token in found if token < self._model.vocab_size)

    def _end_of_turn(self) -> int | None:
        """Return the id of the special token that the template writes behind an answer; None if there is none."""
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER}]
        _, _, behind = self.template.render(messages).partition(ANSWER)
        mark = self.template.end_marker.match(behind.lstrip())
        return None if mark is None else self.tokenizer.token_id(mark[0])


def _checked(messages: Any) -> list[Mapping[str, Any]]:
    """Return messages that a template can render. Raises DataError."""
    is_list = isinstance(messages, list) and bool(messages)
    if not is_list or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise DataError('messages must be a list of objects such as {"role": "user", "content": "Hello"}')
    if messages[-1]["role"] == "assistant":
        raise DataError("messages end with the assistant's; leave the last one out, and it is generated")
    return messages
