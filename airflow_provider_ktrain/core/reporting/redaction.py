"""Hides secrets in a manifest, or in another nested value, so that it can be shown.

In a nested value, the key of a text may say that it is a secret; `core.text.output.masked` knows only the text. A
secret in a Kubernetes Secret is only a reference in a manifest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.identity.task_variables import PROGRAM
from airflow_provider_ktrain.core.manifest.start import is_starter
from airflow_provider_ktrain.core.text.output import masked
from airflow_provider_ktrain.core.text.secret_rules import MASK, is_secret_name

MAX_VALUE_CHARS = 4096  #: Length of one text. Longer ones are cut.
_TOKENS = re.compile(r"(?:(?:api|access|refresh)[_-]?)?tokens", re.IGNORECASE)  #: Keys; their numbers are counts.
CONTEXT_WORDS, MAX_CONTEXT_CHARS = 8, 256  #: Words of a command that show whether the next is a secret.
_FLAG = re.compile(r"--?[\w-]+")
#: Keys of a manifest whose values refer to secrets or only look like them; keys that end with `Ref` do, too.
_REFERENCES = (
    "secretName", "topologyKey", "key", "tokenExpirationSeconds", "serviceAccountToken", "imagePullSecrets",
    "sshAuthMountPath",
)  # fmt: skip
_SECRET_VOLUME = {"secretName", "name", "items", "defaultMode", "optional"}  #: Keys of the volume source `secret`.


def redacted(value: Any, *, hides: Callable[[str], bool] = lambda name: False) -> Any:
    """A copy of a manifest, or of a part of it, without secrets.

    :param hides: whether Airflow hides the value of an environment variable, by its name. Default: never.
    """
    if isinstance(value, Mapping):
        if isinstance(value.get("name"), str) and isinstance(value.get("value"), str):
            others = redacted({key: item for key, item in value.items() if key != "value"}, hides=hides)
            return {**value, **others, "value": _variable(value["name"], value["value"], hides)}
        return {
            masked(key): _masked(item, str(key)) if _is_secret(str(key), item) else redacted(item, hides=hides)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_word(value[max(at - CONTEXT_WORDS, 0) : at], item, hides) for at, item in enumerate(value)]
    return _text(value) if isinstance(value, str) else value


def _variable(name: str, value: str, hides: Callable[[str], bool]) -> str:
    """The value of an environment variable. A function's program contains its arguments, which may be secrets."""
    if name == PROGRAM:
        return f"<the function and its arguments, {len(value):,} characters>"
    return MASK if value and (is_secret_name(name) or hides(name)) else _text(value)


def _word(before: Sequence[object], word: Any, hides: Callable[[str], bool]) -> Any:
    """One word of a command, which may depend on those before it.

    It may be the operand of a flag, have one (`docker login -pSECRET`), or be a setting (`aws configure set KEY`).
    """
    words = [one for one in before if isinstance(one, str) and len(one) <= MAX_CONTEXT_CHARS]
    if not (isinstance(word, str) and words and words[-1] is before[-1]):
        return redacted(word, hides=hides)
    if not (_FLAG.fullmatch(words[-1]) or words[-2:-1] == ["set"] or word.startswith("-p")):
        return redacted(word, hides=hides)
    clear = f"{masked(' '.join(words))} "
    hidden = masked(f"{' '.join(words)} {word}")
    if not hidden.startswith(clear):
        return redacted(word, hides=hides)
    hidden = hidden.removeprefix(clear)
    return MASK if hidden.startswith(MASK) else _text(word if hidden == word else hidden)


def _text(text: str) -> str:
    if is_starter(text):
        return f"<ktrain's starter, {len(text):,} characters>"
    if len(text) > MAX_VALUE_CHARS:
        kept = text[:MAX_VALUE_CHARS].rpartition(" ")[0]  # a word that is cut might be a secret
        return f"{masked(kept)} <{len(text) - len(kept):,} more characters>"
    return masked(text)


def _is_secret(key: str, item: object) -> bool:
    """Whether a value is a secret according to its key, and not a reference to a Kubernetes Secret."""
    if isinstance(item, Mapping) and (key.endswith("Ref") or (key == "secret" and item.keys() <= _SECRET_VOLUME)):
        return False
    return key not in _REFERENCES and (is_secret_name(key) or _TOKENS.fullmatch(key) is not None)


def _masked(value: Any, key: str) -> Any:
    """A copy of a secret with `***` for each text and number.

    Shown are empty texts, booleans, None, and numbers under a key of tokens, which are counts.
    """
    if isinstance(value, Mapping):
        return {masked(name): _masked(item, key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, key) for item in value]
    if isinstance(value, str):
        return value and MASK
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return MASK if is_number and "token" not in key.lower() else value
