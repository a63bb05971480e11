"""Generator of agentic chats: tools, calls in all their forms, several steps, reasoning, parts, flags.

Every text holds a word of its own, so that a test finds by plain search what a template wrote, and where.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]

ODD = ("", "\n", ' "quoted" \\ ', "\u00e9\u4e2d\U0001f600", " <b>&'", "{}", "\n\n", "[1]")


class Generator:
    """Rows from a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self._count = 0

    def word(self) -> str:
        self._count += 1
        return f"w{self._count:05d}x"

    def text(self) -> str:
        return self.word() + self.random.choice(ODD) + self.word()

    def maybe(self, share: float) -> bool:
        return self.random.random() < share

    def value(self, depth: int = 0) -> Any:
        kind = self.random.randrange(8 if depth < 2 else 6)
        if kind < 2:
            return self.text()
        if kind < 6:
            return (self._count * 7 + 100_003, 2.5 + self._count, self.maybe(0.5), None)[kind - 2]
        return [self.value(2), self.text()] if kind == 6 else {self.word(): self.value(depth + 1)}

    def arguments(self) -> Any:
        if self.maybe(0.15):
            return self.random.choice(({}, "{}"))
        found = {self.word(): self.value() for _ in range(self.random.randint(1, 3))}
        return json.dumps(found, ensure_ascii=False) if self.maybe(0.4) else found

    def content(self, parts: float = 0.0) -> Any:
        if self.maybe(parts):
            return [{"type": "text", "text": self.text()} for _ in range(self.random.randint(1, 2))]
        return self.text()

    def call_turn(self, names: list[str], most: int) -> Row:
        calls = [
            {
                "type": "function",
                "id": f"c{self.word()}y"[:9],
                "function": {"name": self.random.choice(names), "arguments": self.arguments()},
            }
            for _ in range(self.random.randint(1, most))
        ]
        turn: Row = {"role": "assistant", "tool_calls": calls}
        kind = self.random.randrange(4)
        if kind < 3:
            turn["content"] = ("", None, self.text())[kind]
        return self.extras(turn)

    def extras(self, turn: Row) -> Row:
        if self.maybe(0.25):
            turn[self.random.choice(("reasoning_content", "thinking"))] = self.text()
        if self.maybe(0.15):
            turn.update(self.random.choice(({"weight": 0}, {"train": False}, {"weight": 1})))
        return turn

    def row(self, *, parts: float = 0.05, roles: tuple[str, ...] = ("tool",), most: int = 3) -> Row:
        names = [f"get_{self.word()}" for _ in range(self.random.randint(1, 3))]
        messages: list[Row] = []
        if self.maybe(0.5):
            messages.append({"role": "system", "content": self.content(parts)})
        role = self.random.choice(roles)
        for _ in range(self.random.randint(1, 2)):
            messages.append({"role": "user", "content": self.content(parts)})
            for _ in range(self.random.randint(0, 2)):
                messages.append(turn := self.call_turn(names, most))
                messages += [
                    {"role": role, "tool_call_id": call["id"], "content": self.content(parts)}
                    for call in turn["tool_calls"]
                ]
            messages.append(self.extras({"role": "assistant", "content": self.content(parts)}))
        if self.maybe(0.4):
            messages += [{"role": "user", "content": self.content(parts)}, self.call_turn(names, most)]
        row: Row = {"messages": messages}
        if self.maybe(0.8):
            row["tools"] = [self.tool(name) for name in names]
        if self.maybe(0.3):
            row["chat_template_kwargs"] = {"enable_thinking": self.maybe(0.5)}
            if not row["chat_template_kwargs"]["enable_thinking"]:
                for message in messages:
                    message.pop("reasoning_content", message.pop("thinking", None))
        return row

    def tool(self, name: str) -> Row:
        properties = {self.word(): {"type": "string", "description": self.text()}}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": name, "description": self.text(), "parameters": parameters}}


def words(value: Any) -> Iterator[str]:
    """Yield the words of a value: those of its texts and keys, and its numbers."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from words(key)
            yield from words(item)
    elif isinstance(value, list):
        for item in value:
            yield from words(item)
    elif isinstance(value, str):
        yield from (
            value[i : i + 7] for i in range(len(value)) if value[i : i + 1] == "w" and value[i + 6 : i + 7] == "x"
        )
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
