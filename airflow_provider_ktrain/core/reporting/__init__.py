"""What leaves for Airflow and its users: log messages, XCom values, asset events, metrics, lineage.

`redaction` masks the secrets of manifests; those of messages are masked by `core/text/output.py`.
"""
