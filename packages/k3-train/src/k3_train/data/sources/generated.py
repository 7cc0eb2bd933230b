"""Sources without end, drawn from a seed: conversations about the question families."""

import random
from dataclasses import dataclass

from k3_train.data.conversations import draw_conversation
from k3_train.data.documents import Entry

CONVERSATIONS_PER_BLOCK = 200


@dataclass(frozen=True)
class ChatSource:
    """Training conversations in the chat format, of the train split of every family."""

    seed: int = 0

    def block(self, number: int) -> list[Entry]:
        """Conversations of block `number`."""
        rng = random.Random(f"{self.seed}:{number}")
        return [draw_conversation(rng) for _ in range(CONVERSATIONS_PER_BLOCK)]
