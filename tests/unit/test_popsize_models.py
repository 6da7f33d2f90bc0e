"""Models: the numbers that papers publish, and what is said of names and files that describe none.

Holds popsize.model, popsize.catalogue and popsize.errors.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popsize.catalogue import MODELS, config_model, model_digest, model_of, model_text, named_model
from popsize.errors import ModelError
from popsize.model import RECOMPUTE, Recompute, Split, Transformer, transformer

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("bert-large", 0.335),
        ("gpt2", 0.124),
        ("gpt2-xl", 1.558),
        ("gpt3-175b", 174.6),
        ("llama2-7b", 6.738),
        ("llama2-70b", 68.98),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.9),
    ],
)
def test_a_named_model_has_its_published_parameters(name: str, billions: float) -> None:
    """Within half a per cent: token types and poolers are not counted."""
    assert named_model(name).num_parameters / 1e9 == pytest.approx(billions, rel=5e-3)


def test_a_model_needs_six_operations_for_a_parameter_and_token() -> None:
    """Two in the forward pass and four in the backward pass, and some more for attention."""
    model = named_model("llama3-8b")
    tokens = model.sequence * (model.num_parameters - 128256 * 4096)

    assert 6 * tokens < model.flops_per_sample < 7.5 * tokens


@given(
    name=st.sampled_from(sorted(MODELS)),
    recompute=st.sampled_from(RECOMPUTE),
    tensor=st.sampled_from([1, 2, 4, 8]),
    sequence_parallel=st.booleans(),
)
def test_recomputation_and_sharding_only_save(
    name: str, recompute: Recompute, tensor: int, *, sequence_parallel: bool
) -> None:
    """What stays is never more than without them."""
    for layer in named_model(name).layers:
        kept = layer.stored(recompute)
        assert 0 <= kept.divided + kept.whole <= layer.kept.divided + layer.kept.whole
        whole = kept.on_device(1)
        assert kept.on_device(tensor, sequence_parallel=sequence_parallel) <= whole


def test_amounts_are_divided_over_a_tensor_group() -> None:
    """One part always, the other one with sequence parallelism only."""
    amount = Split(divided=8.0, whole=4.0) + Split(whole=4.0)

    assert amount.on_device(4) == 10.0
    assert amount.on_device(4, sequence_parallel=True) == 4.0


def test_numbers_are_enough_for_a_model() -> None:
    """A family with its numbers is the model that bears their name, but for learned positions."""
    words = ["layers=96", "hidden=12288", "heads=96", "vocab=50257", "sequence=2048"]
    given_numbers, named = named_model("gpt", words), named_model("gpt3-175b")

    assert given_numbers.num_parameters == pytest.approx(named.num_parameters - 2048 * 12288)
    assert given_numbers.flops_per_sample == named.flops_per_sample
    assert named_model("gpt2", ["sequence=2048"]).sequence == 2048


@pytest.mark.parametrize(
    ("name", "numbers", "said"),
    [
        ("gtp2-xl", [], "nearest are gpt2-xl"),
        ("gpt", ["layers=2", "hidden=64"], "needs heads=…, sequence=…"),
        ("gpt2", ["layer=2"], "'layer=2' says nothing about a model: nearest are layers"),
        ("gpt2", ["layers=two"], "'layers=two' gives no number: write layers=16"),
        ("gpt2", ["layers=1" + "0" * 30], "gives no number"),
        ("gpt2", ["gated=maybe"], "say gated=yes or gated=no"),
        ("gpt2", ["layers=0"], "layers is 0: give a number from 1 to 100,000"),
        ("gpt2", ["heads=7"], "7 heads do not divide a hidden size of 768"),
        ("gpt2", ["layers=100001"], "layers is 100001: give a number from 1 to 100,000"),
        ("gpt2", ["hidden=1000000001"], "hidden is 1000000001: give a number from 1 to 1,000,000,000"),
        ("llama3-8b", ["kv_heads=5"], "5 heads of keys do not divide 32 heads"),
    ],
)
def test_what_is_no_model_is_said(name: str, numbers: list[str], said: str) -> None:
    """With what is wrong, and what is nearest."""
    with pytest.raises(ModelError, match=said):
        named_model(name, numbers)


def test_a_configuration_of_hugging_face_is_a_model() -> None:
    """It is the model that has these numbers by name."""
    found, named = config_model(CONFIG, "config.json"), named_model("llama3-8b")

    assert found.num_parameters == named.num_parameters
    assert found.flops_per_sample == named.flops_per_sample
    assert config_model(CONFIG, "config.json", ["sequence=1024"]).sequence == 1024


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"]
)
def test_a_configuration_without_a_field_names_it(field: str) -> None:
    """And the other names that it has in configurations."""
    less = {name: value for name, value in CONFIG.items() if name != field}

    with pytest.raises(ModelError, match=f"config.json has no {field}"):
        config_model(less, "config.json")
    with pytest.raises(ModelError, match=f"{field} is 'many', and should be a positive number"):
        config_model({**CONFIG, field: "many"}, "config.json")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([1], "it holds no object"),
        ({**CONFIG, "num_local_experts": 8}, "expert parallelism is not planned"),
        ({**CONFIG, "intermediate_size": "wide"}, "intermediate_size is 'wide', and should be a positive number"),
    ],
)
def test_what_is_no_configuration_is_said(table: object, said: str) -> None:
    """With the file's name."""
    with pytest.raises(ModelError, match=said) as error:
        config_model(table, "config.json")
    assert "config.json" in str(error.value)


