"""How an embedded cluster is set up: what the process that starts one tells the process that is one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Config:
    """How an embedded cluster is set up.

    :param state_dir: holds `kubeconfig`, `cluster.json`, logs and the files of pods.
    :param kubeconfig: where the kubeconfig is written; "" is `<state_dir>/kubeconfig`.
    :param port: 0 for any free one.
    :param images: directory by image name; "" for an empty scratch directory.
    :param nodes: how many hosts this machine is shown as.
    :param gpus_per_node: how many `nvidia.com/gpu` each of them has.
    :param resources: more resources of each node, such as {"cpu": "96"}.
    :param mpi_api: v1 or v2beta1, the version in which MPIJob is served.
    :param parent: end when the process of this number, which has started this one, has ended; 0 for never.
    """

    state_dir: str
    kubeconfig: str = ""
    port: int = 0
    images: dict[str, str] = field(default_factory=dict)
    nodes: int = 1
    gpus_per_node: int = 0
    resources: dict[str, str] = field(default_factory=dict)
    mpi_api: str = "v1"
    parent: int = 0

    def dump(self) -> str:
        """As JSON, for a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Config:
        """What `dump` has written."""
        return Config(**json.loads(text))
