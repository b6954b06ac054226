"""TrainJob: the kind, the runtime that it refers to, and `patches` of the runtime, which set its pods' grace period."""
