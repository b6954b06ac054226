"""Finds secrets in text by the names before them and by their form. `core.text.output.masked` applies the rules.

The rules prefer to hide too much: the word after `password:` is hidden, whatever it is. But the beginning of a sentence
after `token:` is shown, and so is what follows the name of an exception: they say why a training failed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MASK = "***"
#: Words in names of passwords, but not in `forward_pass`, `bypass` or `compass`.
_PASSWORD = (
    r"passw|passphrase|pwd|"
    r"(?:(?<![a-z])|pg|db|sql|smtp|mail|ftp|redis|user|root|admin)(?<!ward[_-])(?:pass|pw)(?![a-z])"
)
#: Words in other names, but not tokenizers, numbers of tokens, authors, authenticity, `401 Unauthorized:`, `sacred`,
#: and pins of threads and of hardware, such as `I_MPI_PIN` and `SPIN`.
_OTHER = (
    r"secret|token(?!i[sz]|s)|credential|creds(?![a-z])|(?<![a-z])cred(?![a-z])|"
    r"(?<!mpi)(?<!omp)(?<!cpu)(?<!core)(?<!numa)(?<!thread)(?<!proc)(?<!gpio)[_-]pin(?![\w-])|"
    r"(?<!un)auth(?!ors?\b|enticity)|cookie|signature|api_?key|dsn\b|conn(?:ection)?_?str|"
    r"bearer|\bjwt|(?<![a-z])sas(?![a-z])|(?:gh|git(?:hub|lab)?|devops|ado)_pat(?![a-z])|"
    r"(?:[_-]|\b|private_?|access_?|account_?|encryption_?|signing_?)key(?:_?(?:b64|base64|pem|hex|data))?\b"
)
_PASSWORD_NAME = re.compile(_PASSWORD, re.IGNORECASE)
_AUTHORIZATION = re.compile("authorization", re.IGNORECASE)
#: Options that a password follows, which may begin with a dash.
_PASSWORD_OPTION = re.compile(
    r"(?<!no-)(?<!ask-)(?<!prompt-)(?:passw(?:or)?d|passphrase|pwd|pw|(?<!ward-)pass)\Z", re.IGNORECASE
)
_COOKIE = re.compile("cookie", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?:credentials?|auth)\Z", re.IGNORECASE)
_SECRET_NAME = re.compile(f"{_PASSWORD}|{_OTHER}", re.IGNORECASE)
#: Names of failures, paths and references, as in `NoCredentialsError: Unable to locate credentials`.
_OTHER_NAME = re.compile(
    r"(?:Error|Exception|Warning|Failure|Failed|Invalid|NotFound|Timeout|secretName|[a-z]Path|[a-z]Ref)\Z"
)
_NAME = r"(?<![\w-])(?P<name>[\w-]++)"
_COLON = r"\\?[\"']?\s*+:\s*(?!//)"
_SEPARATOR = r"\\?[\"']?\s*+[:=]\s*"
_NOTHING = r"(?![(\[{]?\*{3}|(?:true|false|none|null)(?![^\s\"',;)}\]]))"
_QUOTED = r"\\\"[^\"\\]*\\\"|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
#: A value in quotes, escaped or not, with the first quote of two, or without quotes.
_VALUE = rf"{_NOTHING}(?:{_QUOTED}|[\"'].*|[^\s\"']+(?:[\"'][^\s\"',;:)}}\]][^\s\"']*)*)"
_PAIR = rf"[\w.-]+=(?:{_QUOTED}|[^\s;\"']*)"
_MEMBERS = rf"(?:{_QUOTED}|[^\"'{{}}\\]|\\[\"']?)"
_SCHEME = r"(?:bearer|basic|digest|negotiate) +"
_WORD_END = r"[\s\"',]{1,8}"  #: What is between two words of a command, which may be a list.
_NO_SENTENCE = r"(?![a-z]+[,.]?\s+[a-z\"'(])"

#: Every name of a secret contains one of these words.
_NAME_HINTS = (
    "pass", "pw", "secret", "token", "cred", "auth", "cookie", "_pin", "-pin",
    "signature", "key", "dsn", "conn", "bearer", "jwt", "sas", "_pat",
)  # fmt: skip


class Rule(NamedTuple):
    """How one form of a secret is recognized.

    :param example: a text with `SECRET` in the place of the secret.
    :param hints: each text that contains such a secret contains one of these words, case folded. To look for them costs
        a thousandth of what the rule costs, and most texts have none of them.
    :param names: what the group `name` of `before` must contain. Default: None, the form is enough.
    """

    before: re.Pattern[str]
    secret: re.Pattern[str]
    example: str
    hints: tuple[str, ...]
    names: re.Pattern[str] | None = None


def _form(before: str, secret: str, example: str, *hints: str) -> Rule:
    """A rule for secrets that their form gives away."""
    return Rule(re.compile(before, re.IGNORECASE), re.compile(secret, re.IGNORECASE), example, hints)


def _named(names: re.Pattern[str], before: str, secret: str, example: str) -> Rule:
    """A rule for secrets that follow a name."""
    return _form(before, secret, example, *_NAME_HINTS)._replace(names=names)


RULES = (
    _form(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----", r"[\s\S]*?(?=-----END|\Z)", "-----BEGIN PRIVATE KEY-----\nSECRET",
        "-----begin ",
    ),
    _form(r"://[^\s/:@]*:", r"[^\s/]+(?=@)", "postgres://me:SECRET@db:5432/runs", "://"),
    _form(r"\bhttps?://", r"[^\s/:@]+(?=@)", "git clone https://SECRET@git.example.com/me/train", "://"),
    _form(
        r"[?&](?:sig|key|code)=", r"[^\s\"'&]+", "https://store.example.com/model.pt?sv=2024&sig=SECRET&se=2026",
        "sig=", "key=", "code=",
    ),
    _named(
        _SECRET_NAME, rf"\bname{_COLON}[\"']?(?P<name>[\w.-]+)[\"']?,?\s*[\"']?value{_COLON}", _VALUE,
        'found v1.EnvVar{Name:"DB_PASS", Value:"SECRET"}',
    ),
    _named(
        _SECRET_NAME, rf"{_NAME}{_SEPARATOR}{_SCHEME}", r"(?!\*{3})[^\s\"']+",
        "OTEL_EXPORTER_OTLP_HEADERS=Authorization=Bearer SECRET",
    ),
    _named(
        _AUTHORIZATION, rf"{_NAME}{_SEPARATOR}(?:token|api-?key) +", r"(?!\*{3})[^\s\"']+",
        "Authorization: Token SECRET",
    ),
    _named(
        _COOKIE, rf"{_NAME}{_SEPARATOR}", rf"{_PAIR}(?:;\s*(?:{_PAIR}|[\w-]+))*", "Cookie: theme=dark; session=SECRET",
    ),
    _named(
        _SECRET_NAME, rf"{_NAME}{_SEPARATOR}[(\[]\s*(?=[\"'])", rf"(?:{_QUOTED}|[\s,])++(?:[\"'].*)?|[\"'].*",
        "get(url, auth=('me', 'SECRET'))",
    ),
    _named(
        _CREDENTIALS, rf"{_NAME}{_SEPARATOR}\{{", rf"(?:{_MEMBERS}|\{{{_MEMBERS}*+\}})++(?:[\"'{{].*)?",
        "Client(credentials={'user': 'SECRET'})",
    ),
    _named(_PASSWORD_NAME, rf"{_NAME}{_COLON}", rf"(?!\w+ \*{{3}}){_VALUE}", "password: SECRET"),
    _named(
        _SECRET_NAME, rf"(?!key\W){_NAME}{_COLON}", rf"(?!\w+ \*{{3}}){_NO_SENTENCE}{_VALUE}", '{"api_key": "SECRET"}'
    ),
    _named(_SECRET_NAME, rf"{_NAME}=(?!=)", rf"(?!{_SCHEME}\*{{3}}){_VALUE}", "DB_PASS=SECRET python train.py"),
    _named(
        _SECRET_NAME, rf"{_NAME} = ", rf"(?!{_SCHEME}\*{{3}}){_NOTHING}(?:{_QUOTED}|[^\s\"'()\[\]]+(?=\s|\Z))",
        "aws_secret_access_key = SECRET",
    ),
    _named(
        _SECRET_NAME, r"(?<![\w-])--?(?P<name>[a-z][\w-]*)(?:\s+|[\"'],\s*)", rf"(?!-){_VALUE}",
        "python train.py --db-pass SECRET",
    ),
    _named(
        _PASSWORD_OPTION, r"(?<![\w-])--(?P<name>[a-z][\w-]*)(?:[ =]|[\"'],\s*)[\"']?(?=-[^-])", r"[^\s\"']+",
        "mysqldump --password -SECRET",
    ),
    _named(
        _SECRET_NAME, rf"\bconfig(?:ure)?{_WORD_END}set{_WORD_END}(?P<name>[\w.-]+){_WORD_END}", r"[^\s\"']+",
        "aws configure set aws_secret_access_key SECRET",
    ),
    _form(
        rf"\b(?:docker|podman|nerdctl|buildah|skopeo|helm|crane|oras)(?:{_WORD_END}[\w./-]{{1,64}}){{0,3}}?{_WORD_END}login\b"
        rf"[^\n;|&]{{0,256}}?[\s\"']-p(?:=|{_WORD_END})?", r"[^\s\"']+", "docker login -u me -p SECRET", "login",
    ),
    _form(
        rf"\b(?:wandb{_WORD_END}login(?:{_WORD_END}--relogin)?|sshpass{_WORD_END}-p|redis-cli{_WORD_END}-a){_WORD_END}",
        r"(?!-)[^\s\"']+", "wandb login SECRET", "wandb", "sshpass", "redis-cli",
    ),
    _form(
        r"(?<![\w-])(?:-u|--(?:proxy-)?user)(?:[ =]|[\"'],\s*)[\"']?(?!\d+:\d+\b)[^\s:\"'/]{1,256}:", r"[^\s\"']+",
        "curl -u me:SECRET https://example.com", "-u", "-user",
    ),
    _form(r"\bbearer +", r"(?=\S*\d)[\w.~+/=-]{8,}", "rejected: bearer SECRET12", "bearer "),
    _form(
        r"\b(?:gh[oprsu]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|k8s-aws-v1\.|ya29\.|(?<![\w-])eyJ[\w-]{8,}\.)",
        r"[\w.-]{20,}", "login with hf_SECRETabcdefghijklmnop",
        "gh", "github_pat_", "glpat-", "hf_", "sk-", "xox", "k8s-aws-v1.", "ya29.", "eyj",
    ),
)  # fmt: skip


_HINTS = frozenset(rule.hints for rule in RULES)


def without_secrets(text: str) -> str:
    """The text with MASK in the place of each secret that RULES find."""
    folded = text.replace("\u0130", "i").replace("\u0131", "i").casefold()  # re.IGNORECASE takes both for an i
    found = {hints for hints in _HINTS if any(hint in folded for hint in hints)}
    for rule in RULES:
        if rule.hints in found:
            text = _applied(rule, text)
    return text


def is_secret_name(name: str) -> bool:
    """Whether a value of this name is a secret."""
    return _is_named(name, _SECRET_NAME)


def _is_named(name: str, secrets: re.Pattern[str]) -> bool:
    return secrets.search(name) is not None and not _OTHER_NAME.search(name)


def _applied(rule: Rule, text: str) -> str:
    """The text without the secrets that the rule finds."""
    parts, shown, at = list[str](), 0, 0
    while before := rule.before.search(text, at):
        at = before.end()
        named = rule.names is None or _is_named(before["name"], rule.names)
        if named and (secret := rule.secret.match(text, at)):
            parts += (text[shown:at], MASK)
            shown = at = secret.end()
    return "".join((*parts, text[shown:])) if parts else text
