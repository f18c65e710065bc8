# The one image of all components and all tasks: --build-arg VARIANT=cpu (default) or gpu.
FROM python:3.11-slim

ARG VARIANT=cpu

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GRPC_FAIL_FAST=use_caller

RUN useradd --uid 1000 --create-home flotilla
WORKDIR /opt/flotilla
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY trainer trainer
COPY components components
COPY pipelines pipelines
COPY configs configs

# The lock constrains: what only development needs stays out. CUDA's own packages are not in it.
RUN case "$VARIANT" in \
        cpu) extra="" ;; \
        gpu) extra="tensorflow[and-cuda]" ;; \
        *) echo "VARIANT is cpu or gpu, not $VARIANT" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --constraint requirements.lock . $extra

USER 1000
