# Tandem and vLLM for NVIDIA GPUs, each in an environment of its own: engine.python=/opt/vllm/bin/python. From the root:
#   docker build -f docker/cuda.Dockerfile -t tandem:cuda .
# torch's wheels bring CUDA's libraries; the host has the driver and the NVIDIA Container Toolkit.
FROM python:3.12-slim
# A compiler: triton builds its launcher with it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y build-essential \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/vllm && /opt/vllm/bin/pip install --no-cache-dir 'vllm>=0.26'
COPY constraints.txt /tmp/constraints.txt
COPY . /tmp/tandem
RUN pip install --no-cache-dir -c /tmp/constraints.txt '/tmp/tandem[data,math,reasoning-gym,tensorboard]' \
    && rm -rf /tmp/tandem
WORKDIR /work
CMD ["tandem", "doctor"]
