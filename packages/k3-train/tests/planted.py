"""A corpus with planted duplicates, binaries, cuts and logs, for the test of the cleaning.

Nothing here knows the pipeline: texts, damage and labels are made with the standard library alone.
A label says what a document is; the second of a planted pair is the duplicate.
"""

import base64
import gzip
import json
import random
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

SHARES = {
    "exact_duplicate": 300,
    "near_duplicate": 500,
    "near_miss": 300,
    "binary": 250,
    "truncated": 350,
    "log": 300,
}
"""Planted documents by label; the rest of the corpus is "clean"."""


@dataclass(frozen=True)
class Planted:
    """A document, its label, and for a duplicate the name of what it copies."""

    name: str
    data: bytes
    label: str
    of: str = ""


def planted_corpus(total: int, seed: int) -> list[Planted]:
    """`total` documents in random order, originals before their duplicates."""
    rng = random.Random(seed)
    words = vocabulary(rng, 6000)
    scale = total / 5000
    counts = {label: round(count * scale) for label, count in SHARES.items()}
    clean = [make_clean(rng, words, number) for number in range(total - sum(counts.values()))]
    found = list(clean)
    pairs = rng.sample(range(len(clean)), counts["exact_duplicate"])
    found += [
        Planted(f"copy-{i}{suffix(clean[i])}", clean[i].data, "exact_duplicate", clean[i].name)
        for i in pairs
    ]
    for label, low, high in (("near_duplicate", 0.8, 0.98), ("near_miss", 0.4, 0.74)):
        for number in range(counts[label]):
            original, changed = near_pair(rng, words, low, high)
            name = f"{label}-{number}"
            found.append(Planted(f"{name}-a.txt", original.encode(), "clean"))
            kept = "clean" if label == "near_miss" else label
            found.append(Planted(f"{name}-b.txt", changed.encode(), kept, f"{name}-a.txt"))
    found = found[: total - counts["binary"] - counts["truncated"] - counts["log"]]
    for label, make in (("binary", binary), ("truncated", truncated), ("log", log)):
        for number in range(counts[label]):
            ending, data = make(rng, words, number)
            found.append(Planted(f"item-{label[0]}{number}{ending}", data, label))
    return in_order(rng, found)


def in_order(rng: random.Random, planted: list[Planted]) -> list[Planted]:
    """Shuffled; where a duplicate comes before its original, the two change places."""
    rng.shuffle(planted)
    place = {one.name: i for i, one in enumerate(planted)}
    for i, one in enumerate(list(planted)):
        if one.of and place[one.of] > place[one.name]:
            j = place[one.of]
            i = place[one.name]
            planted[i], planted[j] = planted[j], planted[i]
            place[planted[i].name], place[planted[j].name] = i, j
    return planted


def jaccard(one: str, two: str) -> float:
    """Common words over all words of two texts."""
    a, b = (set(re.split(r"[^A-Za-z0-9_']+", text)) - {""} for text in (one, two))
    return len(a & b) / len(a | b)


def suffix(one: Planted) -> str:
    return re.sub(r"^[^.]*", "", one.name)


