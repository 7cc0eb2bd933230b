"""What the plugin declares: importable without torch, unique, and pointing at callables."""

import subprocess
import sys

import pytest

from k3_core.plugins import Impl
from k3_kernels.plugin import k3_register_kernel

IMPLS = list(k3_register_kernel())


def test_the_plugin_imports_neither_torch_nor_triton():
    code = "import sys, k3_kernels.plugin; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_names_are_unique_and_start_with_the_op():
    names = [impl.name for impl in IMPLS]
    assert len(set(names)) == len(names)
    assert all(impl.name.startswith(impl.implements + ".") for impl in IMPLS)


@pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: impl.name)
def test_targets_load(impl: Impl):
    assert callable(impl.load())
    assert impl.requires == ("triton>=3.6",)
