"""Builds the C++ extension at install; everything declarative about the tools' settings is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def requirements() -> list[str]:
    lines = (line.split("#", 1)[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    return [line for line in lines if line and not line.startswith("-")]


setup(
    name="megatron-3d",
    version="0.1.0",
    description="3D-parallel training of large language models on PyTorch and DeepSpeed",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron", "megatron.*"]),
    package_data={"megatron.data": ["*.pyi"]},
    ext_modules=[
        Pybind11Extension(
            "megatron.data.helpers",
            [f"megatron/data/native/{name}.cpp" for name in ("helpers", "packing", "steps", "buckets")],
            depends=["megatron/data/native/packing.h"],
            cxx_std=17,
            # no fused multiply-add: the blend must choose the same samples on every processor
            extra_compile_args=["-O3", "-ffp-contract=off"],
        )
    ],
    install_requires=requirements(),
    zip_safe=False,
)
