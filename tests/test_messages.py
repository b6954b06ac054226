"""Tests of the messages that the provider can log or raise: docs/reference/messages.md lists them.

`scripts.messages` finds them in the code. The tests render each with short and with long values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from airflow_provider_ktrain.core.diagnosis.crash_loop import CrashLoop
from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose_crash_loop, diagnose_divergence, diagnose_limit
from airflow_provider_ktrain.core.end_rules import RULES, Event, Successor, why_ended
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.adoption import decide_adoption
from airflow_provider_ktrain.core.identity.adoption_messages import describe_existing
from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, Owner, TaskKey
from airflow_provider_ktrain.core.identity.reaping import ENDED_TASK_STATES, judge
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.core.state.steps.training_metrics import MAX_NAME_CHARS
from airflow_provider_ktrain.core.text.output import MAX_FIRST_LINE_CHARS
from airflow_provider_ktrain.engine.release import describe_freed
from airflow_provider_ktrain.exceptions import TrainingJobError
from scripts.message_texts import Placeholder, Text, has_words, shown, variants
from scripts.messages import LEVELS, PACKAGE, Message, messages

pytestmark = pytest.mark.usefixtures("no_garbage_collection")

NAMESPACE = "team-" + "n" * 58
REQUEST = f"GET /apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs/{'j' * 46}"
#: A short and a long value for each placeholder name. Names of jobs are cut after 46 characters.
VALUES = {
    "job": ("PyTorchJob research/train-3f9a1c2b4d", f"PyTorchJob {NAMESPACE}/{'j' * 46}"),
    "namespace": ("research", NAMESPACE),
    "pod": ("train-3f9a1c2b4d-worker-0", "p" * 63),
    "container": ("pytorch", "c" * 63),
    "error": (
        "503 ServiceUnavailable: overloaded",
        f"{REQUEST}: ClientConnectorError: Cannot connect to host: refused",
    ),
    "gpus": ("1 GPU", "1,024 GPUs"),
    "texts": ("1 GPU", "999 TPUs"),
    "amounts": ("1 GPU", "999 TPUs"),
    "pods": ("1 pod", "999 pods"),
    "phase": ("Failed", "Restarting"),
    "state": ("failed", "up_for_reschedule"),
    "reason": ("it was cleared", "it is being deleted"),
    "lines": ("1 line", "1,234,567 lines"),
    "size": ("1 byte", "1,234,567 bytes"),
    "replica": ("Worker 0", "Launcher 0"),
    "what": ("deleted", "kept without running pods"),
    "held": ("0.5", "12345.6"),
    "wasted": ("0.5", "12345.6"),
    "queued": ("0.5", "12345.6"),
    "unit": ("hours", "minutes"),
    "uid": ("0f4e", "b59f26fc-d2cd-4ec4-aa26-306a98e32116"),
    "unfinished": ("1 pod", "999 pods"),
    "released": ("No GPUs were held", "999 GPUs released"),
    "replicas": ("1 replica", "999 replicas"),
    "path": ("/api/v1/namespaces/research/pods", f"/apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs"),
    "conditions": ("Running", "Running or Succeeded"),
    "wanted": ("Running", "Running or Succeeded"),
    "before": ("1", "999"),
    "workers": ("1", "999"),
    "remark": ("", ".\nIt is suspended"),
    "type": ("KeyError", "JSONDecodeError"),
}
#: Words and phrases that the style guide in CONTRIBUTING.md forbids.
UNWANTED = re.compile(
    r"\b(says?|said|tells?|told|anew|borne|thereof|wherefrom|whence|gone through|"
    r"(?<![Tt]here )is no (?!longer)[a-z]+|finds? no [a-z]+)\b"
)
FOLD_MARK = re.compile(r"^::(end)?group::")  # begins or ends lines that Airflow's UI folds
#: Wrong plurals and punctuation, and unfilled placeholders.
MALFORMED = re.compile(
    r"\b(?<![.,])1 (?!allows|has|is|minus)\w\w+s\b|  | [,;.:]|[,;.]{2}|\(\)|: *\.|[,:;]$|^\s|\s$|%[sdr]\b"
)


def value(placeholder: Placeholder, size: int) -> str:
    name, spec = placeholder.name, placeholder.spec
    if "%" in spec:
        return "12:34:56"
    if placeholder.source.startswith("clipped("):
        return name.ljust((0, 64)[size], "x")
    if "counted" in placeholder.source:
        noun = name.removeprefix("number of ").removesuffix("s")
        return (f"1 {noun}", f"999 {noun}s")[size]
    if name.startswith("number of ") or re.search(r"[dfg,]$", spec):
        return format((1, 999)[size], spec)
    text = VALUES.get(name, (name, name.ljust(24, "x")))[size]
    return repr(text) if spec == "!r" else text


def rendered(text: Text, size: int) -> Iterator[str]:
    for variant in variants(text):
        yield "".join(part if isinstance(part, str) else value(part, size) for part in variant)


def problems(message: Message) -> Iterator[str]:
    if not message.when:
        yield "add a docstring to the function, or a comment above it, that explains when this happens"
    for size in (0, 1):
        for text in rendered(message.text, size):
            first = text.partition("\n")[0]
            # causes and errors, which quote programs, are clipped when the task raises them
            if len(first) > MAX_FIRST_LINE_CHARS and (size == 0 or message.kind in LEVELS):
                yield f"the first line has {len(first)} characters: {first}"
            plain = FOLD_MARK.sub("", text.replace("...", ""))
            for found in (*UNWANTED.finditer(text), *MALFORMED.finditer(plain)):
                yield f"contains {found[0]!r}: {text}"


PARTS = sorted(path.stem for path in PACKAGE.iterdir() if not path.name.startswith("__"))


@pytest.mark.parametrize("part", PARTS)
def test_messages_are_complete_short_and_plain(part: str) -> None:
    """`part` is a module or a sub-package."""
    own = [m for m in messages() if m.module.partition("/")[0] == part and has_words(m.text)]
    found = [f"{m.module}:{m.line} {shown(m.text)!r}: {problem}" for m in own for problem in problems(m)]
    assert not found, "\n".join(found)


def test_no_message_is_hidden_from_the_table() -> None:
    """A message of placeholders only is the text of another message; otherwise the table would lack it."""
    hidden = {shown(m.text) for m in messages() if m.text and not has_words(m.text)}
    assert hidden <= PASSED_ON, "pass a text, or add the function that returns it to scripts.messages.RETURNED"


#: Texts of other messages: of errors, the API server's Status objects, causes, results of a release, decisions, lines
#: of containers, and of the rules in docs/contributing/rules.md.
PASSED_ON = {
    "{error}", "{type}: {error}", "{message}", "{reason}", "({reason})?", "({reason} / {reason})", "{left_out}",
    "{text}", "{unreleased}", "{phase}", "{lines}", "{now}", "{act_on_job}", "{release}", "{served}", "{value}",
    "({code} / {value})", "{custom_operator_name}: {problems}", "{replica} {description}: {error}",
    "{replica} {description}: {message}", "{job} {description}: {message}", "{line}", "{sent}",
    "{repeated}", "{checkpoints}", "{rule}", "{cause}", "{taken}", "({reason} / {why})",
    "{status}", "{event}", "{result}", "{unmet}", "{repetition}", "{killed}",
}  # fmt: skip


def test_the_first_line_of_a_manifest_error_has_the_parts_that_fit() -> None:
    short = ManifestError("invalid parameter", where="hosts", found="'node1'", expected="a list", remedy="write a list")
    assert str(short) == "hosts: invalid parameter; found 'node1'; expected a list; remedy: write a list"
    long = ManifestError("invalid parameter", where="hosts", found="x" * 120, expected="y" * 80, remedy="z")
    assert str(long).splitlines() == [
        f"hosts: invalid parameter; found {'x' * 120}",
        f"expected {'y' * 80}",
        "remedy: z",
    ]


def test_the_first_line_of_an_exception_is_cut() -> None:
    text = f"the API server refused the manifest: {'x' * 300}\nsee the second line"
    cut, *lines = str(TrainingJobError(text)).splitlines()
    assert len(cut) == MAX_FIRST_LINE_CHARS
    assert cut.endswith("x...")
    assert "\n".join(lines) == text
    assert str(TrainingJobError("short\ntext")) == "short\ntext"


# decisions and outcomes: each result, with the longest names

JOB = VALUES["job"][1]
KEY = TaskKey("production", "d" * 250, "t" * 250, f"scheduled__2026-11-22T00:00:00+00:00_{'r' * 200}")


def existing_jobs() -> Iterator[str]:
    """The decisions of a try about an existing job with its name."""
    cases = itertools.product(CONDITIONS, (1, 12), (1, 12), ("me", "other"), (3, 6), (False, True))
    for condition, owner, me, ti_id, max_tries, changed in cases:
        annotations = {OWNER_ANNOTATION: Owner(KEY, owner, "other", 3).annotation()}
        job = {"metadata": {"annotations": annotations}, "status": {"conditions": [condition]}}
        mine = Owner(KEY, me, ti_id, max_tries)
        yield describe_existing(JOB, decide_adoption(job, mine, 1, reattach="if_unchanged", changed=changed))
    yield describe_existing(JOB, decide_adoption({"metadata": {}}, Owner(KEY, 1, "me"), 1))
    foreign = {"metadata": {"annotations": {OWNER_ANNOTATION: Owner(replace(KEY, run_id="x"), 1, "x").annotation()}}}
    yield describe_existing(JOB, decide_adoption(foreign, Owner(KEY, 1, "me"), 1))


CONDITIONS = [
    {"type": condition, "status": "True"}
    for condition in ("Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed")
]


def end_rules() -> Iterator[str]:
    """The sentences of the rules by which a training's life ends."""
    command = f"kubectl delete -n {NAMESPACE} pytorchjobs {'j' * 46}"
    for rule, state in itertools.product(RULES, ("failed", "running", "up_for_reschedule", "")):
        for event in rule.event or Event:
            yield rule.text.format(job=JOB, command=command, next=Successor.NEXT_TRY, why=why_ended(event, state))


