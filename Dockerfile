# An image for one node with NVIDIA GPUs, without models and data:
#   docker build -t vlm-rl .
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/out:/workspace/out" \
#       -v "$HOME/.cache/huggingface:/cache" -e HF_HOME=/cache vlm-rl python train.py --help
# --ipc=host: processes exchange data through /dev/shm, of which Docker gives a container only 64 MB.

# CUDA as torch's wheel is built for; devel, because Triton and vLLM compile kernels while they run. Python is 3.12.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update && apt-get install --yes --no-install-recommends git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1

WORKDIR /workspace
COPY requirements.txt requirements-gpu.txt ./
COPY locks/gpu.txt locks/
# torch alone first, as in the Makefile
RUN pip install -c locks/gpu.txt $(grep '^torch==' requirements.txt)
RUN pip install -c locks/gpu.txt -r requirements.txt -r requirements-gpu.txt
COPY . .
CMD ["bash"]
