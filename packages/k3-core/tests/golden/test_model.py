"""The model equals the released modelling code on every golden case."""

import json

import pytest
import torch
from safetensors.torch import load_file

from k3_core import K3ForConditionalGeneration
from k3_core.model import SequenceBatch

LOGITS, HIDDEN, STATE = 5e-4, 1e-3, 1e-4
WRAPPED = ("mm_tiny", "mxfp4_tiny")


@pytest.fixture(scope="module")
def load(golden):
    models = {}

    def get(name, experts="packed"):
        if (name, experts) not in models:
            path = golden(name)
            model = K3ForConditionalGeneration.from_pretrained(path, experts=experts).eval()
            models[name, experts] = model, path, json.loads((path / "cases.json").read_text())
        return models[name, experts]

    with torch.no_grad():
        yield get


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=0)


def check_states(out, expected):
    for name, value in expected.items():
        if name == "logits":
            close(out.logits, value, LOGITS)
        elif name.endswith(("topk_idx", "attention_mask")):
            assert torch.equal(out.hidden_states[name], value.long()), name
        else:
            close(out.hidden_states[name], value, HIDDEN)


def test_full_forward(load):
    model, path, cases = load("text_tiny")
    out = model(input_ids=torch.tensor([cases["input_ids"]]), output_hidden_states=True)
    check_states(out, load_file(path / "full_forward.safetensors"))


def test_cached_steps(load):
    model, path, cases = load("text_tiny")
    expected = load_file(path / "cached_steps.safetensors")
    ids = torch.tensor([cases["input_ids"]])
    cache = model.new_cache(1)
    chunk_end = cases["prefill_tokens"] + cases["chunk_tokens"]
    steps = [
        ("prefill", [ids[:, : cases["prefill_tokens"]]]),
        ("chunk", [ids[:, cases["prefill_tokens"] : chunk_end]]),
        ("decode", ids[:, chunk_end:].split(1, dim=1)),
    ]
    for name, pieces in steps:
        logits = torch.cat([model(input_ids=piece, cache=cache).logits for piece in pieces], dim=1)
        close(logits, expected[f"{name}.logits"], LOGITS)
        check_cache(model, cache, {k: v for k, v in expected.items() if f"after_{name}" in k})


def check_cache(model, cache, expected):
    """States as they are; convolution tails without the oldest column; keys expanded again."""
    assert expected
    for key, value in expected.items():
        layer, what = int(key.split(".")[2]), key.split(".")[3]
        if what == "kda_state_vk":
            close(cache.kda_state(layer), value, STATE)
        elif what.startswith("conv"):
            part = cache.conv_state(layer).chunk(3, dim=1)["qkv".index(what[-1])]
            close(part, value[..., 1:], STATE)
        else:
            pages, _ = cache.latent_pages(layer, SequenceBatch.from_lengths([0], cache=cache))
            attention = model.language_model.model.layers[layer].self_attn
            key_SHD, value_SHV = attention.expand(pages[0, : cache.lengths[0]])
            actual = key_SHD if what == "mla_key" else value_SHV
            close(actual.transpose(0, 1)[None], value, STATE)


def test_left_padded_batch(load):
    model, path, _ = load("text_tiny")
    expected = load_file(path / "left_padded_batch.safetensors")
    mask = expected["attention_mask"]
    logits = model(input_ids=expected["input_ids"].long(), attention_mask=mask).logits
    close(logits[mask.bool()], expected["logits"][mask.bool()], LOGITS)
    assert logits.isfinite().all()


def test_greedy(load):
    model, _, cases = load("text_tiny")
    greedy = cases["greedy"]
    cache, ids = model.new_cache(1), cases["input_ids"][: greedy["prompt_tokens"]]
    generated, step = [], ids
    while len(generated) < len(greedy["generated"]):
        logits = model(input_ids=torch.tensor([step]), cache=cache).logits
        step = [int(logits[0, -1].argmax())]
        generated += step
    assert generated == greedy["generated"]


