"""Whatever a grammar accepts is parsed without an error and fits the schema (serving 9f, P5)."""

import json
import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_core.xtml import parse_message
from k3_serve.grammar import Compiler, GrammarError, Tool, Turn, turn_grammar

OBJECT = {"type": "object", "additionalProperties": False}
NODE = {
    **OBJECT,
    "properties": {
        "value": {"type": "string", "maxLength": 6},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
}


def one(schema, **fields):  # type: ignore[no-untyped-def]
    return {**OBJECT, "properties": {"x": schema}, "required": ["x"], **fields}


# The families of tool schemas that the public verifier has, in our own words (serving 4b).
FAMILIES = {
    "no parameters": None,
    "an empty object": OBJECT,
    "anything": {},
    "anyOf": one({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]}),
    "oneOf by type": one({"oneOf": [{"type": "boolean"}, {"type": "null"}]}),
    "oneOf of strings": one(
        {"oneOf": [{"pattern": "^a"}, {"enum": ["ab", "c"]}], "type": "string"}
    ),
    "allOf": one({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 5}]}),
    "$defs": one({"$ref": "#/$defs/e"}, **{"$defs": {"e": {"enum": ["a", "b"]}}}),
    "$ref and more": one(
        {"$ref": "#/$defs/s", "maxLength": 3, "allOf": [{"pattern": "b"}]},
        **{"$defs": {"s": {"type": "string", "pattern": "^a"}}},
    ),
    "nested $defs": one(
        {"$ref": "#/$defs/a"},
        **{
            "$defs": {
                "a": {**OBJECT, "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                "b": {"type": "array", "items": {"$ref": "#/$defs/c"}, "maxItems": 3},
                "c": {"type": "integer", "minimum": -3, "maximum": 3},
            }
        },
    ),
    "recursion": one({"$ref": "#/$defs/node"}, **{"$defs": {"node": NODE}}),
    "the root again": one({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "integer range": one({"type": "integer", "minimum": -17, "exclusiveMaximum": 140}),
    "number range": one({"type": "number", "exclusiveMinimum": 0.5, "maximum": 2.25}),
    "multiples": one({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}),
    "string length": one({"type": "string", "minLength": 2, "maxLength": 4}),
    "pattern": one({"type": "string", "pattern": r"^[A-Z]{2}/\d{3}$"}),
    "pattern with arms": one(
        {"type": "string", "pattern": r"^ab?c|[x|y]{2}$|q\|$", "maxLength": 5}
    ),
    "pattern and length": one({"type": "string", "pattern": "ok", "maxLength": 5}),
    "enum of strings": one({"enum": ["a&b", 'say "hi"', "", "<|close|>", "日本"]}),
    "enum of floats": one({"type": "number", "enum": [0.1, 2.5, -3e10]}),
    "enum of all types": one({"enum": ["a", 1, 2.5, None, True, [1, "x"], {"k": []}]}),
    "const": one({"const": {"a": [1, None]}}),
    "several types": one({"type": ["string", "integer", "null", "array"], "maxLength": 2}),
    "array": one({"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3}),
    "tuple": one({"type": "array", "prefixItems": [{"type": "null"}], "items": False}),
    "map": one({"type": "object", "additionalProperties": {"type": "integer"}}),
    "more properties": {
        "properties": {"a": {"const": 1}},
        "additionalProperties": {"type": "null"},
    },
    "optional properties": {
        **OBJECT,
        "properties": {name: {"type": "boolean"} for name in ("a", "b", "c")},
        "required": ["b"],
    },
    "odd names": {
        **OBJECT,
        "properties": {n: {"type": "null"} for n in ('"', "&quot;", "a b", "$ref ", "é\\n", "")},
        "required": ['"', "&quot;", "a b", "$ref ", "é\\n", ""],
    },
    **{
        name: one({"type": "string", "format": name})
        for name in (
            "date",
            "time",
            "date-time",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uuid",
            "uri",
        )
    },
}
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def fits(value, schema):  # type: ignore[no-untyped-def]
    jsonschema.Draft202012Validator(
        {} if schema is None else schema, format_checker=CHECKER
    ).validate(value)


@pytest.fixture(scope="session")
def compiler(tokenizer):  # type: ignore[no-untyped-def]
    return Compiler(tokenizer)


@pytest.fixture(scope="session")
def sample(tokenizer, compiler):  # type: ignore[no-untyped-def]
    """The ids of a random turn that the grammar allows, likelier to end the longer it is."""

    def draw(turn: Turn, seed: int) -> list[int]:
        rng, ids = random.Random(seed), []
        constraint = compiler.compile(turn_grammar(turn, tokenizer))
        while tokenizer.end_of_msg_id not in ids:
            options = constraint.allowed_mask(tokenizer.vocab_size).nonzero()[:, 0].tolist()
            controls = [i for i in options if i >= tokenizer.num_base_tokens]
            # Closers of texts, and characters that end JSON, lest a random text go on for ever.
            if controls and rng.random() < 0.3 + len(ids) / 300:
                options = controls
            elif rng.random() < min(len(ids) / 300, 0.7):
                options = [i for i in options if chr(i) in '"]}'] or options
            ids.append(rng.choice(options))
            constraint.advance(ids[-1])
            assert len(ids) < 5000, tokenizer.decode(ids)
        assert constraint.is_complete
        return ids

    return draw


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=4)
@given(seed=st.integers(0, 10**9), thinks=st.booleans())
def test_calls_parse_and_their_arguments_fit(sample, tokenizer, name, seed, thinks) -> None:  # type: ignore[no-untyped-def]
    schema = FAMILIES[name]
    tools = (Tool("f", schema, True), Tool("g-2", None, None))
    turn = Turn("think" if thinks else "response", tools, "always", max_calls=3)
    message = parse_message(tokenizer, sample(turn, seed), thinks)
    errors = [e for e in message.errors if "is given twice" not in e]  # free names may repeat
    assert not errors
    assert message.is_complete
    assert 1 <= len(message.tool_calls) <= 3
    for call in message.tool_calls:
        assert call.is_complete
        fits(json.loads(call.arguments), {"f": schema, "g-2": {"type": "object"}}[call.name])


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name] is not None])
@settings(max_examples=4)
@given(seed=st.integers(0, 10**9), has_tool=st.booleans())
def test_responses_fit_their_schema(sample, tokenizer, name, seed, has_tool) -> None:  # type: ignore[no-untyped-def]
    tools = (Tool("f", None, None),) if has_tool else ()
    turn = Turn("think", tools, "maybe", json_schema=FAMILIES[name])
    try:
        message = parse_message(tokenizer, sample(turn, seed))
    except GrammarError as error:
        assert name == "oneOf of strings", error  # what llguidance cannot prove exclusive
        return
    assert not [e for e in message.errors if "is given twice" not in e]
    if message.tool_calls:
        assert has_tool and message.content == ""
    else:
        fits(json.loads(message.content), FAMILIES[name])