@given(
    st.builds(
        Transformer,
        layers=st.integers(1, 12),
        hidden=st.sampled_from([64, 128]),
        heads=st.sampled_from([2, 4, 8]),
        sequence=st.integers(1, 64),
        vocab=st.integers(0, 100),
        gated=st.booleans(),
        tied=st.booleans(),
        fused_attention=st.booleans(),
    )
)
def test_a_file_of_a_model_is_the_model(numbers: Transformer) -> None:
    """Every amount comes back as it was."""
    model = transformer(numbers, "a model")
    text = model_text(model)
    back = model_of(json.loads(text), "model.json")

    assert json.loads(model_text(back)) == json.loads(text)
    assert back.num_parameters == model.num_parameters
    assert back.divisors == model.divisors


@pytest.mark.parametrize("field", ["name", "sequence", "layers", "divisors", "tied_parameters"])
def test_a_file_of_a_model_that_lacks_something_is_named(field: str) -> None:
    """With what it lacks."""
    table = json.loads(model_text(named_model("gpt2")))
    del table[field]

    with pytest.raises(ModelError, match=rf"m\.json is no model .*{field}"):
        model_of(table, "m.json")


@pytest.mark.parametrize(
    ("table", "billions"),
    [
        (
            {
                "model_type": "gemma",
                "num_hidden_layers": 28,
                "hidden_size": 3072,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "head_dim": 256,
                "intermediate_size": 24576,
                "vocab_size": 256000,
                "max_position_embeddings": 8192,
            },
            8.54,
        ),
        (
            {
                "model_type": "gemma2",
                "num_hidden_layers": 26,
                "hidden_size": 2304,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "intermediate_size": 9216,
                "vocab_size": 256000,
                "max_position_embeddings": 8192,
            },
            2.61,
        ),
        (
            {
                "model_type": "qwen3",
                "num_hidden_layers": 28,
                "hidden_size": 1024,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 3072,
                "vocab_size": 151936,
                "max_position_embeddings": 40960,
                "tie_word_embeddings": True,
            },
            0.596,
        ),
        (
            {
                "model_type": "mistral",
                "num_hidden_layers": 40,
                "hidden_size": 5120,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 14336,
                "vocab_size": 131072,
                "max_position_embeddings": 131072,
                "tie_word_embeddings": False,
            },
            12.25,
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 32,
                "hidden_size": 4544,
                "num_attention_heads": 71,
                "num_kv_heads": 71,
                "multi_query": True,
                "new_decoder_architecture": False,
                "bias": False,
                "vocab_size": 65024,
                "max_position_embeddings": 2048,
            },
            7.22,
        ),
        (
            {
                "model_type": "gpt_bigcode",
                "n_layer": 40,
                "n_embd": 6144,
                "n_head": 48,
                "n_inner": 24576,
                "multi_query": True,
                "vocab_size": 49152,
                "n_positions": 8192,
            },
            15.52,
        ),
        (
            {
                "model_type": "stablelm",
                "num_hidden_layers": 32,
                "hidden_size": 2560,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "hidden_act": "silu",
                "intermediate_size": 6912,
                "vocab_size": 50304,
                "max_position_embeddings": 4096,
                "tie_word_embeddings": False,
            },
            2.80,
        ),
    ],
    ids=lambda one: one["model_type"] if isinstance(one, dict) else "",
)
def test_a_configuration_has_the_parameters_of_its_weights(table: dict[str, Any], billions: float) -> None:
    """Width of heads, one head of keys, a gate and tied embeddings as their programs have them."""
    assert config_model(table, "config.json").num_parameters / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, "expert parallelism is not planned"),
        ({"model_type": "albert"}, "a model whose layers share parameters"),
        ({"model_type": "mt5"}, "is an encoder-decoder .mt5., which is not planned"),
        ({"model_type": "fsmt", "is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"model_type": "distilbert"}, "is a distilled BERT .distilbert., which is not planned"),
        ({"model_type": "vit"}, "is a model of images"),
        ({"model_type": "mamba2"}, "is a state-space model"),
        ({"model_type": "bloom", "max_position_embeddings": None}, "give sequence=… .*sequence=2048"),
        ({"hidden_size": 10**300}, "hidden_size is 1000.*, and should be a positive number"),
        ({"hidden_size": 10**5000}, "hidden_size is too large to be shown, and should"),
        ({"head_dim": -1}, "head_dim is -1, and should be a positive number"),
    ],
)
def test_a_configuration_that_is_not_planned_is_refused(changes: dict[str, Any], said: str) -> None:
    """With what it is, and what to give in its place."""
    with pytest.raises(ModelError, match=said):
        config_model({**CONFIG, **changes}, "config.json")


