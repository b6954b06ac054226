"""Ports on loopback for servers that start later."""

from __future__ import annotations

import contextlib
import secrets
import socket

LOOPBACK = "127.0.0.1"


def free_port(ports: range) -> int:
    """A port of a range on which no program listens.

    The range should be below the kernel's ephemeral ports, one of which a connection could take before the server
    starts. The port is bound to find out whether it is free: a program that listens would accept a connection in place
    of its client's. Each process draws others, although `random` may have the same seed in several.
    """
    while True:
        port = secrets.choice(ports)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port))
            return port
