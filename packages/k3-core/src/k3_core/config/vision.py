"""`vision_config` of the released config.json: MoonViT-V2 and projector (architecture 1, 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import bad_value
from .part import ConfigPart, ours
from .text import check_at_least


@dataclass(frozen=True, kw_only=True)
class VisionConfig(ConfigPart):
    """Sizes of the tower and the projector; the switches have one value each."""

    vt_hidden_size: int
    vt_num_hidden_layers: int
    vt_num_attention_heads: int
    vt_intermediate_size: int
    qkv_hidden_size: int
    mm_hidden_size: int
    text_hidden_size: int
    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    pos_emb_type: Literal["divided_fixed"] = "divided_fixed"
    pos_emb_interpolation_mode: Literal["bilinear"] = "bilinear"
    merge_kernel_size: tuple[int, int] = (2, 2)
    merge_type: Literal["sd2_tpool"] = "sd2_tpool"
    mm_projector_type: Literal["patchmergerv2"] = "patchmergerv2"
    projector_hidden_act: Literal["gelu"] = "gelu"
    projector_ln_eps: float = 1e-5
    norm_type: Literal["rmsnorm"] = "rmsnorm"
    mlp_type: Literal["mlp2"] = "mlp2"
    activation_func: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    attn_bias: Literal[False] = False
    linear_bias: Literal[False] = False
    patch_embed_proj_bias: Literal[False] = False
    vision_norm_eps: float = ours(1.1920929e-07)

    def validate(self) -> None:
        check_at_least(
            self, 1, "vt_hidden_size", "vt_num_hidden_layers", "vt_num_attention_heads",
            "vt_intermediate_size", "qkv_hidden_size", "text_hidden_size", "patch_size",
            "init_pos_emb_height", "init_pos_emb_width", "init_pos_emb_time",
        )  # fmt: skip
        heads = self.vt_num_attention_heads
        if self.qkv_hidden_size % heads or self.head_dim % 4:
            allowed = f"{heads} heads times a multiple of 4 (2-D RoPE rotates pairs of pairs)"
            raise bad_value("qkv_hidden_size", self.qkv_hidden_size, allowed)
        if self.merge_kernel_size != (2, 2):
            step = "sd2_tpool merges 2 x 2 patches."
            raise bad_value("merge_kernel_size", list(self.merge_kernel_size), "[2, 2]", step)
        if self.mm_hidden_size != self.vt_hidden_size:
            allowed = f"vt_hidden_size = {self.vt_hidden_size}"
            raise bad_value("mm_hidden_size", self.mm_hidden_size, allowed)
        for name in ("projector_ln_eps", "vision_norm_eps"):
            if not getattr(self, name) > 0:
                raise bad_value(name, getattr(self, name), "a number above 0")

    @property
    def head_dim(self) -> int:
        """Channels of one attention head (may be wider than the residual divided by heads)."""
        return self.qkv_hidden_size // self.vt_num_attention_heads

    @property
    def merged_size(self) -> int:
        """Width of one merged token before the projector."""
        rows, columns = self.merge_kernel_size
        return self.mm_hidden_size * rows * columns
