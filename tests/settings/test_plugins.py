"""Families and tasks by name, and a user's own by package.module:ATTRIBUTE."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.options.config import ConfigError
from megatron.settings.plugins import PLACES, _Place, known_plugins, load_plugin


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a package `plugin_house` with the plugins `one` and `two`, and a file that is not a plugin."""
    folder = tmp_path / "plugin_house"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name in ("one", "two"):
        (folder / f"{name}.py").write_text(f'"""A plugin."""\n\nFAMILY = "{name}"\n')
    (folder / "shared.py").write_text('"""What both use."""\n\nOTHER = 1\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("megatron.settings.plugins.IMPORT_ROOT", tmp_path)
    monkeypatch.setitem(PLACES, "architecture", _Place("plugin_house", "FAMILY"))
    load_plugin.cache_clear()
    yield
    load_plugin.cache_clear()
    for name in [name for name in sys.modules if name.startswith("plugin_house")]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_a_file_of_the_package_is_known_by_its_name() -> None:
    assert known_plugins("architecture") == ["one", "two"]
    assert load_plugin("architecture", "two") == "two"


@pytest.mark.usefixtures("package")
def test_a_module_and_attribute_are_imported() -> None:
    assert load_plugin("architecture", "plugin_house.shared:OTHER") == 1


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["three", "shared", "", "../one"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; use one, two, or your own"):
        load_plugin("architecture", name)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["nowhere.at_all:FAMILY", "plugin_house.one:NOTHING", ":FAMILY", "plugin_house.one:"])
def test_what_cannot_be_imported_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be loaded: .+; give package.module:ATTRIBUTE"):
        load_plugin("architecture", name)
