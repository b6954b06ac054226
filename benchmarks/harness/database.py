"""Airflow's database in a benchmark: SQLite, or a PostgreSQL server of its own (KTRAIN_TEST_DATABASE=postgresql)."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from tests.e2e import database as databases

from . import TICK, cpu, tree


@contextlib.contextmanager
def database() -> Iterator[str]:
    """The URL of a new database on the selected server; empty for SQLite."""
    if databases.selected() == databases.SQLITE:
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder, databases.database(Path(folder)) as sql:
        yield sql


def version() -> str:
    """Name and version of the selected database."""
    return databases.version()


def cpu_of_server(sql: str) -> float:
    """CPU seconds that the server's processes have used, also those that have ended. 0: SQLite has none."""
    if not sql:
        return 0.0
    import psycopg2

    with contextlib.closing(psycopg2.connect(sql.replace("+psycopg2", ""))) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT pg_backend_pid()")
        server = int(Path(f"/proc/{cursor.fetchone()[0]}/stat").read_text().rpartition(")")[2].split()[1])
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        ended = (int(fields[13]) + int(fields[14])) / TICK
        return ended + sum(cpu(pid) for pid in tree(server))


def transactions(sql: str) -> int | None:
    """How many transactions the server has carried out. None: SQLite doesn't count them."""
    if not sql:
        return None
    import psycopg2

    with contextlib.closing(psycopg2.connect(sql.replace("+psycopg2", ""))) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database")
        return int(cursor.fetchone()[0])
