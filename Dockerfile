# The image of all steps and all tasks. VARIANT is cpu or gpu; BASE may be NAME@sha256:DIGEST, of an
# official image of Python, which has its packages below /usr/local.
ARG BASE=python:3.11.7-slim-bookworm

# The lock of the variant. The extras s3 (KFP's default store), mlflow and signing are part of it. For
# CPUs TensorFlow is built without its kernels for GPUs too, under another name.
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

# The packages, nearly all of the image. Only a change of a lock installs them again. What is removed
# is loaded by no process of Flotilla: TensorFlow's C++ headers, the library of libclang, and tests of
# packages. The bytecode is compiled here: otherwise every task would compile TensorFlow's Python.
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

# The code as pip installs it, and TensorFlow's usual name for packages that require it.
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
# Python does not search the working directory before the standard library and the packages.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    GRPC_FAIL_FAST=use_caller

# Any other user of group 0 will do as well: OpenShift runs a container as a random one.
RUN useradd --uid 1000 --gid 0 --create-home flotilla && chmod 770 /home/flotilla
WORKDIR /opt/flotilla

# The base has other versions of two packages, whose files would mix with those of the lock.
RUN pip uninstall --yes setuptools wheel
COPY --from=packages /packages /usr/local
COPY --from=code /code /usr/local
COPY configs configs
# A base with its packages elsewhere would not find the code.
RUN flotilla --version

# These may change with each build: after the layers that take long.
ARG BASE
ARG VERSION=0.1.0
ARG COMMIT=""
# The commit in the lineage of a model. A random user has no home of its own.
ENV FLOTILLA_COMMIT=$COMMIT \
    HOME=/home/flotilla
LABEL org.opencontainers.image.title="Flotilla" \
      org.opencontainers.image.description="Parameter-server training as a Kubeflow pipeline" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$COMMIT" \
      org.opencontainers.image.base.name="$BASE"

# By number: Kubernetes can check that it is not root.
USER 1000
