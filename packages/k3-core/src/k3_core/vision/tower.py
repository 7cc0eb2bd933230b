"""MoonViT-V2, the vision tower (report 7.3, architecture 5), with the released tensor names.

Items are packed: patches of all items stand one after another in one [P, D] tensor. Attention
is full over the t * h * w patches of one item and never crosses items.

Legend: P patches of all items, D vision width, H heads, K head width, M merged positions,
C = merge rows * columns * D, R rotated pairs of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_core.config import VisionConfig
from k3_core.modules import Linear
from k3_core.vision.grid import Grid, VisionInputError, read_grids
from k3_core.vision.position import GridPosition, rotary_angles, rotate

Collected = dict[str, Tensor]


def note(collect: Collected | None, name: str, value: Tensor) -> None:
    """Keeps an intermediate when the caller asked for them."""
    if collect is not None:
        collect[name] = value


class PatchProjection(nn.Module):
    """A product with the flattened (channel, row, column) patch; stored as a convolution's."""

    def __init__(self, width: int, patch_size: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 3, patch_size, patch_size, **factory))

    def forward(self, pixel_values_P3HW: Tensor) -> Tensor:
        return F.linear(pixel_values_P3HW.to(self.weight).flatten(1), self.weight.flatten(1))


class PatchEmbed(nn.Module):
    """Patches to vectors, plus their positions."""

    def __init__(self, config: VisionConfig, **factory: Any) -> None:
        super().__init__()
        self.proj = PatchProjection(config.vt_hidden_size, config.patch_size, **factory)
        rows, columns = config.init_pos_emb_height, config.init_pos_emb_width
        self.pos_emb = GridPosition(rows, columns, config.vt_hidden_size, **factory)

    def forward(self, pixel_values_P3HW: Tensor, grids: Sequence[Grid]) -> Tensor:
        return self.proj(pixel_values_P3HW) + self.pos_emb(grids)


class VisionMLP(nn.Module):
    """fc1(gelu_tanh(fc0(x)))."""

    def __init__(self, config: VisionConfig, **factory: Any) -> None:
        super().__init__()
        self.fc0 = Linear(config.vt_hidden_size, config.vt_intermediate_size, **factory)
        self.fc1 = Linear(config.vt_intermediate_size, config.vt_hidden_size, **factory)

    def forward(self, x_PD: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x_PD), approximate="tanh"))


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP; the heads together may be wider than the residual."""

    def __init__(self, config: VisionConfig, **factory: Any) -> None:
        super().__init__()
        width, inner = config.vt_hidden_size, config.qkv_hidden_size
        self.num_heads = config.vt_num_attention_heads
        self.norm0 = nn.RMSNorm(width, eps=config.vision_norm_eps, **factory)
        self.norm1 = nn.RMSNorm(width, eps=config.vision_norm_eps, **factory)
        self.wqkv = Linear(width, 3 * inner, **factory)
        self.wo = Linear(inner, width, **factory)
        self.mlp = VisionMLP(config, **factory)

    def forward(self, x_PD: Tensor, lengths: list[int], rope: tuple[Tensor, Tensor]) -> Tensor:
        x_PD = x_PD + self._attend(self.norm0(x_PD), lengths, rope)
        return x_PD + self.mlp(self.norm1(x_PD))

    def _attend(self, x_PD: Tensor, lengths: list[int], rope: tuple[Tensor, Tensor]) -> Tensor:
        qkv_P3HK = self.wqkv(x_PD).unflatten(-1, (3, self.num_heads, -1))
        q_PHK, k_PHK, v_PHK = qkv_P3HK.unbind(1)
        parts = (rotate(q_PHK, *rope), rotate(k_PHK, *rope), v_PHK)
        items = zip(*(part.transpose(0, 1).split(lengths, dim=1) for part in parts), strict=True)
        # A batch dimension of one, because fused kernels want four dimensions.
        outs = [F.scaled_dot_product_attention(q[None], k[None], v[None])[0] for q, k, v in items]
        return self.wo(torch.cat(outs, dim=1).transpose(0, 1).flatten(1))


class VisionEncoder(nn.Module):
    """The blocks and the final norm."""

    def __init__(self, config: VisionConfig, **factory: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.blocks = nn.ModuleList(
            VisionBlock(config, **factory) for _ in range(config.vt_num_hidden_layers)
        )
        self.final_layernorm = nn.RMSNorm(
            config.vt_hidden_size, eps=config.vision_norm_eps, **factory
        )

    def forward(self, x_PD: Tensor, grids: Sequence[Grid], collect: Collected | None) -> Tensor:
        angle_dtype = torch.float64 if x_PD.dtype == torch.float64 else torch.float32
        rope = rotary_angles(grids, self.head_dim, device=x_PD.device, dtype=angle_dtype)
        lengths = [grid.num_patches for grid in grids]
        for index, block in enumerate(self.blocks):
            x_PD = block(x_PD, lengths, rope)
            note(collect, f"block.{index}", x_PD)
        x_PD = self.final_layernorm(x_PD)
        note(collect, "final_norm", x_PD)
        return x_PD


def merge_patches(x_PD: Tensor, grid: Grid, merge_kernel_size: Sequence[int]) -> Tensor:
    """Mean over the frames of one item, then its neighbours side by side: [M, C].

    Merged positions run row by row; inside one, neighbours run (0,0), (0,1), (1,0), (1,1).
    """
    rows, columns = merge_kernel_size
    mean_HWD = x_PD.unflatten(0, grid).mean(0)
    cells = mean_HWD.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return cells.transpose(1, 2).flatten(2).flatten(0, 1)


class VisionTower(nn.Module):
    """MoonViT-V2; weights are unset until `model.init` or a checkpoint fills them."""

    def __init__(
        self,
        config: VisionConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, device=device, dtype=dtype)
        self.encoder = VisionEncoder(config, device=device, dtype=dtype)

    def forward(
        self, pixel_values_P3HW: Tensor, grid_thws_N3: Tensor, collect: Collected | None = None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Merged features [M, C] of all items and the positions of each item.

        pixel_values_P3HW: patches of all items, [-1, 1], moved to the weights' device and dtype;
        grid_thws_N3: integers (frames, rows, columns). `collect`, when given, receives
        `patch_embed`, `block.i`, `final_norm` and `merged`. Raises `VisionInputError` for pixel
        values or grids that do not fit each other or the model.
        """
        config = self.config
        expected = (3, config.patch_size, config.patch_size)
        if pixel_values_P3HW.ndim != 4 or tuple(pixel_values_P3HW.shape[1:]) != expected:
            raise VisionInputError(
                f"pixel_values has shape {list(pixel_values_P3HW.shape)}; pass patches "
                f"[num_patches, {', '.join(map(str, expected))}], as k3_core.image makes them"
            )
        kernel = config.merge_kernel_size
        grids = read_grids(
            grid_thws_N3,
            num_patches=pixel_values_P3HW.shape[0],
            merge_kernel_size=kernel,
            max_frames=config.init_pos_emb_time,
        )
        x_PD = self.patch_embed(pixel_values_P3HW, grids)
        note(collect, "patch_embed", x_PD)
        x_PD = self.encoder(x_PD, grids, collect)
        items = x_PD.split([grid.num_patches for grid in grids])
        merged_MC = torch.cat(
            [merge_patches(x, grid, kernel) for x, grid in zip(items, grids, strict=True)]
        )
        note(collect, "merged", merged_MC)
        return merged_MC, tuple(grid.num_tokens(kernel) for grid in grids)
