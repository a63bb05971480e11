"""Oracle of the trained spans of a conversation, by another method than megatron/data/chat/turns.py.

Rendering is transformers'. A turn is what the render with it has over the render without it; where a template writes
earlier turns otherwise than later ones, its content is replaced and the difference looked at.
"""

from __future__ import annotations

import json
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]

STRANGE = "\u4e42\u4e5b\u4e63"
"""Placeholder for a content. No conversation of the tests has these characters."""


class Refused(Exception):
    """Refusal of a conversation by the template."""


class Unclear(Exception):
    """A content whose replacement changes other text too, which this oracle cannot handle."""


class Oracle:
    def __init__(self, template: str, tokens: dict[str, str], **variables: Any):
        """`variables`: tools, documents and options of the template."""
        self._template, self._tokens, self._variables = template, tokens, variables

    def render(self, messages: list[Message], prompt: bool = False) -> str:
        try:
            options: dict[str, Any] = {"add_generation_prompt": prompt, **self._tokens, **self._variables}
            texts: Any = render_jinja_template([messages], chat_template=self._template, **options)[0]
        except Exception as error:
            raise Refused(str(error)) from error
        text: str = texts[0]
        return text

    def trained(self, messages: list[Message], eos: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, with EOS appended to an open last turn, and its trained spans."""
        text = self.render(messages)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("train") is False or message.get("weight") == 0:
                continue
            begin, end = self._content(messages, text, i)
            spans.append((self._start(messages, text, i, begin), self._end(messages, text, i, end)))
            if i == len(messages) - 1 and not text[end:].strip():
                text += eos
                spans[-1] = (spans[-1][0], len(text))
        return text, spans

    def _content(self, messages: list[Message], text: str, i: int) -> tuple[int, int]:
        if "tool_calls" in messages[i]:
            first, last = self._name(messages, text, i, 0)[0], self._name(messages, text, i, -1)[1]
            begin = text.find(messages[i].get("content") or STRANGE, 0, first)  # a content of these tests is unique
            return begin if begin >= 0 else first, last
        other = self.render([*messages[:i], {**messages[i], "content": STRANGE}, *messages[i + 1 :]])
        return self._changed(other, text)

    def _changed(self, other: str, text: str) -> tuple[int, int]:
        before, _, after = other.partition(STRANGE)
        if not (text.startswith(before) and text.endswith(after)):
            raise Unclear
        return len(before), len(text) - len(after)

    def _name(self, messages: list[Message], text: str, i: int, call: int) -> tuple[int, int]:
        changed = json.loads(json.dumps(messages))
        changed[i]["tool_calls"][call]["function"]["name"] = STRANGE
        return self._changed(self.render(changed), text)

    def _start(self, messages: list[Message], text: str, i: int, begin: int) -> int:
        prompt = self.render(messages[:i], prompt=True)
        if text[:begin].startswith(prompt):
            return len(prompt)
        # what comes before is written otherwise by now: the end of the prompt, from the last question on
        without = self.render(messages[:i])
        added = prompt.removeprefix(without) if prompt.startswith(without) else prompt[-40:]
        if not added.strip():  # no prompt; the question's end is the same in both
            _, question_end = self._content(messages, text, i - 1)
            _, prompt_end = self._content_of(messages[:i], prompt, i - 1)
            after_question = prompt[prompt_end:]
            assert text[question_end:begin].startswith(after_question)
            return question_end + len(after_question)
        header = added.strip()
        found = text.rfind(header, 0, begin)
        _, question_end = self._content(messages, text, i - 1)
        if found < question_end:  # the header of an earlier turn has less in it: its first line
            line = added.lstrip().partition("\n")[0] + "\n"
            found = text.rfind(line, question_end, begin)
            return begin if found < 0 else found + len(line)
        # of white space behind the header, what the prompt has too is not the model's
        place, rest = found + len(header), added.rstrip()
        for wanted in added[len(rest) :]:
            if place < begin and text[place] == wanted:
                place += 1
            else:
                break
        return place

    def _content_of(self, messages: list[Message], prompt: str, i: int) -> tuple[int, int]:
        other = self.render([*messages[:i], {**messages[i], "content": STRANGE}], prompt=True)
        before, _, after = other.partition(STRANGE)
        return len(before), len(prompt) - len(after)

    def _end(self, messages: list[Message], text: str, i: int, end: int) -> int:
        upto = messages[: i + 1]
        own = self.render(upto)
        _, own_end = self._content(upto, own, i)
        tail, rest = own[own_end:], text[end:]
        if "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>" in tail:  # Command A's prompt stands at every end
            tail = tail[: tail.index("<|START_OF_TURN_TOKEN|>")]
        shared = next(
            (k for k, (a, b) in enumerate(zip(tail, rest, strict=False)) if a != b), min(len(tail), len(rest))
        )
        return end + len(tail[:shared].rstrip())
