"""Properties of image planning and preprocessing for arbitrary sizes and limits."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from k3_core.image import ImageSettings, plan_resize, preprocess_image

SIDES = st.one_of(st.integers(1, 200), st.integers(1, 40_000))
SETTINGS = st.builds(
    ImageSettings,
    in_patch_limit=st.integers(1, 65536),
    patch_limit_on_one_side=st.integers(1, 256).map(lambda half: 2 * half),
    patch_size=st.sampled_from([2, 14, 16]),
)


@given(SIDES, SIDES, SETTINGS)
def test_the_grid_covers_the_scaled_image_and_little_more(
    width: int, height: int, settings: ImageSettings
) -> None:
    plan = plan_resize(width, height, settings)
    patch = settings.patch_size
    for new, pad, grid in (
        (plan.new_width, plan.pad_width, plan.grid_w),
        (plan.new_height, plan.pad_height, plan.grid_h),
    ):
        assert new >= 1 and 0 <= pad < 2 * patch
        assert new + pad == grid * patch
        assert grid % 2 == 0 and grid <= settings.patch_limit_on_one_side
    assert 4 * plan.num_tokens == plan.grid_h * plan.grid_w


@given(SIDES, SIDES, SETTINGS)
def test_images_never_grow_and_keep_their_shape(
    width: int, height: int, settings: ImageSettings
) -> None:
    plan = plan_resize(width, height, settings)
    sides = [(plan.new_width, width), (plan.new_height, height)]
    # A side cut to whole pixels is new <= scale * old < new + 1, but never below one pixel.
    scale_at_least = max((new / old for new, old in sides if new > 1), default=0.0)
    for new, old in sides:
        assert new <= old
        assert new + 1 > scale_at_least * old * (1 - 1e-12)


@given(SIDES, SIDES, SETTINGS)
def test_patches_stay_within_the_budget(width: int, height: int, settings: ImageSettings) -> None:
    # The budget bounds whole patches of the original, so up to one more a side comes on top.
    plan, patch = plan_resize(width, height, settings), settings.patch_size
    columns, rows = max(1, width // patch), max(1, height // patch)
    used = plan.new_width * plan.new_height * columns * rows
    allowed = settings.in_patch_limit * patch**2 * (columns + 1) * (rows + 1)
    assert used <= allowed or 1 in (plan.new_width, plan.new_height)


@given(SIDES, SIDES, SETTINGS)
def test_an_image_shrinks_only_to_meet_a_limit(
    width: int, height: int, settings: ImageSettings
) -> None:
    plan, patch = plan_resize(width, height, settings), settings.patch_size
    if (plan.new_width, plan.new_height) == (width, height):
        return
    num_patches = max(1, width // patch) * max(1, height // patch)
    longest = settings.patch_limit_on_one_side * patch
    widened = (plan.new_width + 1) ** 2 * num_patches
    is_at_budget = widened > settings.in_patch_limit * width**2 * (1 - 1e-9)
    # 49 * (4 / 49) rounds to just under 4, so an image may end one pixel below the side limit.
    is_at_side = max(plan.new_width, plan.new_height) + 1 >= longest
    assert is_at_budget or is_at_side


@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from([4, 16, 64]), st.data())
def test_padding_is_minus_one_and_values_stay_in_range(
    width: int, height: int, limit: int, data: st.DataObject
) -> None:
    level = data.draw(st.integers(0, 255))
    settings = ImageSettings(in_patch_limit=limit)
    values, (frames, rows, columns) = preprocess_image(
        Image.new("L", (width, height), level), settings
    )
    plan = plan_resize(width, height, settings)
    assert (frames, rows, columns) == (1, plan.grid_h, plan.grid_w)
    whole = values.reshape(rows, columns, 3, 14, 14).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
    inside = whole[:, : plan.new_height, : plan.new_width]
    torch.testing.assert_close(inside, torch.full_like(inside, level / 127.5 - 1))
    assert (whole[:, plan.new_height :] == -1).all()
    assert (whole[:, :, plan.new_width :] == -1).all()
