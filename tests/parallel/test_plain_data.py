"""Messages between ranks: plain data comes back as it was, and nothing else is made of what arrives."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.parallel.plain_data import TAG, decode, encode
from megatron.resilience.rank_record import RankPlace, RankRecord
from megatron.resilience.replica_check import Copy
from tests.strangers import Bomb

keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
leaves = keys | st.floats(allow_nan=False) | st.binary() | st.sets(st.integers())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner) | st.dictionaries(st.just(TAG), inner)
    ),
    max_leaves=20,
)


@given(values)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


def test_classes_of_this_package_paths_and_numbers_of_numpy_come_back() -> None:
    record = RankRecord(RankPlace(0, "node", "cpu", 0, 0, 0, 0), own=(0.5, math.inf))
    value = [Copy("layers.0.weight", 1, 0), record, Path("/a/b"), {Copy("b", 0, 0): (1,)}]
    found = decode(encode(value))
    assert found == value
    assert [type(one) for one in found] == [Copy, RankRecord, type(Path()), dict]
    assert decode(encode((np.int64(3), np.float32(0.5)))) == (3, 0.5)
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("value", [object(), print, Bomb(Path("x")), Bomb, 1j])
def test_what_is_not_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="ranks exchange plain data"):
        encode([value])


@pytest.mark.parametrize(
    "kind",
    [
        *(
            "os:system",
            "builtins:print",
            "subprocess:Popen",
            "megatron.runtime.files:write_durably",
            "megatron.train:os",
        ),
        *("megatron.parallel.context:os", "megatron.no_such_module:A", "nonsense"),
    ],
)
def test_nothing_else_is_made_of_what_arrives(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not plain data"):
        decode(json.dumps({TAG: [kind, ["touch x"]]}).encode())
    for content in (pickle.dumps(Bomb(tmp_path / "made")), b"[" * 60000, b"{}", b'{"%": 1}'):
        with pytest.raises(ValueError):
            decode(content)
    assert not list(tmp_path.iterdir())
