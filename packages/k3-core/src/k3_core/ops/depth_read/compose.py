"""depth_read from the ops that it joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from k3_core.ops.depth_read import DepthRead


def read_by(attn_res: Callable[..., Tensor], rms_norm: Callable[..., Tensor]) -> DepthRead:
    """The op on implementations of the two."""

    def depth_read(
        sources: Sequence[Tensor],
        prefix_TD: Tensor,
        added_TD: Tensor | None,
        norm_D: Tensor,
        proj_1D: Tensor,
        out_norm_D: Tensor,
        *,
        eps: float,
        out_eps: float,
    ) -> tuple[Tensor, Tensor]:
        check_added(prefix_TD, added_TD)
        sum_TD = prefix_TD if added_TD is None else prefix_TD + added_TD
        mix_TD = attn_res([*sources, sum_TD], norm_D, proj_1D, eps=eps)
        return rms_norm(mix_TD, out_norm_D, eps=out_eps), sum_TD

    return depth_read


def check_added(prefix_TD: Tensor, added_TD: Tensor | None) -> None:
    """Raise ValueError for an output that does not fit the sum."""
    if added_TD is not None and added_TD.shape != prefix_TD.shape:
        raise ValueError(
            f"depth_read: added is {tuple(added_TD.shape)}, the running sum is "
            f"{tuple(prefix_TD.shape)}; both are [T, D]"
        )
