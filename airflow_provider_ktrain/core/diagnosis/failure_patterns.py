"""Known messages of programs, the kubelet, container runtimes and the scheduler: what they mean and what to do.

The rules in replica_rules.py and startup_rules.py search these tables. In each table the first match wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from airflow_provider_ktrain.core.diagnosis.model import Category

USER_CODE, INFRASTRUCTURE, ENVIRONMENT = Category.USER_CODE, Category.INFRASTRUCTURE, Category.ENVIRONMENT
REJECTED = "was rejected by its node"
_NCCL_NETWORK = "can't communicate with its peers over NCCL"
_NCCL_CHECKS = "the network between the nodes (NCCL_SOCKET_IFNAME, RDMA devices, network policies)"
CODE_PATH = r"[^'\s]*/ktrain[-/]code/"  #: of the code that a task sends, in the pods and in the embedded cluster
SHARED_MEMORY_RESOLUTION = "Mount an emptyDir of medium Memory at /dev/shm: volumes=[SharedMemory()]."


@dataclass(frozen=True)
class FailurePattern:
    """A regular expression for a known message, and what the message means.

    A match explains a failure, but isn't proof: it never forbids a retry.

    :param pattern: regular expression to search for.
    :param category: category of the cause.
    :param description: predicate of the summary, as in `Worker 0 <description>: <message>`.
    :param resolution: what the user should do.
    :param category_with_gpus: category if the pod requests GPUs. Default: None, the same as `category`.
    :param blames_node: whether the failure is the node's, so that `avoid_failed_nodes` avoids the node. Default: False.
    """

    pattern: str
    category: Category
    description: str
    resolution: str
    category_with_gpus: Category | None = None
    blames_node: bool = False


#: Messages of the training program: in its final exception or near the end of its log.
PROGRAM_ERRORS = (
    FailurePattern(
        r"(?i)(CUDA|HIP) out of memory|(CUDA|HIP) error: out of memory|Cuda failure (\d+ )?'out of memory'|"
        r"CUBLAS_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY|Failed to CUDA calloc|Resource.exhausted: Out of memory",
        Category.OUT_OF_MEMORY,
        "ran out of GPU memory",
        "Reduce the batch size, shard the model, or use GPUs with more memory.",
    ),
    FailurePattern(
        r"MemoryError\b|DefaultCPUAllocator|posix_memalign|std::bad_alloc|Cannot allocate memory",
        Category.OUT_OF_MEMORY,
        "ran out of memory",
        "Raise the memory limit, or load less at once.",
    ),
    FailurePattern(
        r"DataLoader worker \(pid.*(exited unexpectedly|killed by signal: Killed)",
        Category.OUT_OF_MEMORY,
        "lost a DataLoader worker, probably to the memory limit",
        "Raise the memory limit, or reduce the batch size, prefetching or the number of DataLoader workers.",
    ),
    FailurePattern(
        r"insufficient shared memory|killed by signal: Bus error|(?i:unexpected bus error)|Bus error \(core dumped\)|"
        r"unable to (write to file|open shared memory object) </torch_",
        USER_CODE,
        "ran out of shared memory",
        SHARED_MEMORY_RESOLUTION,
    ),
    FailurePattern(
        r"BrokenProcessPool|process pool (was terminated abruptly|is not usable anymore)",
        USER_CODE,
        "lost a worker process, probably to a full /dev/shm (shared memory) or the memory limit",
        f"{SHARED_MEMORY_RESOLUTION} Else raise the memory limit, or use fewer worker processes.",
    ),
    FailurePattern(
        r"Too many open files|received 0 items of ancdata",
        USER_CODE,
        "has opened too many files",
        "Use fewer DataLoader workers, torch.multiprocessing.set_sharing_strategy('file_system'), or a higher ulimit.",
    ),
    FailurePattern(
        r"can't start new thread|pthread_create(:| failed)|Resource temporarily unavailable",
        USER_CODE,
        "can't start more threads or processes",
        "Set OMP_NUM_THREADS, use fewer worker processes, or ask for a higher limit of the node (podPidsLimit).",
    ),
    FailurePattern(
        r"error: (unrecognized arguments|the following arguments are required|argument )",
        USER_CODE,
        "rejected its command-line arguments",
        "Correct `args`. Remove arguments that the program does not define, such as --world-size.",
    ),
    FailurePattern(
        r"environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set|"
        r"KeyError: '(LOCAL_RANK|RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'",
        USER_CODE,
        "lacks the variables that torchrun sets",
        "Start the program by torchrun: a TrainJob sets only PET_*, and a PyTorchJob sets no LOCAL_RANK.",
    ),
    FailurePattern(
        rf"can't open file '{CODE_PATH}",
        USER_CODE,
        "can't find its program in the code that was sent",
        "Correct the path: it is relative to the directory of `code` or --code. Or correct the .ktrainignore in it.",
    ),
    FailurePattern(
        r"can't open file |No module named '?__main__|unable to launch the specified application as it could not",
        USER_CODE,
        "can't find its program",
        "Correct the path, or add the program to the image.",
    ),
    FailurePattern(
        r"(?i)exec format error",
        Category.IMAGE,
        "runs an image built for another CPU architecture",
        "Build the image for the node's architecture, or select nodes that match the image.",
    ),
    FailurePattern(
        r"(?i)no NVIDIA driver|ProcessGroupNCCL is only supported with GPUs|No CUDA GPUs are available|"
        r"libcuda\.so\.1: cannot open shared object file",
        USER_CODE,
        "can't see any GPU",
        "Request GPUs (gpus=...) or use gloo. If the pod requests GPUs, report the node and retry on another one.",
        category_with_gpus=INFRASTRUCTURE,
        blames_node=True,
    ),
    FailurePattern(
        r"(?i)driver version is insufficient( for CUDA runtime version)?|no kernel image is available|"
        r"not compiled with CUDA|sm_\w+ is not compatible with|forward compatibility was attempted|NoBinaryForGpu",
        Category.IMAGE,
        "has an image that can't use the node's GPUs",
        "Use an image that supports the node's driver and GPU, or select nodes that fit the image.",
    ),
    FailurePattern(
        r"(?i)invalid device ordinal",
        USER_CODE,
        "can't use its GPUs",
        "Start at most one process per GPU, and select its GPU with torch.cuda.set_device(LOCAL_RANK).",
    ),
    FailurePattern(
        r"Duplicate GPU detected",
        USER_CODE,
        "runs two processes on one GPU",
        "Start at most one process per GPU, and select its GPU with torch.cuda.set_device(LOCAL_RANK).",
    ),
    FailurePattern(
        r"(?i)uncorrectable ECC|GPU has fallen off the bus|Xid[ :(]|device-side hardware|CUDA error: unknown error|"
        r"Cuda failure (\d+ )?'unknown error'|Driver/library version mismatch|system not yet initialized",
        INFRASTRUCTURE,
        "has a broken GPU",
        "Retry on another node, and report this one.",
        blames_node=True,
    ),
    FailurePattern(
        r"(?i)devices?(\(s\) is/| )are busy or unavailable",
        INFRASTRUCTURE,
        "can't use the node's GPU",
        "Retry on another node, and report this one: another program uses the GPU, or the GPU needs a reset.",
        blames_node=True,
    ),
    FailurePattern(
        r"no socket interface found|ncclSocketInit|ibv_\w+ failed|NET/(OFI|IB)|socketPollConnect|socketStartConnect|"
        r"socketFinalizeAccept",
        INFRASTRUCTURE,
        _NCCL_NETWORK,
        f"Check {_NCCL_CHECKS}.",
    ),
    FailurePattern(
        r"(?i)not enough slots available",
        USER_CODE,
        "starts more processes than it has slots",
        "Set -np to at most the number of Workers times slotsPerWorker.",
    ),
    FailurePattern(
        r"has detected an attempt to run as root",
        USER_CODE,
        "can't start mpirun as root",
        "Add --allow-run-as-root to mpirun, or run the image as another user.",
    ),
    FailurePattern(
        r"Host key verification failed|Permission denied \(publickey|ssh: Could not resolve hostname|"
        r"ssh: connect to host |(orted|prted): (command )?not found|unable to upgrade connection|"
        r'Error from server \(\w+\): pods? "?[\w.-]+|"plm_rsh_agent" was set to a path that could not be found|'
        r"kubexec\.sh: |(ORTE|PRTE) was unable to reliably start one or more daemons|"
        r"An (ORTE|PRTE) daemon has unexpectedly failed|unable to complete a TCP connection",
        INFRASTRUCTURE,
        "can't reach its Workers",
        "Check that the Workers run, with sshd (MPIJob v2beta1) or reachable by kubectl exec (v1), and have Open MPI "
        "in their PATH. Under v1, the Launcher must wait for the Workers.",
    ),
    FailurePattern(
        r"(?i)No space left on device|Disk quota exceeded",
        INFRASTRUCTURE,
        "ran out of disk space",
        "Free space on the volume, or enlarge it.",
    ),
    FailurePattern(
        r"Stale file handle|Transport endpoint is not connected|\[Errno 5\] Input/output error",
        INFRASTRUCTURE,
        "can't access its volume",
        "Check the volume's server and the node, then retry.",
    ),
    FailurePattern(
        r"gated repo|GatedRepoError",
        ENVIRONMENT,
        "has no access to a gated repository",
        "Request access to it, and pass a token with that access from a Secret as HF_TOKEN.",
    ),
    FailurePattern(
        r"couldn't connect to 'https?://|LocalEntryNotFoundError|Max retries exceeded with url|"
        r"(requests|urllib3)\.exceptions\.|httpx\.Connect",
        INFRASTRUCTURE,
        "can't download what it needs",
        "Check the network policies and the proxy of the pods, or put the files on a volume.",
    ),
    FailurePattern(
        r"PytorchStreamReader failed|Error while deserializing header|EOFError: Ran out of input|invalid load key",
        USER_CODE,
        "can't read a file that is incomplete or damaged",
        "Delete it, or continue from an earlier checkpoint. Write checkpoints under another name, then rename them.",
    ),
    FailurePattern(
        r"(?i)address already in use",
        INFRASTRUCTURE,
        "can't bind its port",
        "Don't use hostNetwork with a fixed port twice on a node, and don't start torchrun inside torchrun.",
    ),
    FailurePattern(
        r"undefined symbol: |\.so[\d.]*: cannot open shared object file",
        Category.IMAGE,
        "has an image whose libraries don't fit together",
        "Install the library for the image's versions of Python, PyTorch and CUDA.",
    ),
    FailurePattern(
        r"Error building extension|Ninja is required|CUDA_HOME (environment variable is not set|does not exist)",
        Category.IMAGE,
        "can't build an extension",
        "Use an image with ninja, a compiler and CUDA's headers, or build the extension when you build the image.",
    ),
    FailurePattern(
        r"ModuleNotFoundError|SyntaxError|ImportError",
        USER_CODE,
        "can't import its code",
        "Add the missing package or library to the image, or correct the code.",
    ),
)

#: What marks a text as the report of a lost peer. In lower case and not regular expressions: they are searched in the
#: logs of every replica, up to 512 of them. PEER_LOSSES explains the text.
_PEER_LOSS_PHRASES = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "connection reset by remote peer",
    "broken pipe",
    "socket closed",
    "connection refused",
    "client socket has timed out",
    "client socket has failed",
    "failure in name resolution",
    "name or service not known",
    "unhandled system error",
    "ncclsystemerror",
    "ncclinternalerror",
    "ncclremoteerror",
    "remote process exited",
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
    "operations have failed or timed out",
    "rendezvousconnectionerror",
    "rendezvousclosederror",
    "rendezvoustimeouterror",
    "diststoreerror",
    "distnetworkerror",
    "signalexception",
    "got signal: 15",
    "got signal:15",
    "received signal 15",
    "orte has lost communication",
    "lost connection to the remote daemon",
    "a remote process",
    "horovodinternalerror",
    "horovod has been shut down",
    "peer process has unexpectedly disconnected",
    "socket recv failed",
    "failed to execute operation",
    "socketstartconnect",
    "socketpollconnect",
    "got completion from peer",
)
#: What shows that a text with such a phrase is about a server, or about a port of the replica's own.
_NO_PEER_WORDS = (
    "requests.exceptions",
    "urllib3",
    "connectionpool(host=",
    "httpx",
    "aiohttp",
    "botocore",
    "failed to listen",
    "address already in use",
)
_RENDEZVOUS_WORDS = ("store", "barrier", "rendezvous")  #: what a replica waited for if `timed out in` precedes it

_CHECK_PEERS = "Check for replicas that did not start, MASTER_ADDR, the number of replicas, and network policies."
#: Explanations of a replica that lost a peer (see `reports_peer_loss`). The last pattern matches everything.
PEER_LOSSES = (
    FailurePattern(
        r"client socket has (timed out|failed)|waiting for clients|store based barrier|Rendezvous",
        INFRASTRUCTURE,
        "can't connect to its peers",
        _CHECK_PEERS,
    ),
    FailurePattern(
        r"(?i)failure in name resolution|name or service not known|gai error",
        INFRASTRUCTURE,
        "can't resolve a host name",
        f"{_CHECK_PEERS} Check the cluster's DNS.",
    ),
    FailurePattern(
        r"^NCCL: |unhandled system error|ncclSystemError|ncclInternalError",
        INFRASTRUCTURE,
        _NCCL_NETWORK,
        f"Check {_NCCL_CHECKS} and for missing replicas. NCCL_DEBUG=INFO logs more.",
    ),
    FailurePattern(
        "",
        INFRASTRUCTURE,
        "lost a peer, and no replica reports why",
        "Check the network between the nodes and for missing replicas. NCCL_DEBUG=INFO logs more.",
    ),
)

#: Reasons for which Kubernetes ended a pod or a container: the reason of its status or of DisruptionTarget.
DISRUPTIONS = (
    FailurePattern(
        r"^DeadlineExceeded$",
        Category.TIMEOUT,
        "exceeded its pod's activeDeadlineSeconds",
        "Raise the deadline, or shorten the training.",
    ),
    FailurePattern(
        r"Preempt",
        INFRASTRUCTURE,
        "was preempted by a pod of higher priority",
        "Retry, or set a priority_class_name or a queue_name.",
    ),
    FailurePattern(
        r"EvictionByEvictionAPI",
        INFRASTRUCTURE,
        "was evicted from its node",
        "Retry. A node drain evicts all pods of a node.",
    ),
    FailurePattern(
        r"^Evicted$|Eviction|TerminationByKubelet",
        INFRASTRUCTURE,
        "was evicted from its node",
        "Retry. If the node ran low on memory or disk, request as much as the replica uses.",
        blames_node=True,
    ),
    FailurePattern(
        r"^OutOf|UnexpectedAdmissionError|NodeAffinity|TopologyAffinityError|NodePorts|SysctlForbidden",
        INFRASTRUCTURE,
        REJECTED,
        "Retry. Check which pods run on the node, its labels and its devices.",
    ),
    FailurePattern(
        r"NodeLost|Shutdown|^Terminated$|TaintManager|PodGC|ContainerStatusUnknown|DisruptionTarget",
        INFRASTRUCTURE,
        "lost its node",
        "Retry. Check the node's conditions.",
        blames_node=True,
    ),
)
#: Messages of pods with the reason Evicted that explain it better. A limit of the pod's own is the reason in recordings
#: 101 and 101b, and not a shortage on the node; in 101d nothing of the pod has run.
EVICTIONS = (
    FailurePattern(
        r"ephemeral local storage usage exceeds|exceeded its local ephemeral storage limit",
        USER_CODE,
        "wrote more to its local disk than its ephemeral-storage limit allows",
        "Raise the limit ephemeral-storage of the container, or write less: large files belong on a volume.",
    ),
    FailurePattern(
        r"Usage of EmptyDir volume .* exceeds the limit",
        USER_CODE,
        "wrote more to an emptyDir volume than its sizeLimit allows",
        "Raise the sizeLimit of the volume that the message names, or write less to it. The volume may be /dev/shm: "
        'volumes=[SharedMemory("16Gi")].',
    ),
    FailurePattern(
        r"^Pod was rejected",
        INFRASTRUCTURE,
        REJECTED,
        "Retry. Check the node's conditions, and free what it lacks.",
        blames_node=True,
    ),
)

#: Messages of pods with the reason UnexpectedAdmissionError that show a broken device.
_BROKEN_DEVICES = (
    FailurePattern(
        r"nvml|GPU is lost|unhealthy devices",
        INFRASTRUCTURE,
        REJECTED,
        "Retry on another node, and report this one: its GPU does not work.",
        blames_node=True,
    ),
)
_BY_MESSAGE = {"Evicted": EVICTIONS, "UnexpectedAdmissionError": _BROKEN_DEVICES}  #: by the reason

#: Why the container runtime could not start a command. The last pattern matches everything.
START_ERRORS = (
    FailurePattern(
        r"unsatisfied condition: [^\n]*",
        Category.IMAGE,
        "can't start: its image needs a newer GPU driver than the node has",
        "Use an image for an older version of CUDA, or select nodes with a newer driver.",
    ),
    FailurePattern(
        r"Are you trying to mount a directory onto a file[^\n]*",
        ENVIRONMENT,
        "can't mount a file or directory",
        "Correct mountPath and subPath: a file can only be mounted onto a file, and a directory onto a directory.",
    ),
    FailurePattern(
        r"unable to create new parent process[^\n]*",
        INFRASTRUCTURE,
        "can't start: the node's container runtime failed",
        "Retry. Check the load of the node.",
    ),
    FailurePattern(
        r"(nvidia-container-cli|could not select device driver|unresolvable CDI devices)[^\n]*",
        INFRASTRUCTURE,
        "can't start: the node's GPU driver does not work",
        "Retry on another node, and report this one.",
        blames_node=True,
    ),
    FailurePattern(
        r'exec: "python3": .*?(?=: unknown$|$)',
        Category.IMAGE,
        "can't start its command",
        "Use an image that contains python3: jobs with `code` and Python functions need it.",
    ),
    *(
        FailurePattern(
            pattern,
            Category.IMAGE,
            "can't start its command",
            "Correct the command, or use an image that contains it.",
        )
        for pattern in (r"exec: .*?(?=: unknown$|$)", ".*")
    ),
)

CREATE_MISSING = "Create the missing object in the job's namespace, or correct its name in the manifest."
#: Messages of the events FailedMount and FailedAttachVolume, the most specific first.
MOUNT_ERRORS = (
    FailurePattern(
        r"hostPath type check failed",
        ENVIRONMENT,
        "can't mount a volume",
        "Create the directory on the nodes, correct the path, or use the type DirectoryOrCreate.",
    ),
    FailurePattern(
        r"Multi-Attach error",
        INFRASTRUCTURE,
        "can't mount a volume",
        "Use a ReadWriteMany claim, or wait for the other pod to end.",
    ),
    FailurePattern(r'\w "[^"]+" not found', ENVIRONMENT, "can't mount a volume", CREATE_MISSING),
    FailurePattern(
        "",
        INFRASTRUCTURE,
        "can't mount a volume",
        "Check the claim, its storage class and the storage server.",
    ),
)

#: Messages of the events FailedCreatePodSandBox and FailedCreatePodContainer.
SANDBOX_ERRORS = (
    FailurePattern(
        "",
        INFRASTRUCTURE,
        "can't be started by its node",
        "Check the node's network plugin, the free addresses of its subnet, and its container runtime.",
    ),
)

_CORRECT_FIELD = "Correct the field that the message names: in the manifest, the runtime or the webhook that sets it."
#: Reasons and messages of events about refused pods and Services. A quota is not among them.
POD_REFUSALS = (
    FailurePattern(
        "^FailedCreateService: .*must be no more than 63 characters",
        ENVIRONMENT,
        "has a name that is too long for its Services",
        "Shorten the job's name.",
    ),
    FailurePattern("^FailedCreateService: .* is invalid: ", ENVIRONMENT, "can't create its Services", _CORRECT_FIELD),
    FailurePattern("^FailedCreate.* is invalid: ", ENVIRONMENT, "can't create its pods", _CORRECT_FIELD),
    FailurePattern(
        "^FailedCreate.*(denied the request|is forbidden: (?!exceeded quota))",
        ENVIRONMENT,
        "can't create its pods",
        "Correct what the message names, or ask the owner of the policy. A service account must exist in the job's "
        "namespace.",
    ),
)

MISSING_CLAIM = r'persistentvolumeclaim "([^"]+)" not found'  #: in the scheduler's message
#: Reasons in the scheduler's message, each with what to do. All that match are reported.
SCHEDULING_HINTS = (
    (MISSING_CLAIM, "Create the claim, or correct its name."),
    (
        r"unbound immediate PersistentVolumeClaims|volume node affinity conflict",
        "Check the claim: its storage class, and the zone of its volume.",
    ),
    (r"untolerated taint", "Add tolerations for the taint, or select other nodes."),
    (
        r"didn't match Pod's node affinity/selector|didn't match PersistentVolume's",
        "Correct hosts, node_selector or affinity, or label the nodes.",
    ),
    (r"Insufficient|Too many pods", "Request less, select other nodes, or wait until resources are free."),
)


def first_match(patterns: Iterable[FailurePattern], text: str) -> FailurePattern | None:
    """The first of the patterns that matches the text; None if none does."""
    return next((known for known in patterns if re.search(known.pattern, text)), None)


def explain_disruption(reason: str, message: str = "") -> FailurePattern | None:
    """What the reason and message mean for which Kubernetes ended a pod; None if that isn't known.

    :param reason: of the pod's status, or of its condition DisruptionTarget.
    :param message: the one that belongs to the reason. Default: "".
    """
    return first_match(_BY_MESSAGE.get(reason, ()), message) or first_match(DISRUPTIONS, reason)


def names_network_error(text: str) -> bool:
    """Whether a text that reports a lost peer shows an error of the network device: more than that the peer is gone."""
    return "NET/IB" in text or "NET/OFI" in text


def reports_peer_loss(text: str) -> bool:
    """Whether a line of a log, or an exception, reports a lost peer: a consequence, and not a cause."""
    lower = text.lower()
    timed_out = lower.partition("timed out in ")[2]
    if any(phrase in lower for phrase in _PEER_LOSS_PHRASES):
        return not any(word in lower for word in _NO_PEER_WORDS)
    return any(word in timed_out for word in _RENDEZVOUS_WORDS)
