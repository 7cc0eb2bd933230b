"""Sources without end of pictures with text: digits, and scenes with the code that draws them."""

import random
from dataclasses import dataclass

from k3_train.data.digits import DIRECTIONS, changing_clip, draw_digit, moving_clip, random_style
from k3_train.data.documents import Entry, Interleaved, Picture, Text
from k3_train.data.renders import ask_about, draw_scene

DOCUMENTS_PER_BLOCK = 50
MOST_PICTURES = 3
FAMILY_WEIGHTS = {"digit": 0.3, "moving": 0.35, "changing": 0.35}


@dataclass(frozen=True)
class DigitsSource:
    """Documents of one to three pictures, each followed by what it shows, which carries loss.

    side: pixels, a multiple of 28 fills all positions. heldout: draws others than in training.
    """

    seed: int = 0
    side: int = 28
    heldout: bool = False

    def block(self, number: int) -> list[Entry]:
        """Documents of block `number`."""
        part = "heldout" if self.heldout else "train"
        rng = random.Random(f"{part}:{self.seed}:{number}")
        return [self._document(rng) for _ in range(DOCUMENTS_PER_BLOCK)]

    def _document(self, rng: random.Random) -> Interleaved:
        count = rng.randint(1, MOST_PICTURES)
        families = rng.choices(tuple(FAMILY_WEIGHTS), tuple(FAMILY_WEIGHTS.values()), k=count)
        parts: list[Text | Picture] = []
        for family in families:
            picture, answer = draw_item(family, self.side, rng)
            parts += [picture, Text(f"{answer}\n", has_loss=True)]
        return Interleaved(tuple(parts), tuple(families))


@dataclass(frozen=True)
class RendersSource:
    """A drawn scene, then its questions with their answers, which carry loss, in random order.

    The answers are the code that draws it, and where a shape is, in pixels and in [0, 1]. side:
    width and height in pixels, from 16.
    """

    seed: int = 0
    side: int = 112

    def block(self, number: int) -> list[Entry]:
        """Documents of block `number`."""
        rng = random.Random(f"{self.seed}:{number}")
        return [self._document(rng) for _ in range(DOCUMENTS_PER_BLOCK)]

    def _document(self, rng: random.Random) -> Interleaved:
        pairs = ask_about(draw_scene(rng, size=(self.side, self.side)), rng)
        rng.shuffle(pairs)
        parts: list[Text | Picture] = [Picture((pairs[0].image,))]
        for pair in pairs:
            parts += [Text(f"\n{pair.prompt}\n", has_loss=False), Text(pair.answer, has_loss=True)]
        return Interleaved(tuple(parts), tuple(pair.task for pair in pairs))


def draw_item(family: str, side: int, rng: random.Random) -> tuple[Picture, str]:
    """A picture of a family and what it shows: `7`, `7 left`, or `7 then 2`."""
    digit = rng.randrange(10)
    if family == "digit":
        image = draw_digit(digit, random_style(rng, (0.7, 0.95)), side, rng)
        return Picture((image,)), str(digit)
    if family == "moving":
        direction = rng.choice(tuple(DIRECTIONS))
        return Picture(moving_clip(digit, direction, side, rng), 0.0), f"{digit} {direction}"
    other = (digit + rng.randint(1, 9)) % 10
    return Picture(changing_clip(digit, other, side, rng), 0.0), f"{digit} then {other}"
