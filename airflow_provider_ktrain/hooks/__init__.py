"""From an Airflow connection to authenticated clients of a cluster."""
