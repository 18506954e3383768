# Tandem on a CPU, at the tested versions. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t tandem:cpu .
FROM python:3.12-slim
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY constraints.txt /tmp/constraints.txt
# hadolint ignore=DL3013
RUN torch=$(grep '^torch==' /tmp/constraints.txt) \
    && pip install --no-cache-dir "$torch" --index-url https://download.pytorch.org/whl/cpu
COPY . /tmp/tandem
RUN pip install --no-cache-dir -c /tmp/constraints.txt '/tmp/tandem[data,math,reasoning-gym,tensorboard]' \
    && rm -rf /tmp/tandem
WORKDIR /work
CMD ["tandem", "doctor"]
