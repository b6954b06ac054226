"""The next action of a container follower, decided from its known state."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.core.logs.container_run import Run
from airflow_provider_ktrain.core.logs.cursor import Position
from airflow_provider_ktrain.engine.logs.container_state import ObservedContainer, State, next_state

WRITES, ENDED = Run(started=True), Run(started=True, ended=True)
FINAL = Run(started=True, ended=True, final=True)
RESTARTS = Run(started=True, ended=True, restarting=True)
READ = Position(complete=True)


@pytest.mark.parametrize(
    ("run", "position", "state"),
    [
        (Run(), Position(), State.WAITING),
        (WRITES, Position(), State.FOLLOWING),
        (ENDED, Position(), State.SETTLING),
        (ENDED, READ, State.WAITING),
        (RESTARTS, Position(), State.RESTARTING),
        (FINAL, Position(), State.SETTLING),
        (FINAL, READ, State.DONE),
        (Run(ended=True, final=True), Position(), State.DONE),
        (Run(1, started=True), Position(), State.PREVIOUS),
        (Run(1, started=True), READ, State.PREVIOUS),
        (Run(1, started=True), Position(1), State.FOLLOWING),
        (Run(1, started=True, ended=True, backing_off=True), Position(1), State.SETTLING),
    ],
)
def test_next_state_follows_from_the_run_and_the_position(run: Run, position: Position, state: State) -> None:
    assert next_state(ObservedContainer(run), position, resumed=False, drained=False) is state


@pytest.mark.parametrize(
    ("run", "position", "state"),
    [
        (Run(), Position(), State.DONE),
        (WRITES, Position(), State.SETTLING),
        (RESTARTS, Position(), State.SETTLING),
        (ENDED, READ, State.DONE),
        (Run(1, started=True), Position(), State.PREVIOUS),
    ],
)
def test_a_drain_reads_what_is_there_and_waits_for_nothing(run: Run, position: Position, state: State) -> None:
    observed = ObservedContainer(run, draining_since=0.0)
    assert next_state(observed, position, resumed=False, drained=False) is state
    assert next_state(observed, position, resumed=False, drained=True) is State.DONE


@pytest.mark.parametrize("run", [Run(), WRITES, FINAL, Run(1, started=True)])
def test_nothing_is_requested_after_the_pod_was_deleted(run: Run) -> None:
    assert next_state(ObservedContainer(run, deleted=True), Position(), resumed=True, drained=False) is State.DONE


@pytest.mark.parametrize(
    ("run", "state"),
    [(WRITES, State.RESUMING), (FINAL, State.RESUMING), (Run(), State.WAITING), (Run(1), State.PREVIOUS)],
)
def test_the_pod_is_read_before_a_run_is_resumed(run: Run, state: State) -> None:
    assert next_state(ObservedContainer(run), Position(), resumed=True, drained=False) is state
