"""One line of one container."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)  # not frozen: that takes three times as long, and one is made for every line
class LogLine:
    """One line of one container, or several that are logged as one record, with line breaks between them.

    `time` is the kubelet's, in UTC with nine digits; "" if there is none. `text` has no line end; bytes that aren't
    UTF-8 are replaced. `notice` marks a message of the follower about that place in the log: a gap, or dropped lines.
    `init` marks lines of an init container. `pod_uid` is set where the line stands for its container. `lines` is their
    number, 0 for a part of a line but its last. `again` marks lines that another triggerer may have logged before.
    """

    pod: str
    container: str
    role: str
    index: int
    restart: int
    time: str
    text: str
    notice: bool = False
    init: bool = False
    pod_uid: str = ""
    lines: int = 1
    again: bool = False
