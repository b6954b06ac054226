"""What programs, kubelets and schedulers write when something fails, what it means, and what to do about it.

Tables alone; `diagnosis.py` looks into them. Where several patterns match, the first one counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow_provider_ktrain.core.diagnosis.model import Category

USER, INFRASTRUCTURE, ENVIRONMENT = Category.USER_CODE, Category.INFRASTRUCTURE, Category.ENVIRONMENT
SHM = "mount an emptyDir of medium Memory at /dev/shm (volumes=[SharedMemory()])"


@dataclass(frozen=True)
class Words:
    """A regular expression, and what it means where it matches.

    A match explains a failure. It proves nothing, so no entry has the category configuration, which forbids retries.

    :param pattern: the regular expression.
    :param category: of the cause.
    :param what: what befell the replica, as in `Worker 0 <what>: ...`.
    :param resolution: what to do.
    :param category_with_gpus: the category where the pod requests GPUs; None (default): the same one.
    """

    pattern: str
    category: Category
    what: str
    resolution: str
    category_with_gpus: Category | None = None


#: in the log of a program, or in the exception that ended it
PROGRAMS = (
    Words(
        r"(?i)(CUDA|HIP) out of memory|(CUDA|HIP) error: out of memory|Cuda failure (\d+ )?'out of memory'|"
        r"CUBLAS_STATUS_ALLOC_FAILED",
        Category.OUT_OF_MEMORY,
        "ran out of GPU memory",
        "lower the batch size, shard the model, or use GPUs with more memory",
    ),
    Words(
        r"DataLoader worker \(pid.*(exited unexpectedly|killed by signal: Killed)",
        Category.OUT_OF_MEMORY,
        "lost a DataLoader worker, most likely for memory",
        "raise the memory limit, or lower batch size, prefetching or the number of DataLoader workers",
    ),
    Words(
        r"insufficient shared memory|killed by signal: Bus error|(?i:unexpected bus error)|Bus error \(core dumped\)",
        USER,
        "has too little shared memory",
        SHM,
    ),
    Words(
        r"error: (unrecognized arguments|the following arguments are required|argument )",
        USER,
        "does not take its arguments",
        "correct args; leave out what the program does not read, as --world-size",
    ),
    Words(
        r"can't open file |No module named '?__main__|unable to launch the specified application as it could not",
        USER,
        "cannot find its program",
        "correct the path, or the image",
    ),
    Words(
        r"(?i)exec format error",
        USER,
        "has an image for another processor",
        "build the image for the node's architecture, or choose nodes of the image's",
    ),
    Words(
        r"(?i)no NVIDIA driver|ProcessGroupNCCL is only supported with GPUs|No CUDA GPUs are available",
        USER,
        "sees no GPU",
        "request GPUs (gpus=...) or use gloo; where they are requested, report the node and retry on another one",
        category_with_gpus=INFRASTRUCTURE,
    ),
    Words(
        r"(?i)driver version is insufficient|no kernel image is available|not compiled with CUDA|"
        r"invalid device ordinal",
        USER,
        "cannot use the GPUs",
        "use an image that fits the node's driver and GPU, and no more processes than GPUs",
    ),
    Words(
        r"Duplicate GPU detected",
        USER,
        "puts two processes on one GPU",
        "start no more processes than GPUs, and let each take its own: torch.cuda.set_device(LOCAL_RANK)",
    ),
    Words(
        r"(?i)uncorrectable ECC|GPU has fallen off the bus|Xid[ :(]|device-side hardware|CUDA error: unknown error|"
        r"Driver/library version mismatch|system not yet initialized",
        INFRASTRUCTURE,
        "has a broken GPU",
        "retry on another node; report the node",
    ),
    Words(
        r"(?i)not enough slots available",
        USER,
        "starts more processes than there are slots",
        "match -np with Workers times slotsPerWorker",
    ),
    Words(
        r"has detected an attempt to run as root",
        USER,
        "is not allowed to start mpirun",
        "give mpirun --allow-run-as-root, or run the image as another user",
    ),
    Words(
        r"Host key verification failed|Permission denied \(publickey|ssh: Could not resolve hostname|"
        r"ssh: connect to host |(orted|prted): (command )?not found|unable to upgrade connection|"
        r'Error from server \(\w+\): pods? "?[\w.-]+|"plm_rsh_agent" was set to a path that could not be found|'
        r"kubexec\.sh: |(ORTE|PRTE) was unable to reliably start one or more daemons",
        INFRASTRUCTURE,
        "cannot reach its Workers",
        "look at the Workers: they must run, with sshd (v2beta1) or reached by kubectl exec (v1), and have Open MPI in "
        "their PATH; under v1 the Launcher has to wait for them",
    ),
    Words(
        r"(?i)No space left on device|Disk quota exceeded",
        INFRASTRUCTURE,
        "has no space left",
        "free the volume or enlarge it",
    ),
    Words(
        r"Stale file handle|Transport endpoint is not connected|\[Errno 5\] Input/output error",
        INFRASTRUCTURE,
        "cannot use its volume",
        "look at the volume's server and at the node; retry",
    ),
    Words(
        r"(?i)address already in use",
        INFRASTRUCTURE,
        "finds its port taken",
        "do not use hostNetwork with a fixed port twice on a node, nor start torchrun inside torchrun",
    ),
    Words(
        r"ModuleNotFoundError|SyntaxError|ImportError",
        USER,
        "cannot import its code",
        "add what is missing to the image",
    ),
)

_MEETING = "look at replicas that did not start, at MASTER_ADDR and the number of replicas, and at network policies"
#: in what a replica says that only tells that others were not there (`tails.EFFECTS`)
PEERS = (
    Words(
        r"client socket has (timed out|failed)|waiting for clients|store based barrier|Rendezvous",
        INFRASTRUCTURE,
        "did not meet its peers",
        _MEETING,
    ),
    Words(
        r"(?i)failure in name resolution|name or service not known|gai error",
        INFRASTRUCTURE,
        "cannot resolve a host name",
        f"{_MEETING}; and at the cluster's DNS",
    ),
    Words(
        r"unhandled system error|ncclSystemError|ncclInternalError",
        INFRASTRUCTURE,
        "cannot talk to its peers by NCCL",
        "look at the network between the nodes: NCCL_SOCKET_IFNAME, RDMA devices, network policies, and at replicas "
        "that are gone; NCCL_DEBUG=INFO tells more",
    ),
    Words(
        "",
        INFRASTRUCTURE,
        "lost a peer, and no replica says why",
        "look at the network between the nodes, and at replicas that are gone; NCCL_DEBUG=INFO tells more",
    ),
)

#: the reason of a pod, or of a container's end, that was taken away
TAKEN = (
    Words(
        r"^DeadlineExceeded$",
        Category.TIMEOUT,
        "was ended by its pod's activeDeadlineSeconds",
        "raise the deadline, or train less",
    ),
    Words(
        r"Preempt",
        INFRASTRUCTURE,
        "was preempted by a pod of higher priority",
        "retry; or give a priority_class_name, or a queue_name",
    ),
    Words(
        r"^Evicted$|Eviction|TerminationByKubelet",
        INFRASTRUCTURE,
        "was evicted from its node",
        "retry; if it was for memory or disk, request what it uses",
    ),
    Words(
        r"^OutOf|UnexpectedAdmissionError|NodeAffinity|TopologyAffinityError|NodePorts|SysctlForbidden",
        INFRASTRUCTURE,
        "was refused by its node",
        "retry; look at the node: what runs there, its labels and its devices",
    ),
    Words(
        r"NodeLost|Shutdown|^Terminated$|TaintManager|PodGC|ContainerStatusUnknown|DisruptionTarget",
        INFRASTRUCTURE,
        "lost its node",
        "retry; look at the node's conditions",
    ),
)
OWN_DISK_LIMIT = r"exceeds the (total )?limit"
OWN_DISK_REMEDY = "raise the limit that is named, or write less to the pod's own disk"

#: what kept the container runtime from starting a command
STARTS = (
    Words(
        r"(nvidia-container-cli|could not select device driver|unresolvable CDI devices)[^\n]*",
        INFRASTRUCTURE,
        "the node's GPU driver does not work",
        "retry on another node; report the node",
    ),
    *(
        Words(
            pattern,
            Category.IMAGE,
            "the command cannot be started",
            "correct the command, or use an image that has it",
        )
        for pattern in (r"exec: .*?(?=: unknown$|$)", ".*")
    ),
)

_MISSING = "create what is missing in the job's namespace, or correct its name in the manifest"
#: events FailedMount and FailedAttachVolume, the most telling first
MOUNTS = (
    Words(
        r"hostPath type check failed",
        ENVIRONMENT,
        "a volume cannot be mounted",
        "make it on the nodes, or correct the path; the type DirectoryOrCreate makes it",
    ),
    Words(
        r"Multi-Attach error",
        INFRASTRUCTURE,
        "a volume cannot be mounted",
        "use a claim that is ReadWriteMany, or let the other pod end",
    ),
    Words(r"not found", ENVIRONMENT, "a volume cannot be mounted", _MISSING),
    Words(
        "",
        INFRASTRUCTURE,
        "a volume cannot be mounted",
        "look at the claim, its storage class and the storage's server",
    ),
)

#: the scheduler's reasons; all that match are told
PLACES = (
    (r'persistentvolumeclaim "[^"]+" not found', "create the claim, or correct its name"),
    (
        r"unbound immediate PersistentVolumeClaims|volume node affinity conflict",
        "look at the claim: its storage class, and the zone of its volume",
    ),
    (r"untolerated taint", "give tolerations for the taint, or choose other nodes"),
    (
        r"didn't match Pod's node affinity/selector|didn't match PersistentVolume's",
        "correct hosts, node_selector or affinity, or label the nodes",
    ),
    (r"Insufficient|Too many pods", "ask for less, choose other nodes, or wait until some are free"),
)
