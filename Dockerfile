# Two images of one source, for linux/amd64:
#
#   docker build --target cpu -t smartspec:cpu .    on NVIDIA's Triton image, PyTorch on a CPU, a tiny pair
#   docker build --target gpu -t smartspec:gpu .    on the one with TensorRT-LLM
#
# Both serve what /models/smartspec/1/engine.json names, and drain on SIGTERM: give them more time
# than limits.drain_s plus 20 s (docker stop -t 60). deploy/README.md says how to run them.

# Not older than 26.05: before, Triton has known remote vulnerabilities (docs/operate/security.md).
ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm
ARG TRITON_CPU_IMAGE=nvcr.io/nvidia/tritonserver:26.07-py3
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3

# The package alone, for both images.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY backend ./backend
COPY tools ./tools
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${TRITON_CPU_IMAGE} AS cpu
LABEL org.opencontainers.image.title="SmartSpec for Triton, CPU" \
      org.opencontainers.image.description="Speculative decoding by goodput; PyTorch on a CPU" \
      org.opencontainers.image.licenses="Apache-2.0"
# NVIDIA's image starts as root; the packages belong to root and the server does not run as it.
# hadolint ignore=DL3002
USER 0
# An index of CPU builds of torch; without it pip takes the build with CUDA, gigabytes more.
ARG TORCH_INDEX=""
WORKDIR /src
# An environment of its own, which leaves NVIDIA's packages as they are. Debian's Python has no
# ensurepip, so that pip stays outside.
RUN python3 -m venv --without-pip /opt/smartspec \
    && install -d -o 1000 -g 1000 /var/cache/smartspec
# Packages come before the source: a change of the source leaves their layers in the cache.
COPY pyproject.toml ./
COPY deploy/image/requirements.py deploy/image/constraints.txt ./deploy/image/
RUN python3 deploy/image/requirements.py torch > torch.txt \
    && python3 -m pip --python /opt/smartspec/bin/python install --no-cache-dir \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -c deploy/image/constraints.txt -r torch.txt
RUN python3 deploy/image/requirements.py project torch openvino > all.txt \
    && python3 -m pip --python /opt/smartspec/bin/python install --no-cache-dir \
        -c deploy/image/constraints.txt -r all.txt
COPY --from=wheel /dist /dist
RUN python3 -m pip --python /opt/smartspec/bin/python install --no-cache-dir --no-deps \
        /dist/smartspec_py-*.whl
# The stub of Triton's Python backend takes the packages of the first python3 on PATH.
ENV PATH=/opt/smartspec/bin:$PATH \
    HF_HUB_OFFLINE=1 \
    HOME=/var/cache/smartspec \
    PYTHONUNBUFFERED=1 \
    TRANSFORMERS_OFFLINE=1 \
    XDG_CACHE_HOME=/var/cache
COPY engines_build/tiny /models/tiny
COPY deploy/image/tiny.json /models/smartspec/1/engine.json
COPY deploy/image/entrypoint.py deploy/image/healthcheck.py /opt/smartspec/
USER 1000:1000
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=30s --timeout=20s --start-period=300s --retries=3 \
    CMD ["python", "/opt/smartspec/healthcheck.py"]
ENTRYPOINT ["python", "/opt/smartspec/entrypoint.py"]

FROM ${TRITON_IMAGE} AS gpu
LABEL org.opencontainers.image.title="SmartSpec for Triton, GPU" \
      org.opencontainers.image.description="Speculative decoding by goodput; NVIDIA Triton" \
      org.opencontainers.image.licenses="Apache-2.0"
# NVIDIA's image starts as root; the packages belong to root and the server does not run as it.
# hadolint ignore=DL3002
USER 0
WORKDIR /opt/smartspec
COPY pyproject.toml ./
COPY deploy/image/requirements.py ./deploy/image/
# TensorRT-LLM fits one torch, one transformers and one numpy: whatever the image has stays, and
# only what it lacks is installed.
RUN pip list --format=freeze > installed.txt \
    && python3 deploy/image/requirements.py --missing project > missing.txt \
    && pip install --no-cache-dir -c installed.txt -r missing.txt
COPY --from=wheel /dist /dist
# The link is for a plain `tritonserver`, which looks for backends there.
RUN pip install --no-cache-dir --no-deps /dist/smartspec_py-*.whl \
    && ln -s "$(python3 -c 'import pathlib, smartspec_py as s; print(pathlib.Path(s.__file__).parent)')" \
        /opt/tritonserver/backends/smartspec_py \
    && install -d -o 1000 -g 1000 /var/cache/smartspec
ENV HF_HUB_OFFLINE=1 \
    HOME=/var/cache/smartspec \
    PYTHONUNBUFFERED=1 \
    TRANSFORMERS_OFFLINE=1 \
    XDG_CACHE_HOME=/var/cache
COPY deploy/image/entrypoint.py deploy/image/healthcheck.py ./
USER 1000:1000
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=30s --timeout=20s --start-period=1800s --retries=3 \
    CMD ["python3", "/opt/smartspec/healthcheck.py"]
# NVIDIA's own entry comes first, since it finds the CUDA libraries that fit the driver.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "python3", "/opt/smartspec/entrypoint.py"]
