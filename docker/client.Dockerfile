# The client's image: the command line alone, for tests of an installation.
# Build from the repository's root: docker build -f docker/client.Dockerfile . (docs/deploy.md tells the arguments).
ARG BASE=docker.io/library/python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7

FROM ${BASE} AS builder
WORKDIR /src
# The builder's pip installs into an environment that has none, so that the image has none.
RUN python3 -m venv /builder && python3 -m venv --without-pip /opt/triptych
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
COPY . .
ARG EXTRA=cli
# A build behind a proxy or a mirror brings its pip.conf, and its certificates, as secrets; the image keeps neither.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    /builder/bin/pip --python /opt/triptych/bin/python install ./proto ./clients/python "./[${EXTRA}]"

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="triptych-client" \
      org.opencontainers.image.description="Triptych's command line: chat, generate" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=builder /opt/triptych /opt/triptych
# All that is ever written goes below /cache and /tmp, which any user may write to; with a read-only root mount both.
RUN mkdir -m 1777 /cache
ENV PATH=/opt/triptych/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    TRIPTYCH_CACHE=/cache/triptych \
    HF_HOME=/cache/huggingface
WORKDIR /cache
# By number, so that Kubernetes can tell that it is not root; any other number will do as well.
USER 65532:65532
ENTRYPOINT ["triptych"]
