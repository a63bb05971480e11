"""Keys lead to the values that the documentation says, and values under other keys do no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.data.index.indexed import DataError
from megatron.data.read.document_blocks import Block, Position
from megatron.data.read.document_parser import Parsed, object_of_line, parse
from megatron.data.read.search import find_sources


@pytest.fixture
def parsed(tmp_path: Path) -> Any:
    (tmp_path / "in.jsonl").write_text("{}\n")
    listing: Any = find_sources([str(tmp_path / "in.jsonl")])
    source = getattr(listing, "sources", listing)[0]

    def parsed_of(lines: list[bytes], *keys: str) -> Parsed:
        raw = b"\n".join(lines)
        return parse(Block(source, Position(), Position(documents=len(lines)), len(raw), raw), keys)

    return parsed_of


LEADS_TO_X: dict[str, tuple[str, dict[str, Any]]] = {
    "into an object": ("meta.text", {"meta": {"text": "x", "more": 1}}),
    "into two": ("a.b.c", {"a": {"b": {"c": "x"}}}),
    "a name with a dot": ("meta.text", {"meta.text": "x"}),
    "a name with a dot before an object": ("meta.text", {"meta": {"text": "y"}, "meta.text": "x"}),
    "a name with a dot within": ("a.b.c", {"a": {"b.c": "x", "b": {"c": "y"}}}),
    "into an object whose name has a dot": ("a.b.c", {"a": {"b": 1}, "a.b": {"c": "x"}}),
    "a name of dots": ("..", {"..": "x"}),
    "empty names": (".", {"": {"": "x"}}),
    "an empty name": ("", {"": "x"}),
}


@pytest.mark.parametrize("name", LEADS_TO_X)
def test_a_dot_steps_into_an_object_unless_a_name_has_it(name: str, parsed: Any) -> None:
    key, row = LEADS_TO_X[name]
    lines = [json.dumps(row).encode()]
    for given in (lines, [*lines, b""], [*lines, b'{"odd": NaN}']):  # the fast way, and that for other lines
        found = parsed(given, key)
        assert found.columns == [["x"]]
        assert len(found.faults) == (len(given) == 2 and given[1] != b"")
    assert parsed(lines, key, key).columns == [["x"], ["x"]]


FAULTS: dict[str, tuple[bytes, str]] = {
    "no such key": (b'{"meta": {"txt": "x"}, "id": 1}', "no key 'meta.text'; the line has 'meta.txt', 'id'"),
    "no object": (b'{"meta": "x"}', "no key 'meta.text'; the line has 'meta'"),
    "a list": (b'{"meta": [{"text": "x"}]}', "no key 'meta.text'; the line has 'meta'"),
    "no string": (b'{"meta": {"text": ["x"]}}', "the value of 'meta.text' is a JSON array, not a string"),
    "an odd number": (b'{"meta": {"text": 1e999}}', "the value of 'meta.text' holds 1e999, which is not a number"),
    "twice": (b'{"meta": {"text": "x", "text": "y"}}', "the key 'text' occurs 2 times"),
    "two objects": (b'{"meta": {"text": "x"}, "meta": {"text": "y"}}', "the key 'meta' occurs 2 times"),
    "an array": (b'["meta"]', "JSON array, not an object"),
    "text": (b'"meta.text"', "JSON string, not an object"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_under_a_nested_key_is_named(name: str, parsed: Any) -> None:
    line, reason = FAULTS[name]
    (fault,) = parsed([line, b'{"meta": {"text": "x", "score": NaN}, "text": "y", "text": "z"}'], "meta.text").faults
    assert reason in str(fault)


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_key_that_is_not_ascii_is_found_twice_however_it_is_written(ascii_only: bool, parsed: Any) -> None:
    name = json.dumps("t\u00e9xte", ensure_ascii=ascii_only)
    (fault,) = parsed([f'{{{name}: "x", {name}: "y"}}'.encode()], "t\u00e9xte").faults
    assert "the key 't\u00e9xte' occurs 2 times" in str(fault)


def test_chats_too_may_hold_anything_in_other_fields() -> None:
    row = object_of_line(b'{"messages": ["x"], "score": NaN, "id": 1e999, "note": "\\ud800"}', "", ("messages",))
    assert row["messages"] == ["x"]
    with pytest.raises(DataError, match="the value of 'messages' holds Infinity, which is not a number in JSON"):
        object_of_line(b'{"messages": [{"content": [Infinity]}]}', "", ("messages",))
    with pytest.raises(DataError, match=r"the value of 'messages' holds the unpaired surrogate U\+DFFF"):
        object_of_line(b'{"messages": [{"\\udfff": 1}]}', "", ("messages",))


def test_a_long_integer_of_a_chat_keeps_its_digits() -> None:
    """orjson reads those beyond 64 bits as floats, and a template would write 1.2345678901234568e+29."""
    number = 123456789012345678901234567890
    row = object_of_line(b'{"messages": [%d], "id": 0}' % number, "", ("messages",))
    assert row["messages"] == [number]


def test_deep_nesting_is_a_fault_of_the_line(parsed: Any) -> None:
    deep = b'{"text": "x", "text": "y", "z": ' + b"[" * 1000 + b"]" * 1000 + b"}"
    odd = b'{"text": "x", "odd": NaN, "z": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    faults = parsed([deep, odd, b'{"text": "x"}'], "text").faults
    assert len(faults) == 2
    assert all("not JSON" in str(fault) or "occurs 2 times" in str(fault) for fault in faults)
