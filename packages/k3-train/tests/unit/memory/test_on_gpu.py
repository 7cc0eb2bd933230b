"""Memory policies on a GPU: streams, pinned memory, the Triton codes; in bfloat16 autocast."""

import pytest
import torch

from k3_core.config import K3Config
from k3_core.model import K3ForConditionalGeneration, SequenceBatch
from k3_kernels.fp8_blocks import cpu
from k3_train.memory.apply import apply_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (2048,) * 16
SUBLAYERS = {f"layers.*.{name}": "recompute" for name in ("self_attn", "mlp", "block_sparse_moe")}
POINTWISE = {
    f"op:{op}": "recompute"
    for op in ("rms_norm", "gated_rms_norm", "situ_glu", "depth_read", "attn_res", "short_conv")
}


def gradients(table):
    """Gradients by parameter, and the bytes in use at most beyond those at the start."""
    generator = torch.Generator().manual_seed(0)
    config = K3Config.preset("k3-nano")
    model = K3ForConditionalGeneration(config, device="cuda", generator=generator).train()
    model.bind_ops("cuda", "bfloat16")
    apply_memory(model, table)
    ids = torch.randint(0, config.text.vocab_size, (sum(LENGTHS) + 1,), generator=generator)
    ids = ids.cuda()
    for _ in range(3):  # the third uses memory that the first two gave back
        for parameter in model.parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        batch = SequenceBatch.from_lengths(LENGTHS, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = model.training_loss(ids[:-1], ids[1:], batch)
        loss.backward()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, peak


@pytest.fixture(scope="module")
def plain():
    return gradients({})


@pytest.mark.parametrize(
    ("table", "share"),
    [
        (SUBLAYERS, 0.7),
        (POINTWISE, 1.1),  # the kernels keep little by themselves
        ({"layers.*": "offload"}, 0.9),
        ({**SUBLAYERS, **POINTWISE, "layers.*": "offload"}, 0.7),
    ],
    ids=["recompute", "recompute ops", "offload", "recompute and offload"],
)
def test_the_same_bits_from_less_memory(plain, table, share):
    grads, peak = gradients(table)
    expected, most = plain
    again, _ = gradients({})
    fixed = [name for name in expected if torch.equal(again[name], expected[name])]
    assert len(fixed) > 0.9 * len(expected)
    assert [name for name in fixed if not torch.equal(grads[name], expected[name])] == []
    assert peak < share * most


@pytest.mark.parametrize(
    "table",
    [
        {**POINTWISE, "layers.*": "fp8", "op:kda_chunk": "keep"},
        {**POINTWISE, "layers.*": ["fp8", "offload"], "op:kda_chunk": "keep"},
    ],
    ids=["fp8", "fp8 and offload"],
)
def test_fp8_keeps_the_direction(plain, table):
    grads, peak = gradients(table)
    expected, most = plain
    got, exact = (torch.cat([x[n].flatten().double() for n in expected]) for x in (grads, expected))
    assert float(got @ exact / (got.norm() * exact.norm())) > 0.999
    assert peak < most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_are_those_of_plain_torch(dtype):
    from k3_kernels.fp8_blocks.op import dequantize, quantize

    values = (torch.randn(1_000_003) * torch.randn(1_000_003).exp()).to(dtype)
    codes, scales = cpu.quantize(values)
    own_codes, own_scales = (x.cpu() for x in quantize(values.cuda()))
    torch.testing.assert_close(own_scales, scales, rtol=1e-6, atol=0)
    assert int((own_codes.float() != codes.float()).sum()) < 1000
    back = dequantize(codes.cuda(), scales.cuda(), len(values), dtype).cpu()
    assert torch.equal(back, cpu.dequantize(codes, scales, len(values), dtype))
