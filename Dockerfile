# Image for Gaudi nodes: docker build -t megatron-gaudi .     docs/start/gaudi.md says how to run it.
# The base holds the plugin and its build of torch; software, torch and the node's driver belong together (docs/start/gaudi.md).
ARG SOFTWARE=1.24.1
ARG TORCH=2.11.0
FROM vault.habana.ai/gaudi-docker/${SOFTWARE}/ubuntu24.04/habanalabs/pytorch-installer-${TORCH}:latest

# by which a run over several nodes starts its ranks
RUN apt-get update && apt-get install --yes --no-install-recommends openssh-server pdsh && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megatron-3d
# before the sources, so that a change of these does not install it again
COPY requirements.txt requirements-hpu.txt ./
# pip must keep the base's torch
RUN python3 -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > torch.txt \
    && pip install --no-cache-dir -c torch.txt -r requirements-hpu.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --editable .
ENV PYTHON=python3
CMD ["bash"]
