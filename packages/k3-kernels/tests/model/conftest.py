"""Which implementations the whole model is run on here: all that the registry knows of.

Each is named as users name it, by `K3_IMPL_KERNEL_<OP>` (design 3), so that neither priorities nor
a new implementation need a change here. A test asks for its choices by the names in `CHOICES`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import pytest
import torch

from k3_core import K3ForConditionalGeneration
from k3_core.plugins import Impl, resolve
from k3_core.plugins.overrides import env_variable
from k3_kernels.bench.run import runnable

MODEL_OPS = (
    "linear",
    "short_conv",
    "kda_chunk",
    "kda_decode",
    "rms_norm",
    "gated_rms_norm",
    "mla_prefill",
    "gated_mla_decode",
    "attn_res",
    "depth_read",
    "latent_router",
    "route_topk",
    "moe_experts",
    "situ_glu",
)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@dataclass(frozen=True)
class Choice:
    """Implementations named by op, for a model of `dtype` on `device`; the registry's otherwise."""

    label: str
    device: str
    dtype: torch.dtype
    names: Mapping[str, str] = field(default_factory=dict)


def _impls(device: str, dtype: torch.dtype) -> list[Impl]:
    """What can run, of every op of the model."""
    return [impl for op in MODEL_OPS for impl in runnable(op, device, dtype)]


def _variants(device: str, dtype: torch.dtype) -> list[Choice]:
    """Each implementation alone."""
    return [
        Choice(impl.name, device, dtype, {impl.implements: impl.name})
        for impl in _impls(device, dtype)
    ]


def _other_variants(device: str, dtype: torch.dtype) -> list[Choice]:
    """Those that a CPU does not choose by itself."""
    own = {op: resolve("kernel", op, device="cpu").chosen.name for op in MODEL_OPS}
    variants = _variants(device, dtype)
    return [v for v in variants if device != "cpu" or not v.names.items() <= own.items()]


def _families(device: str, dtype: torch.dtype) -> list[Choice]:
    """The registry's choice, and each variant for all ops that have it."""
    names: dict[str, dict[str, str]] = {"default": {}}
    for impl in _impls(device, dtype):
        names.setdefault(impl.name.rpartition(".")[2], {})[impl.implements] = impl.name
    return [Choice(label, device, dtype, chosen) for label, chosen in names.items()]


def _bfloat16_families(device: str, dtype: torch.dtype) -> list[Choice]:
    """On a CPU, where all of them compute in float32 inside, the registry's choice is enough."""
    families = _families(device, dtype)
    return families if device == "cuda" else families[:1]


def _fast_families(device: str, dtype: torch.dtype) -> list[Choice]:
    """The registry's choice and Triton, on a GPU."""
    families = _families(device, dtype) if device == "cuda" else []
    return [family for family in families if family.label in ("default", "triton")]


CHOICES = {
    "variant": (_variants, (torch.float32,)),
    "other_variant": (_other_variants, (torch.float32,)),
    "float32_family": (_families, (torch.float32,)),
    "bfloat16_family": (_bfloat16_families, (torch.bfloat16,)),
    "fast_family": (_fast_families, (torch.float32, torch.bfloat16)),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument named in `CHOICES` runs for each of them; marked gpu on a GPU."""
    for name in CHOICES.keys() & set(metafunc.fixturenames):
        make, dtypes = CHOICES[name]
        choices = [choice for d in DEVICES for dtype in dtypes for choice in make(d, dtype)]
        params = [
            pytest.param(
                choice,
                id=f"{choice.label}-{choice.device}-{str(choice.dtype).removeprefix('torch.')}",
                marks=[pytest.mark.gpu] if choice.device == "cuda" else [],
            )
            for choice in choices
        ]
        metafunc.parametrize(name, params)


@pytest.fixture(scope="session")
def model_ops() -> tuple[str, ...]:
    """The ops that a forward pass calls."""
    return MODEL_OPS


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Triton serves calls without gradients only."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def _loaded() -> Callable[[str, str, torch.dtype], K3ForConditionalGeneration]:
    def load(source: str, device: str, dtype: torch.dtype) -> K3ForConditionalGeneration:
        return K3ForConditionalGeneration.from_pretrained(source, dtype, device).eval()

    return cache(load)


@pytest.fixture
def load(_loaded, monkeypatch) -> Callable[[str, Choice], K3ForConditionalGeneration]:  # type: ignore[no-untyped-def]
    """The model of a folder on the implementations of a choice."""

    def bind(source: str, choice: Choice) -> K3ForConditionalGeneration:
        for op in MODEL_OPS:
            monkeypatch.delenv(env_variable("kernel", op), raising=False)
        for op, name in choice.names.items():
            monkeypatch.setenv(env_variable("kernel", op), name)
        model = _loaded(source, choice.device, choice.dtype)
        model.bind_ops(choice.device, str(choice.dtype).removeprefix("torch."))
        for op, name in choice.names.items():
            resolution = model.resolutions[f"kernel.{op}"]
            assert (resolution.chosen.name, resolution.source) == (name, "env")
        return model

    return bind


@pytest.fixture
def on_cpu(load) -> Callable[[str, str], K3ForConditionalGeneration]:  # type: ignore[no-untyped-def]
    """The model of a folder in float32 on a CPU, on the registry's choice."""
    return partial(load, choice=Choice("default", "cpu", torch.float32))


@pytest.fixture
def references(load) -> Callable[[str, Choice], K3ForConditionalGeneration]:  # type: ignore[no-untyped-def]
    """The model of a folder on the references, of the device and dtype of a choice."""
    names = {op: f"{op}.reference" for op in MODEL_OPS}

    def bind(source: str, choice: Choice) -> K3ForConditionalGeneration:
        return load(source, Choice("reference", choice.device, choice.dtype, names))

    return bind
