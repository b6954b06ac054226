"""`ktrain rbac`: print the rights that the provider needs."""

from __future__ import annotations

import argparse
from typing import Any

import yaml

from airflow_provider_ktrain.cli.arguments import namespace, service_account
from airflow_provider_ktrain.core.checks import rbac


def add_parser(subparsers: Any) -> None:
    """Add the command to `ktrain`."""
    parser = subparsers.add_parser(
        "rbac",
        help="print the minimal Role for workers and triggerers in a namespace",
        description="Pipe it into `kubectl apply -f -`. Bind it to the identity that Airflow's connection uses.",
    )
    parser.add_argument("--namespace", "-n", type=namespace, required=True)
    parser.add_argument("--name", default="ktrain", help="name of the Role (default: ktrain)")
    parser.add_argument(
        "--service-account",
        type=service_account,
        help="[NAMESPACE:]NAME of a ServiceAccount: also print a RoleBinding for it",
    )
    parser.add_argument(
        "--cluster-runtimes",
        action="store_true",
        help="also print a ClusterRole that reads ClusterTrainingRuntimes: TrainJobs with node selection, volumes or "
        "labels of pods need it",
    )
    parser.add_argument("--kueue", action="store_true", help="also the rights to read and pause Kueue's Workloads")
    parser.add_argument(
        "--code",
        action="store_true",
        help="also the rights to create and get ConfigMaps: only tasks with `code`, and `ktrain run --code`, need them",
    )
    parser.add_argument(
        "--nodes",
        action="store_true",
        help="also print a ClusterRole that reads nodes: what is wrong with one, and whether any matches a waiting pod",
    )
    parser.set_defaults(run=_rbac)


def _rbac(args: argparse.Namespace) -> int:
    made = rbac.objects(
        args.namespace,
        args.name,
        args.service_account or "",
        cluster_runtimes=args.cluster_runtimes,
        kueue=args.kueue,
        code=args.code,
        nodes=args.nodes,
    )
    print(yaml.safe_dump_all(made, sort_keys=False), end="")
    return 0
