"""Single rules of the cleaning, the quality classifier, perceptual hashes."""

import random
import sys

import pytest
from PIL import Image, ImageFilter

from k3_core.config import ConfigError, load_dataclass
from k3_core.errors import K3Error
from k3_train.data.clean.frames import FrameIndex, perceptual_hash
from k3_train.data.clean.near import NearDuplicates
from k3_train.data.clean.pipeline import Cleaner
from k3_train.data.clean.quality import HashedLinear, holdout_accuracy
from k3_train.data.clean.settings import CleanSettings
from k3_train.data.documents import Document, Example
from k3_train.data.renders import draw_scene

PROSE = "The first sentence is here. A second one follows it, and there is more to come. "


def reason(name: str, data: bytes | str, **settings: object) -> str | None:
    data = data.encode() if isinstance(data, str) else data
    cleaner = Cleaner(load_dataclass(CleanSettings, settings))
    ((_, found),) = cleaner.judge([Document(name, data)])
    return found


@pytest.mark.parametrize(
    "name, data, expected",
    [
        ("a.txt", PROSE, None),
        ("a.txt", PROSE + "It stops in the", "truncated"),
        ("a.txt", PROSE + "And so on …", "truncated"),
        ("a.txt", PROSE.encode() + "é".encode()[:1], "truncated"),
        ("a.txt", PROSE + "\n\nSee also:\n\n- one thing\n- another", None),
        ("a.txt", PROSE + "\n\n-- Ada Lovelace", None),
        ("a.py", "def function(x):\n    return [x, 1]\n", None),
        ("a.py", "def f(x):\n    return [x, 1", "truncated"),
        ("a.py", "def f(x):\n    return value_of_x", "truncated"),
        ("a.py", "print 'python two is not three'\nx = 1\n", "malformed"),
        ("a.json", '{"key": ["value", 1, 2, 3, "more"]}', None),
        ("a.json", '{"key": ["value", 1, 2, 3, "mo', "truncated"),
        ("a.json", '{"key": ["value", 1, 2, 3, }, "more"]', "malformed"),
        ("a.xml", "<a><b>some text inside</b><b>x</b></a>", None),
        ("a.xml", "<a><b>some text inside</b><b>x</b>", "truncated"),
        ("a.csv", "one,two,three\n1,2,3\n4,5,6\n7,8,9\n10,11,12\n", None),
        ("a.csv", "one,two,three\n1,2,3\n4\n5\n6\n7,8,9,0,1,2,3\n", "malformed"),
        ("a.txt", "caf\xe9 ".encode("latin-1") + PROSE.encode(), "not_utf8"),
        ("a.txt", PROSE.encode("utf-16"), "binary"),
        ("a.txt", "short", "too_short"),
        ("a.txt", "The same line again and again.\n" * 5, "repeated_lines"),
        ("a.txt", "+-*/=()[]{}<>;:,.!?@#$%^&~|" * 3 + "\n", "few_letters"),
        ("a.txt", "word " * 5000, "long_line"),
        ("a.txt", "2026-01-02 03:04:05 INFO it is fine\n" * 3 + PROSE, None),
        ("a.txt", "\n".join(f"2026-01-02 03:04:0{i} INFO no {i}" for i in range(9)), "log"),
    ],
)
def test_rules(name: str, data: bytes | str, expected: str | None) -> None:
    assert reason(name, data) == expected


def test_rules_can_be_turned_off_and_moved() -> None:
    assert reason("a.txt", PROSE + "It stops in the", truncated=False) is None
    assert reason("a.txt", "short", min_chars=3) is None
    with pytest.raises(ConfigError, match=r"near_jaccard: 1\.5 is out of range"):
        reason("a.txt", PROSE, near_jaccard=1.5)
    with pytest.raises(ConfigError, match="Did you mean 'truncated'"):
        reason("a.txt", PROSE, truncatd=False)


def test_generated_entries_pass_and_are_counted() -> None:
    cleaner = Cleaner()
    entries = [Example("", "x"), Example("", "x"), Document("a", b"x")]
    assert list(cleaner.clean(entries)) == entries[:2]
    assert (cleaner.report["read"], cleaner.report["kept"]) == (3, 2)


