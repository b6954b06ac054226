"""Names, owners, and the decision of a task about an existing job."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.identity.adoption import Adoption, cleared, decide_adoption, first_try_since_clear
from airflow_provider_ktrain.core.identity.adoption_messages import differences
from airflow_provider_ktrain.core.identity.names import (
    DEPLOYMENT_LABEL,
    OWNER_ANNOTATION,
    SUBMISSION_LABEL,
    SUSPENDED_ANNOTATION,
    JobRef,
    Owner,
    Reattach,
    TaskKey,
    Unreadable,
    label_value,
)
from airflow_provider_ktrain.core.kinds.conditions import FAILED_ANNOTATION, failure_annotation, true_conditions
from tests.core.trainjobs import trainjob
from tests.factories import owned_job

DELETED = "2026-11-21T10:00:00Z"
KEY = TaskKey("prod", "mnist", "train", "manual__2026-11-21T10:00:00+00:00")
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?")
keys = st.builds(
    TaskKey, st.text(min_size=1), st.text(min_size=1), st.text(min_size=1), st.text(min_size=1), st.integers(-1, 9999)
)


# names and labels


@given(keys, st.none() | st.text())
def test_job_name_leaves_room_for_the_suffixes_of_operators(key: TaskKey, prefix: str | None) -> None:
    name = key.job_name(prefix)
    assert DNS_1035.fullmatch(name)
    assert len(f"{name}-worker-9999") <= 63
    assert len(f"{name}-launcher-xxxxx") <= 63
    assert name == key.job_name(prefix), "deterministic"


@given(keys, keys)
def test_different_tasks_have_different_names(one: TaskKey, other: TaskKey) -> None:
    assert (one.job_name("same") == other.job_name("same")) == (one == other)


@pytest.mark.parametrize("field", ["deployment", "dag_id", "task_id", "run_id", "map_index"])
def test_every_part_of_the_key_changes_the_name(field: str) -> None:
    other: Any = {field: 7 if field == "map_index" else "other"}
    assert replace(KEY, **other).job_name("same") != KEY.job_name("same")


@pytest.mark.parametrize(
    ("task_id", "readable"),
    [
        ("train", "train-"),
        ("group.Train_Model", "group-train-model-"),
        ("1st", "job-1st-"),
        ("тренировка", "job-"),
        ("-", "job-"),
        ("x" * 250, "x" * 35 + "-"),
    ],
)
def test_readable_part_of_the_name(task_id: str, readable: str) -> None:
    name = replace(KEY, task_id=task_id).job_name()
    assert name.startswith(readable)
    assert DNS_1035.fullmatch(name)


@given(keys)
def test_labels_are_valid(key: TaskKey) -> None:
    for value in key.labels("0123456789ab").values():
        assert len(value) <= 63
        assert LABEL.fullmatch(value)


@given(st.text(), st.text())
def test_label_values_stay_distinct(one: str, other: str) -> None:
    assert (label_value(one) == label_value(other)) == (one == other)


def test_labels_name_deployment_submission_and_mapped_index() -> None:
    labels = replace(KEY, map_index=3).labels("abc")
    assert labels[DEPLOYMENT_LABEL] == "prod"
    assert labels[SUBMISSION_LABEL] == "abc"
    assert labels["ktrain.airflow/map-index"] == "3"
    assert "ktrain.airflow/map-index" not in KEY.labels("abc")


# owners


@given(keys, st.integers(1, 99), st.uuids(), st.none() | st.integers(0, 99))
def test_owner_is_restored_from_its_annotation(key: TaskKey, number: int, ti_id: object, max_tries: int | None) -> None:
    owner = Owner(key, number, str(ti_id), max_tries)
    found = Owner.of(owned_job(owner))
    assert found == owner
    assert found is not None
    assert found.max_tries == max_tries


def test_owner_of_an_earlier_version_is_read() -> None:
    annotation = {**asdict(KEY), "try_number": 1, "ti_id": "ti-1"}
    assert Owner.of({"metadata": {"annotations": {OWNER_ANNOTATION: json.dumps(annotation)}}}) == Owner(KEY, 1, "ti-1")


TOO_LARGE = json.dumps({**asdict(KEY), "try_number": 1, "ti_id": "ti-1"}).replace(
    '"try_number": 1', '"try_number": 1e999'
)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"try_number": 1}', '"x"', "1", TOO_LARGE])
def test_unreadable_annotation_is_not_a_missing_one(text: str) -> None:
    job = {"metadata": {"annotations": {OWNER_ANNOTATION: text}}}
    assert Owner.of(job) is Unreadable.OWNER
    assert decide_adoption(job, Owner(KEY, 1, "me"), 1).action is Adoption.REFUSE


def test_missing_annotation_gives_no_owner() -> None:
    assert Owner.of({}) is None
    assert Owner.of({"metadata": {"annotations": None}}) is None


# decisions


@pytest.mark.parametrize(
    ("owner_try", "first_try", "condition", "changed", "action"),
    [
        # this life of the task began with try 1: if try 1 or 2 is the owner, it was an earlier try and this is a retry
        (1, 1, "Running", False, Adoption.ADOPT),
        (1, 1, "Running", True, Adoption.ADOPT),
        (2, 1, "Created", False, Adoption.ADOPT),
        (1, 1, "Suspended", False, Adoption.ADOPT),
        (1, 1, "Restarting", False, Adoption.ADOPT),
        (1, 1, "Succeeded", False, Adoption.TAKE_RESULT),
        (2, 1, "Succeeded", True, Adoption.TAKE_RESULT),
        (1, 1, "Failed", False, Adoption.REPLACE),
        # a clear has started another life with try 3
        (1, 3, "Running", False, Adoption.REPLACE),
        (2, 3, "Suspended", False, Adoption.REPLACE),
        (2, 3, "Succeeded", False, Adoption.REPLACE),
        (2, 3, "Failed", False, Adoption.REPLACE),
    ],
)
def test_decision_about_the_job_of_an_earlier_try(
    owner_try: int, first_try: int, condition: str, changed: bool, action: Adoption
) -> None:
    me = Owner(KEY, 3, "me")
    assert (
        decide_adoption(owned_job(Owner(KEY, owner_try, "before"), condition), me, first_try, changed=changed).action
        is action
    )


def test_a_failed_job_is_replaced_also_after_its_condition_has_vanished() -> None:
    """Its JobSet was recreated while it was suspended (recording 60b): the next try must not resume it."""
    failed = trainjob(2, ("Failed", "True", "DeadlineExceeded"))
    found = trainjob(2, ("Suspended", "True", "Suspended"))
    found["spec"]["suspend"] = True
    found["metadata"]["annotations"] = {
        OWNER_ANNOTATION: Owner(KEY, 1, "before").annotation(),
        SUSPENDED_ANNOTATION: "before",
        FAILED_ANNOTATION: failure_annotation(failed),
    }
    assert decide_adoption(found, Owner(KEY, 2, "me"), 1).action is Adoption.REPLACE
    assert true_conditions(found)["Failed"] == true_conditions(failed)["Failed"]
    assert failure_annotation(trainjob()) is None


@pytest.mark.parametrize("stored", ["", "{", "[]", "null"])
def test_a_failure_that_cannot_be_read_is_a_failure(stored: str) -> None:
    assert "Failed" in true_conditions({"metadata": {"annotations": {FAILED_ANNOTATION: stored}}})


CONDITIONS = ("Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed")


@pytest.mark.parametrize("condition", CONDITIONS)
def test_job_that_is_being_deleted_is_waited_for(condition: str) -> None:
    """Its success isn't repeated, unless the task was cleared."""
    found = owned_job(Owner(KEY, 1, "before"), condition, deletionTimestamp=DELETED)
    expected = Adoption.TAKE_RESULT if condition == "Succeeded" else Adoption.WAIT
    assert decide_adoption(found, Owner(KEY, 2, "me"), 1).action is expected
    assert decide_adoption(found, Owner(KEY, 2, "me"), 2).action is Adoption.WAIT


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("deleting", [False, True])
@pytest.mark.parametrize(
    "owner",
    [
        None,
        Owner(replace(KEY, deployment="staging"), 1, "x"),
        Owner(replace(KEY, run_id="other"), 1, "x"),
        Owner(replace(KEY, map_index=0), 1, "x"),
        Owner(KEY, 3, "a later try"),
    ],
    ids=["nobody", "deployment", "run", "mapped", "later try"],
)
def test_foreign_job_is_refused_and_its_owner_named(owner: Owner | None, deleting: bool, condition: str) -> None:
    decision = decide_adoption(
        owned_job(owner, condition, deletionTimestamp=DELETED if deleting else None), Owner(KEY, 2, "me"), 1
    )
    assert decision.action is Adoption.REFUSE
    assert decision.reason
    if owner is not None and owner.key != KEY:
        assert str(owner.key) in decision.detail


