"""Replaces secrets in a manifest by `***`, so that it can be logged.

Airflow masks the values of its own connections and variables in logs. A manifest has other secrets: environment
variables, passwords in URLs, options of a command. A secret in a Kubernetes Secret is only a reference here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from airflow_provider_ktrain.core.manifest.program import PROGRAM_VARIABLE

MASK = "***"
MAX_VALUE_CHARS = 4096  #: of one text; longer ones are cut
_SECRET = (  # but not tokenizers, numbers of tokens, authors and authenticity
    r"secret|token(?!i[sz]|s)|passw|passphrase|pwd|credential|auth(?!ors?\b|enticity)|cookie|signature|api_?key|(?:_|\b)key\b|"
    r"(?:private|access|encryption|signing)_?key\b|dsn\b|conn(?:ection)?_?str|bearer|\bjwt"
)
_NAME = re.compile(_SECRET, re.IGNORECASE)
_TOKENS = re.compile(r"(?:(?:api|access|refresh)[_-]?)?tokens", re.IGNORECASE)  #: keys; their numbers are counts
_WORD = rf"[\w-]{{0,60}}(?:{_SECRET})[\w-]{{0,60}}"  # bounded, so that no text takes long
_ASSIGNED = re.compile(rf"(?i)({_WORD}=)(\"[^\"]*\"|'[^']*'|[^\s\"']+)")
#: `"api_key": "..."` of JSON, `password: ...`, `Authorization: Bearer ...`
_FIELD = re.compile(rf"(?i)({_WORD}[\"']?\s*:\s*(?:(?:bearer|basic)\s+)?)(?!//)(\"[^\"]*\"|'[^']*'|[^\s\"',}}]+)")
_FLAG = re.compile(rf"(?i)(--?{_WORD}\s+)(\"[^\"]*\"|'[^']*'|[^\s\"'-][^\s\"']*)")
_FLAG_ALONE = re.compile(rf"(?i)--?{_WORD}")
#: keys of a manifest whose values refer to secrets or only look like them; keys that end with `Ref` do, too
_REFERENCES = (
    "secretName", "topologyKey", "key", "tokenExpirationSeconds", "serviceAccountToken", "imagePullSecrets",
    "sshAuthMountPath",
)  # fmt: skip
_SECRET_VOLUME = {"secretName", "name", "items", "defaultMode", "optional"}  #: keys of the volume source `secret`
_URL_PASSWORD = re.compile(r"(://[^\s/:@]*:)[^\s/@]+(@)")


def redacted(value: Any, *, hides: Callable[[str], bool] = lambda name: False) -> Any:
    """A copy of a manifest, or of a part of it, without secrets.

    :param value: of JSON types.
    :param hides: whether Airflow hides the value of an environment variable, by its name. Default: never.
    """
    if isinstance(value, Mapping):
        if isinstance(value.get("name"), str) and isinstance(value.get("value"), str):
            others = redacted({key: item for key, item in value.items() if key != "value"}, hides=hides)
            return {**value, **others, "value": _variable(value["name"], value["value"], hides)}
        return {
            key: _masked(item, str(key)) if _is_secret(str(key), item) else redacted(item, hides=hides)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [redacted(item, hides=hides) for item in value]
        return [MASK if n and _is_flag(value[n - 1]) and _is_operand(items[n]) else items[n] for n in range(len(items))]
    return _text(value) if isinstance(value, str) else value


def _variable(name: str, value: str, hides: Callable[[str], bool]) -> str:
    """The value of an environment variable. A function's program contains its arguments, which may be secrets."""
    if name == PROGRAM_VARIABLE:
        return f"<the function and its arguments, {len(value):,} characters>"
    return MASK if value and (_NAME.search(name) or hides(name)) else _text(value)


def _text(text: str) -> str:
    if len(text) > MAX_VALUE_CHARS:
        kept = text[:MAX_VALUE_CHARS].rpartition(" ")[0]  # a word that is cut might be a secret
        return f"{_text(kept)} <{len(text) - len(kept):,} more characters>"
    text = _URL_PASSWORD.sub(rf"\g<1>{MASK}\g<2>", text)
    for pattern in (_FIELD, _ASSIGNED, _FLAG):
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text


def _is_secret(key: str, item: object) -> bool:
    """Whether a value is a secret according to its key, and not a reference to a Kubernetes Secret."""
    if key in _REFERENCES or (isinstance(item, Mapping) and _is_reference(key, item)):
        return False
    return _NAME.search(key) is not None or _TOKENS.fullmatch(key) is not None


def _is_reference(key: str, item: Mapping[str, Any]) -> bool:
    return key.endswith("Ref") or (key == "secret" and item.keys() <= _SECRET_VOLUME)


def _masked(value: Any, key: str) -> Any:
    """A copy of a secret with `***` for each text and number.

    Shown are empty texts, booleans, None, and numbers under a key of tokens, which are counts.
    """
    if isinstance(value, Mapping):
        return {name: _masked(item, key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, key) for item in value]
    if isinstance(value, str):
        return value and MASK
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return MASK if is_number and "token" not in key.lower() else value


def _is_flag(word: object) -> bool:
    return isinstance(word, str) and _FLAG_ALONE.fullmatch(word) is not None


def _is_operand(word: object) -> bool:
    return isinstance(word, str) and not word.startswith("-")
