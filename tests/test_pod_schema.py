"""What the comparison of the pod schema with the models of the Kubernetes client finds."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.core.manifest.schema import TYPES
from scripts.pod_schema import findings


def test_table_is_that_of_the_client() -> None:
    assert findings() == []


@pytest.mark.parametrize(
    ("name", "old", "new", "found"),
    [
        ("Container", "workingDir:s", "", "Container lacks workingDir, a field of V1Container: str"),
        ("Probe", "exec:any", "exec:any pause:i", "Probe.pause is no field of V1Probe"),
        ("EnvVar", "name!:s", "name:s", "EnvVar.name is required in V1EnvVar"),
        ("Toleration", "key:s", "key!:s", "Toleration.key is optional in V1Toleration"),
        ("PodSpec", "priority:i", "priority:s", "PodSpec.priority is s in the table, and int in the client"),
        ("Capabilities", "add:[s]", "add:s", "Capabilities.add is s in the table, and list[str] in the client"),
        ("Resources", "limits:{q}", "limits:[q]", "Resources.limits is [q] in the table, and dict[str, str] in the"),
        ("Volume", "emptyDir:EmptyDir", "emptyDir:Nfs", "Nfs lacks medium, a field of V1EmptyDirVolumeSource: str"),
    ],
)
def test_difference_is_found(name: str, old: str, new: str, found: str) -> None:
    assert old in TYPES[name]
    assert any(one.startswith(found) for one in findings({**TYPES, name: TYPES[name].replace(old, new)}))
