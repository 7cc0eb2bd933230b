"""Put K3's functions behind fla's module paths, in `sys.modules` and nowhere else.

Without fla, modules of these names are made. Where fla is installed, `install()` raises and says
so; `install(override=True)` imports it, sets K3's functions in its modules and in every module of
fla that had taken the originals by name, and leaves the rest of fla as it is.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_KDA = ("chunk_kda", "fused_recurrent_kda")
_RECURRENT = ("fused_recurrent_kda", "fused_recurrent_kda_fwd")
_GATE = ("fused_kda_gate", "naive_kda_gate", "naive_kda_lowerbound_gate")
_NAIVE = ("naive_recurrent_kda", "naive_chunk_kda")
_ATTNRES = ("fused_attnres", "naive_attnres")
_CONV = ("ShortConvolution", "causal_conv1d", "causal_conv1d_update", "fast_causal_conv1d_fn")
_NORM = ("group_norm", "group_norm_linear", "layer_norm", "layer_norm_linear", "rms_norm")
_NORM_LAYERS = (
    "GroupNorm",
    "GroupNormLinear",
    "GroupNormRef",
    "LayerNorm",
    "LayerNormLinear",
    "RMSNorm",
    "RMSNormLinear",
)
_GATED = (
    "layer_norm_gated",
    "layer_norm_swish_gate_linear",
    "rms_norm_gated",
    "rms_norm_swish_gate_linear",
)
_GATED_LAYERS = (
    "FusedLayerNormGated",
    "FusedLayerNormSwishGate",
    "FusedLayerNormSwishGateLinear",
    "FusedRMSNormGated",
    "FusedRMSNormSwishGate",
    "FusedRMSNormSwishGateLinear",
)
_L2 = ("L2Norm", "l2_norm", "l2norm")
_CACHE = ("FLA_CACHE_MODE",)
_UTILS = (
    "IS_AMD",
    "IS_INTEL",
    "IS_INTEL_ALCHEMIST",
    "IS_NPU",
    "IS_NVIDIA",
    "IS_NVIDIA_BLACKWELL",
    "IS_NVIDIA_HOPPER",
    "assert_close",
    "device",
    "device_platform",
    "device_torch_lib",
    "get_abs_err",
    "get_err_ratio",
)

# fla's path: the names in it and, by name, the module of this package that has them.
_NORM_NAMES = {"norm": (*_NORM, "rms_norm_linear"), "norm_layers": _NORM_LAYERS}
_GATED_NAMES = {"norm_gated": _GATED, "norm_gated_layers": _GATED_LAYERS}
PATHS: dict[str, dict[str, tuple[str, ...]]] = {
    "fla": {},
    "fla.ops": {"kda": _KDA, "attnres": _ATTNRES[:1]},
    "fla.ops.attnres": {"attnres": _ATTNRES},
    "fla.ops.attnres.fused": {"attnres": _ATTNRES[:1]},
    "fla.ops.attnres.naive": {"attnres": _ATTNRES[1:]},
    "fla.ops.kda": {"kda": _KDA},
    "fla.ops.kda.chunk": {"kda": _KDA[:1]},
    "fla.ops.kda.fused_recurrent": {"kda": _RECURRENT},
    "fla.ops.kda.gate": {"gate": _GATE},
    "fla.ops.kda.naive": {"naive": _NAIVE},
    "fla.modules": {
        "conv": _CONV[:1],
        "norm_layers": tuple(name for name in _NORM_LAYERS if name != "GroupNormRef"),
        "norm_gated_layers": _GATED_LAYERS,
        "l2norm": _L2[:1],
    },
    "fla.modules.conv": {"conv": _CONV[:2]},
    "fla.modules.conv.short_conv": {"conv": _CONV[:1]},
    "fla.modules.conv.triton": {"conv": _CONV[2:3]},
    "fla.modules.convolution": {"conv": _CONV},
    "fla.modules.causal_conv1d": {"conv": _CONV[:3]},
    "fla.modules.layernorm": _NORM_NAMES,
    "fla.modules.fused_norm_gate": _GATED_NAMES,
    "fla.modules.l2norm": {"l2norm": _L2},
    "fla.modules.norm": {},
    "fla.modules.norm.layernorm": _NORM_NAMES,
    "fla.modules.norm.fused_norm_gate": _GATED_NAMES,
    "fla.modules.norm.l2norm": {"l2norm": _L2},
}
# Made only where fla is not: devices and test helpers, which a real fla has for itself.
HELPERS: dict[str, dict[str, tuple[str, ...]]] = {
    "fla.ops.utils": {},
    "fla.ops.utils.cache": {"utils": _CACHE},
    "fla.utils": {"utils": _UTILS},
}
# The two packages that fla calls where they are installed; made only where they are not.
PEERS: dict[str, dict[str, tuple[str, ...]]] = {
    "causal_conv1d": {"peers": ("causal_conv1d_fn", "causal_conv1d_update")},
    "flash_kda": {"peers": ("fwd",)},
}


def install(*, override: bool = False, peers: bool = False) -> tuple[str, ...]:
    """Serve fla's paths from K3 in this process; returns the paths, sorted.

    With `override` an installed fla is imported and its functions are replaced; without it an
    installed fla is an error. `peers` also makes the modules `causal_conv1d` and `flash_kda`,
    unless they are installed, so that code asking for those packages runs on K3's ops as well.
    A second call changes nothing. Raises RuntimeError when fla is installed and `override` is not
    given.
    """
    if _is_installed("fla"):
        if not override:
            raise RuntimeError(
                f"fla is installed ({_origin('fla')}); call install(override=True) to put K3's "
                "ops in front of it in this process, or uninstall it"
            )
        served = [path for path, names in PATHS.items() if names and _replace(path, names)]
    else:
        served = [_make(path, names) for path, names in {**PATHS, **HELPERS}.items()]
    if peers:
        made = {path: names for path, names in PEERS.items() if not _is_installed(path)}
        served += [_make(path, names) for path, names in made.items()]
    return tuple(sorted(served))


def _is_installed(name: str) -> bool:
    """Whether a top-level module exists that is not one of ours."""
    module = sys.modules.get(name)
    if module is not None:
        return not hasattr(module, "__k3_compat__")
    return find_spec(name) is not None


def _origin(name: str) -> str:
    module = sys.modules.get(name)
    found = module.__spec__ if module is not None else find_spec(name)
    return str(found.origin if found else module)


def _functions(names: dict[str, tuple[str, ...]]) -> dict[str, object]:
    """The objects of K3 by name."""
    found: dict[str, object] = {}
    for source, attributes in names.items():
        module = importlib.import_module(f"k3_kernels.compat.fla.{source}")
        found |= {attribute: getattr(module, attribute) for attribute in attributes}
    return found


def _make(path: str, names: dict[str, tuple[str, ...]]) -> str:
    """A module at `path`, a package as far as imports below it are concerned."""
    if path not in sys.modules:
        module = ModuleType(path, f"K3's ops under the name {path}.")
        module.__spec__ = ModuleSpec(path, loader=None, is_package=True)
        module.__path__ = []
        functions = _functions(names)
        # Below every version of fla: who asks for one may want more than is served here.
        marks = {"__k3_compat__": True, "__all__": sorted(functions), "__version__": "0+k3"}
        vars(module).update(functions, **marks)
        sys.modules[path] = module
        parent, _, child = path.rpartition(".")
        # fla's old package has a function where its new one has a module of the same name.
        if parent and not hasattr(sys.modules[parent], child):
            setattr(sys.modules[parent], child, module)
    return path


def _replace(path: str, names: dict[str, tuple[str, ...]]) -> bool:
    """Set K3's objects in fla's module at `path`; False where this fla has no such module."""
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError:
        return False
    for name, ours in _functions(names).items():
        original = getattr(module, name, None)
        if original is None or original is ours:
            continue
        for other in [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "fla"]:
            for attribute, value in list(vars(other).items()):
                if value is original:
                    setattr(other, attribute, ours)
    return True
