"""BertConfig accepts what a BERT can have, and says in one sentence what is wrong with the rest."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertscope.config import RULES, BertConfig
from bertscope.errors import BertscopeError, ConfigError
from tests.conftest import cases

WRONG = [
    *cases("config_fields.yaml", "values"),
    pytest.param("vocab_size", 10**5000, "more than 38 digits", id="5000-digits"),
]


@pytest.mark.parametrize(("field", "value", "words"), WRONG)
def test_a_wrong_value_is_named_with_what_is_allowed(field, value, words):
    with pytest.raises(ConfigError) as caught:
        BertConfig(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_error_is_a_value_error_and_means_exit_code_2():
    with pytest.raises(ValueError, match="vocab_size") as caught:
        BertConfig(vocab_size=0)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=20)
@given(value=st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none(), st.lists(st.integers())))
def test_any_value_is_either_kept_or_refused_in_one_line(name, value):
    try:
        config = BertConfig(**{name: value})
    except ConfigError as error:
        assert error.field in (name, "pad_token_id", "hidden_size", "add_cross_attention")  # noqa: PT017
        assert len(str(error).splitlines()) == 1  # noqa: PT017
    else:
        assert RULES[name].accepts(getattr(config, name))


def test_the_configuration_is_frozen_and_knows_its_fields():
    config = BertConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 5  # type: ignore[misc]
    with pytest.raises(TypeError, match="vocabulary"):
        BertConfig(vocabulary=5)


def test_integers_are_taken_for_numbers():
    assert BertConfig(hidden_dropout_prob=0).hidden_dropout_prob == 0.0
    assert isinstance(BertConfig(hidden_dropout_prob=0).hidden_dropout_prob, float)


def test_a_callable_activation_is_taken_and_shown_by_name():
    import math

    config = BertConfig(hidden_act=math.tanh)
    assert config.hidden_act is math.tanh
    assert config.to_dict()["hidden_act"] == "tanh"


def test_from_dict_lists_what_does_not_shape_a_bert():
    config = BertConfig.from_dict({"vocab_size": 100, "directionality": "bidi", "pooler_fc_size": 768})
    assert config.vocab_size == 100
    assert config.ignored == ("directionality", "pooler_fc_size")


def test_from_dict_takes_the_number_of_labels_from_their_names():
    assert BertConfig.from_dict({"id2label": {"0": "a", "1": "b", "2": "c"}}).num_labels == 3
    assert BertConfig.from_dict({"num_labels": 4}).num_labels == 4


@pytest.mark.parametrize(("values", "words"), cases("config_fields.yaml", "dictionaries"))
def test_from_dict_refuses_what_would_build_another_model(values, words):
    with pytest.raises(BertscopeError, match=words):
        BertConfig.from_dict(values)


def test_to_dict_and_from_dict_are_inverse():
    config = BertConfig(hidden_size=24, num_attention_heads=3, architectures=("BertModel",), classifier_dropout=0.5)
    assert BertConfig.from_dict(config.to_dict()) == config
