"""A task whose identity has no right to create jobs: the first line says so, at once."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB
from airflow_provider_ktrain.exceptions import TrainingClusterError
from tests.apiserver.messages import Request, Response, failure
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")


@pytest.mark.parametrize("instance", [PYTORCHJOB, MPIJOB, TRAINJOB], indirect=True, ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("reads", [False, True], ids=["no rights", "may read"])
def test_missing_right_is_said_at_once(
    instance: VirtualInstance, number: int, reads: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was created by a first try, and nothing of an earlier try can be read."""
    kind, more = instance.kind, dict[str, Any](workers=1) if instance.kind is MPIJOB else {}

    def answer(request: Request, _: Response | None) -> Response:
        text = f'User "system:serviceaccount:a:b" cannot {request.verb} resource "{kind.plural}" in API group'
        return failure(403, f"{kind.plural}.{kind.group} is forbidden: {text} in the namespace", "Forbidden")

    for method in ["POST"] if reads else ["POST", "GET"]:
        instance.api.replace(method, f"/{kind.plural}", answer, 10**6, processed=False)
    began = instance.clock
    with pytest.raises(TrainingClusterError) as error:
        instance.execute(command=["sh", "-c", "true"], number=number, retries=1, **more)
    verb = "create" if reads or number == 1 else "get"
    assert str(error.value).startswith(f"no right to {verb} {kind.plural}.{kind.group} in namespace 'default' (403). ")
    assert instance.clock - began <= 1.0
    assert ("whether the job was created" in capsys.readouterr().out) is (number == 2 and not reads)
