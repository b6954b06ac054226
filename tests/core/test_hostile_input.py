"""What a program prints and others store: any of it is bounded before anything expensive, and raises nowhere."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core import diagnosis, logs
from airflow_provider_ktrain.core.diagnosis import collectives
from airflow_provider_ktrain.core.diagnosis.failure_patterns import PEER_LOSSES, PROGRAM_ERRORS
from airflow_provider_ktrain.core.diagnosis.log_parser import read_tail
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.formats import step_of_tries, with_try
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.logs.result import MAX_BYTES, find_result, keep_result_line
from airflow_provider_ktrain.core.logs.stacks import End, Stack, own_text, read_record
from airflow_provider_ktrain.core.state.steps.reported_steps import ReportedSteps
from airflow_provider_ktrain.core.state.steps.training_metrics import TrainingMetrics
from airflow_provider_ktrain.core.text.output import ends_of, masked
from airflow_provider_ktrain.core.text.secret_rules import RULES, without_secrets
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from airflow_provider_ktrain.core.text.xcom_values import INTEGERS, storable, transportable
from airflow_provider_ktrain.manifests import load

JSON_NUMBERS = st.integers(-(10**400), 10**400) | st.floats()
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | JSON_NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
REPORTS = st.dictionaries(st.sampled_from(["step", "loss", "a"]), JSON_NUMBERS, max_size=3)
MARKERS = ["KTRAIN_RESULT ", "KTRAIN_METRIC ", "KTRAIN_STACK ", "KTRAIN_RESULT_PART "]
LATE = 1_800_000_000.0


def fits(value: Any) -> bool:
    """Whether Airflow's transport (msgpack) and databases take a value: what `transportable` promises."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and fits(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(fits, value))
    if isinstance(value, float):
        return math.isfinite(value) and INTEGERS.start <= value < INTEGERS.stop
    return not isinstance(value, int) or value in INTEGERS


def metric(**values: Any) -> str:
    return f"KTRAIN_METRIC {json.dumps(values)}"


# numbers


@pytest.mark.parametrize("step", [1e300, -1e300, 2**53, -(2**53), math.nan, math.inf, 10**30])
def test_number_that_can_be_no_step_counts_as_none(step: float) -> None:
    metrics = TrainingMetrics()
    metrics.read_line("Master 0", metric(step=step, loss=1.5), LATE)
    assert metrics.points() == {"loss": [[1, 1.5]]}, "the number of the report is its step"
    assert metrics.step is None
    assert not metrics.steps.to_dict()
    assert metrics.take_ignored_step("Master 0") is not None
    metrics.read_line("Master 0", metric(step=step, loss=1.5), LATE)
    assert metrics.take_ignored_step("Master 0") is None, "it is said once for each replica"
    metrics.read_step("Worker 0", metric(step=step), LATE)
    assert metrics.step is None


def test_largest_step_counts() -> None:
    metrics = TrainingMetrics()
    metrics.read_line("Master 0", metric(step=2**53 - 1, loss=1), LATE)
    assert metrics.step == 2**53 - 1
    assert metrics.take_ignored_step("Master 0") is None


def test_absurd_percentage_of_a_trainjob_counts_as_none() -> None:
    metrics = TrainingMetrics()
    status = {"progressPercentage": 1e300, "lastUpdatedTime": "2026-11-21T10:00:00Z", "metrics": "none"}
    metrics.read_trainer_status({"status": {"trainerStatus": status}})
    assert metrics.step is None


def test_steps_that_an_older_release_has_stored_count_as_none() -> None:
    steps = ReportedSteps.from_dict({"before": 1e300, "first": 0, "highest": 1e300})
    assert steps == ReportedSteps(first=0)
    assert steps.usage(1, 1) == {}
    stored = with_try(with_try(None, {"try_number": 1, "step": 1e300}), {"try_number": 2, "step": 7})
    assert step_of_tries(stored, 1, 3) == 7
    point = {"source": "Master 0", "at": 1.0, "points": [[1e300, 1], [5, 2], [5, 3]], "best": [1e300, 1]}
    metrics = TrainingMetrics({"series": {"loss": point}, "step": -1e300})
    assert metrics.step is None
    assert metrics.points(1) == {"loss": [[5, 3]]}