@pytest.mark.parametrize("experts", ["packed", "dequantized"])
@pytest.mark.parametrize("name", WRAPPED)
def test_multimodal_forward(load, name, experts):
    model, path, cases = load(name, experts)
    vision = load_file(path / "vision.safetensors")
    out = model(
        input_ids=torch.tensor([cases["multimodal_input_ids"]]),
        pixel_values=vision["pixel_values"],
        grid_thws=vision["grid_thws"],
        output_hidden_states=True,
    )
    check_states(out, load_file(path / "multimodal_forward.safetensors"))


@pytest.mark.parametrize("name", WRAPPED)
def test_text_only_whole_and_cached(load, name):
    model, path, cases = load(name)
    expected = load_file(path / "text_and_decode.safetensors")["text_only.logits"]
    ids = torch.tensor([cases["text_input_ids"]])
    close(model(input_ids=ids).logits, expected, LOGITS)
    cache, prefill = model.new_cache(1, max_length=64), cases["text_cached"]["prefill_tokens"]
    pieces = (ids[:, :prefill], *ids[:, prefill:].split(1, dim=1))
    cached = torch.cat([model(input_ids=piece, cache=cache).logits for piece in pieces], dim=1)
    close(cached, expected, LOGITS)


@pytest.mark.parametrize("name", WRAPPED)
def test_multimodal_decode(load, name):
    model, path, cases = load(name)
    vision = load_file(path / "vision.safetensors")
    expected = load_file(path / "text_and_decode.safetensors")["multimodal_decode.logits"]
    generated = cases["multimodal_greedy"]["generated"]
    cache = model.new_cache(1)
    out = model(
        input_ids=torch.tensor([cases["multimodal_input_ids"]]),
        pixel_values=vision["pixel_values"],
        grid_thws=vision["grid_thws"],
        cache=cache,
    )
    assert int(out.logits[0, -1].argmax()) == generated[0]
    logits = [model(input_ids=torch.tensor([[token]]), cache=cache).logits for token in generated]
    close(torch.cat(logits, dim=1), expected, LOGITS)
    picked = torch.cat(logits, dim=1)[0].argmax(-1).tolist()
    assert picked[:-1] == generated[1:]


def test_packed_and_dequantized_experts_agree(load):
    packed, _, cases = load("mxfp4_tiny")
    decoded, _, _ = load("mxfp4_tiny", "dequantized")
    ids = torch.tensor([cases["text_input_ids"]])
    close(packed(input_ids=ids).logits, decoded(input_ids=ids).logits, 1e-5)


def test_replayed_routes_give_the_same_logits(load):
    """Routes recorded from a run and given back, as indices alone and with weights."""
    from k3_core.model.batch import SequenceBatch

    model, _, cases = load("text_tiny")
    ids = torch.tensor(cases["input_ids"])
    plain = SequenceBatch.from_lengths([len(ids)])
    first = model.forward_packed(ids, plain, output_hidden_states=True)
    layers = [i for i in range(9) if f"layers.{i}.topk_idx" in first.hidden_states]
    assert len(layers) == 8
    idx = {i: first.hidden_states[f"layers.{i}.topk_idx"] for i in layers}
    pairs = {i: (idx[i], first.hidden_states[f"layers.{i}.topk_weight"]) for i in layers}
    for routes in (idx, pairs):
        batch = SequenceBatch.from_lengths([len(ids)], routes=routes)
        close(model.forward_packed(ids, batch).logits, first.logits, 1e-4)
    swapped = {i: (r + 1) % 16 for i, r in idx.items()}
    batch = SequenceBatch.from_lengths([len(ids)], routes=swapped)
    other = model.forward_packed(ids, batch, output_hidden_states=True)
    assert (other.logits - first.logits).abs().max() > 0.1
    recorded = other.hidden_states["layers.1.topk_idx"]
    assert torch.equal(recorded, swapped[1].sort(dim=-1).values)
