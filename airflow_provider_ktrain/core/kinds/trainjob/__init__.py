"""TrainJob: the kind, the runtime that a job refers to, and the patches of its pod templates.

What its pods get from the runtime or a patch, such as their grace period, is read in `patches`.
"""
