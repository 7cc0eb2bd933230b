"""Token files: what is written is read, damage is refused, nothing half-written is left."""

from pathlib import Path

import numpy as np
import pytest

from k3_core.errors import K3Error
from k3_train.data.token_file import TokenFile, TokenFileWriter


def write(
    path: Path,
    documents: list[list[int]],
    *,
    vocab_size: int = 4096,
    masks: list[list[int]] | None = None,
) -> TokenFile:
    with TokenFileWriter(
        path, vocab_size=vocab_size, has_mask=masks is not None, sources={"from": "test"}
    ) as out:
        for index, document in enumerate(documents):
            out.add(document, [len(document)], masks[index] if masks else None)
    return TokenFile.open(path)


@pytest.mark.parametrize("vocab_size, dtype", [(4096, "uint16"), (163840, "uint32")])
def test_round_trip(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    documents = [[1, 2, 3], [vocab_size - 1], [0, 5]]
    file = write(tmp_path / "a", documents, vocab_size=vocab_size)
    assert file.tokens.dtype == dtype
    assert [file.document(i) for i in range(file.num_documents)] == documents
    assert file.mask is None
    assert file.num_tokens == file.manifest["num_loss_tokens"] == 6
    assert file.manifest["sources"] == {"from": "test"}
    file.verify()


def test_mask_is_kept_and_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "a", [[1, 2, 3], [4, 5]], masks=[[0, 1, 1], [0, 1]])
    assert file.mask is not None
    assert file.mask.tolist() == [0, 1, 1, 0, 1]
    assert file.manifest["num_loss_tokens"] == 3


def test_failure_leaves_the_old_file(tmp_path: Path) -> None:
    write(tmp_path / "a", [[7]])
    with (
        pytest.raises(RuntimeError),
        TokenFileWriter(tmp_path / "a", vocab_size=10, has_mask=False, sources={}) as out,
    ):
        out.add([1, 2], [2])
        raise RuntimeError
    assert TokenFile.open(tmp_path / "a").document(0) == [7]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_replaces_a_token_file_but_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "a", [[7]])
    assert write(tmp_path / "a", [[8, 9]]).document(0) == [8, 9]
    (tmp_path / "b").mkdir()
    with pytest.raises(K3Error, match="not a token file"):
        write(tmp_path / "b", [[1]])


def test_truncation_and_damage_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3]])
    part = tmp_path / "a" / "tokens.bin"
    part.write_bytes(np.array([1, 2, 4], "uint16").tobytes())
    with pytest.raises(K3Error, match="sha256"):
        TokenFile.open(tmp_path / "a").verify()
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(K3Error, match=r"5 bytes.*6"):
        TokenFile.open(tmp_path / "a")
    with pytest.raises(K3Error, match="k3 train data build"):
        TokenFile.open(tmp_path / "absent")


@pytest.mark.parametrize(
    "tokens, lengths, mask",
    [
        ([1, 2], [1], None),
        ([1, 2], [2, 0], None),
        ([10], [1], None),
        ([-1], [1], None),
        ([1], [1], [1]),
    ],
)
def test_writer_refuses(
    tmp_path: Path, tokens: list[int], lengths: list[int], mask: list[int] | None
) -> None:
    with (
        pytest.raises(K3Error),
        TokenFileWriter(tmp_path / "a", vocab_size=10, has_mask=False, sources={}) as out,
    ):
        out.add(tokens, lengths, mask)
    assert not (tmp_path / "a").exists()
