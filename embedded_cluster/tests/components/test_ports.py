"""Free ports, which other clusters and programs of this machine look for at the same time."""

from __future__ import annotations

import random
import socket

import pytest

from ktrain_embedded.node.environment import PORTS, Ports
from ktrain_embedded.ports import LOOPBACK, free_port


def test_port_on_which_a_program_listens_is_not_free() -> None:
    taken = free_port(PORTS)
    with socket.create_server((LOOPBACK, taken)) as server:
        found = {free_port(range(taken, taken + 4)) for _ in range(60)}
        assert taken not in found
        server.settimeout(0)
        with pytest.raises(BlockingIOError):  # no connection was made to the program
            server.accept()


def test_clusters_in_processes_with_the_same_seed_assign_different_ports() -> None:
    found = []
    for _ in range(2):
        random.seed(1)
        ports = Ports()
        found.append([ports.of({"metadata": {"uid": f"pod-{number}"}}) for number in range(5)])
    assert found[0] != found[1]
