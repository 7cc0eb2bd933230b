"""The suite `lm_eval`: tasks of lm-eval with the model in this process.

Tasks whose data are local files need no network: `include_path` is a folder of their YAML files,
and paths of data in them are from the working folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from k3_core.config import ConfigError
from k3_train.evaluate.base import Result, Subject, Wanted
from k3_train.evaluate.intervals import Z
from k3_train.optional import require

EXTRA = "lm-eval"
BOOTSTRAPS = 1000
"""Draws for the standard error of a metric that has no formula for it."""


@dataclass(frozen=True)
class LmEvalSuite:
    """Options of the suite `lm_eval`.

    tasks: names of tasks, groups or tags. include_path: folder of YAML files; empty for none.
    num_fewshot: solved examples in a prompt; -1 leaves the task's own number.
    """

    tasks: tuple[str, ...] = ()
    include_path: str = ""
    num_fewshot: int = -1

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError(
                "lm_eval.tasks", "none is named", "Name tasks: --set 'lm_eval.tasks=[\"...\"]'."
            )

    def measure(self, subject: Subject, wanted: Wanted) -> Iterator[Result]:
        """A result for each metric and filter of each task, with lm-eval's standard error.

        ConfigError when lm_eval is not installed.
        """
        lm_eval = require("lm_eval", EXTRA, "the suite lm_eval")
        managers = require("lm_eval.tasks", EXTRA, "the suite lm_eval")
        # Imported here: it needs lm_eval.
        from k3_train.evaluate.lm_eval_model import K3LM

        seed = wanted.seed
        found = lm_eval.simple_evaluate(
            model=K3LM(subject, seed=seed),
            tasks=list(self.tasks),
            task_manager=managers.TaskManager(include_path=self.include_path or None),
            num_fewshot=None if self.num_fewshot < 0 else self.num_fewshot,
            limit=wanted.limit or None,
            log_samples=False,
            bootstrap_iters=BOOTSTRAPS,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
        harness = f"lm_eval {version('lm_eval')}"
        for task, values in found["results"].items():
            yield from results_of(task, values, found, harness)


def results_of(
    task: str, values: Mapping[str, Any], found: Mapping[str, Any], harness: str
) -> Iterator[Result]:
    """Results of one task from lm-eval's `metric,filter` and `metric_stderr,filter`."""
    count = found.get("n-samples", {}).get(task, {}).get("effective", 0)
    conditions: dict[str, float | str] = {}
    for name, key in (("version", "versions"), ("shots", "n-shot")):
        if task in found.get(key, {}):
            conditions[name] = found[key][task]
    for key, value in values.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = values.get(f"{metric}_stderr,{chosen}")
        half = Z * error if isinstance(error, int | float) else None
        yield Result(
            task,
            metric,
            float(value),
            int(count),
            None if half is None else value - half,
            None if half is None else value + half,
            conditions={**conditions, **({} if chosen == "none" else {"filter": chosen})},
            harness=harness,
        )