def vocabulary(rng: random.Random, size: int) -> list[str]:
    """Made-up words, common ones many times."""
    parts = [one + two for one in "bcdfghjklmnpqrstvwxyz" for two in ("a", "e", "io")]
    found: dict[str, None] = {}
    while len(found) < size:
        found["".join(rng.choices(parts, k=rng.randint(1, 4)))] = None
    return [word for rank, word in enumerate(found) for _ in range(1 + size // (8 * rank + 8))]


def pick(rng: random.Random, words: list[str]) -> str:
    return rng.choice(words)


def sentence(rng: random.Random, words: list[str]) -> str:
    body = rng.choices(words, k=rng.randint(5, 22))
    if rng.random() < 0.3:
        body[rng.randrange(len(body) - 1)] += ","
    text = " ".join(body)
    return text[0].upper() + text[1:] + rng.choice(".....!?")


def paragraph(rng: random.Random, words: list[str]) -> str:
    return " ".join(sentence(rng, words) for _ in range(rng.randint(2, 7)))


def wrap(text: str, width: int) -> str:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) >= width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


# Complete documents, by suffix.


def prose(rng: random.Random, words: list[str]) -> str:
    parts = [paragraph(rng, words) for _ in range(rng.randint(2, 6))]
    if rng.random() < 0.4:
        parts = [wrap(part, rng.choice((60, 72, 80))) for part in parts]
    if rng.random() < 0.3:
        parts.insert(0, " ".join(pick(rng, words).title() for _ in range(4)))
    ending = rng.choice(
        ("", "", "", f"\n\n-- {pick(rng, words).title()} {pick(rng, words).title()}")
    )
    if rng.random() < 0.1:
        parts.append("\n".join(f"- {pick(rng, words)} {pick(rng, words)}" for _ in range(4)))
    if rng.random() < 0.1:
        parts.append("naïve café — 東京は晴れです。🙂 Ελλάδα.")
    return "\n\n".join(parts) + ending + rng.choice(("\n", ""))


def python(rng: random.Random, words: list[str]) -> str:
    blocks = []
    for _ in range(rng.randint(3, 8)):
        name, a, b = (f"{pick(rng, words)}_{rng.randrange(1000)}" for _ in range(3))
        doc = sentence(rng, words)
        blocks.append(
            f'def {name}({a}, {b}=None):\n    """{doc}"""\n'
            f"    total = [{rng.randrange(99)}, {a}]  # {pick(rng, words)}\n"
            f"    for {pick(rng, words)} in range(len(total)):\n"
            f'        print("{pick(rng, words)}", total[0] + {rng.randrange(999)})\n'
            f"    return {{'{pick(rng, words)}': total, '{pick(rng, words)}': {b}}}\n"
        )
    return "import os\n\n\n" + "\n\n".join(blocks)


def c_code(rng: random.Random, words: list[str]) -> str:
    blocks = [f"#include <{pick(rng, words)}.h>\n"]
    for _ in range(rng.randint(3, 8)):
        name, a = (f"{pick(rng, words)}{rng.randrange(1000)}" for _ in range(2))
        blocks.append(
            f"/* {sentence(rng, words)} */\nstatic int {name}(int {a}, char *{pick(rng, words)})\n"
            f"{{\n    if ({a} > {rng.randrange(99)}) {{\n"
            f'        printf("{pick(rng, words)} %d\\n", {a}); // {pick(rng, words)}\n'
            f"        return {a}[{rng.randrange(9)}];\n    }}\n"
            f"    return {rng.randrange(99)};\n}}\n"
        )
    return "\n".join(blocks)


def json_text(rng: random.Random, words: list[str]) -> str:
    rows = [
        {
            "name": pick(rng, words),
            "size": rng.randrange(10**6),
            "tags": rng.sample(words, 3),
            "note": sentence(rng, words),
        }
        for _ in range(rng.randint(4, 12))
    ]
    return json.dumps({"items": rows}, indent=rng.choice((None, 2)))


def html(rng: random.Random, words: list[str]) -> str:
    body = "\n".join(
        f'<div class="{pick(rng, words)}"><h2>{pick(rng, words)}</h2>\n'
        f"<p>{paragraph(rng, words)}</p><br></div>"
        for _ in range(rng.randint(2, 5))
    )
    head = f"<head><title>{pick(rng, words)}</title></head>"
    return f"<!DOCTYPE html>\n<html>{head}\n<body>\n{body}\n</body>\n</html>\n"


def table(rng: random.Random, words: list[str]) -> str:
    width = rng.randint(4, 8)
    rows = [[pick(rng, words) for _ in range(width)]]
    rows += [
        [str(rng.randrange(10**6)) for _ in range(width - 1)] + [pick(rng, words)]
        for _ in range(rng.randint(20, 60))
    ]
    return "\n".join(",".join(row) for row in rows) + "\n"


# Complete documents that look a little like something to drop.


def changelog(rng: random.Random, words: list[str]) -> str:
    parts = []
    for number in range(rng.randint(3, 8)):
        date = f"20{rng.randrange(10, 30)}-0{rng.randrange(1, 10)}-1{rng.randrange(10)}"
        items = "\n".join(f"- {sentence(rng, words)}" for _ in range(rng.randint(2, 5)))
        parts.append(f"## {number}.{rng.randrange(9)}.0 ({date})\n\n{items}")
    return "\n\n".join(parts) + "\n"


def tutorial(rng: random.Random, words: list[str]) -> str:
    lines = [f"2026-01-0{i} 12:00:0{i} INFO {sentence(rng, words)}" for i in range(1, 4)]
    first = wrap("\n\n".join(paragraph(rng, words) for _ in range(3)), 70)
    return f"{first}\n\n```\n" + "\n".join(lines) + f"\n```\n\n{wrap(paragraph(rng, words), 70)}\n"


def poem(rng: random.Random, words: list[str]) -> str:
    return "\n".join(
        " ".join(pick(rng, words) for _ in range(6)) + ("\n" if i % 4 == 3 else "")
        for i in range(20)
    )


def diary(rng: random.Random, words: list[str]) -> str:
    return "\n\n".join(
        f"Day {i}, {rng.randrange(1, 12):02}:{rng.randrange(60):02}. {paragraph(rng, words)}"
        for i in range(1, rng.randint(4, 8))
    )


CLEAN: tuple[tuple[str, Callable[[random.Random, list[str]], str], int], ...] = (
    (".txt", prose, 8),
    (".md", prose, 3),
    (".py", python, 4),
    (".c", c_code, 2),
    (".json", json_text, 2),
    (".html", html, 2),
    (".csv", table, 1),
    (".md", changelog, 1),
    (".md", tutorial, 1),
    (".txt", poem, 1),
    (".txt", diary, 1),
)


def make_clean(rng: random.Random, words: list[str], number: int) -> Planted:
    """A complete document of any kind."""
    ending, make, _ = rng.choices(CLEAN, weights=[weight for *_, weight in CLEAN])[0]
    return Planted(f"item-{number}{ending}", make(rng, words).encode(), "clean")


# Damage.


def near_pair(rng: random.Random, words: list[str], low: float, high: float) -> tuple[str, str]:
    """A text and a copy with some words exchanged, whose word sets have an index in [low, high]."""
    while True:
        original = "\n\n".join(paragraph(rng, words) for _ in range(rng.randint(2, 8)))
        wanted = rng.uniform(low, high)
        used = set(re.findall(r"\w+", original))
        # n - k common words of n + k: the index of k exchanged ones
        count = round(len(used) * (1 - wanted) / (1 + wanted))
        fresh: list[str] = []
        while len(fresh) < count:
            word = rng.choice(words)
            if word not in used and word not in fresh:
                fresh.append(word)
        exchange = dict(zip(rng.sample(sorted(used), count), fresh, strict=True))
        changed = "".join(exchange.get(part, part) for part in re.split(r"(\W+)", original))
        if low <= jaccard(original, changed) <= high:
            return original, changed


def binary(rng: random.Random, words: list[str], number: int) -> tuple[str, bytes]:
    text = prose(rng, words).encode()
    noise = rng.randbytes(rng.randint(200, 4000))
    kinds: list[Callable[[], bytes]] = [
        lambda: noise,
        lambda: gzip.compress(text, mtime=0),
        lambda: zlib.compress(text),
        lambda: b"\x89PNG\r\n\x1a\n" + noise,
        lambda: b"\x7fELF\x02\x01\x01" + bytes(9) + noise,
        lambda: b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n" + text[:100] + noise,
        lambda: struct.pack(
            f"<{len(noise) // 8}d", *(rng.gauss(0, 1) for _ in noise[::8][: len(noise) // 8])
        ),
        lambda: text.decode().encode("utf-16"),
        lambda: base64.encodebytes(noise),
        lambda: noise.hex().encode(),
        lambda: text[: len(text) // 2] + noise + text[len(text) // 2 :],
        lambda: noise.decode("utf-8", "replace").encode(),
        lambda: b"PK\x03\x04\x14\x00" + noise,
    ]
    return rng.choice((".txt", ".md", ".dat", "")), kinds[number % len(kinds)]()


def truncated(rng: random.Random, words: list[str], number: int) -> tuple[str, bytes]:
    """A complete document cut inside a line, a word boundary or not, never at a sentence's end."""
    while True:
        ending, make, _ = rng.choices(CLEAN[:7], weights=[w for *_, w in CLEAN[:7]])[0]
        data = make(rng, words).encode()
        if number % 20 == 0:
            return ending if ending in (".txt", ".md") else ".txt", paragraph(
                rng, words
            ).encode() + (
                rng.choice((b" [truncated]", b" ... (continued)", b" Read more", "…".encode()))
            )
        cut = rng.randrange(int(0.3 * len(data)), int(0.95 * len(data)))
        kept = data[:cut]
        if ending == ".csv" and data[cut:].partition(b"\n")[0].count(b",") == 0:
            continue  # in the last field: as well a complete row
        if not kept.endswith((b"\n", b" ", b".", b"!", b"?", b"-", b":")) and b"\n-" not in kept:
            return ending, kept


def log(rng: random.Random, words: list[str], number: int) -> tuple[str, bytes]:
    def stamp() -> tuple[int, ...]:
        return tuple(rng.randrange(10, n) for n in (24, 60, 60))

    level = ("INFO", "DEBUG", "WARNING", "ERROR")
    month = ("Jan", "Feb", "Mar", "Oct")
    forms: list[Callable[[], str]] = [
        lambda: "2026-0{}-1{} {}:{}:{},{} {} [main] {}: {}".format(
            rng.randrange(1, 10),
            rng.randrange(10),
            *stamp(),
            rng.randrange(100, 999),
            rng.choice(level),
            pick(rng, words),
            sentence(rng, words),
        ),
        lambda: "{} 1{} {}:{}:{} host {}[{}]: {}".format(
            rng.choice(month),
            rng.randrange(10),
            *stamp(),
            pick(rng, words),
            rng.randrange(9999),
            sentence(rng, words),
        ),
        lambda: '10.0.{}.{} - - [1{}/Oct/2025:{}:{}:{} +0000] "GET /{} HTTP/1.1" 200 {}'.format(
            rng.randrange(255),
            rng.randrange(255),
            rng.randrange(10),
            *stamp(),
            pick(rng, words),
            rng.randrange(99999),
        ),
        lambda: f"[{rng.uniform(0, 9999):12.6f}] {pick(rng, words)}: {sentence(rng, words)}",
        lambda: f"{rng.choice(level)}:{pick(rng, words)}:{sentence(rng, words)}",
        lambda: "I01{} {}:{}:{}.{} 7 {}.cc:{}] {}".format(
            rng.randrange(10, 31),
            *stamp(),
            rng.randrange(100000, 999999),
            pick(rng, words),
            rng.randrange(999),
            sentence(rng, words),
        ),
        lambda: json.dumps(
            {
                "ts": rng.randrange(10**9),
                "level": rng.choice(level).lower(),
                "msg": sentence(rng, words),
            }
        ),
        lambda: f"[{rng.randrange(1, 99):3d}%] Building CXX object {pick(rng, words)}.cc.o",
        lambda: f"step {rng.randrange(9999)} loss {rng.random():.4f} lr {rng.random():.2e}",
        lambda: (
            f"tests/{pick(rng, words)}.py::test_{pick(rng, words)} PASSED [ {rng.randrange(99)}%]"
        ),
    ]
    form = forms[number % len(forms)]
    lines = [form() for _ in range(rng.randint(12, 60))]
    if number % 4 == 0:  # some lines go on in the next one
        for _ in range(len(lines) // 5):
            lines.insert(rng.randrange(1, len(lines)), f"    {pick(rng, words)} {pick(rng, words)}")
    return rng.choice((".txt", ".md", "")), ("\n".join(lines) + "\n").encode()
