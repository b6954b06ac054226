"""Manifests are logged without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.redaction import MAX_VALUE_CHARS, redacted


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "client_secret", "AUTH_HEADER", "SSH_KEY"],
)
def test_variables_with_a_secret_name_are_hidden(name: str) -> None:
    assert redacted([{"name": name, "value": "s3cret"}]) == [{"name": name, "value": "***"}]


@pytest.mark.parametrize("name", ["EPOCHS", "MAX_TOKENS", "TOKENIZERS_PARALLELISM", "AUTHOR", "KEYBOARD", "MONKEY"])
def test_other_variables_are_shown(name: str) -> None:
    assert redacted({"name": name, "value": "5"}) == {"name": name, "value": "5"}


def test_other_keys_beside_a_name_and_a_value_are_redacted() -> None:
    given = {"name": "run", "value": "5", "password": "hunter2", "items": [{"api_key": "hunter2"}]}
    assert redacted(given) == {"name": "run", "value": "5", "password": "***", "items": [{"api_key": "***"}]}


def test_variables_that_airflow_hides_are_hidden() -> None:
    assert redacted({"name": "PROXY", "value": "x"}, hides=lambda name: name == "PROXY")["value"] == "***"


def test_references_to_secrets_are_shown() -> None:
    items = [{"key": "id", "path": "id_rsa", "mode": 256}]
    token = {"audience": "vault", "expirationSeconds": 3600, "path": "token"}
    reference: dict[str, Any] = {
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "envFrom": [{"secretRef": {"name": "hub"}}],
        "volumes": [
            {"name": "keys", "secret": {"secretName": "ssh-keys", "defaultMode": 256, "items": items}},
            {"name": "all", "projected": {"sources": [
                {"secret": {"name": "ssh", "items": items, "optional": True}}, {"serviceAccountToken": token},
            ]}},
        ],
        "imagePullSecrets": [{"name": "registry"}],
        "automountServiceAccountToken": False,
        "sshAuthMountPath": "/root/.ssh",
    }  # fmt: skip
    assert redacted(reference) == reference


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", "abc", "--epochs", "5"], ["--api-key", "***", "--epochs", "5"]),
        (["--token=abc"], ["--token=***"]),
        (["--token", "--verbose"], ["--token", "--verbose"]),
        (["sh", "-c", "HF_TOKEN=abc python train.py --max-tokens 512"],
         ["sh", "-c", "HF_TOKEN=*** python train.py --max-tokens 512"]),
        (["sh", "-c", "login --password 'a b' && train"], ["sh", "-c", "login --password *** && train"]),
        (["--store", "postgres://me:pa55@db:5432/runs"], ["--store", "postgres://me:***@db:5432/runs"]),
    ],
    ids=lambda words: " ".join(words),
)  # fmt: skip
def test_secrets_in_commands_are_hidden(words: list[str], shown: list[str]) -> None:
    assert redacted({"command": words})["command"] == shown


def test_the_program_of_a_function_is_hidden_because_it_contains_its_arguments() -> None:
    shown = redacted({"name": "KTRAIN_PROGRAM", "value": "aW1wb3J0IG9z" * 100})["value"]
    assert shown == "<the function and its arguments, 1,200 characters>"


def test_long_texts_are_cut_between_words() -> None:
    text = f"{'x ' * (MAX_VALUE_CHARS // 2 - 1)}TOKEN=abcdef {'y ' * 50}"
    shown = redacted([text])[0]
    assert "abc" not in shown
    assert shown.endswith(" more characters>")


@pytest.mark.parametrize("text", ["-" * 200_000, "token" * 40_000, "a_" * 100_000, "://a:" * 40_000])
def test_no_text_takes_long(text: str) -> None:
    assert len(redacted([text])[0]) < len(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abc123", "Authorization: Bearer ***"),
        ('{"api_key": "abc123", "epochs": 3}', '{"api_key": ***, "epochs": 3}'),
        ("password: abc123", "password: ***"),
        ("tokens: 5", "tokens: 5"),
        ("https://auth.example.com:443/x", "https://auth.example.com:443/x"),
        ("authors: me", "authors: me"),
    ],
)
def test_fields_with_a_secret_name_are_hidden(text: str, shown: str) -> None:
    assert redacted(["curl", text]) == ["curl", shown]


@pytest.mark.parametrize(
    "key", ["privateKey", "accessKey", "s3.secretAccessKey", "encryptionKey", "connection_string", "bearer", "jwt"]
)
def test_names_of_keys_and_credentials_are_hidden(key: str) -> None:
    assert redacted({key: "abc123"}) == {key: "***"}
    assert redacted([f'{{"{key}": "abc123"}}']) == [f'{{"{key}": ***}}']


@pytest.mark.parametrize("key", ["topologyKey", "publicKey", "key", "monkey"])
def test_keys_that_are_not_secret_are_shown(key: str) -> None:
    assert redacted({key: "abc123"}) == {key: "abc123"}


def test_annotations_with_a_secret_name_are_hidden() -> None:
    assert redacted({"annotations": {"my/db-password": "abc123", "owner": "me"}}) == {
        "annotations": {"my/db-password": "***", "owner": "me"}
    }


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"password": ["a", "b"]}, {"password": ["***", "***"]}),
        ({"tokens": ["x"]}, {"tokens": ["***"]}),
        ({"access_tokens": {"hub": "x"}}, {"access_tokens": {"hub": "***"}}),
        ({"credentials": {"hub": {"user": "me", "pins": [12, 3.5]}}},
         {"credentials": {"hub": {"user": "***", "pins": ["***", "***"]}}}),
        ({"secret": {"name": "me", "word": "x"}}, {"secret": {"name": "***", "word": "***"}}),
        ({"auth": [{"name": "HOME", "value": "x"}]}, {"auth": [{"name": "***", "value": "***"}]}),
        ({"password": 1234}, {"password": "***"}),
        ({"result": [{"api_key": ("a",)}]}, {"result": [{"api_key": ["***"]}]}),
    ],
    ids=str,
)  # fmt: skip
def test_everything_under_a_secret_key_is_hidden(given: dict[str, Any], shown: dict[str, Any]) -> None:
    assert redacted(given) == shown


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": 512}, {"token_count": {"train": 512}}, {"mean_token_accuracy": 0.93}, {"stop_tokens": ["</s>"]},
        {"auth": {"enabled": True, "user": None, "word": ""}}, {"authenticity": 0.5}, {"key": ["a"]},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_are_not_secrets_are_shown(given: dict[str, Any]) -> None:
    assert redacted(given) == given
