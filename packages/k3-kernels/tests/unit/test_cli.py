"""`k3 kernels`: what list and bench print and write, and how tune chooses."""

import importlib
import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from k3_core.cli.app import run
from k3_core.ops import OP_NAMES
from k3_core.plugins import ensure_plugins
from k3_core.testing import TOLERANCE
from k3_kernels import tuning
from k3_kernels.bench import cases
from k3_kernels.bench.cases import Sizes, bench_cases
from k3_kernels.bench.clock import medians
from k3_kernels.cli import timing, tuner
from k3_kernels.mla_decode import cpu as mla_decode
from k3_kernels.tuning import SWEEPS, Sweep

TINY = Sizes(
    tokens=16,
    heads=2,
    head_dim=16,
    width=32,
    sources=3,
    experts=4,
    top_k=2,
    expert_width=32,
    rows=2,
    context=128,
    latent=16,
    shared=8,
    vocabulary=32,
)


def test_list_says_what_is_used_and_why_nothing_else_is(capsys):
    assert run(["kernels", "list", "--device", "cpu", "--json"]) == 0
    answers = {one["implements"]: one for one in json.loads(capsys.readouterr().out)}
    assert tuple(answers) == OP_NAMES
    segment = answers["kda_segment"]
    assert (segment["chosen"], segment["source"]) == ("kda_segment.cpu", "auto")
    reasons = {one["name"]: one["reason"] for one in segment["rejected"]}
    assert reasons["kda_segment.triton"] == "runs on cuda, not on cpu"
    assert reasons["kda_segment.reference"] == "priority 0, below 10 of kda_segment.cpu"


