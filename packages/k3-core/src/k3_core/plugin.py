"""What k3-core itself declares; a plugin like any other. Source: design 3 (registry)."""

from collections.abc import Iterable

from k3_core.cli.lazy import CommandRegistry
from k3_core.config.declare import implementations as presets
from k3_core.model.declare import implementations as parts
from k3_core.ops.declare import implementations as kernels
from k3_core.plugins import Impl, hookimpl


def _parts_of(kind: str) -> list[Impl]:
    return [impl for impl in parts() if impl.kind == kind]


@hookimpl
def k3_register_attention() -> Iterable[Impl]:
    """KDA and Gated MLA layers."""
    return _parts_of("attention")


@hookimpl
def k3_register_moe() -> Iterable[Impl]:
    """LatentMoE and the dense layers."""
    return _parts_of("moe")


@hookimpl
def k3_register_depth_mixer() -> Iterable[Impl]:
    """Block AttnRes, Full AttnRes and the plain residual."""
    return _parts_of("depth_mixer")


@hookimpl
def k3_register_cache() -> Iterable[Impl]:
    """The contiguous hybrid cache."""
    return _parts_of("cache")


@hookimpl
def k3_register_kernel() -> Iterable[Impl]:
    """The reference of every op."""
    return kernels()


@hookimpl
def k3_register_preset() -> Iterable[Impl]:
    """Named configurations."""
    return presets()


@hookimpl
def k3_add_commands(registry: CommandRegistry) -> None:
    """The commands that k3-core brings; `info` and `plugins` need no plugin."""
    registry.add("inspect", target="k3_core.cli.inspect:app", help="Sizes of a model.")
    registry.add("generate", target="k3_core.cli.generate:app", help="Text from a model.")
    registry.add("eval", target="k3_core.cli.eval:app", help="Measure a model on tasks.")
    registry.add("demo", target="k3_core.cli.demo:app", help="Ten questions to k3-nano.")
