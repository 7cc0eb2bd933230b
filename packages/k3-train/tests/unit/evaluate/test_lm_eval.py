"""The adapter for lm-eval, over a stand-in with its documented interface and over itself."""

import json
import math
import sys
import types
from dataclasses import dataclass, replace

import pytest
import torch

from k3_core.config import ConfigError
from k3_train.evaluate.base import Wanted
from k3_train.evaluate.rows import open_suite
from k3_train.evaluate.scoring import before_stops, joined, score


@dataclass
class Instance:
    """What lm-eval asks: `args` is (context, continuation), (text,) or (context, options)."""

    args: tuple


@pytest.fixture
def stand_in(monkeypatch):
    """Modules of the names that the adapter imports; returns what was registered and asked."""
    seen = {}

    class LM:
        def __init__(self):
            self.cache_hook = None

    def register_model(name):
        def register(cls):
            seen[name] = cls
            return cls

        return register

    def simple_evaluate(model, tasks, **options):
        seen["options"] = options
        pairs = [Instance(("1 + 1 =", one)) for one in (" 2", " 3")]
        best = max(model.loglikelihood(pairs))[0]
        assert tasks == ["mine"]
        values = {"alias": "mine", "acc,none": best, "acc_stderr,none": 0.5, "f1,cut": 1.0}
        values |= {"f1_stderr,cut": "N/A"}
        return {
            "results": {"mine": values},
            "versions": {"mine": 2.0},
            "n-shot": {"mine": 3},
            "n-samples": {"mine": {"original": 9, "effective": 4}},
        }

    contents = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": LM},
        "lm_eval.api.registry": {"register_model": register_model},
        "lm_eval.tasks": {"TaskManager": lambda include_path: f"tasks of {include_path}"},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "k3_train.evaluate.lm_eval_model", raising=False)
    monkeypatch.setattr("k3_train.evaluate.lm_eval_suite.version", lambda name: "0.0")
    yield seen
    sys.modules.pop("k3_train.evaluate.lm_eval_model", None)


@pytest.fixture
def lm(stand_in, subject):
    """The adapter over the tiny model, with a context of 20 tokens."""
    from k3_train.evaluate.lm_eval_model import K3LM

    assert stand_in["k3"] is K3LM
    return K3LM(replace(subject, trained_length=20))


def logprobs_by_brute_force(model, ids):
    logits = model(input_ids=torch.tensor([ids])).logits[0].detach().double().log_softmax(-1)
    return [float(logits[place, ids[place + 1]]) for place in range(len(ids) - 1)]


def test_continuations_are_scored_after_their_context(lm, subject):
    pairs = [("Is it? ", "yes"), ("", "alone"), ("a\n", "")]
    found = lm.loglikelihood([Instance(pair) for pair in pairs])
    for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
        ids = [subject.tokenizer.bos_id, *(context + continuation).encode()]
        expected = logprobs_by_brute_force(subject.model, ids)[len(context) :]
        assert logprob == pytest.approx(sum(expected), rel=1e-5)
        assert is_greedy == (not continuation)


@pytest.mark.parametrize("length", [0, 1, 19, 20, 21, 55, 60])
def test_rolling_windows_score_each_token_once_and_fill_the_last(lm, subject, length):
    from k3_train.evaluate.lm_eval_model import rolling_windows

    text = "abcdefghij" * 6
    ids = [subject.tokenizer.bos_id, *text[:length].encode()]
    pieces = list(rolling_windows(ids, 20))
    assert [token for one in pieces for token in one.ids[one.start :]] == ids[1:]
    assert all(len(one.ids) <= 21 for one in pieces)
    if length > 20:
        assert [one.start for one in pieces[:-1]] == [1] * (len(pieces) - 1)
        assert len(pieces[-1].ids) == 21
    expected = sum(
        sum(logprobs_by_brute_force(subject.model, list(one.ids))[one.start - 1 :])
        for one in pieces
    )
    (found,) = lm.loglikelihood_rolling([Instance((text[:length],))])
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


