"""What messages that are written for the author of a task say in `ktrain`: its own options instead of parameters.

Each phrase is one of ours and long enough not to occur in what a message quotes of a program.
"""

from __future__ import annotations

import re

_LIMITS = r"(?:queue|schedule|startup|partial_start|log_stall|progress)_timeout|max_restarts|crash_loop_limit"
_QUEUE_LABEL = "label kueue.x-k8s.io/queue-name"
#: Regular expressions, each with what replaces it.
_PHRASES = (
    # the deadline has an option; the other limits are fixed
    (r" A part of execution_timeout is reserved for the release\.", ""),
    (r"execution_timeout if the operator set the deadline from it", "--timeout"),
    (r"\(execution_timeout\)", "(--timeout)"),
    (r"Raise execution_timeout", "Raise --timeout"),
    (rf" \((?:{_LIMITS}|avoid_failed_nodes|on_finish_action)\)", ""),
    (rf",? or raise (?:{_LIMITS})", ""),
    (rf" Raise (?:{_LIMITS}) if [^.\n]*\.", ""),
    # nothing repeats a run
    (r"Set `schedule_timeout` or `retries` to wait, use", "Use"),
    (r", and (?:set )?`retries` of the task", ""),
    (r"; crash_loop_limit only ends crash loops", ""),
    (r", or max_restarts of the task", ""),
    (r": Airflow retries the task", ""),
    (r"a retry tries again", "then run this command again"),
    (r"If no try of the task follows, run:", "To delete it, run:"),
    # the manifest's words
    (r"a priority_class_name or a queue_name", f"a priorityClassName or the {_QUEUE_LABEL}"),
    (r"(?<=\()`queue_name`(?=\))", _QUEUE_LABEL),
    (r"(?<=set )`queue_name`|(?<=remove )`queue_name`", f"the {_QUEUE_LABEL}"),
    (r"hosts, node_selector or affinity", "nodeSelector or affinity"),
    # the cluster
    (
        r"Check the `kubernetes` connection \(kube_config_path, kube_config, in_cluster\) or KUBECONFIG",
        "Check --kubeconfig, --context or KUBECONFIG",
    ),
    (r"Check the connection's kubeconfig", "Check the kubeconfig"),
    (r"or check the connection\.", "or check --kubeconfig and --context."),
    # the task
    (r"the task (?=deletes the job|sets it)", "this command "),
    (r"before its task has read", "before this command has read"),
    (r"get this task's labels", "get this run's labels"),
    (r"use one task for each job", "run each job with a command of its own"),
    (r"Airflow did not take all lines", "the terminal did not take all lines"),
)


def for_run(text: str) -> str:
    """A message of core and engine in the words of `ktrain run`, and of `ktrain check` if it can't ask the cluster."""
    for phrase, words in _PHRASES:
        text = re.sub(phrase, words, text)
    return text
