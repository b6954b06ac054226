"""The types of Kubeflow Trainer 2.3 (TrainJob and its runtimes) and JobSet 0.12."""

from __future__ import annotations

from ktrain_embedded.objects.structs import Struct, struct_of

HEAD = "apiVersion:str kind:str metadata:V1ObjectMeta"
MANAGERS = ("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue")

TRAINER: dict[str, Struct] = {
    "TrainJob/v1alpha1": struct_of(f"{HEAD} spec:TrainJobSpec status:TrainJobStatus", go_name="TrainJob"),
    "TrainJobSpec": struct_of(
        "activeDeadlineSeconds:int64 initializer:Initializer managedBy:str runtimePatches:list[RuntimePatch] "
        "runtimeRef:RuntimeRef suspend:bool trainer:Trainer",
        required="runtimeRef", defaults={"suspend": False, "managedBy": MANAGERS[0]},
        minimums={"activeDeadlineSeconds": 1}, go_name="TrainJobSpec",
    ),
    "RuntimeRef": struct_of(
        "apiGroup:str kind:str name:str", required="name",
        defaults={"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime"}, go_name="RuntimeRef",
    ),
    "Trainer": struct_of(
        "args:list[str] command:list[str] env:list[V1EnvVar] image:str numNodes:int numProcPerNode:int "
        "resourcesPerNode:V1ResourceRequirements", go_name="Trainer",
    ),
    "Initializer": struct_of("dataset:InitializerSource model:InitializerSource", go_name="Initializer"),
    "InitializerSource": struct_of(
        "env:list[V1EnvVar] secretRef:V1LocalObjectReference storageUri:str", go_name="DatasetInitializer"
    ),
    "RuntimePatch": struct_of(
        "manager:str time:datetime trainingRuntimeSpec:PatchedRuntimeSpec", required="manager", go_name="RuntimePatch"
    ),
    "PatchedRuntimeSpec": struct_of("template:PatchedJobSetTemplate", go_name="TrainingRuntimeSpecPatch"),
    "PatchedJobSetTemplate": struct_of(
        "metadata:LabelsAndAnnotations spec:PatchedJobSet", go_name="JobSetTemplatePatch"
    ),
    "PatchedJobSet": struct_of("replicatedJobs:list[PatchedReplicatedJob]", go_name="JobSetSpecPatch"),
    "PatchedReplicatedJob": struct_of("name:str template:PatchedJobTemplate", "name", go_name="ReplicatedJobPatch"),
    "PatchedJobTemplate": struct_of("metadata:LabelsAndAnnotations spec:PatchedJob", go_name="JobTemplatePatch"),
    "PatchedJob": struct_of("template:PatchedPodTemplate", go_name="JobSpecPatch"),
    "PatchedPodTemplate": struct_of("metadata:LabelsAndAnnotations spec:PatchedPod", go_name="PodTemplatePatch"),
    "PatchedPod": struct_of(
        "affinity:V1Affinity containers:list[PatchedContainer] imagePullSecrets:list[V1LocalObjectReference] "
        "initContainers:list[PatchedContainer] nodeSelector:dict[str,str] schedulingGates:list[V1PodSchedulingGate] "
        "securityContext:V1PodSecurityContext serviceAccountName:str terminationGracePeriodSeconds:int64 "
        "tolerations:list[V1Toleration] volumes:list[V1Volume]", go_name="PodSpecPatch",
    ),
    "PatchedContainer": struct_of(
        "env:list[V1EnvVar] name:str securityContext:V1SecurityContext volumeMounts:list[V1VolumeMount]", "name",
        go_name="ContainerPatch",
    ),
    "LabelsAndAnnotations": struct_of("annotations:dict[str,str] labels:dict[str,str]", go_name="ObjectMeta"),
    "TrainJobStatus": struct_of(
        "conditions:list[V1Condition] jobsStatus:list[JobStatusOfTrainJob] trainerStatus:TrainerStatus",
        go_name="TrainJobStatus",
    ),
    "JobStatusOfTrainJob": struct_of(
        "active:int failed:int name:str ready:int succeeded:int suspended:int",
        "active failed name ready succeeded suspended", go_name="JobStatus",
    ),
    "TrainerStatus": struct_of(
        "estimatedRemainingSeconds:int lastUpdatedTime:datetime metrics:list[TrainerMetric] progressPercentage:int",
        go_name="TrainJobTrainerStatus",
    ),
    "TrainerMetric": struct_of("name:str value:str", "name value", go_name="Metric"),
    "TrainingRuntime/v1alpha1": struct_of(f"{HEAD} spec:RuntimeSpec", go_name="TrainingRuntime"),
    "ClusterTrainingRuntime/v1alpha1": struct_of(f"{HEAD} spec:RuntimeSpec", go_name="ClusterTrainingRuntime"),
    "RuntimeSpec": struct_of(
        "mlPolicy:MLPolicy podGroupPolicy:object template:JobSetTemplate", "template", go_name="TrainingRuntimeSpec"
    ),
    "MLPolicy": struct_of(
        "flux:object jax:object mpi:MPIPolicy numNodes:int torch:TorchPolicy xgboost:object",
        defaults={"numNodes": 1}, go_name="MLPolicy",
    ),
    "TorchPolicy": struct_of("numProcPerNode:int", go_name="TorchMLPolicySource"),
    "MPIPolicy": struct_of(
        "mpiImplementation:str numProcPerNode:int runLauncherAsNode:bool sshAuthMountPath:str",
        defaults={
            "mpiImplementation": "OpenMPI", "numProcPerNode": 1, "runLauncherAsNode": False,
            "sshAuthMountPath": "/root/.ssh",
        },
        enums={"mpiImplementation": ("OpenMPI", "Intel", "MPICH")}, go_name="MPIMLPolicySource",
    ),
    "JobSetTemplate": struct_of("metadata:LabelsAndAnnotations spec:JobSetSpec", go_name="JobSetTemplateSpec"),
}  # fmt: skip

