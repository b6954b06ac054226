"""What leaves for Airflow and its users: log messages, XCom values, asset events, metrics, lineage."""
