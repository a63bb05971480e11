"""The notebooks run as Jupyter runs them: in a kernel, cell by cell, in an empty folder."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def read(notebook: Path) -> nbformat.NotebookNode:
    return nbformat.read(notebook, as_version=nbformat.NO_CONVERT)  # type: ignore[no-untyped-call]


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a notebook in a folder, and return what its cells show."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = read(ROOT / "examples" / "notebooks" / f"{name}.ipynb")
    client = nbclient.NotebookClient(notebook, timeout=HANG_S, resources={"metadata": {"path": str(folder)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_stores_no_output(notebook: Path) -> None:
    content = read(notebook)
    nbformat.validate(content)
    assert [
        cell.id for cell in content.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)
    ] == []


@pytest.mark.slow
def test_pretraining_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("pretrain", tmp_path, monkeypatch)
    assert "layout     PP 1 x TP 2 x DP 1" in shown
    assert "iteration       40/      80" in shown
    assert "iteration       80/      80" in shown
    assert shown.rstrip().splitlines()[-1].startswith("'")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finetune", "preferences"])
def test_fine_tuning_and_preferring_run_in_a_kernel(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, tmp_path, monkeypatch)
