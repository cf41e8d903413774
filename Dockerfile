# Two images for linux/amd64:
#
#   docker build --target cpu -t smartspec:cpu .    Python with the wheel of Triton, and a tiny pair
#   docker build --target gpu -t smartspec:gpu .    NVIDIA's Triton image with TensorRT-LLM
#
# Both serve the models that /models/smartspec/1/engine.json names, and drain on SIGTERM. The stop
# timeout must be longer than limits.drain_s plus 20 s (docker stop -t 60). docs/operate/deploy.md
# explains how to run them, and scripts/check_image builds and tries the first.

ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm
# Base of `cpu`. With nvcr.io/nvidia/tritonserver:26.07-py3 it serves by that Triton instead of the
# wheel's. NVIDIA's images must be 26.05 or newer: older ones have known remote vulnerabilities
# (docs/operate/security.md).
ARG CPU_IMAGE=${PYTHON_IMAGE}
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3

# Builds the wheel of this package for both images.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY backend ./backend
COPY tools ./tools
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${CPU_IMAGE} AS cpu
LABEL org.opencontainers.image.title="SmartSpec for Triton, CPU" \
      org.opencontainers.image.description="Speculative decoding by goodput; PyTorch on a CPU" \
      org.opencontainers.image.licenses="Apache-2.0"
# Packages are installed as root; the server runs as user 1000.
# hadolint ignore=DL3002
USER 0
# Index of CPU builds of torch. Without it, pip installs the CUDA build, which is gigabytes larger.
ARG TORCH_INDEX=""
WORKDIR /src
# A separate virtual environment, so that the packages of the base do not change. It has no pip,
# because the server needs none.
RUN python3 -m venv --without-pip /opt/smartspec \
    && install -d -o 1000 -g 1000 /var/cache/smartspec
# Packages are installed before the source, so that a source change does not rebuild their layers.
COPY pyproject.toml ./
# pip checks the hash of every package but torch, which has a build for each kind of machine.
COPY deploy/image/requirements.py deploy/image/locked.txt ./deploy/image/
RUN python3 -m pip --python /opt/smartspec/bin/python install --no-cache-dir \
        --no-deps --require-hashes -r deploy/image/locked.txt
RUN python3 deploy/image/requirements.py torch > torch.txt \
    && python3 -m pip --python /opt/smartspec/bin/python install --no-cache-dir \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r torch.txt
COPY --from=wheel /dist /dist
RUN python3 -m pip --python /opt/smartspec/bin/python install --no-cache-dir --no-deps \
        /dist/smartspec_py-*.whl \
    && python3 -m pip --python /opt/smartspec/bin/python check
# Fails if the base has no Triton and no Python that the wheel of Triton has a stub for.
RUN /opt/smartspec/bin/python -c "from smartspec_launch import files; files.find_installation()"
# The stub of Triton's Python backend uses the packages of the first python3 on PATH.
# SMARTSPEC_ALLOW_REMOTE: who can reach a container is decided outside it, by the published ports.
ENV PATH=/opt/smartspec/bin:$PATH \
    HF_HOME=/var/cache/smartspec/huggingface \
    HOME=/var/cache/smartspec \
    PYTHONUNBUFFERED=1 \
    SMARTSPEC_ALLOW_REMOTE=1 \
    XDG_CACHE_HOME=/var/cache
COPY engines_build/tiny /models/tiny
COPY deploy/image/tiny.json /models/smartspec/1/engine.json
COPY deploy/image/entrypoint.py deploy/image/healthcheck.py /opt/smartspec/
USER 1000:1000
VOLUME ["/var/cache/smartspec"]
EXPOSE 8000 8001 8002 9000
HEALTHCHECK --interval=30s --timeout=65s --start-period=300s --retries=2 \
    CMD ["python", "/opt/smartspec/healthcheck.py"]
ENTRYPOINT ["python", "/opt/smartspec/entrypoint.py"]

FROM ${TRITON_IMAGE} AS gpu
LABEL org.opencontainers.image.title="SmartSpec for Triton, GPU" \
      org.opencontainers.image.description="Speculative decoding by goodput; NVIDIA Triton" \
      org.opencontainers.image.licenses="Apache-2.0"
# NVIDIA's image starts as root. Packages are installed as root; the server runs as user 1000.
# hadolint ignore=DL3002
USER 0
WORKDIR /opt/smartspec
COPY pyproject.toml ./
COPY deploy/image/requirements.py ./deploy/image/
# TensorRT-LLM needs exact versions of torch, transformers and numpy. So installed packages do not
# change, and only missing packages are installed.
RUN pip list --format=freeze > installed.txt \
    && python3 deploy/image/requirements.py --missing project > missing.txt \
    && pip install --no-cache-dir -c installed.txt -r missing.txt
COPY --from=wheel /dist /dist
# The link is for use with plain `tritonserver`, which looks for backends in that folder.
RUN pip install --no-cache-dir --no-deps /dist/smartspec_py-*.whl \
    && ln -s "$(python3 -c 'import pathlib, smartspec_py as s; print(pathlib.Path(s.__file__).parent)')" \
        /opt/tritonserver/backends/smartspec_py \
    && install -d -o 1000 -g 1000 /var/cache/smartspec
ENV HF_HOME=/var/cache/smartspec/huggingface \
    HOME=/var/cache/smartspec \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache
COPY deploy/image/entrypoint.py deploy/image/healthcheck.py ./
USER 1000:1000
VOLUME ["/var/cache/smartspec"]
EXPOSE 8000 8001 8002 9000
HEALTHCHECK --interval=30s --timeout=65s --start-period=1800s --retries=2 \
    CMD ["python3", "/opt/smartspec/healthcheck.py"]
# NVIDIA's entry point runs first, because it selects the CUDA libraries for the driver.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "python3", "/opt/smartspec/entrypoint.py"]
