"""Settings of the image processor; the defaults are the released ones (architecture 6)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from k3_core.errors import K3Error

PATTERNS = ("chessboard", "white")
FILL_STAGES = ("after_resize", "before_resize")


class ImageError(K3Error, ValueError):
    """An image, a video or a setting that the processor refuses."""


def _known(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(cls)]
    for name in values:
        if name not in names:
            raise ImageError(f"unknown image setting {name!r}; there are {', '.join(names)}")
    return dict(values)


@dataclass(frozen=True)
class Background:
    """What shows through transparent pixels; sizes in pixels, values in 0..255."""

    pattern: str = "chessboard"
    chessboard_square_size: int = 8
    chessboard_square_on_top_left: bool = True
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 180

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ImageError(f"pattern {self.pattern!r}; allowed are {', '.join(PATTERNS)}")
        if self.chessboard_square_size < 1:
            raise ImageError(f"chessboard_square_size {self.chessboard_square_size}; at least 1")
        if not self.chessboard_square_on_top_left:
            raise ImageError("chessboard_square_on_top_left = false is unknown; leave it true")


@dataclass(frozen=True)
class ImageSettings:
    """Limits in patches, means and deviations in units of 255, background of transparency."""

    in_patch_limit: int = 65536
    patch_size: int = 14
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    merge_kernel_size: int = 2
    fixed_output_tokens: None = None
    patch_limit_on_one_side: int = 512
    transparent_bg_config: Background | None = Background()
    transparent_bg_fill_stage: str = "after_resize"

    def __post_init__(self) -> None:
        for name in ("in_patch_limit", "patch_size", "merge_kernel_size"):
            if getattr(self, name) < 1:
                raise ImageError(f"{name} = {getattr(self, name)}; it is at least 1")
        side, kernel = self.patch_limit_on_one_side, self.merge_kernel_size
        if side < kernel or side % kernel:
            raise ImageError(
                f"patch_limit_on_one_side = {side}; padding would exceed it unless it is a "
                f"multiple of merge_kernel_size {kernel}"
            )
        if self.fixed_output_tokens is not None:
            raise ImageError(
                f"fixed_output_tokens = {self.fixed_output_tokens}; only null is supported, "
                "as released"
            )
        if self.transparent_bg_fill_stage not in FILL_STAGES:
            raise ImageError(
                f"transparent_bg_fill_stage {self.transparent_bg_fill_stage!r}; "
                f"allowed are {', '.join(FILL_STAGES)}"
            )
        if len(self.image_mean) != 3 or len(self.image_std) != 3 or 0 in self.image_std:
            raise ImageError(
                f"image_mean {self.image_mean} and image_std {self.image_std}; "
                "pass three values each, no deviation zero"
            )

    @property
    def cell(self) -> int:
        """Pixels of one side of a text position: patch size times merge kernel."""
        return self.patch_size * self.merge_kernel_size

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ImageSettings":
        """Settings from the released `media_proc_cfg`; an unknown key is an `ImageError`."""
        known = _known(cls, values)
        for name in ("image_mean", "image_std"):
            if name in known:
                known[name] = tuple(known[name])
        background = known.get("transparent_bg_config")
        if background is not None:
            known["transparent_bg_config"] = Background(**_known(Background, background))
        return cls(**known)


RELEASED = ImageSettings()
