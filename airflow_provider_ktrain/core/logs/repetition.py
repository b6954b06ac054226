"""Whether a worker logs the lines of a trigger again: only where Airflow stops showing them when the task resumes."""

from __future__ import annotations

from dataclasses import dataclass

CLOUDWATCH = "CloudWatchRemoteLogIO"
#: Airflow's log handlers that read only the file of the worker (apache/airflow#70317). This and the names are as in
#: the providers amazon 9.39, alibaba 3.5, apache-hdfs 4.14, google 22.8 and microsoft-azure 15.2.
READ_ONE_FILE = {CLOUDWATCH, "OSSRemoteLogIO", "HdfsRemoteLogIO"}
#: Airflow's log handlers that also read a trigger's file: they read all files whose names begin with that of the
#: worker's.
READ_ALL_FILES = {"S3RemoteLogIO", "GCSRemoteLogIO", "WasbRemoteLogIO"}
#: How much the clocks of the host that handed the job over and of the trigger's host may differ.
MAX_CLOCK_SKEW_SECONDS = 60.0


@dataclass(frozen=True)
class LogFiles:
    """The log files of a task on the disk of its worker.

    :param began_at: time of the first record in the worker's file, in epoch seconds; None: it can't be read.
    :param trigger_wrote_at: when a trigger last wrote to its file, in epoch seconds; None: none has written a line.
    """

    began_at: float | None
    trigger_wrote_at: float | None


@dataclass(frozen=True)
class LogStorage:
    """Where Airflow stores the log of a task.

    :param handlers: the class of the handler of remote logs, and its base classes; empty without remote logs.
    :param files: without remote logs; None: the worker's file was not found.
    :param dies_with_pod: whether the worker is a pod of the KubernetesExecutor: it may have no other disk than its own.
    """

    handlers: tuple[str, ...]
    files: LogFiles | None
    dies_with_pod: bool


@dataclass(frozen=True)
class Repetition:
    """The lines of the trigger are logged again.

    :param why: a clause for the log.
    :param from_beginning: whether the lines before the deferral are missing, too: another worker has them.
    :param keeps_time: whether records may have the time at which the kubelet received the line. CloudWatch rejects
        events over 14 days old, and requests whose events span over 24 hours (Amazon's reference of PutLogEvents).
    """

    why: str
    from_beginning: bool
    keeps_time: bool


def repetition_of(choice: str, storage: LogStorage, deferred_at: float) -> Repetition | str:
    """How the lines are logged again; if they aren't, what the log says about that: mostly nothing.

    :param choice: `[ktrain] repeat_logs`. Any other value than `always` and `never` is `auto`.
    :param deferred_at: when the worker handed the job over, in epoch seconds.
    """
    handlers, files = set(storage.handlers), storage.files
    shares_disk = (
        files is not None
        and files.trigger_wrote_at is not None
        and files.trigger_wrote_at >= deferred_at - MAX_CLOCK_SKEW_SECONDS
    )
    if choice == "never":
        return ""
    if choice == "always":
        why = "[ktrain] repeat_logs is `always`"
    elif handlers & READ_ONE_FILE:
        why = "Airflow doesn't show a trigger's lines from this log storage (apache/airflow#70317)"
    elif handlers & READ_ALL_FILES or shares_disk:
        return ""
    elif handlers:
        return (
            f"It is not known whether Airflow shows the lines of the trigger from {storage.handlers[0]}.\n"
            "If they are missing here, set [ktrain] repeat_logs to `always`."
        )
    elif storage.dies_with_pod:
        return ""
    elif files is None:
        return (
            "The lines of the trigger may be missing here: the file of this log was not found by [logging] "
            "log_filename_template.\nIf they are missing, set [ktrain] repeat_logs to `always`."
        )
    else:
        why = "the log of the trigger is on another machine's disk"
    elsewhere = files is not None and files.began_at is not None and files.began_at > deferred_at
    return Repetition(why, from_beginning=elsewhere, keeps_time=CLOUDWATCH not in handlers)