@given(st.lists(REPORTS, max_size=30))
def test_any_numbers_become_values_that_airflow_takes(reports: list[dict[str, Any]]) -> None:
    metrics = TrainingMetrics()
    for number, report in enumerate(reports):
        metrics.read_line("Master 0", metric(**report), LATE + number, earlier=number % 5 == 4)
    usage = metrics.steps.usage(8, 1e6)
    outcome = {"usage": usage, "metrics": metrics.summary(), "handover": metrics.handover(), "step": metrics.step}
    assert fits(transportable(outcome, "outcome"))
    again = TrainingMetrics(metrics.handover())
    again.take_earlier({"series": metrics.points(), "metrics": metrics.summary()})
    assert again.points() == metrics.points() or len(reports) > 20


@given(JSON_VALUES)
def test_transportable_takes_anything(value: Any) -> None:
    assert fits(transportable({"value": value}, "usage"))
    assert fits(transportable([value, (value,)], "event"))


def test_number_of_a_usage_that_does_not_fit_is_left_out() -> None:
    usage = {"gpus": 2, "repeated_steps": 10**300, "others": {"amd.com/gpu": {"held": 1e300, "busy": 3}}}
    fit = {"gpus": 2, "others": {"amd.com/gpu": {"busy": 3}}}
    assert transportable(usage, "usage") == fit
    assert transportable({"usage": usage, "loss": 1e300}, "outcome") == {"usage": fit, "loss": "1e+300"}
    odd: dict[Any, Any] = {1: 2}
    assert transportable(odd, "outcome") == {"1": 2}


# lines


@given(
    st.text(max_size=60),
    st.sampled_from(["KTRAIN_RESULT ", "KTRAIN_METRIC ", "KTRAIN_STACK ", "KTRAIN_RESULT_PART "]),
    JSON_VALUES,
)
def test_any_line_is_read_without_an_error(text: str, marker: str, value: Any) -> None:
    for line in (f"{text}{marker}{text}", f"{text}{marker}{json.dumps(value)}", f"{marker}{'[' * 5000}"):
        TrainingMetrics().read_line("Master 0", line, LATE)
        own_text(line)
        read_record(line)
        held = keep_result_line("", line)
        assert len(held) <= MAX_BYTES + 100
        result, _, _ = find_result(PYTORCHJOB, {}, [], held)
        assert fits(result)


def test_long_text_is_kept_by_its_ends_without_the_words_at_the_cut() -> None:
    text = "first " + "secretsecret" * 1000 + " last"
    assert ends_of(text) == "first [... 12,000 characters ...] last"
    assert ends_of("a" * 4096) == "a" * 4096


RECORD_KEYS = st.sampled_from(["pid", "rank", "part", "main", "frames", "why", "end", "left_out"])
FRAMES = st.lists(st.tuples(st.text(max_size=4), JSON_NUMBERS, st.text(max_size=4)), max_size=2)


@given(st.dictionaries(RECORD_KEYS, JSON_NUMBERS | st.booleans() | st.text(max_size=4) | FRAMES))
def test_any_record_of_a_stack_is_read_without_an_error(fields: dict[str, Any]) -> None:
    record = read_record(f"KTRAIN_STACK {json.dumps(fields)}")
    numbers = [record.pid, *(frame.line for frame in record.frames)] if isinstance(record, Stack) else []
    numbers += [record.left_out] if isinstance(record, End) else []
    assert all(0 <= number < 2**53 for number in numbers)


@pytest.mark.parametrize("number", ["Infinity", "1e999", "NaN", "9" * 4300], ids=range(4))
def test_record_of_a_stack_with_an_absurd_number_is_none(number: str) -> None:
    assert read_record(f'KTRAIN_STACK {{"pid": {number}}}') is None
    assert read_record(f'KTRAIN_STACK {{"pid": 1, "frames": [["a.py", {number}, "f"]]}}') is None
    assert read_record(f'KTRAIN_STACK {{"end": true, "left_out": {number}}}') is None


