"""Pictures from drawing to packed batches: digits, encoding, the store, the sampler."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from k3_core.errors import K3Error
from k3_core.image import preprocess_image, preprocess_video
from k3_core.image.preprocess import normalized
from k3_core.tokenizer import K3Tokenizer
from k3_train.data.corpus import build_corpus
from k3_train.data.digits import DIRECTIONS, changing_clip, draw_digit, moving_clip, random_style
from k3_train.data.documents import Interleaved, Picture, Text
from k3_train.data.encode_pictures import encode_interleaved, encode_picture
from k3_train.data.sampler import PackedSampler
from k3_train.data.sources.pictures import DigitsSource, RendersSource
from k3_train.data.token_file import TokenFile, TokenFileWriter


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    return K3Tokenizer({bytes([byte]): byte for byte in range(256)}, 256)


@pytest.fixture(scope="module")
def digits(tokenizer: K3Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    path = tmp_path_factory.mktemp("data") / "digits"
    return build_corpus(path, tokenizer, DigitsSource(), kind="digits", num_tokens=2000)


def frames(count: int, width: int = 50, height: int = 30) -> tuple[Image.Image, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)) for _ in range(count)
    )


def test_an_encoded_picture_is_the_processors(tokenizer: K3Tokenizer) -> None:
    """Text, grid and pixels of an image and of a clip, the placeholder once a position."""
    (image,) = frames(1)
    ids, grid, patches = encode_picture(tokenizer, Picture((image,)))
    pixels, expected_grid = preprocess_image(image)
    assert torch.equal(normalized(torch.from_numpy(patches)), pixels)
    assert grid == expected_grid == (1, 4, 4)
    pads = "<|media_pad|>" * 4
    text = f"<|media_begin|>image 50x30<|media_content|>{pads}<|media_end|>"
    assert ids == tokenizer.encode(text, allow_special=True)

    clip = frames(4, 28, 28)
    ids, grid, patches = encode_picture(tokenizer, Picture(clip, seconds=2.0))
    video = preprocess_video(clip, fps=2.0)
    assert torch.equal(normalized(torch.from_numpy(patches)), video.pixel_values)
    assert [list(grid)] == video.grid_thws.tolist()
    later = video.prompts[0].replace("00:00:00", "00:00:02")
    assert ids == tokenizer.encode(later, allow_special=True)


def test_an_item_with_too_many_or_unlike_frames_is_refused(tokenizer: K3Tokenizer) -> None:
    with pytest.raises(K3Error, match=r"an image of frames .* give 1 to 1 frames"):
        encode_picture(tokenizer, Picture(frames(2)))
    with pytest.raises(K3Error, match=r"a clip of frames .* give 1 to 4 frames"):
        encode_picture(tokenizer, Picture(frames(5), 0.0))
    unlike = (*frames(1, 28, 28), *frames(1, 56, 28))
    with pytest.raises(K3Error, match="of one size"):
        encode_picture(tokenizer, Picture(unlike, 0.0))


def test_text_and_pictures_stand_in_their_order_with_loss_where_it_is_wanted(
    tokenizer: K3Tokenizer,
) -> None:
    parts = (Text("a", False), Picture(frames(1)), Text("bc", True), Picture(frames(1)))
    ids, mask, pictures = encode_interleaved(tokenizer, Interleaved(parts))
    assert len(ids) == len(mask)
    assert [(one.start, one.stop) for one in pictures] == [(2, 20), (22, 40)]
    for one in pictures:
        assert ids[one.start] == tokenizer.media_begin_id
        assert ids[one.stop - 1] == tokenizer.media_end_id
    assert [i for i, flag in enumerate(mask) if flag] == [20, 21, 40]
    assert bytes(ids[20:22]) == b"bc"
    assert ids[0] == tokenizer.bos_id and ids[40] == tokenizer.eos_id


def test_digits_differ_and_clips_go_where_they_say() -> None:
    def centre(image: Image.Image) -> np.ndarray:
        values = np.asarray(image.convert("L"), np.float64)
        rows, columns = np.nonzero(values < (values.min() + np.median(values)) / 2)
        return np.array([columns.mean(), rows.mean()])

    rng = random.Random(0)
    for direction, (across, down) in DIRECTIONS.items():
        shown = moving_clip(3, direction, 56, rng)
        way = centre(shown[-1]) - centre(shown[0])
        assert way @ (across, down) > 6
        assert abs(way @ (down, across)) < 3
    first = changing_clip(1, 8, 56, rng)
    ink = [(np.asarray(one.convert("L")) < 128).sum() for one in first]
    assert min(ink[2:]) > 1.3 * max(ink[:2])
    style = random_style(rng, (0.9, 0.9))
    drawn = [np.asarray(draw_digit(d, style, 28, random.Random(0)), np.float64) for d in range(10)]
    gaps = [np.abs(drawn[a] - drawn[b]).mean() for a in range(10) for b in range(a)]
    assert min(gaps) > 3


def test_blocks_are_a_function_of_their_number_and_held_out_ones_are_others() -> None:
    block = DigitsSource(seed=1).block(3)
    assert block == DigitsSource(seed=1).block(3)
    assert block != DigitsSource(seed=1).block(4)
    assert block != DigitsSource(seed=1, heldout=True).block(3)
    kinds = {len(p.frames) for e in block for p in e.parts if isinstance(p, Picture)}
    assert kinds == {1, 4}


def test_a_scene_is_followed_by_its_questions(tokenizer: K3Tokenizer) -> None:
    first = RendersSource(seed=2, side=56).block(0)
    assert first == RendersSource(seed=2, side=56).block(0)
    orders = set()
    for entry in first:
        picture, *texts = entry.parts
        assert picture.frames[0].size == (56, 56)
        assert [text.has_loss for text in texts] == [False, True] * 3
        code = texts[2 * entry.families.index("code") + 1].text
        names: dict[str, Image.Image] = {}
        exec(code, names)
        assert names["image"].tobytes() == picture.frames[0].tobytes()
        orders.add(entry.families)
    assert len(orders) > 3
    ids, _, _ = encode_interleaved(tokenizer, first[0])
    assert ids.count(tokenizer.media_pad_id) == 4


def test_a_file_keeps_its_pictures_and_says_when_one_byte_changed(
    digits: TokenFile, tokenizer: K3Tokenizer, tmp_path: Path
) -> None:
    digits.verify()
    described = digits.manifest["images"]
    assert (
        described["count"]
        == len(digits.images)
        == sum(digits.manifest["sources"]["questions"].values())
    )
    number = 0
    for entry in DigitsSource().block(0):
        for part in entry.parts:
            if isinstance(part, Picture):
                _, grid, patches = encode_picture(tokenizer, part)
                assert digits.images.grids_N3[number].tolist() == list(grid)
                assert np.array_equal(digits.images.patches(number), patches)
                number += 1
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in (*digits.manifest["sha256"], "manifest.json"):
        (copy / name).write_bytes((digits.path / name).read_bytes())
    with (copy / "pixels.bin").open("r+b") as stream:
        stream.write(b"\x01")
    with pytest.raises(K3Error, match=r"pixels\.bin has sha256"):
        TokenFile.open(copy).verify()
    with (copy / "pixels.bin").open("ab") as stream:
        stream.write(b"\x01")
    with pytest.raises(K3Error, match=r"pixels\.bin has .* the manifest asks for"):
        TokenFile.open(copy)


def test_a_batch_holds_the_pictures_of_its_tokens(
    digits: TokenFile, tokenizer: K3Tokenizer
) -> None:
    sampler = PackedSampler([digits], [1], 200, 128, seed=0)
    for step in range(12):
        batch = sampler.batch(step)
        assert batch.images is not None
        assert len(batch.input_ids) == sum(batch.seqlens)
        assert abs(len(batch.input_ids) - 200) < digits.images.longest
        begins = (batch.input_ids == tokenizer.media_begin_id).nonzero()[:, 0].tolist()
        assert len(batch.images.spans) == len(begins)
        positions = int((batch.input_ids == tokenizer.media_pad_id).sum())
        assert positions == int((batch.images.grids[:, 1:].prod(1) // 4).sum())
        assert len(batch.images.patches) == int(batch.images.grids.prod(1).sum())
        for start, stop in batch.images.spans:
            assert batch.input_ids[stop - 1] == tokenizer.media_end_id
            assert (batch.labels[start - 1 : stop - 1] == -100).all() or start == 0
        short = batch.head(60)
        assert len(short.input_ids) <= 60 or short.images is not None
        assert torch.equal(short.input_ids, batch.input_ids[: len(short.input_ids)])
        ends = (short.input_ids == tokenizer.media_end_id).sum()
        assert (0 if short.images is None else len(short.images.grids)) == ends


def test_the_place_in_the_data_names_the_pictures(digits: TokenFile) -> None:
    place = PackedSampler([digits], [1], 200, 128, seed=0).position(3)
    hashes = digits.manifest["sha256"]
    assert place["streams"] == {
        "digits": {"offset": 600, "sha256": hashes["tokens.bin"], "pixels": hashes["pixels.bin"]}
    }


def test_the_place_in_a_file_of_shards_is_named_too(tmp_path: Path) -> None:
    with TokenFileWriter(
        tmp_path / "a", vocab_size=512, has_mask=False, sources={}, shard_tokens=5
    ) as out:
        for _ in range(3):
            out.add(range(6), [6])
    file = TokenFile.open(tmp_path / "a")
    (stream,) = PackedSampler([file], [1], 4, 4, seed=0).position(1)["streams"].values()
    assert stream["offset"] == 4
    assert len(stream["sha256"]) == 64
    assert stream["sha256"] not in file.manifest["sha256"].values()


def test_pictures_longer_than_a_piece_or_a_batch_are_refused(digits: TokenFile) -> None:
    with pytest.raises(K3Error, match="more than max_seq_len 20, and pictures are not cut"):
        PackedSampler([digits], [1], 200, 20, seed=0)
    with pytest.raises(K3Error, match="more than the 20 that a batch takes"):
        PackedSampler([digits], [1], 20, 200, seed=0)


def test_pictures_need_a_file_that_is_made_for_them(tmp_path: Path, tokenizer: K3Tokenizer) -> None:
    ids, mask, pictures = encode_interleaved(tokenizer, Interleaved((Picture(frames(1)),)))
    with (
        pytest.raises(K3Error, match="has_images=True"),
        TokenFileWriter(tmp_path / "a", vocab_size=512, has_mask=True, sources={}) as out,
    ):
        out.add(ids, [len(ids)], mask, images=pictures)
