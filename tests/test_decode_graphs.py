"""CUDA graphs of decode steps, with the kernels of k3-kernels, beside eager steps."""

import pytest
import torch

from k3_core.engine import Request, Sampling
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
