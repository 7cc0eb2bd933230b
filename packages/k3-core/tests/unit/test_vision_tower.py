"""Parts of the vision tower against explicit formulas, and what the tower refuses."""

import math
from itertools import product

import pytest
import torch

from k3_core.config import VisionConfig
from k3_core.model.init import init_parameters
from k3_core.vision import (
    Grid,
    Projector,
    VisionInputError,
    VisionTower,
    encode_images,
)
from k3_core.vision.position import GridPosition, frame_sinusoid, rotary_angles, rotate
from k3_core.vision.tower import merge_patches

CONFIG = VisionConfig(
    vt_hidden_size=16, vt_num_hidden_layers=2, vt_num_attention_heads=3, vt_intermediate_size=24,
    qkv_hidden_size=24, mm_hidden_size=16, text_hidden_size=20, patch_size=4,
    init_pos_emb_height=6, init_pos_emb_width=4, init_pos_emb_time=4,
)  # fmt: skip
GRIDS = [(1, 2, 8), (3, 4, 2), (4, 6, 4)]


def build(dtype: torch.dtype = torch.float64) -> tuple[VisionTower, Projector]:
    generator = torch.Generator().manual_seed(0)
    modules = VisionTower(CONFIG, dtype=dtype), Projector(CONFIG, dtype=dtype)
    for module in modules:
        init_parameters(module, 0.3, generator)
    return modules


