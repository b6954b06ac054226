"""Every scenario on a cluster: the embedded one, or the one that KTRAIN_TEST_KUBECONFIG leads to."""

from .conftest import Suite
from .scenario import Scenario


def test_on_the_cluster(suite: Suite, scenario: Scenario) -> None:
    found = suite.result(scenario)
    assert not found, "\n".join(found)