ABSURD_REPORTS = [
    "collective: [ , ] are the lagging ranks",
    "collective: [1 2] are the lagging ranks",
    f"collective: [{'9' * 2000}] are the lagging ranks",
    f"[rank{'9' * 1900}]: collective {'flight recorder dump signal'}",
    "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE,"
    f" ran for {'9' * 1900} milliseconds",
    f"[rank1]: [PG a last enqueued work: {'9' * 900}, last completed work: {'9' * 900}",
]


@pytest.mark.parametrize("line", ABSURD_REPORTS, ids=range(len(ABSURD_REPORTS)))
def test_absurd_numbers_of_collectives_are_read_without_an_error(line: str) -> None:
    _, never_joined, seconds = collectives._read({"Worker 0": [line], "Worker 1": [line.replace("rank1", "rank2")]})
    assert all(number < 10**9 for number in never_joined)
    assert seconds < 10**12


def test_time_before_all_others_is_none() -> None:
    assert epoch_seconds("0001-01-01") is None


def test_keys_of_any_kind_are_transportable() -> None:
    odd: dict[Any, Any] = {10**5000: 1, None: 2}
    assert fits(transportable(odd, "event"))


# time


def test_result_that_is_held_is_not_parsed_for_each_further_line() -> None:
    held = keep_result_line("", f"KTRAIN_RESULT {json.dumps([1] * 15_000)}")
    assert seconds(lambda line: [keep_result_line(held, line) for _ in range(100)], "KTRAIN_RESULT x") < 10 * seconds(
        json.loads, held.removeprefix("KTRAIN_RESULT ")
    )


def _patterns(value: Any, depth: int = 0) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        yield value
    elif depth < 5 and isinstance(value, list | tuple):
        for item in value:
            yield from _patterns(item, depth + 1)
    elif depth < 5 and isinstance(value, dict):
        yield from _patterns(list(value.values()), depth + 1)
    elif depth < 5 and hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        yield from _patterns([getattr(value, name) for name in value.__dataclass_fields__], depth + 1)


def _prefixes(pattern: re.Pattern[str]) -> Iterator[str]:
    """The literal text with which a pattern, or an alternative of it, begins."""
    for alternative in re.sub(r"\(\?[a-z]+\)|\(\?:|\\b|\^", "", pattern.pattern).replace("(", "|").split("|"):
        if prefix := re.match(r"(?:\\[^\w]|[\w\s:=/-])*", alternative):
            yield prefix[0].replace("\\", "")


def patterns_of_lines() -> Iterator[tuple[str, re.Pattern[str], set[str]]]:
    """The regular expressions that see lines of a program, each with what may come at its beginning."""
    for rule in RULES:
        before = rule.example.partition("SECRET")[0]
        yield (
            rule.example,
            rule.before,
            {before, before.split()[-1] if before.split() else before, *_prefixes(rule.before)},
        )
    for known in (*PROGRAM_ERRORS, *PEER_LOSSES):
        pattern = re.compile(known.pattern)
        yield known.pattern, pattern, set(_prefixes(pattern))
    for package in (diagnosis, logs):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                for number, pattern in enumerate(_patterns(value)):
                    yield f"{module.name.rpartition('.')[2]}.{name}[{number}]", pattern, set(_prefixes(pattern))


#: Beginnings that `_prefixes` doesn't find, of the rules with the longest bodies.
MORE = (
    "-u=",
    "-u ",
    "eyJ-",
    "eyJaaaaaaaa",
    "nrt_",
    "nrt_allocate",
    "DataLoader worker (pid",
    "[PG a",
    "{{",
    "[(",
    '"\\',
    "a:",
)


def seconds(call: Any, text: Any, most: int = 5) -> float:
    """CPU of the call: the least of `most` measurements, or of fewer if it is slow."""
    times: list[float] = []
    while len(times) < most and sum(times) < 0.5:
        began = time.thread_time()
        call(text)
        times.append(time.thread_time() - began)
    return min(times)


