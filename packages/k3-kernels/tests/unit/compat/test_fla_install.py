"""install(): which paths it serves, what it does beside an installed fla, and the signatures."""

import importlib
import inspect
import sys

import pytest
import torch

from k3_kernels.compat.fla import install as install_function
from k3_kernels.compat.fla import kda

# Positional order of fla-core 0.6.0.
CHUNK_KDA = (
    "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
    "use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound "
    "disable_recompute return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu "
    "cp_context use_graph max_num_seqs"
)
SIGNATURES = {
    "fla.ops.kda.chunk_kda": CHUNK_KDA,
    "fla.ops.kda.fused_recurrent_kda": (
        "q k v g beta A_log dt_bias scale initial_state output_final_state "
        "use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval "
        "lower_bound state_v_first cu_seqlens"
    ),
    "fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd": (
        "q k v g beta A_log dt_bias initial_state scale output_final_state inplace_final_state "
        "state_v_first cu_seqlens ssm_state_indices num_accepted_tokens use_qk_l2norm_in_kernel "
        "use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound out"
    ),
    "fla.ops.kda.gate.fused_kda_gate": "g A_log dt_bias lower_bound output_dtype",
    "fla.ops.kda.naive.naive_recurrent_kda": (
        "q k v g beta scale initial_state output_final_state"
    ),
    "fla.ops.attnres.fused_attnres": (
        "query residuals rms_weight output_rms_weight rms_eps scale return_weights checkpoint_level"
    ),
    "fla.modules.convolution.causal_conv1d": (
        "x weight bias residual initial_state output_final_state activation backend cu_seqlens "
        "cu_seqlens_cpu chunk_indices cp_context"
    ),
    "fla.modules.convolution.causal_conv1d_update": "x cache residual weight bias activation",
    "fla.modules.layernorm.rms_norm": "x weight bias residual eps prenorm residual_in_fp32",
    "fla.modules.fused_norm_gate.rms_norm_gated": (
        "x g weight bias activation residual prenorm residual_in_fp32 eps"
    ),
    "fla.modules.l2norm.l2norm": "x eps output_dtype",
}


@pytest.fixture(autouse=True)
def clean_modules(monkeypatch, tmp_path):
    """No fla in this process, whatever is installed, and none left behind."""
    names = ("fla", "causal_conv1d", "flash_kda")
    before = {n: m for n, m in sys.modules.items() if n.split(".")[0] in names}
    for name in before:
        del sys.modules[name]
    real = install_module().find_spec
    hidden = dict.fromkeys(names)
    monkeypatch.setattr(
        install_module(), "find_spec", lambda n: hidden[n] if n in hidden else real(n)
    )
    yield hidden
    for name in [n for n in sys.modules if n.split(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(before)


def install_module():
    return importlib.import_module("k3_kernels.compat.fla.install")


def test_every_path_can_be_imported_with_its_names():
    served = install_function()
    assert served == tuple(sorted({**install_module().PATHS, **install_module().HELPERS}))
    for path in served:
        module = importlib.import_module(path)
        assert all(getattr(module, name) is not None for name in module.__all__)
    from fla.modules import FusedRMSNormGated, ShortConvolution
    from fla.ops.kda import chunk_kda

    assert chunk_kda is kda.chunk_kda
    assert FusedRMSNormGated.__module__.startswith("k3_kernels.")
    assert ShortConvolution(4, 3).weight.shape == (4, 1, 3)


def test_a_second_call_keeps_the_modules():
    install_function()
    first = sys.modules["fla.ops.kda"]
    install_function()
    assert sys.modules["fla.ops.kda"] is first


def test_what_is_not_served_is_not_found():
    install_function()
    with pytest.raises(ModuleNotFoundError, match=r"fla\.layers"):
        importlib.import_module("fla.layers")


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_flas_names_and_order(name):
    install_function()
    path, _, function = name.rpartition(".")
    parameters = inspect.signature(
        getattr(importlib.import_module(path), function)
    ).parameters.values()
    ours = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted = SIGNATURES[name].split()
    assert ours[: len(wanted)] == wanted


@pytest.fixture
def real_fla(tmp_path, monkeypatch, clean_modules):
    """A small package named fla with functions of its own."""
    files = {
        "fla/__init__.py": "from fla.layers import chunk_kda\n",
        "fla/ops/__init__.py": "",
        "fla/ops/kda/__init__.py": "from fla.ops.kda.chunk import chunk_kda\n",
        "fla/ops/kda/chunk.py": "def chunk_kda(): return 'theirs'\ndef helper(): return 'kept'\n",
        "fla/layers.py": "from fla.ops.kda import chunk_kda\ndef call(): return chunk_kda\n",
        "fla/utils.py": "device = 'theirs'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    del clean_modules["fla"]


def test_an_installed_fla_is_an_error_that_says_what_to_do(real_fla):
    with pytest.raises(RuntimeError, match=r"fla is installed \(.*install\(override=True\)"):
        install_function()
    assert "fla" not in sys.modules


def test_override_reaches_every_module_that_took_the_function(real_fla):
    served = install_function(override=True)
    layers, chunk = (importlib.import_module(n) for n in ("fla.layers", "fla.ops.kda.chunk"))
    assert sys.modules["fla"].chunk_kda is layers.call() is chunk.chunk_kda is kda.chunk_kda
    assert chunk.helper() == "kept" and importlib.import_module("fla.utils").device == "theirs"
    assert served == ("fla.ops", "fla.ops.kda", "fla.ops.kda.chunk")


def test_peers_are_made_on_request_only():
    install_function()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_kda")
    assert {"causal_conv1d", "flash_kda"} < set(install_function(peers=True))
    conv = importlib.import_module("causal_conv1d")
    x = torch.randn(2, 3, 7)
    weight = torch.randn(3, 4)
    expected = torch.nn.functional.conv1d(x, weight.unsqueeze(1), padding=3, groups=3)[..., :7]
    torch.testing.assert_close(conv.causal_conv1d_fn(x, weight), expected)
    state = torch.zeros(2, 3, 4)
    steps = [conv.causal_conv1d_update(x[..., t], state, weight) for t in range(7)]
    torch.testing.assert_close(torch.stack(steps, dim=-1), expected)