def test_any_callable_scores_quality() -> None:
    texts = [PROSE, PROSE.replace("first", "last") + "Something quite different is said there."]
    cleaner = Cleaner(CleanSettings(near=False), quality=lambda text: float("first" in text))
    verdicts = cleaner.judge(Document(f"{i}.txt", text.encode()) for i, text in enumerate(texts))
    assert [found for _, found in verdicts] == [None, "low_quality"]


def test_near_duplicates_agree_with_the_exact_index_of_all_pairs() -> None:
    rng = random.Random(0)
    texts = []
    for _ in range(60):
        words = [f"w{rng.randrange(4000)}" for _ in range(60)]
        texts.append(words)
        for _ in range(rng.randrange(4)):
            changed = rng.choice(texts)[:]
            for _ in range(rng.randrange(12)):
                changed[rng.randrange(len(changed))] = f"w{rng.randrange(4000)}"
            texts.append(changed)
    kept: list[set[str]] = []
    with NearDuplicates(0.8) as index:
        for words in texts:
            own = set(words)
            alike = [
                i for i, other in enumerate(kept) if len(own & other) >= 0.8 * len(own | other)
            ]
            found = index.find_or_add(" ".join(words))
            assert found in alike if alike else found is None
            if not alike:
                kept.append(own)
    assert 20 < len(kept) < len(texts)


def test_near_duplicates_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(K3Error, match=r"needs rensa.*pip install 'k3-train\[data\]'"):
        NearDuplicates()


def test_the_classifier_learns_a_difference(tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = random.Random(1)

    def texts(own: str) -> list[str]:
        return [
            " ".join(rng.choice(f"the a of in {own}".split()) for _ in range(40))
            for _ in range(100)
        ]

    good, bad = texts("theorem proof lemma"), texts("click buy cheap")
    assert holdout_accuracy(good, bad) > 0.95
    model = HashedLinear.train(good, bad)
    path = tmp_path_factory.mktemp("quality") / "q.safetensors"
    model.save(path)
    loaded = HashedLinear.load(path)
    assert loaded("a proof of the lemma") == model("a proof of the lemma") > 0.5
    assert loaded("buy the cheap") < 0.5
    path.write_bytes(b"no")
    with pytest.raises(K3Error, match="is no quality classifier"):
        HashedLinear.load(path)
    with pytest.raises(K3Error, match="0 good and 1 bad"):
        HashedLinear.train([], ["x"])


def test_hashes_are_those_of_the_imagehash_library() -> None:
    """imagehash 4.3.2, `phash` of the first scenes."""
    hashes = [perceptual_hash(draw_scene(random.Random(seed)).image()) for seed in range(4)]
    assert hashes == [
        0xFCBCCE43B34046A3,
        0xEB94946B6263946B,
        0xBCC3C33C3CC3C323,
        0x9B84E07A9C0771FC,
    ]


def picture(seed: int) -> Image.Image:
    """Smooth random clouds."""
    noise = Image.frombytes("L", (160, 120), random.Random(seed).randbytes(160 * 120))
    return noise.filter(ImageFilter.GaussianBlur(8)).point(lambda v: min(255, max(0, 8 * v - 900)))


def test_changed_pictures_are_alike_and_others_are_not() -> None:
    index = FrameIndex()
    assert [index.find_or_add([picture(seed)]) for seed in range(40)] == [None] * 40
    changed = picture(7).resize((80, 60)).point(lambda value: min(255, value + 10))
    assert index.find_or_add([changed]) == 7


def test_a_clip_is_alike_when_most_of_its_frames_are() -> None:
    index = FrameIndex()
    clip = [picture(seed) for seed in range(5)]
    assert index.find_or_add(clip) is None
    assert index.find_or_add([*clip[:4], picture(50)]) == 0
    assert index.find_or_add([*clip[:3], picture(51), picture(52)]) is None
    assert index.find_or_add([]) is None
