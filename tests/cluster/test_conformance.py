"""Every scenario on a cluster: the embedded one, or the one that KTRAIN_TEST_KUBECONFIG leads to."""

from .conftest import Suite


def test_scenario(suite: Suite, name: str) -> None:
    found = suite.results[name].result()
    assert not found, "\n".join(found)
