# Targets: cpu (the last, so the default) and cuda. Each ends as one virtual environment on a slim Python image:
# no source, no package manager's cache, no compiler but the one for C that Triton needs on GPUs; user 10001, and
# only /tmp is written to.
#
#   docker build --target cpu --build-arg PYTHON_DIGEST=sha256:... -t ep-server:0.1.0 .
#   docker build --target cuda --build-arg PYTHON_DIGEST=sha256:... --build-arg CUDA_DIGEST=sha256:... -t ep-server:0.1.0-cuda .
#
# The chart asks for these tags: its appVersion. Which images are built on is decided by who builds: no image has
# the default digests. Print the current ones, of both ..._IMAGE below, with
#   docker buildx imagetools inspect python:3.11-slim-bookworm --format '{{.Manifest.Digest}}'
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG PYTHON_DIGEST=sha256:0000000000000000000000000000000000000000000000000000000000000000
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG CUDA_DIGEST=sha256:0000000000000000000000000000000000000000000000000000000000000000

FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libfabric-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/build && /opt/build/bin/pip install -c constraints.txt setuptools wheel pybind11
COPY LICENSE MANIFEST.in README.md pyproject.toml setup.py ./
COPY csrc csrc
COPY protos protos
COPY ep_server ep_server

FROM build AS wheel-cpu
RUN EP_SERVER_CUDA=0 EP_SERVER_FABRIC=1 /opt/build/bin/pip wheel --no-deps --no-build-isolation -w /wheels .

FROM ${CUDA_IMAGE}@${CUDA_DIGEST} AS toolkit

FROM build AS wheel-cuda
COPY --from=toolkit /usr/local/cuda /usr/local/cuda
RUN EP_SERVER_CUDA=1 EP_SERVER_FABRIC=1 /opt/build/bin/pip wheel --no-deps --no-build-isolation -w /wheels .

FROM build AS install-cpu
# Where torch's build without CUDA is; empty takes what the default index has.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=wheel-cpu /wheels /wheels
RUN python -m venv /opt/ep-server \
    && /opt/ep-server/bin/pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} /wheels/*.whl \
    && /opt/ep-server/bin/pip check \
    && /opt/ep-server/bin/pip uninstall -y pip

FROM build AS install-cuda
ARG TORCH_INDEX=
COPY --from=wheel-cuda /wheels /wheels
RUN python -m venv /opt/ep-server \
    && /opt/ep-server/bin/pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} /wheels/*.whl \
    && /opt/ep-server/bin/pip check \
    && /opt/ep-server/bin/pip uninstall -y pip

FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ep-server" \
      org.opencontainers.image.description="Expert-parallel decode server for Mixture-of-Experts language models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
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
# As a rank starts, Triton compiles what loads and launches its kernels.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001:10001

FROM runtime-cuda AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=install-cuda /opt/ep-server /opt/ep-server

FROM runtime AS cpu
COPY --from=install-cpu /opt/ep-server /opt/ep-server
