"""`ktrain`: the embedded cluster, checks of manifests, RBAC rules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="ktrain", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)

    from airflow_provider_ktrain.local import cli as cluster

    cluster.add_parser(subparsers)
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