@pytest.mark.parametrize("condition", CONDITIONS)
def test_job_of_the_same_try_with_another_id_is_refused(condition: str) -> None:
    """The owner belongs to another Airflow with our deployment id, or to a run that was deleted and created again."""
    decision = decide_adoption(owned_job(Owner(KEY, 1, "theirs"), condition), Owner(KEY, 1, "me"), 1)
    assert decision.action is (Adoption.REPLACE if condition in ("Succeeded", "Failed") else Adoption.REFUSE)
    assert "the same [ktrain] deployment_id" in decision.detail
    going = owned_job(Owner(KEY, 1, "theirs"), condition, deletionTimestamp=DELETED)
    assert decide_adoption(going, Owner(KEY, 1, "me"), 1).action is Adoption.WAIT


@pytest.mark.parametrize("condition", ["Created", "Running", "Suspended"])
def test_if_unchanged_replaces_a_live_job_with_another_manifest(condition: str) -> None:
    found, me = owned_job(Owner(KEY, 1, "before"), condition), Owner(KEY, 2, "me")
    assert decide_adoption(found, me, 1, reattach="if_unchanged", changed=True).action is Adoption.REPLACE
    assert decide_adoption(found, me, 1, reattach="if_unchanged", changed=False).action is Adoption.ADOPT


