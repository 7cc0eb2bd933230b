"""What the plugin declares: imported without torch, loadable, Triton first where measured."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from k3_core.errors import ImplUnavailable
from k3_core.ops import OP_NAMES
from k3_core.plugins import Impl, filters, resolve
from k3_kernels.plugin import k3_register_kernel

IMPLS = list(k3_register_kernel())
TRITON = [impl for impl in IMPLS if impl.name.endswith(".triton")]
LOOPS = [impl for impl in IMPLS if impl.name.endswith(".numba")]
TORCH = [impl for impl in IMPLS if impl not in (*TRITON, *LOOPS)]
per_triton = pytest.mark.parametrize("impl", TRITON, ids=lambda impl: impl.name)
per_torch = pytest.mark.parametrize("impl", TORCH, ids=lambda impl: impl.name)
A100, H200 = (8, 0), (9, 0)


def test_the_plugin_imports_neither_torch_nor_a_compiler():
    code = "import sys, k3_kernels.plugin; print({'torch', 'triton', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_names_are_unique_and_start_with_the_op():
    names = [impl.name for impl in IMPLS]
    assert len(set(names)) == len(names)
    for impl in IMPLS:
        op, _, variant = impl.name.partition(".")
        assert op == impl.implements and op in OP_NAMES
        assert variant in ("triton", "cpu", "cuda", "numba")


@per_torch
def test_torch_variants_need_nothing_and_can_all_that_the_reference_can(impl: Impl):
    assert callable(impl.load())
    assert not impl.requires
    reference = resolve("kernel", impl.implements, name="reference").chosen
    assert impl.features == reference.features


@pytest.mark.skipif(not find_spec("numba"), reason="numba is not installed")
@pytest.mark.parametrize("impl", LOOPS, ids=lambda impl: impl.name)
def test_loops_come_first_on_a_cpu_in_what_they_compute(impl: Impl, monkeypatch):
    assert callable(impl.load())
    reference = resolve("kernel", impl.implements, name="reference").chosen
    assert impl.features == reference.features | {"graph_safe"}
    for dtype in ("float32", "float64"):
        assert resolve("kernel", impl.implements, dtype=dtype).chosen == impl
    assert resolve("kernel", impl.implements, dtype="bfloat16").chosen != impl
    monkeypatch.setattr(filters, "installed_version", lambda distribution: None)
    assert resolve("kernel", impl.implements, dtype="float32").chosen != impl


@pytest.mark.parametrize("op", ["kda_chunk", "kda_segment", "short_conv", "mla_prefill"])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "bfloat16"), ("cuda", "float32")])
def test_the_torch_form_serves_what_has_no_triton(op, device, dtype):
    needs = {"dtype": dtype, "features": ["backward"], "capability": A100}
    found = resolve("kernel", op, device=device, **needs)
    assert (found.chosen.name, found.source) == (f"{op}.cpu", "auto")


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
@per_triton
def test_targets_load(impl: Impl):
    assert callable(impl.load())
    assert impl.requires == ("triton>=3.6",)


@per_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_triton_comes_first_on_the_gpu_it_was_measured_on(impl, dtype, monkeypatch):
    monkeypatch.setattr(filters, "installed_version", lambda distribution: "3.7.1")
    op = impl.implements
    on_h200 = resolve("kernel", op, device="cuda", dtype=dtype, capability=H200)
    assert (on_h200.chosen, on_h200.source) == (impl, "auto")
    on_a100 = resolve("kernel", op, device="cuda", dtype=dtype, capability=A100)
    assert on_a100.chosen not in TRITON
    monkeypatch.setattr(filters, "installed_version", lambda distribution: None)
    assert resolve("kernel", op, device="cuda", dtype=dtype, capability=H200).chosen not in TRITON


@per_triton
def test_a_name_chooses_it_and_nothing_stands_in_for_it(impl, monkeypatch):
    op = impl.implements
    monkeypatch.setenv(f"K3_IMPL_KERNEL_{op.upper()}", "triton")
    with pytest.raises(ImplUnavailable, match="runs on cuda, not on cpu"):
        resolve("kernel", op, device="cpu")
    monkeypatch.setattr(filters, "installed_version", lambda distribution: "3.7.1")
    on_cuda = resolve("kernel", op, device="cuda", dtype="bfloat16", capability=H200)
    assert (on_cuda.chosen, on_cuda.source) == (impl, "env")
    monkeypatch.setattr(filters, "installed_version", lambda distribution: None)
    with pytest.raises(ImplUnavailable, match=r"requires triton>=3\.6, which is not installed"):
        resolve("kernel", op, device="cuda", dtype="bfloat16", capability=H200)
