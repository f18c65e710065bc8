# The image of all steps and all tasks. VARIANT is cpu or gpu; BASE may be NAME@sha256:DIGEST.
ARG BASE=python:3.11.7-slim-bookworm
FROM ${BASE}

ARG VARIANT=cpu

# Python does not search the working directory before the standard library and the packages.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    GRPC_FAIL_FAST=use_caller

RUN useradd --uid 1000 --create-home flotilla
WORKDIR /opt/flotilla
COPY pyproject.toml requirements.lock requirements-gpu.lock README.md LICENSE ./
COPY trainer trainer
COPY components components
COPY pipelines pipelines
COPY configs configs

# A lock constrains: what only development needs stays out. KFP's default store needs the extra s3.
# The GPU variant adds CUDA by its own lock. Removed is what no process of Flotilla loads: TensorFlow's
# C++ headers, the library of libclang, tests of packages, and the second copy of this code. The
# bytecode that pip compiles stays: without it every task would compile TensorFlow's Python again.
RUN case "$VARIANT" in \
        cpu) extra="" ;; \
        gpu) extra="--constraint requirements-gpu.lock tensorflow[and-cuda]" ;; \
        *) echo "VARIANT is cpu or gpu, not $VARIANT" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --constraint requirements.lock ".[s3]" $extra \
    && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && rm -rf tensorflow/include clang/native \
    && find pyarrow scipy sklearn -type d -name tests -prune -exec rm -rf {} + \
    && cd /opt/flotilla \
    && rm -rf trainer components pipelines build flotilla.egg-info

# These may change with each build: after the layers that take long.
ARG BASE
ARG VERSION=0.1.0
ARG COMMIT=""
# The commit in the lineage of a model.
ENV FLOTILLA_COMMIT=$COMMIT
LABEL org.opencontainers.image.title="Flotilla" \
      org.opencontainers.image.description="Parameter-server training as a Kubeflow pipeline" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$COMMIT" \
      org.opencontainers.image.base.name="$BASE"

# By number: Kubernetes can check that it is not root.
USER 1000
