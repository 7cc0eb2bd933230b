"""What the keys of a prompt with images are made of, beside its ids (report 2.6; rule I12)."""

from __future__ import annotations

from hashlib import blake2b

from k3_core.engine.protocol import Images


def end_of_images(rows: list[int], has_images: bool, placeholder: int | None) -> int:
    """The row after the last image row."""
    if not has_images or placeholder not in rows:
        return 0
    return len(rows) - rows[::-1].index(placeholder)


def image_hashes(images: Images) -> list[bytes]:
    """Hash of each image's pixels and grid."""
    sizes = images.grid_thws.prod(-1).tolist()
    hashes = []
    for pixels, grid in zip(images.pixel_values.split(sizes), images.grid_thws, strict=True):
        data = pixels.detach().float().cpu().contiguous().numpy().tobytes()
        header = repr((tuple(pixels.shape), grid.tolist())).encode()
        hashes.append(blake2b(header + data, digest_size=16).digest())
    return hashes