def patches(grids: list[tuple[int, int, int]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    num_patches = sum(math.prod(grid) for grid in grids)
    return torch.randn(num_patches, 3, 4, 4, generator=generator, dtype=torch.float64)


def test_items_do_not_see_each_other() -> None:
    pixel_values = patches(GRIDS)
    together = encode_images(*build(), pixel_values, torch.tensor(GRIDS))
    parts = pixel_values.split([math.prod(grid) for grid in GRIDS])
    for item, part, grid in zip(together, parts, GRIDS, strict=True):
        [alone] = encode_images(*build(), part, torch.tensor([grid]))
        torch.testing.assert_close(item, alone, atol=1e-12, rtol=0)


def test_every_frame_of_an_item_reaches_every_position() -> None:
    pixel_values = patches([(3, 2, 4)]).requires_grad_()
    [item] = encode_images(*build(), pixel_values, torch.tensor([(3, 2, 4)]))
    for position in range(2):
        (gradient,) = torch.autograd.grad(item[position, 0], pixel_values, retain_graph=True)
        assert (gradient.abs().amax((1, 2, 3)) > 0).all()


def test_gradients_equal_finite_differences() -> None:
    tower, projector = build()
    grids = torch.tensor([(2, 2, 2), (1, 2, 4)])
    pixel_values = patches([(2, 2, 2), (1, 2, 4)]).requires_grad_()
    weights = list(tower.parameters()) + list(projector.parameters())

    def function(pixel_values: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.cat(encode_images(tower, projector, pixel_values, grids))

    assert torch.autograd.gradcheck(function, (pixel_values, *weights), fast_mode=True)


def test_frame_sinusoid_follows_its_formula() -> None:
    table = frame_sinusoid(4, 16)
    for t, i in product(range(4), range(8)):
        angle = t * 10000 ** (-i / 8)
        assert table[t, i].item() == pytest.approx(math.sin(angle), abs=1e-12)
        assert table[t, 8 + i].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_position_grid_is_resized_by_half_pixel_bilinear_weights() -> None:
    position = GridPosition(6, 4, 3, dtype=torch.float64)
    torch.nn.init.normal_(position.weight)
    source = position.weight.detach()
    found = position([Grid(1, 4, 6)]).detach().unflatten(0, (4, 6))

    def taps(index: int, size: int, source_size: int) -> list[tuple[int, float]]:
        center = max((index + 0.5) * source_size / size - 0.5, 0.0)
        low = math.floor(center)
        return [(low, 1 - center + low), (min(low + 1, source_size - 1), center - low)]

    for y, x in product(range(4), range(6)):
        rows, columns = taps(y, 4, 6), taps(x, 6, 4)
        terms = [source[r, c] * u * v for (r, u), (c, v) in product(rows, columns)]
        torch.testing.assert_close(found[y, x], sum(terms), atol=1e-12, rtol=0)


def test_only_videos_get_the_frame_term() -> None:
    position = GridPosition(2, 2, 4, dtype=torch.float64)
    torch.nn.init.normal_(position.weight)
    still = position([Grid(1, 2, 2)])
    moving = position([Grid(2, 2, 2)]).unflatten(0, (2, 4))
    torch.testing.assert_close(still, position.weight.flatten(0, 1), atol=0, rtol=0)
    added = moving - still
    expected = frame_sinusoid(2, 4)[:, None].expand_as(added)
    torch.testing.assert_close(added, expected, atol=1e-12, rtol=0)


def test_rotation_is_a_complex_product_with_column_and_row_angles() -> None:
    grid, head_dim = Grid(2, 3, 5), 8
    dtype = torch.float64
    x = torch.randn(grid.num_patches, 2, head_dim, dtype=dtype)
    angles = rotary_angles([grid], head_dim, device=torch.device("cpu"), dtype=dtype)
    found = torch.view_as_complex(rotate(x, *angles).unflatten(-1, (-1, 2)))
    source = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    for t, row, column in product(*map(range, grid)):
        patch = (t * grid.h + row) * grid.w + column
        for pair in range(head_dim // 2):
            place = column if pair % 2 == 0 else row
            angle = place * 10000 ** (-4 * (pair // 2) / head_dim)
            factor = complex(math.cos(angle), math.sin(angle))
            expected = source[patch, :, pair] * factor
            torch.testing.assert_close(found[patch, :, pair], expected, atol=1e-12, rtol=0)


def test_merging_averages_frames_and_joins_neighbours() -> None:
    grid = Grid(3, 4, 6)
    x = torch.randn(grid.num_patches, 5, dtype=torch.float64)
    frames = x.reshape(3, 4, 6, 5)
    found = merge_patches(x, grid, (2, 2))
    assert found.shape == (6, 20)
    for row, column in product(range(2), range(3)):
        cell = [
            sum(frames[t, 2 * row + dy, 2 * column + dx] for t in range(3)) / 3
            for dy, dx in [(0, 0), (0, 1), (1, 0), (1, 1)]
        ]
        torch.testing.assert_close(found[row * 3 + column], torch.cat(cell), atol=1e-12, rtol=0)


def test_initialisation_fills_every_parameter() -> None:
    for module in build(torch.float32):
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, math.nan)
        init_parameters(module, 0.02, torch.Generator().manual_seed(2))
        for name, parameter in module.named_parameters():
            values = parameter.detach().flatten()
            if "norm" in name:
                assert (values == 1).all(), name
                continue
            error = 5 * 0.02 / math.sqrt(len(values))  # five deviations of the estimates
            assert abs(values.mean()) < error, name
            assert abs(values.std() - 0.02) < error, name


@pytest.mark.parametrize(
    ("num_patches", "grids", "message"),
    [
        (6, [(1, 3, 2)], "h = 3 patches"),
        (6, [(1, 2, 3)], "w = 3 patches"),
        (20, [(5, 2, 2)], "5 frames"),
        (0, [(0, 2, 2)], "0 frames"),
        (0, [(1, 0, 2)], "h = 0"),
        (1028, [(1, 2, 514)], "from 2 to 512"),
        (5, [(1, 2, 2)], "has 5 patches .* cover 4"),
    ],
)
def test_wrong_grids_are_refused(num_patches: int, grids: list, message: str) -> None:
    tower, _ = build()
    pixel_values = torch.zeros(num_patches, 3, 4, 4, dtype=torch.float64)
    with pytest.raises(VisionInputError, match=message):
        tower(pixel_values, torch.tensor(grids))


@pytest.mark.parametrize(
    "grids", [torch.zeros(3, dtype=torch.long), torch.ones(1, 3), torch.zeros(0, 3).long()]
)
def test_grids_of_another_kind_are_refused(grids: torch.Tensor) -> None:
    tower, _ = build()
    with pytest.raises(VisionInputError, match="grid_thws"):
        tower(torch.zeros(4, 3, 4, 4), grids)


def test_patches_of_another_size_are_refused() -> None:
    tower, _ = build()
    with pytest.raises(VisionInputError, match=r"\[4, 3, 5, 5\]"):
        tower(torch.zeros(4, 3, 5, 5), torch.tensor([(1, 2, 2)]))
