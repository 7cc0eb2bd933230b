"""What the plugin declares. Nothing here imports torch: the targets are strings."""

from collections.abc import Iterable, Mapping

from k3_core.plugins import Impl, hookimpl

FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


@hookimpl
def k3_register_attention() -> Iterable[Impl]:
    """A KDA layer that always runs token by token."""
    return [
        Impl(
            kind="attention",
            name="kda.recurrent",
            target="k3_plugin_template.recurrent_kda:RecurrentKDA",
            dtypes=FLOATS,
            features=frozenset({"backward"}),
            priority=20,
            summary="token by token, slow and short",
        )
    ]


@hookimpl
def k3_register_kernel() -> Iterable[Impl]:
    """SiTU-GLU without a call of tanh."""
    return [
        Impl(
            kind="kernel",
            name="situ_glu.logistic",
            target="k3_plugin_template.situ_glu:situ_glu",
            dtypes=FLOATS,
            features=frozenset({"backward"}),
            priority=20,
            summary="tanh by the logistic function",
        )
    ]


@hookimpl
def k3_info() -> Mapping[str, str]:
    """A line for `k3 info`."""
    return {"purpose": "example"}
