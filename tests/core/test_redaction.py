"""Secrets are hidden in texts and in manifests."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
from hypothesis import given

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.errors import KtrainError, ManifestError
from airflow_provider_ktrain.core.reporting.redaction import MAX_VALUE_CHARS, redacted
from airflow_provider_ktrain.core.text.output import (
    MAX_LINE_CHARS,
    Verbatim,
    clipped,
    first_line,
    masked,
    with_short_first_line,
)
from airflow_provider_ktrain.core.text.secret_rules import RULES
from tests.secrets import SECRET, texts_with_a_secret

MESSAGES = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "messages.md"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.example)
def test_each_rule_hides_the_secret_of_its_example(rule: Any) -> None:
    assert rule.secret.match(rule.example, rule.before.search(rule.example).end())
    assert "SECRET" not in masked(rule.example)
    assert "***" in masked(rule.example)


@pytest.mark.parametrize(
    "prefix",
    ["ghp_", "gho_", "ghr_", "ghs_", "ghu_", "github_pat_", "glpat-", "hf_", "sk-", "xoxb-", "eyJhbGciOiJIUzI1NiJ9."],
)
def test_tokens_of_each_service_are_hidden(prefix: str) -> None:
    assert masked(f"login with {prefix}11ABCDEFG0abcdefijklmnop_qrstuv") == f"login with {prefix}***"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("PGPASS=x", "PGPASS=***"),
        ("c(credentials={'user': 'x'}, n=1)", "c(credentials={***}, n=1)"),
        ("credentials={'aws': {'id': 'x'}} is invalid", "credentials={***} is invalid"),
        ("aws_credentials = {'a': {'b': {'c': 'x'}}}", "aws_credentials = {***"),
        ("credent\u0131al: x", "credent\u0131al: ***"),
        ("GIT_PASSPHRASE=x", "GIT_PASSPHRASE=***"),
        ("ftp_pwd: x", "ftp_pwd: ***"),
        ("hf-token: a1", "hf-token: ***"),
        ("session-cookie=x", "session-cookie=***"),
        ("X-Amz-Signature=x", "X-Amz-Signature=***"),
        ("apikey=x", "apikey=***"),
        ("SENTRY_DSN=x", "SENTRY_DSN=***"),
        ("AzureConnStr=x", "AzureConnStr=***"),
        ("jwt=x", "jwt=***"),
        ("x-bearer=x", "x-bearer=***"),
        ("https://host/x?key=abc", "https://host/x?key=***"),
        ("https://host/x?code=abc", "https://host/x?code=***"),
        ("SMTP_PASS: x", "SMTP_PASS: ***"),
        ("AZURE_STORAGE_SAS=sv=2024&sig=x train", "AZURE_STORAGE_SAS=*** train"),
        ("ENCRYPTION_KEY_B64=eA==", "ENCRYPTION_KEY_B64=***"),
        ("--db-pass x", "--db-pass ***"),
        ("curl -u a:b https://host", "curl -u a:*** https://host"),
        ("curl --user a:b", "curl --user a:***"),
        ("https://host/x?sig=abc&se=1", "https://host/x?sig=***&se=1"),
        ("https://abc@host", "https://***@host"),
        ("redis://:a@b@host:6379", "redis://:***@host:6379"),
        (
            "Command '['login', '--token', 'abc', '-u', 'a:b']' failed",
            "Command '['login', '--token', ***, '-u', 'a:***']' failed",
        ),
        (r"{\"api_key\": \"a b\", \"n\": 1}", r"{\"api_key\": ***, \"n\": 1}"),
        (r'"password": "a\"b", "n": 1', '"password": ***, "n": 1'),
        ("password: a'b", "password: ***"),
        ('password: "of two words, cut', "password: ***"),
        ("error: password: swordfish is wrong", "error: password: *** is wrong"),
        ("Authorization=Basic x", "Authorization=Basic ***"),
        ("authorization = Bearer x y", "authorization = Bearer *** y"),
        ("Authorization: ApiKey x", "Authorization: ApiKey ***"),
        ("AccountName=me;AccountKey=x==;EndpointSuffix=y z", "AccountName=me;AccountKey=*** z"),
        ("connect(credentials = ['me', \"x'y\"], port=1)", "connect(credentials = [***], port=1)"),
        ("credentials=('me', 'x of many words", "credentials=(***"),
        ('"credentials": ["me", "x"], "n": 1', '"credentials": [***], "n": 1'),
        ('Set-Cookie: a="x y"; Path=/; Secure', "Set-Cookie: ***"),
        ("Cookie: a=x; b=y\nHost: z", "Cookie: ***\nHost: z"),
        ("- name: DB_PASS\n  value: x", "- name: DB_PASS\n  value: ***"),
    ],
)
def test_secrets_in_texts_are_hidden(text: str, hidden: str) -> None:
    assert masked(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "failed to fetch oauth token: unexpected status from GET request",
        "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        "AuthenticationError: wrong password",
        'MountVolume.SetUp failed for volume "token-x" : secret "hub" not found',
        "spec.template.spec.volumes[0].secretKeyRef: unknown field",
        "google-auth==2.3",
        "registry https://registry:5000/a@sha256:12",
        "abfss://container@account.dfs.core.windows.net/model",
        "docker run -u 1000:1000",
        "forward_pass=3 BYPASS=1 tokens: 5",
        "HF_TOKEN=none, use_auth=True, token=None",
        "secretName: hub",
        "cookie: no value for the session",
    ],
)
def test_texts_that_say_why_a_training_failed_are_shown(text: str) -> None:
    assert masked(text) == text


def test_our_own_messages_are_shown() -> None:
    messages = MESSAGES.read_text()
    assert masked(messages) == messages


@given(texts_with_a_secret())
def test_what_shortens_or_raises_a_text_hides_its_secrets(text: str) -> None:
    filler = "x " * MAX_LINE_CHARS
    cause = Cause(Category.USER_CODE, text, text, text, failed_nodes={text: text}, last_lines=(text,))
    long = Cause(Category.USER_CODE, f"{filler}{text}{filler}").with_short_summary()
    for value in (
        masked(text), masked({text: [text, (text,)]}), clipped(f"{text} {filler}"), clipped(f"{filler} {text}"),
        first_line(text), with_short_first_line(f"{text} {filler}"), cause.as_dict(), cause.last_lines, long,
        KtrainError(text), ManifestError(text, where=text, found=text, expected=text, remedy=text),
    ):  # fmt: skip
        assert SECRET not in str(value)


@pytest.mark.parametrize("size", [80, 200, MAX_LINE_CHARS])
@pytest.mark.parametrize("length", [2, 3, 50], ids=lambda times: f"{times} sizes")
def test_no_part_of_a_secret_that_is_cut_is_shown(size: int, length: int) -> None:
    secret = "q" * length * size
    for text in (
        f"the value {{'id': 7, 'token': '{secret}'}} can't be sent",
        f"password={secret} postgres://me:{secret}@db:5432/runs {'the end ' * size}",
        f"{'the beginning ' * size} postgres://me:{secret}@db:5432/runs",
        f"https://{secret}@host",
    ):
        assert "q" not in clipped(text, size)
        assert len(clipped(text, size)) <= size


@given(texts_with_a_secret())
def test_hiding_again_changes_nothing(text: str) -> None:
    assert masked(masked(text)) == masked(text)


def test_lines_of_the_program_and_manifests_are_not_searched_again() -> None:
    assert masked(Verbatim("token=abc\0")) == "token=abc\ufffd"
    assert type(masked(Verbatim("x"))) is str


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "text",
    [
        "-",
        "token",
        "a_",
        "://a:",
        "token='",
        "name:",
        "--a ",
        '"key":',
        "-u ",
        "https://",
        'token=\\"',
        "a b=c ",
        "cookie:a=b;",
        "cookie=a",
        "a=b;",
        "auth=('",
        "auth=['a',",
        "auth={'a': {",
        "'a',",
        "auth: basic ",
    ],
)
def test_no_form_of_a_text_takes_long(text: str) -> None:
    """The time is proportional to the length: in each 100 KB, the same text takes below a second on a slow machine."""
    long = text * (100_000 // len(text))
    began = time.process_time()
    masked(long)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "name",
    [
        "PGPASS", "SMTP_PASS", "AZURE_STORAGE_SAS", "ENCRYPTION_KEY_B64", "HF_TOKEN", "WANDB_API_KEY",
        "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "client_secret", "AUTH_HEADER", "SSH_KEY", "DB_PW", "PGPW", "S3_CREDS",
        "awsCreds", "GIT_CRED", "HSM_PIN", "card-pin", "GH_PAT",
    ],
)  # fmt: skip
def test_variables_with_a_secret_name_are_hidden(name: str) -> None:
    assert redacted([{"name": name, "value": "s3cret"}]) == [{"name": name, "value": "***"}]


@pytest.mark.parametrize(
    "name",
    [
        "EPOCHS", "MAX_TOKENS", "TOKENIZERS_PARALLELISM", "AUTHOR", "KEYBOARD", "MONKEY", "THREADS_PINNED",
        "PINNED_MEMORY", "SPIN", "PIN_MEMORY", "pin_memory", "I_MPI_PIN", "CPU_PIN", "SACRED_RUN", "PWM", "INCREDIBLE",
    ],
)  # fmt: skip
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
        (["curl", "-u", "a:b", "--db-pass", "a b"], ["curl", "-u", "a:***", "--db-pass", "***"]),
        (["--token", "--verbose"], ["--token", "--verbose"]),
        (["--password", "-abc"], ["--password", "***"]),
        (["--password", "--verbose"], ["--password", "--verbose"]),
        (["--password-stdin", "-v"], ["--password-stdin", "-v"]),
        (["sh", "-c", "mysql --no-password -v"], ["sh", "-c", "mysql --no-password -v"]),
        (["docker", "login", "-u", "me", "-p", "abc"], ["docker", "login", "-u", "me", "-p", "***"]),
        (["sh", "-c", "docker login -u me -p abc && docker run -p 80:80 x"],
         ["sh", "-c", "docker login -u me -p *** && docker run -p 80:80 x"]),
        (["docker", "login", "-u", "me", "-pabc"], ["docker", "login", "-u", "me", "-p***"]),
        (["ssh", "-p22", "docker"], ["ssh", "-p22", "docker"]),
        (["sh", "-c", "docker login -u me -pabc r.io"], ["sh", "-c", "docker login -u me -p*** r.io"]),
        (["sh", "-c", "helm registry login -p 'abc' r.io"], ["sh", "-c", "helm registry login -p '***' r.io"]),
        (["sh", "-c", "ssh login -p 22"], ["sh", "-c", "ssh login -p 22"]),
        (["sh", "-c", "wandb login --relogin abc && train"], ["sh", "-c", "wandb login --relogin *** && train"]),
        (["sshpass", "-p", "abc", "ssh", "-p", "22", "host"], ["sshpass", "-p", "***", "ssh", "-p", "22", "host"]),
        (["aws", "configure", "set", "aws_secret_access_key", "abc"],
         ["aws", "configure", "set", "aws_secret_access_key", "***"]),
        (["sh", "-c", "aws configure set aws_secret_access_key abc; train"],
         ["sh", "-c", "aws configure set aws_secret_access_key *** train"]),
        (["sh", "-c", "aws configure set region eu-west-1"], ["sh", "-c", "aws configure set region eu-west-1"]),
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
        ("Authorization: Basic abc123", "Authorization: Basic ***"),
        ('{"api_key": "abc123", "epochs": 3}', '{"api_key": ***, "epochs": 3}'),
        ("password: abc123", "password: ***"),
        ("tokens: 5", "tokens: 5"),
        ("https://auth.example.com:443/x", "https://auth.example.com:443/x"),
        ("authors: me", "authors: me"),
        ("401 Unauthorized: https://api.example.com refused", "401 Unauthorized: https://api.example.com refused"),
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
        ({"labels": {"hf_11ABCDEFG0abcdefijklmnop": "x"}}, {"labels": {"hf_***": "x"}}),
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
