"""Build the C++ extensions; everything else about the package is declared in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

NATIVE = "megatron/data/native"

setup(
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
