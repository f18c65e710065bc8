# The one image of all components and all tasks: --build-arg VARIANT=cpu (default) or gpu.
FROM python:3.11.7-slim-bookworm

ARG VARIANT=cpu

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GRPC_FAIL_FAST=use_caller

RUN useradd --uid 1000 --create-home flotilla
WORKDIR /opt/flotilla
COPY pyproject.toml requirements.lock requirements-gpu.lock README.md LICENSE ./
COPY trainer trainer
COPY components components
COPY pipelines pipelines
COPY configs configs

# A lock constrains: what only development needs stays out. KFP's default store needs the extra s3.
# The GPU variant adds CUDA by its own lock.
RUN case "$VARIANT" in \
        cpu) extra="" ;; \
        gpu) extra="--constraint requirements-gpu.lock tensorflow[and-cuda]" ;; \
        *) echo "VARIANT is cpu or gpu, not $VARIANT" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --constraint requirements.lock ".[s3]" $extra

# What the lineage of a model says of this code. Here, another commit alone makes no layer anew.
ARG COMMIT=""
ENV FLOTILLA_COMMIT=$COMMIT

# By number: Kubernetes can check that it is not root.
USER 1000
