"""Keys and values of the lookup families: common words, random letters, small integers."""

import random
import string

_KEYS = """
    anchor apple arrow badge basket beach bell bird boat book bottle bread bridge brush bucket
    button cabin camel candle carpet castle chair cherry circle cloud coat coin corn crown desk
    diamond door drum eagle engine fence field flag flute forest fork garden gate glass glove goat
    hammer harbor hat helmet honey horse island jacket kettle key kite ladder lake lamp leaf lemon
    lion magnet map market mirror moon mountain needle ocean onion orange oven paper pencil piano
    pillow planet plate pocket rabbit rain ribbon ring river rocket roof rope saddle salt ship
    shovel spoon stone sugar table tiger tower train tree tunnel valley violin wagon window wolf
    wood yard
"""
_VALUES = """
    red blue green black white brown pink gray gold silver north south east west spring summer
    autumn winter one two three four five six seven eight nine ten small large fast slow
"""
KEYS = tuple(_KEYS.split())
VALUES = tuple(_VALUES.split())


def draw_keys(rng: random.Random, count: int, letters: float) -> list[str]:
    """`count` different keys: words, or (with probability `letters`) three random letters each."""
    if rng.random() >= letters:
        return rng.sample(KEYS, count)
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys["".join(rng.choices(string.ascii_lowercase, k=3))] = None
    return list(keys)


def draw_values(rng: random.Random, count: int) -> list[str]:
    """`count` values, repeats allowed: integers below 100 or (one time in four) words."""
    if rng.random() < 0.25:
        return rng.choices(VALUES, k=count)
    return [str(rng.randrange(100)) for _ in range(count)]
