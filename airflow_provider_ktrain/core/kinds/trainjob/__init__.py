"""TrainJob: the kind, the runtime that a job refers to, and the patches of its pod templates."""
