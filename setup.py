"""Builds the C++ kernels where that is possible. Everything else about the package is in pyproject.toml."""

from __future__ import annotations

import platform
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "kernels/cpu"
COMMON_FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    "-ffp-contract=off",  # a product is fused with a sum where the source says so
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12's intrinsics headers initialise x with x
]
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
# Each instruction set in a file of its own, so that the library loads on any x86-64 and chooses when it runs.
FLAGS = {
    f"{FOLDER}/library.cpp": [],
    f"{FOLDER}/avx2.cpp": ["-mavx2", "-mfma"],
    f"{FOLDER}/avx512.cpp": AVX512_FLAGS,
    f"{FOLDER}/avx512_bf16.cpp": [*AVX512_FLAGS, "-mavx512bf16"],
}
HEADERS = [f"{FOLDER}/{name}.h" for name in ("attention", "elementwise", "library", "linear", "parallel", "vec")]


class BuildKernels(build_ext):
    """Compiles every source with its own flags; a failure leaves the package without the library."""

    def build_extension(self, ext: Extension) -> None:
        objects = []
        for source, flags in FLAGS.items():
            objects += self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=[*COMMON_FLAGS, *flags], depends=ext.depends
            )
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-s", "-Wl,--as-needed"], libraries=["m"],
            target_lang="c++",
        )  # fmt: skip


class AnyPythonWheel(bdist_wheel):
    """The library knows nothing of Python's ABI: one wheel a platform serves all versions."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, where = super().get_tag()
        return "py3", "none", where


kernels = Extension("kernels.cpu._native", sources=list(FLAGS), depends=HEADERS, optional=True)
has_kernels = sys.platform == "linux" and platform.machine() == "x86_64"
setup(
    ext_modules=[kernels] if has_kernels else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
