# syntax=docker/dockerfile:1
# Groupwise as a container, for CPUs or NVIDIA GPUs. Made from deploy/requirements.lock; runs as a user without rights.
#
#   docker build -t groupwise .
#   docker build -t groupwise:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run -p 8420:8420 -e GROUPWISE_API_KEY=... -v groupwise:/var/lib/groupwise groupwise
#   docker run --gpus all ... groupwise:cuda serve Qwen/Qwen3-0.6B
#   docker run -v "$PWD:/work" -w /work --user "$(id -u)" -e HF_HOME=/work/.cache groupwise run my_run.yaml
#
# Everything that is to stay is under /var/lib/groupwise: adapters, jobs, downloaded models.
# The same image each time: --build-arg BASE=python:3.11-slim@sha256:..., the digest that `docker pull` prints.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/groupwise
ENV PATH=/opt/groupwise/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN pip install "torch==${TORCH}" --index-url "${TORCH_INDEX}"
COPY deploy/requirements.lock /source/
RUN pip install --no-deps --require-hashes --requirement /source/requirements.lock
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install --no-deps /source

FROM ${BASE}
# Triton and torch.compile compile on the machine that they run on: without gcc attention is merged and steps are uncompiled
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home --home-dir /var/lib/groupwise groupwise
COPY --from=build /opt/groupwise /opt/groupwise
ENV PATH=/opt/groupwise/bin:$PATH \
    HF_HOME=/var/lib/groupwise/huggingface \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/groupwise
VOLUME /var/lib/groupwise
EXPOSE 8420
HEALTHCHECK --start-period=120s --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8420/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["groupwise"]
CMD ["serve", "starter", "--host", "0.0.0.0", "--state-dir", "/var/lib/groupwise/state"]
