"""Every scenario on a cluster: the embedded one, or the one that KTRAIN_TEST_KUBECONFIG leads to."""

from collections.abc import Callable

from .conftest import Results
from .facts import of_scenario
from .scenario import Scenario


def test_scenario_on_the_cluster(
    results: Results, scenario: Scenario, record_property: Callable[[str, object], None]
) -> None:
    found = results(scenario)
    counted = of_scenario(scenario)
    record_property("facts", [counted.compared, counted.different + len(found)])  # for the summary
    assert not found, "\n".join(found)
