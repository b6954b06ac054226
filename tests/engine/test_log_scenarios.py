"""Each line of each run is read once and in order, whatever happens to the container, its pod and its follower."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from airflow_provider_ktrain.engine.logs.reader import is_of_kubelet

from .log_story import tell

pytestmark = pytest.mark.virtual_time

NO_LOG = b"unable to retrieve container logs for containerd://5541b231"
NO_WATCHER = b"failed to create fsnotify watcher: too many open files"
NO_FILE = b'failed to try resolving symlinks in path "/var/log/pods/ns_p/main/0.log": lstat: no such file or directory'
DELETED = "the pod was deleted before its log was read to the end"
NO_RUN_0 = "lines of run 0 may be missing: the kubelet "
#: The pod runs, and five lines were read.
RUNS = "status, write 5, follow, wait"
#: The pod ends, and the rest is read.
ENDS = "end, observe state=terminated phase=Succeeded, drain"
AGAIN = "run_again, status, write 3 begin=50"


class Scenario(NamedTuple):
    """What happens, in steps of `log_story.Story`.

    :param gaps: what is reported of lines that nobody can read any more. Default: nothing.
    :param unread: whether the last drain reports that the log was not read to its end. Default: False.
    """

    steps: str
    gaps: tuple[str, ...] = ()
    unread: bool = False


END_OF_A_RUN = {
    "last line has no line end": Scenario(f"{RUNS}, write_part half, {ENDS}"),
    "ended before it was observed": Scenario(
        "status state=terminated phase=Succeeded init=['init'], write 10 container=init, end container=init, write 10,"
        "end, follow, drain"
    ),
    "observed again after it was read": Scenario(f"{RUNS}, {ENDS}, observe state=terminated phase=Succeeded, drain"),
    "still running": Scenario(f"{RUNS}, write 50, drain"),
    "connection lost at the end": Scenario(f"{RUNS}, cut_off, drain 0.2", unread=True),
    "refused to the end": Scenario(
        "status state=terminated phase=Succeeded, refuse, follow, drain 240", ("403 Forbidden",), unread=True
    ),
}
DELETION = {
    "deleted": Scenario(f"{RUNS}, delete, write 5, end, drain"),
    "deleted, and the last line has no line end": Scenario(f"{RUNS}, write_part half, delete, end, drain 240"),
    "deleted before it was followed": Scenario("status, write 5, lose, skip, delete, drain", (DELETED,), unread=True),
    "recreated": Scenario(
        f"{RUNS}, cut_off, recreate, write 5 begin=-100, come_back, wait_for_pod_reads 1, observe, wait, drain",
        (DELETED,),
        unread=True,
    ),
}
RESTARTS = {
    "while the server was away": Scenario(f"{RUNS}, cut_off, write 5, end, {AGAIN}, come_back, wait, drain"),
    "not shown yet, while the server was away": Scenario(
        f"{RUNS}, cut_off, write 5, end, run_again, write 3 begin=50, come_back, wait_for_pod_reads 2, status, wait, "
        "drain"
    ),
    "not shown yet": Scenario(  # a fast crash loop on a loaded node (Kubernetes 1.36)
        f"{RUNS}, end, wait_for_pod_reads 1, run_again, write 3 begin=20, wait_for_pod_reads 4, observe, wait, drain"
    ),
    "in a back-off": Scenario(
        f"{RUNS}, cut_off, {AGAIN}, end, status state=waiting, come_back, wait, drain",
        (f"{NO_RUN_0}no longer has its log",),
    ),
    "three times": Scenario(
        f"run_again, run_again, status, write 3, end, {AGAIN}, follow, wait, drain",
        ("the kubelet keeps one previous run",),
    ),
}
KUBELET = {
    "log of the previous run is deleted": Scenario(
        f"status, fail NO_LOG, {AGAIN}, follow, wait, drain", (f"{NO_RUN_0}no longer has its log",)
    ),
    "previous run can't be read": Scenario(
        f"status, fail NO_FILE, {AGAIN}, follow, wait, drain", (f"{NO_RUN_0}can't read its log.",)
    ),
    "log can't be read any more": Scenario(
        f"{RUNS}, fail NO_FILE, {ENDS}", (f"{NO_RUN_0}can't read its log.\n{NO_FILE.decode()}",)
    ),
    "an error that passes": Scenario(f"{RUNS}, fail NO_WATCHER 3, wait_for_errors, write 5, wait, {ENDS}"),
    "rotated": Scenario(
        f"{RUNS}, cut_off, write 10, lose, rotate, write 10, come_back, wait, drain",
        ("lines between 2026-11-21T10:00:00.040000000Z and 2026-11-21T10:00:00.150000000Z may be missing",),
    ),
}
KEPT_OPEN = {
    "until the pod is deleted": Scenario(
        f"{RUNS}, write 50, drain keep_open=True, write 50, wait, write 10, end, delete_unseen, drain_deleted"
    ),
    "with a line without a line end": Scenario(
        f"{RUNS}, write_part half, drain keep_open=True, write_part whole ends=True, end, delete_unseen, drain_deleted"
    ),
    "not, because it could not be read up to now": Scenario(
        f"{RUNS}, cut_off, drain 0.2 keep_open=True, come_back, write 1, lose, drain_deleted", unread=True
    ),
    "and cut off at the end": Scenario(
        f"{RUNS}, drain keep_open=True, delete_unseen, cut, drain_deleted", (DELETED,), unread=True
    ),
}
HANDOVER = {
    "late": Scenario(f"{RUNS}, hand_over, write 14_000, follow, wait, write 10, wait, wait_for_streams 2, {ENDS}"),
    "after the end": Scenario(f"{RUNS}, {ENDS}, hand_over, forbid_reading, follow, drain"),
    "after the end, and the pod is deleted": Scenario(f"{RUNS}, {ENDS}, hand_over, skip, delete, drain"),
    "after the end, and the pod is deleted unseen": Scenario(
        f"{RUNS}, {ENDS}, hand_over, delete_unseen, follow, drain"
    ),
    "of a pod that never ran": Scenario("status state=waiting, follow, hand_over, skip, delete, drain"),
    "before the watch shows a restart": Scenario(
        f"{RUNS}, hand_over, write 10, end, {AGAIN}, follow late=True, wait, drain 240"
    ),
    "before the status shows a restart": Scenario(
        f"{RUNS}, hand_over, write 10, end, run_again, write 5 begin=30, follow, wait_for_pod_reads 2, status, wait, "
        "drain 240"
    ),
    "of a pod that is recreated": Scenario(
        f"{RUNS}, hand_over, recreate, write 5 begin=50, follow, wait, drain",
        ("lines after 2026-11-21T10:00:00.040000000Z may be missing: the pod was deleted before its log could be",),
    ),
}
TAKEOVER = {
    "after a restart": Scenario(f"{RUNS}, hand_over, write 30, end, {AGAIN}, write 200, take_over 51, wait, drain"),
    "after the end": Scenario(f"{RUNS}, {ENDS}, hand_over, take_over 60, drain"),
    "of a pod that is deleted": Scenario(
        f"{RUNS}, hand_over, delete_unseen, take_over 60, drain",
        ("the pod was deleted before its log could be resumed",),
    ),
}


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, id=f"{family}: {name}")
        for family, scenarios in {
            "end of a run": END_OF_A_RUN, "deletion": DELETION, "restart": RESTARTS, "kubelet": KUBELET,
            "kept open": KEPT_OPEN, "handover": HANDOVER, "takeover": TAKEOVER,
        }.items()
        for name, scenario in scenarios.items()
    ],
)  # fmt: skip
async def test_scenario(scenario: Scenario) -> None:
    story = await tell(scenario.steps, NO_LOG=NO_LOG, NO_FILE=NO_FILE, NO_WATCHER=NO_WATCHER)
    story.check(scenario.gaps, scenario.unread)


@pytest.mark.parametrize(
    ("unended", "expected"),
    [
        (NO_WATCHER, True),
        (NO_FILE, True),
        (b"2026-11-21T10:06:08.600000000Z 37%", False),  # a progress bar without a line end
        (b"2026-11-21T10:06:08.6+01:00 37%", False),
        (b"", False),
    ],
)
def test_unended_line_without_a_timestamp_is_the_kubelets(unended: bytes, expected: bool) -> None:
    assert is_of_kubelet(unended) is expected
