"""The steps that the new job of a retry repeats, in its log and its usage."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.exceptions import TrainingUserCodeError
from tests.operators.task_instance import Instance

#: Fails after step 5 in the first attempt, and then resumes after step 3.
PROGRAM = """
step=1 last=5
[ $KTRAIN_ATTEMPT = 1 ] || { step=4 last=8; }
while [ $step -le $last ]; do echo "KTRAIN_METRIC {\\"step\\": $step}"; step=$((step + 1)); done
[ $KTRAIN_ATTEMPT != 1 ]
"""


def train(instance: Instance, number: int, max_tries: int = 1, **options: Any) -> Any:
    command = ["sh", "-c", PROGRAM]
    return instance.execute(number=number, retries=1, max_tries=max_tries, command=command, deferrable=False, **options)


def test_retry_counts_the_steps_that_it_repeats(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingUserCodeError):
        train(instance, 1)
    assert "Repeated: " not in capsys.readouterr().out
    train(instance, 2)
    assert "Repeated: steps 4 to 5, which an earlier try had reached" in capsys.readouterr().out
    assert instance.ti is not None
    usage = instance.ti.xcoms["usage"]
    assert usage["repeated_steps"] == 2
    assert 0 <= usage["repeated"] <= usage["held"]


def test_first_try_after_a_clear_repeats_nothing(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingUserCodeError):
        train(instance, 1)
    instance.delete()
    with pytest.raises(TrainingUserCodeError):
        train(instance, 2, max_tries=3)  # a clear sets it
    assert "Repeated: " not in capsys.readouterr().out
    assert instance.ti is not None
    assert "repeated_steps" not in instance.ti.xcoms["usage"]
