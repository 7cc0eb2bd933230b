"""Long-context items against solvers that only read the prompt."""

import random
import re
from collections.abc import Callable

import pytest

from k3_core.errors import K3Error
from k3_train.data.long_context import FAMILIES, Item, draw_item


def body_and_question(item: Item) -> tuple[str, str]:
    text, _, rest = item.prompt.partition("\n\nQuestion: ")
    question, _, end = rest.partition("\nAnswer:\n")
    assert not end
    return text, question


def codes(text: str) -> dict[str, str]:
    return dict(re.findall(r"The code of (the [\w ]+) is (\d{5})\.", text))


def solve_codes(text: str, question: str) -> str:
    known = codes(text)
    asked = re.findall(r"the \w+ \w+ number \d\d", question)
    return ", ".join(known[name] for name in asked)


def solve_hops(text: str, question: str) -> str:
    known = codes(text)
    links = dict(re.findall(r"The code of (the [\w ]+) is that of (the [\w ]+)\.", text))
    (name,) = re.findall(r"the \w+ \w+ number \d\d", question)
    hops = 0
    while name in links:
        name, hops = links[name], hops + 1
    assert hops == 4
    return known[name]


def solve_registers(text: str, question: str) -> str:
    values: dict[str, int] = {}
    for line in re.findall(r"Now .*", text):
        words = line.rstrip(".").split()
        name, last = words[2], words[-1]
        if "set" in words:
            values[name] = int(last)
        elif "takes" in words:
            values[name] = values[last]
        else:
            values[name] += int(last) * (1 if "up" in words else -1)
    return str(values[re.findall(r"register (\w)", question)[0]])


SOLVERS: dict[str, Callable[[str, str], str]] = {
    "needle": solve_codes,
    "multi_key": solve_codes,
    "multi_hop": solve_hops,
    "state_retention": solve_registers,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [3000, 20_000])
def test_the_answer_follows_from_the_prompt(family: str, length: int) -> None:
    for seed in range(20):
        item = draw_item(family, length, random.Random(seed))
        assert item.family == family
        assert 0.9 * length <= item.length == len(item.prompt) <= length
        assert item.answer == SOLVERS[family](*body_and_question(item))
        assert item == draw_item(family, length, random.Random(seed))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"needle"}))
def test_no_half_of_the_text_has_all_facts(family: str) -> None:
    item = draw_item(family, 20_000, random.Random(3))
    text, _ = body_and_question(item)
    places = [m.start() for m in re.finditer(r"^(?:The code of|Now register)", text, re.M)]
    num_quarters = {4 * place // len(text) for place in places}
    assert num_quarters == {0, 1, 2, 3}


def test_the_needle_is_anywhere() -> None:
    depths = []
    for seed in range(60):
        text, _ = body_and_question(draw_item("needle", 5000, random.Random(seed)))
        depths.append(text.index("The code of the") / len(text))
    assert min(depths) < 0.1 and max(depths) > 0.9


def test_length_is_counted_in_the_given_unit_and_filler_is_used() -> None:
    def words(text: str) -> int:
        return len(text.split())

    item = draw_item("needle", 500, random.Random(0), filler=lambda rng: "lorem ipsum", count=words)
    assert 450 <= item.length == words(item.prompt) <= 500
    assert item.prompt.count("lorem ipsum") > 200


def test_refusals() -> None:
    with pytest.raises(K3Error, match="did you mean 'needle'"):
        draw_item("needel", 1000, random.Random(0))
    with pytest.raises(K3Error, match="needs a length of"):
        draw_item("multi_key", 100, random.Random(0))