def greedy_text(subject, context, count):
    ids = [subject.tokenizer.bos_id, *context.encode()]
    first = len(ids)
    for _ in range(count):
        ids.append(int(subject.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in subject.tokenizer.stop_ids:
            return subject.tokenizer.decode(ids[first:-1])
    return subject.tokenizer.decode(ids[first:])


def test_texts_are_generated_up_to_a_stop_string(lm, subject):
    whole = {context: greedy_text(subject, context, 12) for context in ("one", "another")}
    limited = [Instance((one, {"until": [], "max_gen_toks": 12})) for one in whole]
    assert lm.generate_until(limited) == list(whole.values())
    stop = whole["one"][5:7]
    options = {"until": stop, "max_new_tokens": 12, "do_sample": False, "temperature": 0.7}
    (cut,) = lm.generate_until([Instance(("one", options))])
    assert cut == whole["one"].split(stop)[0]
    drawn = [Instance(("one", {"do_sample": True, "max_tokens": 12, "top_p": 0.9}))] * 3
    first = lm.generate_until(drawn)
    assert first == lm.generate_until(drawn)
    assert len(set(first)) == 3, "each request draws of its own"
    with pytest.raises(Exception, match=r"options \['num_beams'\] are unknown"):
        lm.generate_until([Instance(("one", {"num_beams": 3}))])


def test_the_first_of_several_stops_counts():
    assert before_stops("a b\nc", ["\n", "b"]) == "a "
    assert before_stops("a", ["\n"]) == "a"
    assert before_stops("a", []) == "a"


def test_results_become_rows_with_the_version_and_the_standard_error(stand_in, subject):
    suite = open_suite("lm_eval", {"tasks": ["mine"], "include_path": "folder"})
    acc, cut = suite.measure(subject, Wanted(seed=3, limit=4))
    pieces = [joined(subject, "1 + 1 =", [answer])[0] for answer in (" 2", " 3")]
    best = max(one.logprob for one in score(subject, pieces))
    assert (acc.family, acc.metric, acc.count) == ("mine", "acc", 4)
    assert acc.value == pytest.approx(best)
    assert acc.high - acc.value == pytest.approx(0.98, abs=0.001)
    assert acc.harness == "lm_eval 0.0"
    assert acc.conditions == {"version": 2.0, "shots": 3}
    assert (cut.metric, cut.low, cut.conditions["filter"]) == ("f1", None, "cut")
    options = stand_in["options"]
    assert options["task_manager"] == "tasks of folder"
    assert {value for name, value in options.items() if name.endswith("seed")} == {3}
    assert (options["limit"], options["num_fewshot"]) == (4, None)


def test_without_lm_eval_the_extra_is_named(subject, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"needs lm_eval.*pip install 'k3-train\[lm-eval\]'"):
        list(open_suite("lm_eval", {"tasks": ["mine"]}).measure(subject, Wanted()))
    with pytest.raises(ConfigError, match="none is named"):
        open_suite("lm_eval")


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
{more}
metadata: {{version: 1.0}}
"""
MORE = {
    "multiple_choice": 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]',
    "generate_until": (
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 8}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"
    ),
    "loglikelihood_rolling": "metric_list: [{metric: bits_per_byte}]",
}


@pytest.mark.external
@pytest.mark.timeout(300)
def test_local_tasks_run_in_lm_eval(subject, tmp_path, monkeypatch):
    """Needs `pip install 'k3-train[lm-eval]'`; the tasks are files, so no network."""
    pytest.importorskip("lm_eval")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    texts = ["one and", "two or"]
    choices = [" this", " that"]
    lines = []
    for text in texts:
        greedy = greedy_text(subject, text, 8).split("\n")[0]
        lines.append({"text": text, "choices": choices, "answer": 0, "greedy": greedy})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for kind, more in MORE.items():
        name = f"k3_{kind}"
        task = TASK.format(name=name, data=data, kind=kind, more=more)
        if kind == "generate_until":
            task = task.replace("{{answer}}", "{{greedy}}")
        if kind == "loglikelihood_rolling":
            task = task.replace('"{{answer}}"', '"{{text}}"').replace(
                'doc_to_text: "{{text}}"', 'doc_to_text: ""'
            )
        (tmp_path / f"{name}.yaml").write_text(task)
    options = {"tasks": [f"k3_{kind}" for kind in MORE], "include_path": str(tmp_path)}
    found = list(open_suite("lm_eval", options).measure(subject, Wanted()))
    values = {(one.family, one.metric): one.value for one in found}
    pieces = [joined(subject, text, choices) for text in texts]
    right = [first.logprob > other.logprob for first, other in (score(subject, p) for p in pieces)]
    assert values["k3_multiple_choice", "acc"] == sum(right) / 2
    assert values["k3_generate_until", "exact_match"] == 1.0
    nats = -sum(
        sum(logprobs_by_brute_force(subject.model, [subject.tokenizer.bos_id, *text.encode()]))
        for text in texts
    )
    bits = nats / math.log(2) / len("".join(texts))
    assert values["k3_loglikelihood_rolling", "bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert {one.harness.split()[0] for one in found} == {"lm_eval"}
