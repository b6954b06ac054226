#!/bin/sh
# Runs the conformance suite (tests/conformance) on real clusters made by kind: `make test-kind`.
# Needs docker, kind and kubectl. One cluster for each of the two operators, because both own the resource mpijobs.
set -eu

cd "$(dirname "$0")/../.."
pytest=${PYTEST:-.venv/bin/pytest}
work=$(mktemp -d)
image=ktrain-conformance:1
trap 'kind delete cluster --name ktrain-v1; kind delete cluster --name ktrain-v2beta1; rm -rf "$work"' EXIT

docker build -t "$image" - <<'IMAGE'
FROM python:3.12-slim
IMAGE

new_cluster() { # name
    kind create cluster --name "$1" --kubeconfig "$work/$1" --wait 120s
    kind load docker-image --name "$1" "$image"
}

suite() { # name, what it serves
    KTRAIN_TEST_KUBECONFIG="$work/$1" KTRAIN_TEST_IMAGE="$image" KTRAIN_TEST_SERVES="$2" \
        "$pytest" embedded_cluster/tests/conformance -q --timeout 1500
}

training_operator() { # name
    kubectl --kubeconfig "$work/$1" apply --server-side \
        -k "github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.2"
    kubectl --kubeconfig "$work/$1" -n kubeflow wait --for=condition=Available --timeout=180s deployment/training-operator
}

new_cluster ktrain-v1
training_operator ktrain-v1
suite ktrain-v1 any,v1

# mpi-operator's MPIJob v2beta1 takes the place of training-operator's v1, which is configured to ignore it
new_cluster ktrain-v2beta1
training_operator ktrain-v2beta1
kubectl --kubeconfig "$work/ktrain-v2beta1" -n kubeflow patch deployment training-operator --type=json \
    -p '[{"op": "add", "path": "/spec/template/spec/containers/0/args", "value": ["--enable-scheme=pytorchjob"]}]'
kubectl --kubeconfig "$work/ktrain-v2beta1" -n kubeflow rollout status --timeout=180s deployment/training-operator
kubectl --kubeconfig "$work/ktrain-v2beta1" delete crd mpijobs.kubeflow.org
kubectl --kubeconfig "$work/ktrain-v2beta1" apply --server-side \
    -f https://raw.githubusercontent.com/kubeflow/mpi-operator/v0.8.2/deploy/v2beta1/mpi-operator.yaml
kubectl --kubeconfig "$work/ktrain-v2beta1" -n mpi-operator rollout status --timeout=180s deployment/mpi-operator
suite ktrain-v2beta1 v2beta1
