# An image with gossip-training and the commands of its lab:
#     docker build -t gossip-training .
#     docker run --rm gossip-training gossip train world_size=2
# PYTHON is one of 3.11 to 3.14. torch is taken from wherever pip looks; for the build for CPUs, give it the index that
# PyTorch's selector names: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
COPY LICENSE README.md pyproject.toml setup.cfg setup.py gossip_training.py /source/
COPY configs /source/configs
COPY gossip /source/gossip
COPY topologies /source/topologies
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:${PYTHON}-slim
ARG PIP_EXTRA_INDEX_URL
COPY constraints.txt /constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir -c /constraints.txt "$(echo /wheels/*.whl)[lab]" && python -m gossip_training
WORKDIR /work
CMD ["gossip", "train"]
