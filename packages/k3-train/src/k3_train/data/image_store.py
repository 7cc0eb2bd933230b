"""Pictures beside the tokens of a token file (architecture 5 and 6).

`images.bin` has int64 [N, 5], a row for each picture in the order of the tokens: the span [start,
stop) of its text in the file and its grid (frames, rows and columns of patches). `pixels.bin` has
uint8 patches [P, 3, H, W] of all, scaled and padded but not normalised. The text of a picture holds
the placeholder as often as it has positions, so that token counts are those of training.

N pictures, P patches, X places in the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from k3_core.errors import K3Error
from k3_train.data.shards import map_array

IMAGES = "images.bin"
PIXELS = "pixels.bin"
CHANNELS = 3

Integers = npt.NDArray[np.int64]


class EncodedPicture(NamedTuple):
    """One picture of a document: the span of its text in the document, its grid, its patches."""

    start: int
    stop: int
    grid: tuple[int, int, int]
    patches_P3HW: npt.NDArray[np.uint8]

    def moved(self, tokens: int) -> "EncodedPicture":
        """The same picture `tokens` places later."""
        return self._replace(start=self.start + tokens, stop=self.stop + tokens)


@dataclass(frozen=True)
class ImageStore:
    """The pictures of a token file, possibly none. Pixels are a read-only memory map."""

    starts_N: Integers
    stops_N: Integers
    grids_N3: Integers
    pixels_P3HW: npt.NDArray[np.uint8]

    @classmethod
    def open(cls, path: Path, manifest: Mapping[str, Any]) -> "ImageStore":
        """Map the pictures of the token file `path`; K3Error when their sizes are wrong."""
        described = manifest.get("images")
        if described is None:
            nothing = np.zeros(0, np.int64)
            return cls(nothing, nothing, nothing.reshape(0, 3), np.zeros((0, 3, 1, 1), np.uint8))
        count, side = described["count"], described["patch_size"]
        index_N5 = map_array(path / IMAGES, "int64", (count, 5)).astype(np.int64)
        pixels = map_array(path / PIXELS, "uint8", (described["patches"], CHANNELS, side, side))
        starts_N, stops_N, grids_N3 = index_N5[:, 0], index_N5[:, 1], index_N5[:, 2:]
        if int(grids_N3.prod(1).sum()) != len(pixels):
            raise K3Error(
                f"the grids of {path / IMAGES} cover {int(grids_N3.prod(1).sum())} patches, "
                f"{PIXELS} has {len(pixels)}: the file was damaged or changed, build it again"
            )
        return cls(starts_N, stops_N, grids_N3, pixels)

    def __len__(self) -> int:
        return len(self.starts_N)

    @property
    def longest(self) -> int:
        """Tokens of the longest text of a picture, 0 when there is none."""
        return int((self.stops_N - self.starts_N).max(initial=0))

    def before(self, places_X: Integers) -> Integers:
        """Each place, or the start of the picture that a cut there would divide."""
        if not len(self):
            return places_X
        number_X = np.searchsorted(self.starts_N, places_X, "right") - 1
        is_inside_X = (number_X >= 0) & (places_X < self.stops_N[number_X])
        return np.where(is_inside_X, self.starts_N[number_X], places_X)

    def within(self, start: int, stop: int) -> Integers:
        """Numbers of the pictures that begin in [start, stop) of the tokens."""
        return np.arange(*np.searchsorted(self.starts_N, (start, stop)))

    def patches(self, number: int) -> npt.NDArray[np.uint8]:
        """Patches of one picture, [its patches, 3, H, W]."""
        stop = int(self._ends_N[number])
        return self.pixels_P3HW[stop - int(self.grids_N3[number].prod()) : stop]

    @cached_property
    def _ends_N(self) -> Integers:
        return self.grids_N3.prod(1).cumsum()


class ImageStoreWriter:
    """Writes the two parts of the pictures into the folder of a token file."""

    def __init__(self, folder: Path) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._num_patches, self._patch_size = 0, 0
        self._folder = folder
        self._pixels: BinaryIO = (folder / PIXELS).open("wb")

    def add(self, pictures: Sequence[EncodedPicture], offset: int) -> None:
        """Append pictures whose spans count from token `offset` of the file."""
        for one in pictures:
            size = one.patches_P3HW.shape[-1]
            if self._patch_size not in (0, size):
                raise K3Error(
                    f"patches of {size} and of {self._patch_size} pixels in one file: "
                    "cut all pictures for one model"
                )
            self._patch_size = size
            self._rows.append((one.start + offset, one.stop + offset, *one.grid))
            self._pixels.write(one.patches_P3HW.tobytes())
            self._num_patches += len(one.patches_P3HW)

    def close(self) -> None:
        """Close the file of the pixels."""
        self._pixels.close()

    def publish(self) -> dict[str, int]:
        """Write the index; what the manifest says of the pictures."""
        index_N5 = np.asarray(self._rows, np.int64).reshape(-1, 5)
        (self._folder / IMAGES).write_bytes(index_N5.tobytes())
        return {
            "count": len(index_N5),
            "patches": self._num_patches,
            "patch_size": self._patch_size,
        }
