"""The tests of the provider.

No test uses the kubeconfig of the user who runs them: what a test submits by mistake must not reach a real cluster. The
clients of Kubernetes read KUBECONFIG when they are imported, so it is set before anything is. `tests/clusters.py` reads
KTRAIN_TEST_KUBECONFIG instead.
"""

import os

os.environ["KUBECONFIG"] = "/nowhere/kubeconfig"
