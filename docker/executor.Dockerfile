# The executor's image: weights, KV tensors, kernels. VARIANT is cpu or cuda.
# Build from the repository's root: docker build -f docker/executor.Dockerfile . (docs/deploy.md tells the arguments).
ARG BASE=docker.io/library/python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
ARG VARIANT=cpu

FROM ${BASE} AS environment
WORKDIR /src
# The builder's pip installs into an environment that has none, so that the image has none.
RUN python3 -m venv /builder && python3 -m venv --without-pip /opt/triptych
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt .

# torch has a layer of its own, which a change of ours leaves as it is. The CPU's build comes from torch's own index; the
# CUDA one, with the CUDA libraries that it needs, from pip's. Empty: pip's. The driver is the node's.
# A build behind a proxy or a mirror brings its pip.conf, and its certificates, as secrets; the image keeps neither.
FROM environment AS builder
ARG VARIANT
ARG TORCH_INDEX_CPU=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX_CUDA=""
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    case "${VARIANT}" in \
      cpu) index="${TORCH_INDEX_CPU}" ;; \
      cuda) index="${TORCH_INDEX_CUDA}" ;; \
      *) echo "VARIANT is ${VARIANT}; cpu or cuda is needed" >&2; exit 1 ;; \
    esac \
    && /builder/bin/pip --python /opt/triptych/bin/python install ${index:+--index-url "${index}"} torch
COPY . .
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    /builder/bin/pip --python /opt/triptych/bin/python install ./proto "./[executor$([ "${VARIANT}" = cpu ] || echo -cuda13)]"
# The CUDA kernels are compiled here, which needs no card, so that no pod compiles them at its start.
WORKDIR /
RUN mkdir -p /opt/triptych/kernels \
    && if [ "${VARIANT}" = cuda ]; then /opt/triptych/bin/python -m kernels.build --out /opt/triptych/kernels; fi

FROM ${BASE}
ARG VARIANT
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="triptych-executor" \
      org.opencontainers.image.description="Triptych's executor (${VARIANT}): weights, KV tensors, kernels" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=builder /opt/triptych /opt/triptych
# All that is ever written goes below /cache and /tmp, which any user may write to; with a read-only root mount both.
RUN mkdir -m 1777 /cache
# USER, LOGNAME: torch asks for the user's name, which a random number has not.
ENV PATH=/opt/triptych/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    USER=triptych \
    LOGNAME=triptych \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    TRIPTYCH_CACHE=/cache/triptych \
    TRIPTYCH_EXECUTOR__KERNELS=/opt/triptych/kernels \
    HF_HOME=/cache/huggingface \
    CUPY_CACHE_DIR=/cache/cupy \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /cache
# By number, so that Kubernetes can tell that it is not root; any other number will do as well.
USER 65532:65532
EXPOSE 50053
ENTRYPOINT ["triptych", "executor"]
