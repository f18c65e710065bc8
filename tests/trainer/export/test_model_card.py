"""What the model card says of where a model comes from."""

from __future__ import annotations

from trainer.config.schema import Config
from trainer.export import model_card


def training_of(config: Config) -> str:
    facts = model_card.Facts(config=config, dataset="", checkpoint="", decision="", step=3)
    return model_card._training(facts)


def test_it_names_the_bundle_of_the_users_modules_where_there_is_one():
    uri = f"s3://team/flotilla/code/{'a' * 64}"
    assert training_of(Config(code=uri)).endswith(f"those of the bundle `{uri}`.")
    assert "bundle" not in training_of(Config())
