"""Collections while a process imports."""

from __future__ import annotations

import gc

import pytest

from megatron.runtime.first_steps import importing


def test_collections_pause_for_imports_alone() -> None:
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collections_go_on_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError("no such module")
    assert gc.isenabled()


def test_what_the_user_has_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
