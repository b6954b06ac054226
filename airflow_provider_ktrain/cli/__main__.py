"""`python -m airflow_provider_ktrain.cli`: the same as `ktrain`."""

import sys

from airflow_provider_ktrain.cli import main

sys.exit(main())