def growth(call: Any, prefix: str) -> float:
    """How much longer a call takes for 16 KiB of a repeated text than for 4 KiB: 4 is linear, 16 quadratic.

    A call that takes more than 0.1 s of CPU for 4 KiB is not tried with 16 KiB.
    """
    short, long = ((prefix * (size // len(prefix) + 1))[:size] for size in (4 * 1024, 16 * 1024))
    least = seconds(call, short, 2)
    return 0.0 if least < 5e-5 else math.inf if least > 0.1 else seconds(call, long, 2) / least


def is_quadratic(call: Any, prefix: str) -> bool:
    """Whether each of several measurements says so: among thousands, a single one can be wrong on a busy machine."""
    return all(growth(call, prefix) >= 8 for _ in range(5))


@pytest.mark.thorough
def test_no_pattern_of_lines_takes_quadratic_time_for_what_follows_its_beginning() -> None:
    slow = [
        (name, prefix, follows)
        for name, pattern, prefixes in patterns_of_lines()
        for prefix in sorted({*prefixes, "version `GLIBC"})
        for follows in "1 "
        if prefix and is_quadratic(lambda text, pattern=pattern, prefix=prefix: pattern.search(prefix + text), follows)
    ]
    assert not slow


def test_no_pattern_of_lines_takes_quadratic_time() -> None:
    slow = [
        (name, prefix)
        for name, pattern, prefixes in patterns_of_lines()
        for prefix in sorted({*prefixes, *MORE})
        if prefix and is_quadratic(pattern.search, prefix)
    ]
    assert not slow


@pytest.mark.parametrize(
    "text", ["-u=", "eyJ-", "token: 'a ", "password=", "://a:", "credentials={", "a b: ", "bearer ", "auth={x\\'\n"]
)
def test_secrets_are_masked_in_linear_time(text: str) -> None:
    assert not is_quadratic(without_secrets, text)


def test_invalid_result_is_quoted_in_linear_time() -> None:
    assert not is_quadratic(lambda text: find_result(PYTORCHJOB, {}, [], f"KTRAIN_RESULT {text[:MAX_BYTES]}"), "-u=")


def test_place_of_a_value_is_described_only_in_the_warnings_that_are_kept() -> None:
    numbers = [1e300] * 5_000
    assert seconds(storable, {"k" * 60: {"k" * 60: numbers}}) < 5 * seconds(storable, numbers)


def test_log_of_errors_is_parsed_as_fast_as_any_other() -> None:
    errors, ordinary = (f"{unit * 80}\n" * 130 for unit in ("ERROR the disk is full ", "epoch 3 step 120: loss 0.31 "))
    assert seconds(lambda log: read_tail(log.splitlines()), errors) < 5 * seconds(
        lambda log: read_tail(log.splitlines()), ordinary
    )


def test_merge_keys_are_counted_before_they_multiply() -> None:
    lines = ["a0: &a0 {b0: 0, b1: 1, b2: 2, b3: 3, b4: 4, b5: 5, b6: 6, b7: 7, b8: 8}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)]
    began = time.thread_time()
    with pytest.raises(ManifestError, match="merge keys"):
        load("\n".join(lines))
    assert time.thread_time() - began < 60 * seconds(yaml.safe_load, "\n".join(lines[:5])) + 1


@pytest.mark.parametrize("value", ["1" * 5000, "!!int text", "!!bool perhaps", "!!timestamp x"], ids=range(4))
def test_value_of_a_manifest_that_can_not_be_read_is_an_error_of_the_manifest(value: str) -> None:
    with pytest.raises(ManifestError, match="a value can't be read"):
        load(f"a: {value}\n")


def test_integer_of_json_that_can_not_be_read_is_an_error_of_the_manifest() -> None:
    with pytest.raises(ManifestError, match="a value can't be read"):
        load(f'{{"a": {"1" * 5000}}}')


def test_merge_key_that_contains_itself_is_an_error() -> None:
    with pytest.raises(ManifestError, match="contains itself"):
        load("a: &a\n  <<: *a\n  b: 1\n")


def test_secrets_of_cloud_providers_are_hidden() -> None:
    for prefix in ("k8s-aws-v1.", "ya29."):
        assert masked(f"exec plugin: {prefix}aHR0cHM6Ly9zdHMuZXUtd2VzdC0xLm") == f"exec plugin: {prefix}***"
