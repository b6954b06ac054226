"""Text before it leaves the process: without secrets and what can't be stored, short enough to read.

`output.masked` masks the secrets of every cause, message and log line of ours, by the rules of `secret_rules`.
"""
