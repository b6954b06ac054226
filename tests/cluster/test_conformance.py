"""Every scenario on a cluster: the embedded one, or the one that KTRAIN_TEST_KUBECONFIG leads to."""

from .conftest import Results
from .scenario import Scenario


def test_on_the_cluster(results: Results, scenario: Scenario) -> None:
    found = results(scenario)
    assert not found, "\n".join(found)