def orphans() -> Iterator[str]:
    """The findings of the reaper, with 0, 1 and 2 active pods."""
    for condition, state, held in itertools.product(CONDITIONS, (*ENDED_TASK_STATES, "up_for_reschedule"), (0, 1, 2)):
        annotations = {OWNER_ANNOTATION: Owner(KEY, 1, "x").annotation()}
        job = {"metadata": {"annotations": annotations}, "status": {"conditions": [condition]}}
        verdict = judge(job, KEY.deployment, state, held)
        yield f"{JOB} {'is left over' if verdict.orphan else 'is kept'}: {verdict.reason}."


def limits() -> Iterator[str]:
    """The causes of jobs that exceeded a limit, without and with a pod that explains it."""
    job = {"kind": "PyTorchJob", "metadata": {"name": "j" * 63, "namespace": NAMESPACE}}
    labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "999"}
    image = f"registry.example.com:5000/{'team/' * 30}image:{'t' * 128}"
    waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}": not found'}
    statuses = [{"name": "c" * 63, "image": image, "state": {"waiting": waiting}}]
    pod = {"metadata": {"name": "p" * 253, "labels": labels}, "status": {"containerStatuses": statuses}}
    for limit, pods, amount in itertools.product(Limit, ([], [pod]), (1, 86400)):
        if limit not in (Limit.CRASH_LOOP, Limit.NAN):
            yield diagnose_limit(limit, amount, make_evidence(job, pods)).summary
    yield diagnose_crash_loop(CrashLoop("Worker 999", 12), make_evidence(job, [pod])).summary
    for metric, step in itertools.product(("loss", "m" * MAX_NAME_CHARS), (None, 10**9)):
        yield diagnose_divergence("Worker 999", metric, step).summary


def releases() -> Iterator[str]:
    """The pods and GPUs that a release freed, for 0, 1 and 2 pods that run."""

    limits = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    pod = {"status": {"phase": "Running"}, "spec": {"nodeName": "node", "containers": [limits]}}
    for number, verified in itertools.product((0, 1, 2), (False, True)):
        yield f"{JOB} kept without running pods. {describe_freed([pod] * number, verified)}"


@pytest.mark.parametrize("source", [existing_jobs, end_rules, orphans, limits, releases])
def test_messages_about_decisions_are_short_and_plain(source: Callable[[], Iterator[str]]) -> None:
    found = [
        text
        for text in dict.fromkeys(source())
        if len(text.partition("\n")[0]) > MAX_FIRST_LINE_CHARS
        or UNWANTED.search(text)
        or MALFORMED.search(text.replace("...", ""))
        or re.search(r"\b(None|nan|0 GPUs released)\b", text)
    ]
    assert not found, "\n".join(found)
