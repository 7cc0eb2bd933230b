"""What says that a file is the one that was written."""

import hashlib
from pathlib import Path


def file_sha256(path: Path) -> str:
    """SHA-256 of the file's bytes in hexadecimal, as `sha256sum` prints it."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
