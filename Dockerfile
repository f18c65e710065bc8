# The container image of all steps and tasks. VARIANT is cpu or gpu. BASE must be an official Python
# image, because these have their packages below /usr/local; it may be given as NAME@sha256:DIGEST.
ARG BASE=python:3.11.7-slim-bookworm

# This stage creates the lock file of the variant. It includes the extras s3 (for KFP's default object
# store), mlflow and signing. On x86, the CPU variant uses the package tensorflow-cpu, which is smaller
# because it has no GPU kernels.
FROM ${BASE} AS requirements
ARG VARIANT=cpu
WORKDIR /build
COPY requirements.lock requirements-cpu.lock requirements-gpu.lock ./
RUN case "$VARIANT $(uname -m)" in \
        "cpu x86_64") sed -i '/^tensorflow==/,/[^\\]$/d' requirements.lock \
            && cat requirements-cpu.lock >> requirements.lock ;; \
        "cpu "*) ;; \
        "gpu "*) cat requirements-gpu.lock >> requirements.lock ;; \
        *) echo "VARIANT is cpu or gpu, not $VARIANT" >&2; exit 2 ;; \
    esac

# This stage installs the packages, so that a change of Flotilla's code does not install them again.
# Large files that Flotilla does not load are removed: TensorFlow's C++ headers, libclang and some
# tests. Bytecode is compiled here, because otherwise every task would compile TensorFlow's modules.
FROM ${BASE} AS packages
WORKDIR /build
COPY .ci/uv.py .ci/uv.py
COPY requirements-build.lock ./
COPY --from=requirements /build/requirements.lock ./
RUN python .ci/uv.py pip install --no-deps --require-hashes --no-build-isolation --compile \
        --prefix /packages --requirement requirements.lock \
    && cd /packages/lib/python3*/site-packages \
    && rm -rf tensorflow/include clang/native \
    && find pyarrow scipy sklearn -type d -name tests -prune -exec rm -rf {} +

# This stage installs Flotilla. If TensorFlow is installed as tensorflow-cpu, it also installs an empty
# package named `tensorflow`, because other packages require this name.
FROM packages AS code
RUN pinned="$(sed -n 's/^tensorflow-cpu==\([^ ]*\).*/\1/p' requirements.lock)" \
    && if [ -n "$pinned" ]; then \
        mkdir alias \
        && printf '[project]\nname = "tensorflow"\nversion = "%s"\ndependencies = ["tensorflow-cpu==%s"]\n[tool.setuptools]\npy-modules = []\n' \
            "$pinned" "$pinned" > alias/pyproject.toml \
        && pip install --no-deps --no-build-isolation --prefix /code ./alias; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY flotilla flotilla
COPY configs configs
COPY trainer trainer
COPY components components
COPY pipelines pipelines
RUN pip install --no-deps --no-build-isolation --prefix /code .

FROM ${BASE}
# With PYTHONSAFEPATH, modules in the working directory do not hide the standard library or packages.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    GRPC_FAIL_FAST=use_caller

# OpenShift runs the container as a random user of group 0, so this group must be able to write to the
# home folder.
RUN useradd --uid 1000 --gid 0 --create-home flotilla && chmod 770 /home/flotilla
WORKDIR /opt/flotilla

# The base image has other versions of these packages, whose files would mix with the locked ones.
RUN pip uninstall --yes setuptools wheel
COPY --from=packages /packages /usr/local
COPY --from=code /code /usr/local
COPY configs configs
# Fail here if the base image searches for packages elsewhere and does not find the code.
RUN flotilla --version

# These values may change with each build, so they come after the layers that take a long time to build.
ARG BASE
ARG VERSION=0.1.0
ARG COMMIT=""
# FLOTILLA_COMMIT is recorded in the lineage of a model. HOME is set because a random user is not in
# /etc/passwd.
ENV FLOTILLA_COMMIT=$COMMIT \
    HOME=/home/flotilla
LABEL org.opencontainers.image.title="Flotilla" \
      org.opencontainers.image.description="Parameter-server training as a Kubeflow pipeline" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$COMMIT" \
      org.opencontainers.image.base.name="$BASE"

# Set the user by number, so that Kubernetes can check that it is not root.
USER 1000
