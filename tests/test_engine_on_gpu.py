"""The serving engine on a GPU with the kernels of k3-kernels: graphs, tiers, drafts."""

import pytest
import torch

from k3_core.engine import Request, Sampling, fold_events
from k3_serve.testing import SteppedEngine, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = Sampling(temperature=0.0, max_tokens=12)
REQUESTS = [
    Request(tuple((7 * i + t) % 200 for t in range(n)), GREEDY) for i, n in enumerate((3, 40, 17))
]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-3), (torch.bfloat16, 0.5)])
def test_graphs_give_the_logits_of_eager_steps(dtype, limit):
    model = tiny_model(dtype).to("cuda")
    model.bind_ops("cuda", str(dtype).removeprefix("torch."))
    rows = []
    for has_graphs in (True, False):
        made = SteppedEngine(model, max_batch=6, unit=16, num_pages=200, token_budget=64)
        if not has_graphs:
            made._runner._graphs = None
        made.answer(REQUESTS)
        assert not has_graphs or made._runner._graphs._graphs
        rows.append(torch.cat([torch.stack(own) for own in made.rows.values()]))
        assert not rows[-1].isnan().any()
    # In bfloat16 a token may differ, and what follows it: the first ones do not.
    first = [torch.cat([r[:1], r[12:13], r[24:25]]) for r in rows]
    torch.testing.assert_close(first[0], first[1], rtol=limit, atol=limit)
    if dtype == torch.float32:
        torch.testing.assert_close(rows[0], rows[1], rtol=limit, atol=limit)


@pytest.fixture(scope="module")
def model():
    made = tiny_model(torch.float32, num_mtp_layers=1).to("cuda")
    made.bind_ops("cuda", "float32")
    return made


def answers(engine, prompts):
    """Tokens and handle of each prompt, one after the other."""
    results = []
    for prompt in prompts:
        handle = engine.submit(Request(prompt, GREEDY))
        engine.run()
        results.append((fold_events(list(handle)).token_ids, handle))
    return results


def test_what_is_evicted_comes_back_from_host_memory_and_from_files(model, tmp_path):
    prompts = [tuple((17 * k + 3 * i * i + i) % 256 for i in range(40)) for k in range(5)]
    cold = SteppedEngine(model, unit=4, num_pages=600)
    wanted = [tokens for tokens, _ in answers(cold, prompts)]
    limits = {"unit": 4, "num_pages": 60, "max_batch": 3, "token_budget": 24}
    engine = SteppedEngine(model, **limits, cpu_cache_bytes=2_000_000, disk_cache=tmp_path)
    answers(engine, prompts)
    (tokens, handle), *_ = answers(engine, prompts[:1])
    assert tokens == wanted[0]
    assert handle.cache_report["tier"] == "cpu" and handle.num_cached_tokens == 36
    engine._tiers.close()
    engine = SteppedEngine(model, **limits, cpu_cache_bytes=2_000_000, disk_cache=tmp_path)
    (tokens, handle), *_ = answers(engine, prompts[1:2])
    assert tokens == wanted[1]
    assert handle.cache_report["tier"] == "disk" and handle.num_cached_tokens == 36
    engine._tiers.close()


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_drafts_do_not_change_the_tokens(model, num_tokens):
    options = {"max_batch": 6, "unit": 16, "num_pages": 200}
    plain = SteppedEngine(model, **options)
    engine = SteppedEngine(model, **options, draft="mtp", draft_tokens=num_tokens)
    wanted = [answer.token_ids for answer in plain.answer(REQUESTS)]
    assert [answer.token_ids for answer in engine.answer(REQUESTS)] == wanted
    assert any(one.draft for plan in engine.plans for one in plan.decodes)