def test_list_as_a_table_follows_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("K3_IMPL_KERNEL_KDA_CHUNK", "reference")
    monkeypatch.setenv("K3_IMPL_KERNEL_SITU_GLU", "triton")
    assert run(["kernels", "list", "--device", "cpu"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["kda_chunk", "kda_chunk.reference", "env"] in [line[:3] for line in lines]
    (failed,) = [line for line in lines if line[:2] == ["situ_glu", "none"]]
    assert "'triton'" in failed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--device", "tpu"], "'tpu' is not known; use cpu or cuda"),
        (["list", "--dtype", "int8"], "'int8' is not known; use bfloat16, float16"),
        (["bench", "--op", "kda_stop"], "did you mean 'kda_step'?"),
        (["tune", "--op", "situ_glu"], "no launch configurations"),
    ],
)
def test_what_does_not_exist_is_named(capsys, arguments, message):
    assert run(["kernels", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """One run of the whole benchmark on tiny shapes."""
    out = tmp_path_factory.mktemp("bench") / "figures.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cases.SIZES, "cpu", TINY)
        patch.setattr(timing, "BUDGET", 0.0)
        timing.measure("cpu", "float32", op=None, out=out)
    record = json.loads(out.read_text())
    assert record["machine"]["torch"] == torch.__version__
    return record["rows"]


def test_bench_times_everything_that_can_run(rows):
    wanted = {
        impl.name
        for impl in ensure_plugins().impls("kernel")
        if "cpu" in impl.devices and "float32" in impl.dtypes
        if not any(need.startswith("triton") for need in impl.requires)
    }
    assert {row["impl"] for row in rows} == wanted
    assert {row["op"] for row in rows} == set(OP_NAMES) == {case.op for case in bench_cases("cuda")}
    assert all(row["seconds"] > 0 for row in rows)


def test_bench_compares_with_the_reference_of_the_same_call(rows):
    by_call = {}
    for row in rows:
        by_call.setdefault((row["op"], row["case"], row["has_backward"]), []).append(row)
    for (op, *_), group in by_call.items():
        first, *others = group
        assert first["impl"] == f"{op}.reference" and first["ratio"] == 1
        for row in others:
            assert row["ratio"] == pytest.approx(first["seconds"] / row["seconds"])
        assert sum(row["is_chosen"] for row in group) == 1
    assert {"kda_chunk", "attn_res"} <= {op for op, _, has_backward in by_call if has_backward}


def test_bench_gives_the_error(rows, monkeypatch, capsys):
    assert all(row["error"] < TOLERANCE[torch.float32] for row in rows)
    wrong = mla_decode.mla_decode
    monkeypatch.setattr(mla_decode, "mla_decode", lambda *a, **k: 2 * wrong(*a, **k))
    monkeypatch.setattr(timing, "BUDGET", 0.0)
    monkeypatch.setitem(cases.SIZES, "cpu", TINY)
    timing.measure("cpu", "float32", op="mla_decode", out=None)
    (line, _) = [x for x in capsys.readouterr().out.splitlines() if "mla_decode.cpu" in x]
    assert float(line.split()[-1]) == pytest.approx(1.0, abs=0.01)


def test_medians_take_turns():
    calls = []
    found = medians({name: lambda name=name: calls.append(name) for name in "ab"}, "cpu", 0.0)
    assert found.keys() == {"a", "b"}
    assert calls == ["a", "b"] * 5


@dataclass(frozen=True)
class Blocks:
    """A configuration."""

    values: int


def refuse(blocks):
    """Stands for a launch that the device has no shared memory for."""
    if blocks.values == 99:
        raise RuntimeError("out of resource: shared memory")


def own_sweeps():
    yield Sweep((128,), tuple(Blocks(values) for values in (16, 32, 99, 64)), refuse)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU whose time is in the table, and one op that can be tuned on it."""
    times = {"0": 10e-6, "1": 8e-6, "2": 1e-6, "3": 9e-6}
    monkeypatch.setenv("K3_CACHE", str(tmp_path))
    for module in (tuner, tuning):
        monkeypatch.setattr(module, "device_name", lambda: "GPU")
        monkeypatch.setattr(module, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(tuner, "captured", lambda run: run() or run)
    monkeypatch.setattr(tuner, "medians", lambda runs, device, budget: {x: times[x] for x in runs})
    monkeypatch.setitem(sys.modules, "own_sweeps", SimpleNamespace(sweeps=own_sweeps))
    monkeypatch.setattr(tuner, "SWEEPS", {"kda_step": "own_sweeps:sweeps"})
    tuning.forget()
    yield times
    tuning.forget()


def test_tune_keeps_the_fastest_that_runs(gpu, capsys):
    assert run(["kernels", "tune", "--op", "kda_step"]) == 0
    output = capsys.readouterr().out
    assert "{'values': 99} left out, RuntimeError: out of resource" in output
    assert "kernels-GPU.json" in output
    assert tuning.tuned("kda_step", (128,), Blocks(16)) == Blocks(32)


def test_tune_keeps_the_default_where_nothing_is_clearly_faster(gpu):
    gpu.update({"1": 9.9e-6, "3": 11e-6})
    assert run(["kernels", "tune"]) == 0
    (entry,) = tuning.read_cache(tuning.cache_file("GPU"), "GPU")
    assert entry["config"] == {"values": 16}
    assert entry["microseconds"] == entry["default_microseconds"] == pytest.approx(0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tune_without_a_gpu_says_so(capsys):
    assert run(["kernels", "tune"]) == 2
    assert "finds no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize("op", SWEEPS)
def test_sweeps_begin_with_what_the_op_would_use(op, device, monkeypatch):
    """Asked with the shape of a sweep, the table has to be what looks the entry up."""
    pytest.importorskip("triton")
    module, _, attribute = SWEEPS[op].partition(":")
    config = importlib.import_module(module.replace(".sweep", ".config"))
    asked = []
    monkeypatch.setattr(config, "tuned", lambda *entry: asked.append(entry) or entry[-1])
    assert op in OP_NAMES
    for one in getattr(importlib.import_module(module), attribute)(device, TINY):
        assert len(set(one.candidates)) == len(one.candidates) > 1
        lookup = config.choose_step_blocks if op == "kda_step" else config.choose_blocks
        num_states = {"few": 1, "many": 10**6}
        last = num_states[one.shape[2]] if op == "kda_step" else config.BF16
        lookup(one.shape[0], one.shape[0], last)
        assert asked.pop() == (op, one.shape, one.candidates[0])


def test_a_sweep_launches(device):
    pytest.importorskip("triton")
    from k3_kernels.kda_step.sweep import sweeps

    one = next(sweeps(device, TINY))
    assert one.run(one.candidates[0]).isfinite().all()
