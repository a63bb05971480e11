"""A user's own objects by package.module:ATTRIBUTE and FILE.py:ATTRIBUTE."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.options.config import ConfigError
from megatron.options.plugins import find_plugin, import_attribute

OWN = {"one": 1, "two": 2}


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a package `plugin_house` with a file, and a file outside it."""
    folder = tmp_path / "plugin_house"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "one.py").write_text('"""A plugin."""\n\nFAMILY = "mine"\n')
    (tmp_path / "alone.py").write_text("KNOWN = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("plugin_house")]:
        del sys.modules[name]


def test_a_registered_name_comes_first() -> None:
    assert find_plugin("architecture", "two", OWN) == 2


@pytest.mark.parametrize(("name", "value"), [("plugin_house.one:FAMILY", "mine"), ("alone.py:KNOWN", 3)])
def test_a_users_own_is_imported(name: str, value: object) -> None:
    assert find_plugin("architecture", name, OWN) == value
    assert import_attribute("callbacks", name) == value


@pytest.mark.parametrize("name", ["three", "shared", "", "../one", "plugin_house.one"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; use one, two, or your own"):
        find_plugin("architecture", name, OWN)


@pytest.mark.parametrize("name", ["nowhere.at_all:FAMILY", "plugin_house.one:NOTHING", ":FAMILY", "plugin_house.one:"])
def test_what_cannot_be_imported_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"architecture=.+ cannot be loaded: .+; give package.module:ATTRIBUTE"):
        find_plugin("architecture", name, OWN)
