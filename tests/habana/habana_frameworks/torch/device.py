"""The device `hpu` of this process, over host memory: `install` makes it known to torch, for good.

A tensor on it says so, an operator refuses a tensor of the CPU beside it, and each operator for which a card's host
would wait is among the calls, with the line that called it: `host_read` a copy to the host, a number, or a result
whose size depends on the data; `host_write` a copy to the device that does not return at once; `read_behind` and
`write_behind` copies that do. Call it before the first backward pass of the process: torch's autograd starts its
threads for the devices that it knows then.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from habana_frameworks.torch import hpu, stand_in

SOURCE = Path(__file__).with_suffix(".cpp")
NOT_CALLERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _build() -> Path:
    """Return the compiled device; the first process to need it compiles, in a quarter of a minute."""
    here = Path(torch.__file__).parent
    version = f"{torch.__version__} {torch.version.git_version}"
    digest = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron-tests"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"hpu-{digest}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / library.name
                includes = [f"-I{here / 'include'}", f"-I{here / 'include/torch/csrc/api/include'}"]
                libraries = [f"-L{here / 'lib'}", "-ltorch_cpu", "-lc10"]
                flags = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}"]
                command = ["g++", *flags, *includes, str(SOURCE), "-o", str(built), *libraries]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise RuntimeError(f"the device of the stand-in does not compile:\n{done.stderr}")
                built.replace(library)
    return library


def _abi() -> int:
    return int(torch._C._GLIBCXX_USE_CXX11_ABI)


def _note(kind: str, operator: str) -> None:
    """Keep a note of the device's in the calls."""
    current = sys.modules.get("habana_frameworks.torch.stand_in")
    if current is not None:
        current.calls.append((kind, {"operator": operator, "where": _where()}))


def _where() -> str:
    """Return the innermost line of Python outside torch and these packages."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_CALLERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.cache
def _load() -> Any:
    """Load the device, which cannot be taken back."""
    torch.ops.load_library(_build())
    notes = torch.library.Library("habana_stand_in", "IMPL")
    notes.impl("note", _note, "CompositeExplicitAutograd")
    torch._dynamo.register_backend(lambda graph, inputs: graph, name="hpu_backend")
    return notes  # as long as it lives, the note is Python's


def install() -> None:
    """Make the device known to torch."""
    if not hasattr(torch.ops.habana_stand_in, "note"):  # by an earlier import in this process
        torch._hpu_notes = _load()  # type: ignore[attr-defined]
    torch.hpu = sys.modules["torch.hpu"] = hpu  # type: ignore[attr-defined]
    importlib.import_module("habana_frameworks.torch.distributed.hccl")


def counts() -> Counter[str]:
    """Return the number of calls by name."""
    return Counter(name for name, _ in stand_in.calls)


def _spoil(module: str, name: str) -> None:
    """Let the results of a kernel be a tenth too large, or the updates of the optimizer."""
    kernel = getattr(importlib.import_module(f"habana_frameworks.torch.{module}"), name)
    method = {"FusedClipNorm": "clip_norm", "FusedAdamW": "_update"}.get(name, "apply")
    right = getattr(kernel, method)

    def update(optimizer: Any, group: Any, trained: Any) -> None:
        rate, group["lr"] = group["lr"], group["lr"] * 1.1
        right(optimizer, group, trained)
        group["lr"] = rate

    def larger(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs) * 1.1

    wrong = update if method == "_update" else larger
    setattr(kernel, method, staticmethod(wrong) if method == "apply" else wrong)


def install_in_process() -> None:
    """Install the device in a process of its own.

    HABANA_STAND_IN_CALLS names a folder where it writes `counts` when it ends, as a rank does, by os._exit.
    HABANA_STAND_IN_WRONG=MODULE:KERNEL makes one wrong.
    """
    install()
    if wrong := os.environ.get("HABANA_STAND_IN_WRONG"):
        _spoil(*wrong.split(":"))
    os.register_at_fork(after_in_child=stand_in.calls.clear)
    exit_now, folder = os._exit, os.environ.get("HABANA_STAND_IN_CALLS")

    def end(status: int) -> None:
        if folder is not None:
            name = f"{os.environ.get('RANK', '0')}-{os.getpid()}.json"
            (Path(folder) / name).write_text(json.dumps(counts()))
        exit_now(status)

    os._exit = end  # type: ignore[assignment]
