"""The suite `tasks`: unseen questions of `k3_core.tasks` in the chat format, answered greedily."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from k3_core.evaluate.greedy import generate_greedy
from k3_core.evaluate.questions import MAX_TOKENS, count_right, unseen_questions
from k3_core.tasks import FAMILIES
from k3_train.evaluate.base import Result, Subject, Wanted, accuracy, check_families

NUM_QUESTIONS = 100


@dataclass(frozen=True)
class TasksSuite:
    """Options of the suite `tasks`.

    families: of `k3_core.tasks`; empty for all. max_tokens: of one answer, reasoning included.
    batch_size: questions answered side by side.
    """

    families: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS
    batch_size: int = 100

    def __post_init__(self) -> None:
        check_families("tasks.families", self.families, FAMILIES)

    def measure(self, subject: Subject, wanted: Wanted) -> Iterator[Result]:
        """Accuracy by family and effort: every effort has the same questions of the test split."""
        generate = partial(
            generate_greedy,
            subject.model,
            stop_ids=subject.tokenizer.stop_ids,
            max_tokens=self.max_tokens,
            batch_size=self.batch_size,
        )
        count = wanted.limit or NUM_QUESTIONS
        for family in self.families or FAMILIES:
            questions = unseen_questions(family, count, wanted.seed)
            for effort in wanted.efforts:
                right, num_tokens = count_right(questions, effort, subject.tokenizer, generate)
                used = {"tokens_per_answer": num_tokens / count}
                yield accuracy(family, right, count, effort=effort, conditions=used)
