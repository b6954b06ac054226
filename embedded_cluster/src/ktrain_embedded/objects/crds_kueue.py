"""The types of Kueue 0.18: queues, flavors, and the Workload that represents a job in a queue."""

from __future__ import annotations

from ktrain_embedded.objects.structs import Struct, struct_of

HEAD = "apiVersion:str kind:str metadata:V1ObjectMeta"
STOP_POLICIES = ("None", "Hold", "HoldAndDrain")

STRUCTS: dict[str, Struct] = {
    "ResourceFlavor/v1beta2": struct_of(f"{HEAD} spec:ResourceFlavorSpec"),
    "ResourceFlavorSpec": struct_of(
        "nodeLabels:dict[str,str] nodeTaints:list[V1Taint] tolerations:list[V1Toleration] topologyName:str"
    ),
    "WorkloadPriorityClass/v1beta2": struct_of(f"{HEAD} description:str value:int", "value"),
    "LocalQueue/v1beta2": struct_of(f"{HEAD} spec:LocalQueueSpec status:QueueStatus"),
    "LocalQueueSpec": struct_of(
        "clusterQueue:str fairSharing:object stopPolicy:str", defaults={"stopPolicy": "None"},
        enums={"stopPolicy": STOP_POLICIES},
    ),
    "ClusterQueue/v1beta2": struct_of(f"{HEAD} spec:ClusterQueueSpec status:QueueStatus"),
    "ClusterQueueSpec": struct_of(
        "admissionChecksStrategy:object admissionScope:object cohortName:str fairSharing:object "
        "flavorFungibility:FlavorFungibility namespaceSelector:V1LabelSelector preemption:Preemption "
        "queueingStrategy:str resourceGroups:list[ResourceGroup] stopPolicy:str",
        defaults={"queueingStrategy": "BestEffortFIFO", "stopPolicy": "None"},
        enums={"queueingStrategy": ("StrictFIFO", "BestEffortFIFO"), "stopPolicy": STOP_POLICIES},
    ),
    "FlavorFungibility": struct_of("preference:str whenCanBorrow:str whenCanPreempt:str"),
    "Preemption": struct_of("borrowWithinCohort:object reclaimWithinCohort:str withinClusterQueue:str"),
    "ResourceGroup": struct_of("coveredResources:list[str] flavors:list[FlavorQuotas]", "coveredResources flavors"),
    "FlavorQuotas": struct_of("name:str resources:list[ResourceQuota]", "name resources"),
    "ResourceQuota": struct_of(
        "borrowingLimit:quantity lendingLimit:quantity name:str nominalQuota:quantity", "name nominalQuota"
    ),
    "QueueStatus": struct_of(
        "admittedWorkloads:int conditions:list[V1Condition] fairSharing:object flavors:list[object] "
        "flavorsReservation:list[object] flavorsUsage:list[object] pendingWorkloads:int reservingWorkloads:int"
    ),
    "Workload/v1beta2": struct_of(f"{HEAD} spec:WorkloadSpec status:WorkloadStatus"),
    "WorkloadSpec": struct_of(
        "active:bool maximumExecutionTimeSeconds:int podSets:list[PodSet] preemptionGates:list[object] priority:int "
        "priorityClassRef:PriorityClassRef queueName:str", defaults={"active": True},
    ),
    "PriorityClassRef": struct_of("group:str kind:str name:str"),
    "PodSet": struct_of(
        "count:int minCount:int name:str template:V1PodTemplateSpec topologyRequest:object", "count name template"
    ),
    "WorkloadStatus": struct_of(
        "accumulatedPastExecutionTimeSeconds:int admission:Admission admissionChecks:list[object] clusterName:str "
        "conditions:list[V1Condition] nominatedClusterNames:list[str] reclaimablePods:list[object] "
        "requeueState:object resourceRequests:list[PodSetRequest] schedulingStats:object unhealthyNodes:list[object]"
    ),
    "Admission": struct_of("clusterQueue:str podSetAssignments:list[PodSetAssignment]", "clusterQueue"),
    "PodSetAssignment": struct_of(
        "count:int delayedTopologyRequest:str flavors:dict[str,str] name:str resourceUsage:dict[str,quantity] "
        "topologyAssignment:object", "name",
    ),
    "PodSetRequest": struct_of("name:str resources:dict[str,quantity]", "name"),
}  # fmt: skip