def test_numbers_change_a_configuration() -> None:
    """Each of them; what is none is refused."""
    found = config_model(CONFIG, "config.json", ["layers=2", "head_width=256", "tied=yes"])
    block = next(layer for layer in found.layers if layer.name == "block")

    assert block.count == 2
    assert found.tied_parameters == 128256 * 4096
    assert block.parameters.divided > config_model(CONFIG, "config.json").layers[1].parameters.divided
    for words in (["sequence=abc"], ["layres=2"], ["layers=2", "layers=3"]):
        with pytest.raises(ModelError, match=words[-1]):
            config_model(CONFIG, "config.json", words)


def test_a_name_of_a_configuration_is_one_that_can_be_shown() -> None:
    """Without what a terminal or a picture takes for orders of its own."""
    assert config_model({**CONFIG, "_name_or_path": "\x1b[31mred\x00\ud800"}, "c.json").name == "[31mred"
    assert config_model({**CONFIG, "_name_or_path": "\x1b"}, "c.json").name == "c.json"


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("popsize_model",), 99, "has version 99; this one reads 1: describe it again"),
        (("popsize_model",), True, "has version True"),
        (("layers",), [], "layers is empty"),
        (("layers",), [3], "one of layers is 3, and should be an object"),
        (("layers", 1, "parameters"), 5, "parameters is 5, and should be an object"),
        (("layers", 1, "parameters"), {"halved": 5}, "parameters has 'halved'"),
        (("layers", 1, "parameters", "divided"), "many", "divided is 'many', and should be a number"),
        (("layers", 1, "parameters", "whole"), float("nan"), "whole is nan, which no model has"),
        (("layers", 1, "parameters", "whole"), 10**400, "whole is 1000"),
        (("layers", 1, "mask_heads"), "q", "mask_heads is 'q', and should be a whole number"),
        (("layers", 1, "can_recompute"), 1, "can_recompute is 1, and should be true or false"),
        (("layers", 1, "count"), -1, "count is -1, which no model has"),
        (("layers", 1, "count"), True, "count is True, and should be a whole number"),
        (("layers", 1, "parts"), [], "parts is empty"),
        (("layers", 1, "parts"), ["half"], "one of parts is 'half', and should be a number"),
        (("layers", 1, "halved"), 1, "one of layers has 'halved'"),
        (("divisors",), [["heads", 0]], "one of divisors is 0, which no model has"),
        (("divisors",), [["heads"]], "one of divisors is .'heads'., and should be a name and a number"),
        (("tied_parameters",), -1, "tied_parameters is -1, which no model has"),
        (("tied_parameters",), 1e12, "parameters"),
        (("sequence",), 0, "sequence is 0, which no model has"),
        (("name",), 5, "name is 5, and should be a text"),
    ],
)
def test_a_file_of_a_model_with_a_wrong_value_is_refused(place: tuple[Any, ...], value: object, said: str) -> None:
    """With its field and what was found."""
    table: Any = json.loads(model_text(named_model("gpt2")))
    inner = table
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value

    with pytest.raises(ModelError, match=said) as error:
        model_of(table, "m.json")
    assert str(error.value).startswith("m.json ")


def test_a_model_of_unknown_divisors_is_not_divided() -> None:
    """Only a tensor group of one device is legal."""
    table = json.loads(model_text(named_model("gpt2"))) | {"divisors": []}

    assert model_of(table, "m.json").divisors == (("largest_tensor_group", 1),)


def test_models_of_other_numbers_have_other_digests() -> None:
    """Equal ones have the same, whatever read them."""
    model = named_model("gpt2")

    assert model_digest(model_of(json.loads(model_text(model)), "m.json")) == model_digest(model)
    assert model_digest(model) != model_digest(named_model("gpt2", ["layers=13"]))