JOBSET: dict[str, Struct] = {
    "JobSet/v1alpha2": struct_of(f"{HEAD} spec:JobSetSpec status:JobSetStatus", go_name="JobSet"),
    "JobSetSpec": struct_of(
        "coordinator:Coordinator failurePolicy:FailurePolicy managedBy:str network:Network "
        "replicatedJobs:list[ReplicatedJob] startupPolicy:StartupPolicy successPolicy:SuccessPolicy suspend:bool "
        "ttlSecondsAfterFinished:int volumeClaimPolicies:object", go_name="JobSetSpec",
    ),
    "ReplicatedJob": struct_of(
        "dependsOn:list[DependsOn] groupName:str name:str replicas:int template:JobTemplate", "name template",
        defaults={"groupName": "default", "replicas": 1}, go_name="ReplicatedJob",
    ),
    "JobTemplate": struct_of("metadata:LabelsAndAnnotations spec:V1JobSpec", go_name="JobTemplateSpec"),
    "DependsOn": struct_of(
        "name:str status:str", "name status", enums={"status": ("Ready", "Complete")}, go_name="DependsOn"
    ),
    "Network": struct_of("enableDNSHostnames:bool publishNotReadyAddresses:bool subdomain:str", go_name="Network"),
    "SuccessPolicy": struct_of(
        "operator:str targetReplicatedJobs:list[str]", "operator", enums={"operator": ("All", "Any")},
        go_name="SuccessPolicy",
    ),
    "FailurePolicy": struct_of(
        "maxRestarts:int restartStrategy:str rules:list[FailurePolicyRule]", defaults={"restartStrategy": "Recreate"},
        enums={"restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart")}, go_name="FailurePolicy",
    ),
    "FailurePolicyRule": struct_of(
        "action:str name:str onJobFailureReasons:list[str] onJobFailureMessagePatterns:list[str] "
        "targetReplicatedJobs:list[str]", "action",
        enums={"action": ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob")},
        go_name="FailurePolicyRule",
    ),
    "StartupPolicy": struct_of(
        "startupPolicyOrder:str", "startupPolicyOrder", enums={"startupPolicyOrder": ("AnyOrder", "InOrder")},
        go_name="StartupPolicy",
    ),
    "Coordinator": struct_of("jobIndex:int podIndex:int replicatedJob:str", "replicatedJob", go_name="Coordinator"),
    "JobSetStatus": struct_of(
        "conditions:list[V1Condition] individualJobRecreates:object previousInPlaceRestartAttempt:int "
        "replicatedJobsStatus:list[JobStatusOfTrainJob] restarts:int restartsCountTowardsMax:int terminalState:str",
        go_name="JobSetStatus",
    ),
}  # fmt: skip

STRUCTS = TRAINER | JOBSET
