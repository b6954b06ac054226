"""What leaves for Airflow."""
