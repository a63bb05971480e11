"""Build the C++ extensions, and add scripts, examples and pages; all else is declared in pyproject.toml."""

import os
from collections.abc import Iterator
from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_py import build_py

SHARED = ("scripts", "examples", "docs")
OF_A_CHECKOUT = ("check.sh", "quickstart.sh", "setup.sh", "test.sh")
SHARE = "megatron/share"
"""Folder of the wheel, which `megatron-run` reads (megatron/cli/calls/run.py)."""


class BuildWithShared(build_py):
    """Copies what users start, read and change into the package, so that it exists once in the sources."""

    def shared_files(self) -> Iterator[str]:
        for folder in SHARED:
            for path in sorted(glob(f"{folder}/**", recursive=True)):
                name = os.path.basename(path)
                if os.path.isfile(path) and "__pycache__" not in path and name not in OF_A_CHECKOUT:
                    yield path

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # reads them in the checkout
            return
        for path in self.shared_files():
            target = os.path.join(self.build_lib, SHARE, path)
            self.mkpath(os.path.dirname(target))
            self.copy_file(path, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        shared = [] if self.editable_mode else [*self.shared_files()]
        return [
            *super().get_outputs(include_bytecode),
            *(os.path.join(self.build_lib, SHARE, path) for path in shared),
        ]


NATIVE = "megatron/data/native"

setup(
    cmdclass={"build_py": BuildWithShared},
    options={"build_ext": {"parallel": 2}},  # both at once: 24 s in place of 38
    ext_modules=[
        Pybind11Extension(
            "megatron.data.helpers",
            [f"{NATIVE}/helpers.cpp"],
            depends=sorted(glob(f"{NATIVE}/*")),
            cxx_std=17,
            # no fused multiply-add: the blend must choose the same samples on every processor
            extra_compile_args=["-O3", "-ffp-contract=off"],
        ),
        Pybind11Extension(
            "megatron.parallel.token_operators",
            ["megatron/parallel/native/token_operators.cpp"],
            cxx_std=17,
            extra_compile_args=["-O3", "-Wno-psabi"],  # vectors are passed to inlined functions alone
        ),
    ],
)
