"""The rules of Kubernetes' strategic merge; the expected results are those of `kubectl patch`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds.strategic_merge import merged, removals

Json = dict[str, Any]
A, B = {"name": "a", "image": "a:1"}, {"name": "b", "image": "b:1"}
UDP = {"containerPort": 53, "protocol": "UDP"}
SPREAD = {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        ({"a": 1, "m": {"x": 1, "y": 2}}, {"m": {"y": 3}, "b": 4}, {"a": 1, "m": {"x": 1, "y": 3}, "b": 4}),
        ({"a": 1, "b": 2}, {"a": None, "c": None}, {"b": 2}),
        ({}, {"m": {"x": None, "y": 1}}, {"m": {"y": 1}}),
        ({"containers": [A, B]}, {"containers": [{"name": "b", "tty": True}]}, {"containers": [A, {**B, "tty": True}]}),
        ({"containers": [A]}, {"containers": [B]}, {"containers": [A, B]}),
        ({"containers": [A, B]}, {"containers": [{"name": "a", "$patch": "delete"}]}, {"containers": [B]}),
        ({"containers": [A]}, {"containers": [{"$patch": "replace"}, B]}, {"containers": [B]}),
        ({"containers": [A]}, {"containers": [{"name": "a", "$patch": "replace"}]}, {"containers": [{"name": "a"}]}),
        ({"containers": [A]}, {"containers": []}, {"containers": [A]}),
        ({"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, {"tolerations": [{"key": "b"}]}),
        (
            {"ports": [UDP, {"containerPort": 53}]},
            {"ports": [{"containerPort": 53, "protocol": "TCP", "name": "a"}]},
            {"ports": [UDP, {"containerPort": 53, "protocol": "TCP", "name": "a"}]},
        ),
        (
            {"topologySpreadConstraints": [{**SPREAD, "maxSkew": 1}]},
            {"topologySpreadConstraints": [{**SPREAD, "maxSkew": 2}]},
            {"topologySpreadConstraints": [{**SPREAD, "maxSkew": 2}]},
        ),
        ({"s": {"a": 1, "b": 2}}, {"s": {"$patch": "replace", "c": 3}}, {"s": {"c": 3}}),
        ({"s": {"a": 1}, "t": 1}, {"s": {"$patch": "delete"}}, {"t": 1}),
        ({"env": "not a list"}, {"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "1"}]}),
    ],
)  # fmt: skip
def test_strategic_merge(base: Json, patch: Json, result: Json) -> None:
    before = copy.deepcopy((base, patch))
    assert merged(base, patch) == result
    assert (base, patch) == before


@pytest.mark.parametrize(
    ("patch", "error"),
    [
        ({"spec": {"containers": [{"image": "a"}]}}, r"^p\.spec\.containers\[0\]: an entry has no name"),
        ({"spec": {"containers": ["a"]}}, r"^p\.spec\.containers\[0\]: .*found str"),
        ({"spec": {"$setElementOrder/containers": []}}, r"^p\.spec: the directive \$setElementOrder/containers is not"),
        ({"spec": {"$patch": "drop"}}, r"^p\.spec: the directive \$patch .*found 'drop'; expected \$patch"),
    ],
)
def test_patch_that_cannot_be_merged_is_refused_with_its_path(patch: Json, error: str) -> None:
    with pytest.raises(ManifestError, match=error):
        merged({}, patch, "p")


def test_removals_are_found() -> None:
    patch = {"a": None, "b": [{"c": None, "d": 1}], "e": {"$patch": "replace"}, "f/g": {"h": None}}
    assert list(removals(patch, "p")) == ["p.a", "p.b[0].c", "p.e.$patch", "p['f/g'].h"]


NAMES = st.sampled_from(["a", "b", "c", "d"])
VALUES = st.one_of(st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
ENTRY = st.fixed_dictionaries({"name": NAMES}, optional={"image": VALUES, "m": st.dictionaries(NAMES, VALUES)})
LISTS = st.lists(ENTRY, max_size=4, unique_by=lambda entry: str(entry["name"]))
BASES = st.fixed_dictionaries(
    {}, optional={"containers": LISTS, "tolerations": LISTS, "m": st.dictionaries(NAMES, VALUES), "x": VALUES}
)
PATCH_ENTRY = st.fixed_dictionaries(
    {"name": NAMES}, optional={"image": st.none() | VALUES, "$patch": st.sampled_from(["delete", "replace"])}
)
PATCHES = st.fixed_dictionaries(
    {},
    optional={
        "containers": st.lists(PATCH_ENTRY, max_size=4, unique_by=lambda entry: str(entry["name"])),
        "tolerations": LISTS,
        "m": st.none() | st.dictionaries(NAMES, st.none() | VALUES),
        "x": st.none() | VALUES,
    },
)


@given(BASES)
def test_empty_patch_changes_nothing(base: Json) -> None:
    assert merged(base, {}) == base


@given(BASES, PATCHES)
def test_merging_twice_is_merging_once(base: Json, patch: Json) -> None:
    once = merged(base, patch)
    assert merged(once, patch) == once


@given(BASES, PATCHES)
def test_other_entries_stay_in_their_order(base: Json, patch: Json) -> None:
    touched = {entry["name"] for entry in patch.get("containers", ())}
    others = [entry for entry in base.get("containers", ()) if entry["name"] not in touched]
    result = merged(base, patch)
    assert [entry for entry in result.get("containers", ()) if entry["name"] not in touched] == others
    kept = [entry["name"] for entry in base.get("containers", ()) if entry in result.get("containers", ())]
    names = [entry["name"] for entry in result.get("containers", ())]
    assert sorted(kept, key=names.index) == kept
    assert {key: value for key, value in result.items() if key not in patch} == {
        key: value for key, value in base.items() if key not in patch
    }
