"""Speculative decoding with k3-nano on the CPU: tokens a second over those without, in one run.

    python benchmarks/spec_cpu.py [--threads 1] [--tokens 96] [--repeats 3]

Prompts that repeat themselves (lines of code, a numbered list), alone and several at a time; and a
draft that is never right, for what it costs. Each variant takes turns with the plain engine; a
ratio is the median of the turns. Seconds are those of the processor, which other processes on the
machine do not add to. Greedy answers are checked to be the same.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

from k3_core.engine import Request, Sampling
from k3_core.engine.load import load_model
from k3_serve.engine.core import ContinuousEngine
from k3_serve.testing import GuessDraft

CODE = 'def add_{0}(a, b):\n    """Adds {0}."""\n    return a + b + {0}\n\n\n'
LIST = "{0}: the quick brown fox jumps over the lazy dog\n"
VARIANTS = (("ngram", 4), ("ngram", 8), ("mtp", 3), ("never right", 4))
CASES = (
    ("code", CODE, 1, VARIANTS),
    ("list", LIST, 1, VARIANTS),
    ("code", CODE, 4, (VARIANTS[0], VARIANTS[2])),
    ("code", CODE, 8, (VARIANTS[0], VARIANTS[2])),
)


class Bench:
    """The model, and one answer a prompt and engine."""

    def __init__(self, num_tokens: int) -> None:
        self.model, self.tokenizer = load_model("k3-nano", experts="dequantized")
        self.num_tokens = num_tokens

    def ids(self, pattern: str, shift: int) -> tuple[int, ...]:
        """A prompt of eight repetitions."""
        text = "".join(pattern.format(shift + i) for i in range(8))
        return tuple(self.tokenizer.encode(text))

    def run(
        self, pattern: str, count: int, draft: str | None, num_draft: int
    ) -> tuple[list[tuple[int, ...]], float]:
        """Answers, and their tokens a second of processor time; the prompts are in the cache."""
        made = draft
        if draft == "never right":
            unused = self.model.config.text.vocab_size - 1
            made = GuessDraft(lambda rows, limit: [unused] * limit)
        prompts = [self.ids(pattern, shift) for shift in range(count)]
        sampling = Sampling(max_tokens=self.num_tokens, temperature=0)
        options = {"draft_tokens": num_draft, "draft_max_requests": count}
        with ContinuousEngine(self.model, draft=made, **options) as engine:
            warm = Sampling(max_tokens=1, temperature=0)
            engine.generate([Request(prompt, warm) for prompt in prompts])
            begin = time.process_time()
            answers = engine.generate([Request(prompt, sampling) for prompt in prompts])
            seconds = time.process_time() - begin
        tokens = [answer.token_ids for answer in answers]
        return tokens, sum(map(len, tokens)) / seconds

    def rows(self, repeats: int) -> Iterator[str]:
        """One line a case."""
        for name, pattern, count, variants in CASES:
            for draft, num_draft in variants:
                ratios, plain_rates = [], []
                for _ in range(repeats):
                    wanted, plain = self.run(pattern, count, None, 1)
                    got, rate = self.run(pattern, count, draft, num_draft)
                    assert got == wanted, f"{draft} changed an answer"
                    ratios.append(rate / plain)
                    plain_rates.append(plain)
                ratio, rate = statistics.median(ratios), statistics.median(plain_rates)
                yield f"{name:5} {count} {draft:12} {num_draft}  {rate:6.1f}  {ratio:5.2f}"


def main() -> None:
    """Prints prompt, requests, draft, its tokens, plain tokens a second, ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("prompt, requests, draft, its tokens, plain tokens/s, ratio")
    for row in Bench(options.tokens).rows(options.repeats):
        print(row, flush=True)


if __name__ == "__main__":
    main()
