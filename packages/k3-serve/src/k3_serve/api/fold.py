"""A stream of chunks as one object: the non-streamed answer (serving 4c)."""

from collections.abc import Callable, Iterable
from typing import Any

Chunk = dict[str, Any]


def fold_choices(
    chunks: Iterable[Chunk], start: Callable[[], Chunk], add: Callable[[Chunk, Chunk], None]
) -> Chunk:
    """The head of the chunks and their choices in order of index.

    `start` gives the empty fields of a choice; `add` puts a chunk's part into a choice.
    """
    result: Chunk = {}
    choices: dict[int, Chunk] = {}
    for chunk in chunks:
        result.update({key: chunk[key] for key in chunk if key != "choices"})
        for part in chunk["choices"]:
            index = part["index"]
            if index not in choices:
                choices[index] = {"index": index, **start()}
            add(choices[index], part)
            choices[index]["finish_reason"] = part["finish_reason"]
    return {**result, "choices": [choices[index] for index in sorted(choices)]}