@pytest.mark.parametrize("deleted", [None, DELETED])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_job_that_this_try_created_is_adopted(condition: str, deleted: str | None) -> None:
    """The response to a create can get lost; the second create then reports that the job exists."""
    me = Owner(KEY, 2, "me")
    found = owned_job(me, condition, deletionTimestamp=deleted)
    assert decide_adoption(found, me, 1, reattach="if_unchanged", changed=True).action is Adoption.ADOPT
    assert decide_adoption(found, me, 2).action is Adoption.ADOPT


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("has_submitted", [True, False])
def test_result_of_a_deleted_run_is_not_taken(has_submitted: bool, is_stored: bool) -> None:
    """The store of this run is empty, and that of the job's run was not. Other jobs are adopted as usual."""
    owner, me = Owner(KEY, 1, "before", is_stored=is_stored), Owner(KEY, 2, "me")
    assert f'"is_stored": {str(is_stored).lower()}' in owner.annotation() or not is_stored
    taken = has_submitted or not is_stored
    expected = Adoption.TAKE_RESULT if taken else Adoption.REPLACE
    assert decide_adoption(owned_job(owner, "Succeeded"), me, 1, has_submitted=has_submitted).action is expected
    going = owned_job(owner, "Succeeded", deletionTimestamp=DELETED)
    assert decide_adoption(going, me, 1, has_submitted=has_submitted).action is (
        Adoption.TAKE_RESULT if taken else Adoption.WAIT
    )
    assert decide_adoption(owned_job(owner, "Running"), me, 1, has_submitted=has_submitted).action is Adoption.ADOPT


def test_decisions_are_consistent_for_every_combination() -> None:
    for owner_try, first, condition, deleting, changed, reattach in itertools.product(
        (1, 2, 3), (1, 2, 3), CONDITIONS, (False, True), (False, True), get_args(Reattach)
    ):
        found = owned_job(
            Owner(KEY, owner_try, f"ti-{owner_try}"), condition, deletionTimestamp=DELETED if deleting else None
        )
        decision = decide_adoption(found, Owner(KEY, 2, "ti-2"), first, reattach=reattach, changed=changed)
        if owner_try == 2:
            assert decision.action is Adoption.ADOPT
            continue
        if decision.action in (Adoption.ADOPT, Adoption.TAKE_RESULT):
            assert owner_try >= first, "never across a clear"
            assert not deleting or decision.action is Adoption.TAKE_RESULT
            assert (decision.action is Adoption.TAKE_RESULT) == (condition == "Succeeded")
        if decision.action is Adoption.REPLACE:
            assert owner_try <= 2
            assert not deleting


