# lmjax for GPUs (the default) or TPUs: docker build [--build-arg JAX=tpu] -t REGISTRY/lmjax .
# The CUDA libraries come with jax's own wheels; the node brings the driver.
FROM python:3.12-slim
ARG JAX=cuda
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /lmjax
COPY constraints constraints
COPY pyproject.toml README.md ./
COPY lmjax lmjax
COPY configs configs
RUN pip install -c constraints/py312.txt -e ".[gcs,${JAX}]"
ENTRYPOINT ["lmjax"]
CMD ["--help"]
