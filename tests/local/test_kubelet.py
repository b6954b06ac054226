"""The kubelet, held to recordings of a real one."""

from __future__ import annotations

from pathlib import Path

from kube import small


async def test_a_pod_succeeds_step_by_step(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        pod = cluster.create("one", "echo hello; echo $HOSTNAME")
        assert await cluster.ended("one") == "Succeeded"
        assert cluster.log(pod) == "hello\none\n"
        assert cluster.phases("one") == ["Pending", "Running", "Succeeded"]
        assert cluster.events("one") == [
            ("Scheduled", "Successfully assigned default/one to ktrain-node-0"),
            ("Pulled", 'Container image "demo" already present on machine and can be accessed by the pod'),
            ("Created", "Container created"),
            ("Started", "Container started"),
        ]