# retry or clear


@pytest.mark.parametrize(
    ("max_tries", "retries", "first"),
    [
        (0, 0, 1),  # no retries
        (2, 2, 1),  # tries 1 to 3 are one life
        (3, 2, 2),  # cleared after try 1: max_tries = 1 + 2
        (5, 2, 4),  # cleared after try 3
        (4, 0, 5),
    ],
)
def test_first_try_since_the_clear(max_tries: int, retries: int, first: int) -> None:
    assert first_try_since_clear(max_tries, retries) == first


@pytest.mark.parametrize(
    ("before", "now", "retries", "clear"),
    [
        (3, 3, 3, False),
        (3, 3, 1, False),  # `retries` was lowered in the DAG file while try 1 trained
        (1, 1, 5, False),  # or `retries` was raised
        (2, 3, 2, True),  # a clear after try 1
        (0, 1, 3, True),  # a clear, and then `retries` was raised
        (None, 3, 3, False),  # a job of an earlier version: decided by the number of its try
        (None, 3, 1, True),
    ],
)
def test_only_a_clear_moves_max_tries(before: int | None, now: int, retries: int, clear: bool) -> None:
    owner, me = Owner(KEY, 1, "before", before), Owner(KEY, 2, "me", now)
    first = first_try_since_clear(now, retries)
    assert cleared(owner, me, first) is clear
    assert decide_adoption(owned_job(owner), me, first).action is (Adoption.REPLACE if clear else Adoption.ADOPT)


def test_a_clear_while_running_looks_like_a_retry() -> None:
    """Airflow doesn't change max_tries: the job is adopted, unless the kill has released it. This is documented."""
    retries, max_tries = 2, 2
    first = first_try_since_clear(max_tries, retries)
    assert decide_adoption(owned_job(Owner(KEY, 1, "killed")), Owner(KEY, 2, "me"), first).action is Adoption.ADOPT


# differences and references


@pytest.mark.parametrize(
    ("expected", "found", "paths"),
    [
        ({"a": 1}, {"a": 1, "defaulted": 2}, []),
        ({"a": 1}, {"a": 2}, ["$.spec.a"]),
        ({"a": 1}, {}, ["$.spec.a"]),
        ({"a": None, "b": {}, "c": []}, {}, []),
        ({"a": [{"x": 1}]}, {"a": [{"x": 1, "y": 2}]}, []),
        ({"a": [{"x": 1}, 2]}, {"a": [{"x": 2}, 2]}, ["$.spec.a[0].x"]),
        ({"a": [1]}, {"a": [1, 2]}, ["$.spec.a"]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 0}}}, ["$.spec.a.b.c"]),
        ({"a": {"b": 1}}, {"a": [1]}, ["$.spec.a"]),
        ({"a": {"b": 1}}, {"a": None}, ["$.spec.a"]),
    ],
)
def test_differences_are_found_by_path(expected: dict[str, Any], found: dict[str, Any], paths: list[str]) -> None:
    assert list(differences(expected, found)) == paths


def test_job_reference_is_restored_from_json() -> None:
    ref = JobRef("PyTorchJob", "v1", "ns", "train-1", "u-1", "ti-1", "prod", "abc", "https://a:6443 (CA 12)")
    assert JobRef.from_dict(json.loads(json.dumps(ref.to_dict()))) == ref
    older = {name: value for name, value in ref.to_dict().items() if name != "cluster"}
    assert JobRef.from_dict(older) == replace(ref, cluster="")


def test_pods_are_selected_by_our_label_or_the_operators_labels() -> None:
    ours = JobRef("PyTorchJob", "v1", "ns", "train-1", "u-1", submission="abc")
    assert ours.pod_selector == "ktrain.airflow/submission=abc"
    assert replace(ours, submission="").pod_selector == "training.kubeflow.org/job-name=train-1"
