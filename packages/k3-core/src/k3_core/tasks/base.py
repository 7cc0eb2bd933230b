"""What a question is, and how questions are split into train and test (issue item 10).

A question belongs to a family, has one right answer, and can show how an assistant answers it
at each thinking effort of the chat format (architecture 8). The split is a hash of the operands
only, so an operand set that is in the test part is unseen in every wording and at every effort.
"""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from k3_core.errors import K3Error

EFFORTS = ("low", "high", "max")
SPLITS = ("train", "test")
TEST_PERCENT = 10

Message = dict[str, Any]


def is_test(key: str, percent: int = TEST_PERCENT) -> bool:
    """Whether `key` hashes into the held-out `percent` of all keys; stable across versions."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 < percent


def check_effort(effort: str) -> None:
    """Refuse an effort that the chat format does not have."""
    if effort not in EFFORTS:
        raise K3Error(f"effort {effort!r} is not one of {', '.join(EFFORTS)}: pass one of them")


@dataclass(frozen=True)
class Question(ABC):
    """One question with its answer.

    `key` is the canonical form of the operands that decides the split; `prompt` is the user's
    text; `answer` is the exact response.
    """

    family: ClassVar[str]
    key: str
    prompt: str
    answer: str

    @property
    def split(self) -> str:
        """`train` or `test`, by the hash of family and operands."""
        return "test" if is_test(f"{self.family}:{self.key}") else "train"

    @property
    def messages(self) -> list[Message]:
        """The chat of the first request."""
        return [{"role": "user", "content": self.prompt}]

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Tool declarations of the request, None when there are none."""
        return None

    @abstractmethod
    def reasoning(self, effort: str) -> str:
        """The text of the think channel at `effort`."""

    def tool_result(self, call: Mapping[str, Any]) -> str:
        """The text that the environment returns for a call that the model made."""
        raise K3Error(f"family {self.family!r} has no tools, but the model called {dict(call)!r}")

    def reference_turn(self, effort: str) -> list[Message]:
        """The messages that follow the request when the assistant answers rightly."""
        check_effort(effort)
        return [self.final_message(self.reasoning(effort))]

    def training_messages(self, effort: str) -> list[Message]:
        """The whole conversation: request and reference turn."""
        return self.messages + self.reference_turn(effort)

    def final_message(self, reasoning: str) -> Message:
        """The assistant message that gives the plain answer after `reasoning`."""
        return {"role": "assistant", "reasoning_content": reasoning, "content": self.answer}

    def check(self, text: str) -> bool:
        """Whether `text` is the answer; surrounding space and one final period are allowed."""
        return text.strip().removesuffix(".").rstrip() == self.answer


def draw_until(
    make: Callable[[random.Random], Question], rng: random.Random, split: str
) -> Question:
    """Draw questions until one is in `split`."""
    if split not in SPLITS:
        raise K3Error(f"split {split!r} is not one of {', '.join(SPLITS)}: pass one of them")
    while True:
        question = make(rng)
        if question.split == split:
            return question
