"""The card of k3-nano states the bundled files: bytes and sha256 of each, bytes of each part."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import pytest

from k3_core.checkpoint import CheckpointFolder

FOLDER = Path(str(files("k3_core"))) / "assets" / "k3-nano"
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")
FILES = re.findall(r"^\| `([\w.]+)` \| ([\d,]+) \| `([0-9a-f]{64})` \|$", CARD, re.M)
PARTS = re.findall(r"^\| ([^|`*]+?) \| ([\d,]+) \| ([\d,]+) \|$", CARD, re.M)
TOTAL = re.search(r"^\| \*\*all tensors\*\* \| ([\d,]+) \| ([\d,]+) \|$", CARD, re.M)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_every_bundled_file_is_on_the_card() -> None:
    names = sorted(path.name for path in FOLDER.iterdir() if path.name != "README.md")
    assert [name for name, *_ in FILES] == names


@pytest.mark.parametrize(("name", "size", "digest"), FILES)
def test_bytes_and_sha256(name: str, size: str, digest: str) -> None:
    data = (FOLDER / name).read_bytes()
    assert len(data) == number(size)
    assert hashlib.sha256(data).hexdigest() == digest


def test_it_fits_into_twelve_megabytes() -> None:
    assert sum(number(size) for _, size, _ in FILES) <= 12_000_000


def test_the_parts_add_up_to_the_tensors_of_the_file() -> None:
    entries = CheckpointFolder.open(FOLDER).entries.values()
    assert TOTAL is not None and len(PARTS) == 12
    assert sum(number(count) for _, count, _ in PARTS) == number(TOTAL[1]) == len(entries)
    num_bytes = sum(entry.num_bytes for entry in entries)
    assert sum(number(size) for *_, size in PARTS) == number(TOTAL[2]) == num_bytes


@pytest.mark.parametrize(
    ("part", "pattern"),
    [
        ("embedding and output head", r"(embed_tokens|lm_head)\."),
        ("routed experts, MXFP4", r"layers\.[0-7]\..*\.experts\."),
        ("KDA layers' attention", r"layers\.[012456]\.self_attn\."),
        ("Gated MLA layers' attention", r"layers\.[37]\.self_attn\."),
        ("shared experts", r"layers\.[0-7]\..*shared_experts\."),
        ("dense MLP", r"^language_model\..*\.mlp\."),
        ("latent projections", r"layers\.[0-7]\..*routed_expert_"),
        ("routers", r"layers\.[0-7]\..*moe\.gate\."),
        ("MTP layer without", r"layers\.8\.(?!.*\.experts\.)"),
        ("routed experts of the MTP", r"layers\.8\..*\.experts\."),
        ("vision tower and projector", r"^(vision_tower|mm_projector)\."),
    ],
)
def test_bytes_of_a_part(part: str, pattern: str) -> None:
    (row,) = [row for row in PARTS if row[0].startswith(part)]
    folder = CheckpointFolder.open(FOLDER)
    entries = [one for one in folder.entries.values() if re.search(pattern, one.name)]
    assert (len(entries), sum(one.num_bytes for one in entries)) == (number(row[1]), number(row[2]))
