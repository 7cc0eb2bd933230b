"""Whether bytes are text at all, and text in UTF-8."""

import codecs
import re

MAGIC = (
    b"\x89PNG\r\n",
    b"GIF8",
    b"\xff\xd8\xff",
    b"BM\x00",
    b"RIFF",
    b"\x1f\x8b",
    b"PK\x03\x04",
    b"BZh",
    b"\xfd7zXZ\x00",
    b"(\xb5/\xfd",
    b"\x7fELF",
    b"MZ\x90\x00",
    b"%PDF-",
    b"\xca\xfe\xba\xbe",
    b"SQLite format 3\x00",
    b"\x00asm",
    b"OggS",
    b"fLaC",
    b"ID3",
)
"""First bytes of formats that are not text."""
CONTROLS = bytes({*range(32), 127} - set(b"\t\n\r\f\x1b"))
"""Control characters that text does not have; escape starts the colours of a terminal."""
MAX_CONTROLS = 0.002
MAX_REPLACED = 0.005
"""Share of U+FFFD: bytes that somebody decoded as if they were text."""
MIN_ASCII = 0.7
"""Share of printable ASCII in text of a European single-byte encoding."""
BLOB = re.compile(
    rb"(?<![A-Za-z0-9+/=_-])[A-Za-z0-9+/=_-]{60,}|\b[0-9a-fA-F]{32,}\b|^[!-`]{61}$", re.M
)
"""A run of base64, hexadecimal or uuencode."""
SHORTEST_BLOB = 32
MAX_BLOB = 0.5


def is_binary(data: bytes) -> bool:
    """Whether the bytes are no text: another format, control characters, an encoded blob."""
    if data.startswith(MAGIC) or b"\0" in data:
        return True
    size = max(len(data), 1)
    if (len(data) - len(data.translate(None, CONTROLS))) / size > MAX_CONTROLS:
        return True
    if 3 * data.count(b"\xef\xbf\xbd") / size > MAX_REPLACED:
        return True
    if not is_utf8(data) and _printable_ascii(data) / size < MIN_ASCII:
        return True
    if max(map(len, data.split()), default=0) < SHORTEST_BLOB:
        return False
    return sum(map(len, BLOB.findall(data))) / size > MAX_BLOB


def is_utf8(data: bytes) -> bool:
    """Whether the bytes are UTF-8; the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def ends_inside_character(data: bytes) -> bool:
    """Whether UTF-8 stops in the middle of its last character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return bool(decoder.getstate()[0])


def _printable_ascii(data: bytes) -> int:
    return len(data) - len(data.translate(None, bytes(range(32, 127)) + b"\t\n\r"))
