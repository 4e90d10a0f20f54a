# Targets: cpu (the default) and cuda. Each is a virtual environment on a slim Python image, without sources,
# package caches or a C++ compiler. The server runs as user 10001 and writes only to /tmp.
#
#   docker build -t ep-server:0.1.0 .
#   docker build --target cuda -t ep-server:0.1.0-cuda .
#
# The tags are those that the Helm chart asks for: its appVersion. To pin a base image, add its digest:
#   docker buildx imagetools inspect python:3.11-slim-bookworm --format '{{.Manifest.Digest}}'
#   docker build --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:... -t ep-server:0.1.0 .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04

FROM scratch AS sources
COPY LICENSE MANIFEST.in README.md pyproject.toml setup.py /src/
COPY csrc /src/csrc
COPY protos /src/protos
COPY ep_server /src/ep_server

FROM ${PYTHON_IMAGE} AS requirements
COPY pyproject.toml /
RUN python -c 'import tomllib; project = tomllib.load(open("/pyproject.toml", "rb"))["project"]; \
print(*project["dependencies"], *project["optional-dependencies"]["doors"], sep="\n")' > /requirements.txt

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libfabric-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints*.txt ./
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install -c constraints-cpu.txt pip setuptools wheel pybind11 \
    && python -m venv --without-pip /opt/ep-server

# The dependencies are a layer of their own: a code change does not rewrite it.
FROM build AS dependencies-cpu
# The index of torch's CPU builds. If empty, pip takes torch from the default index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=requirements /requirements.txt ./
RUN /opt/build/bin/pip --python /opt/ep-server/bin/python install -c constraints-cpu.txt -r requirements.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}

FROM build AS dependencies-cuda
ARG TORCH_INDEX=
COPY --from=requirements /requirements.txt ./
RUN /opt/build/bin/pip --python /opt/ep-server/bin/python install -c constraints-cuda.txt -r requirements.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}

FROM build AS package-cpu
COPY --from=sources /src ./
RUN EP_SERVER_CUDA=0 EP_SERVER_FABRIC=1 /opt/build/bin/pip wheel --no-deps --no-build-isolation -w /wheels . \
    && /opt/build/bin/pip --python /opt/ep-server/bin/python install --no-deps --root /package /wheels/*.whl

FROM ${CUDA_IMAGE} AS toolkit

FROM build AS package-cuda
COPY --from=toolkit /usr/local/cuda /usr/local/cuda
COPY --from=sources /src ./
RUN EP_SERVER_CUDA=1 EP_SERVER_FABRIC=1 /opt/build/bin/pip wheel --no-deps --no-build-isolation -w /wheels . \
    && /opt/build/bin/pip --python /opt/ep-server/bin/python install --no-deps --root /package /wheels/*.whl

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="ep-server" \
      org.opencontainers.image.description="Expert-parallel decode server for Mixture-of-Experts language models" \
      org.opencontainers.image.licenses="Apache-2.0"
# For servers of several nodes.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libfabric1 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 ep-server \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin ep-server
ENV PATH=/opt/ep-server/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    EP_SERVER_GRPC__HOST=0.0.0.0 \
    EP_SERVER_METRICS__HOST=0.0.0.0 \
    EP_SERVER_LOG__FORMAT=json
WORKDIR /tmp
USER 10001:10001
EXPOSE 50051 9400 50061
STOPSIGNAL SIGTERM
# For a server without TLS on the default port; orchestrators probe gRPC themselves.
HEALTHCHECK --interval=10s --timeout=6s --start-period=15m --retries=3 CMD ["ep-server", "health"]
ENTRYPOINT ["ep-server"]
CMD ["serve"]

FROM runtime AS runtime-cuda
USER 0:0
# Triton compiles the kernels' launchers with a C compiler when a rank starts.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime-cuda AS cuda
COPY --from=dependencies-cuda /opt/ep-server /opt/ep-server
COPY --from=package-cuda /package /
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"

FROM runtime AS cpu
COPY --from=dependencies-cpu /opt/ep-server /opt/ep-server
COPY --from=package-cpu /package /
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
