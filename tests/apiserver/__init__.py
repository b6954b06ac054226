"""A scripted Kubernetes API server: one core, served over HTTP or called in-process, where a test orders all events."""

from tests.apiserver.faults import Gate, Lost, cutter
from tests.apiserver.http import InThread, clients, connected, kubeconfig, served, serving
from tests.apiserver.logs import LogFile, Record
from tests.apiserver.messages import Object, Refused, Request, Response, failure
from tests.apiserver.pods import PODS, PodServer
from tests.apiserver.server import ApiServer
from tests.apiserver.stamps import EPOCH, log_time, precise_stamp, stamp
from tests.apiserver.store import NAMESPACE

__all__ = [
    "EPOCH",
    "NAMESPACE",
    "PODS",
    "ApiServer",
    "Gate",
    "InThread",
    "LogFile",
    "Lost",
    "Object",
    "PodServer",
    "Record",
    "Refused",
    "Request",
    "Response",
    "clients",
    "connected",
    "cutter",
    "failure",
    "kubeconfig",
    "log_time",
    "precise_stamp",
    "served",
    "serving",
    "stamp",
]
