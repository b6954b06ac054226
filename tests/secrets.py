"""Texts with a secret of each kind, for tests of what hides them."""

from __future__ import annotations

from hypothesis import strategies as st

from airflow_provider_ktrain.core.text.secret_rules import RULES

SECRET = "hunter2hunter2"
EXAMPLES = tuple(rule.example.replace("SECRET", SECRET) for rule in RULES)


def texts_with_a_secret() -> st.SearchStrategy[str]:
    """Each example, alone and in other text."""
    other = st.text(st.characters(categories=["L", "N", "Zs"]) | st.sampled_from("=:'\"{}[],-\n"), max_size=20)
    return st.builds(lambda before, text, after: f"{before} {text} {after}", other, st.sampled_from(EXAMPLES), other)
