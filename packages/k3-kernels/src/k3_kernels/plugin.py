"""What k3-kernels declares to the registry; imports no torch. Source: design 3, 5."""

from collections.abc import Iterable

from k3_core.cli.lazy import CommandRegistry
from k3_core.plugins import Impl, hookimpl
from k3_kernels.kda_declare import IMPLS as KDA_IMPLS
from k3_kernels.loops_declare import IMPLS as LOOPS_IMPLS
from k3_kernels.ops_declare import IMPLS as OPS_IMPLS
from k3_kernels.torch_declare import IMPLS as TORCH_IMPLS


@hookimpl
def k3_register_kernel() -> Iterable[Impl]:
    """Plain torch for any device, loops for few tokens on a CPU, Triton for CUDA devices."""
    return [*TORCH_IMPLS, *LOOPS_IMPLS, *KDA_IMPLS, *OPS_IMPLS]


@hookimpl
def k3_add_commands(registry: CommandRegistry) -> None:
    """The command `k3 kernels`."""
    registry.add("kernels", target="k3_kernels.cli:app", help="What the ops run here, how fast.")
