"""The real verl trainer with its vLLM replicas, fed by the swarm server over the engine link."""

#: How to install what training needs.
INSTALL = "in a clone, on a CPU `make setup`, with GPUs `pip install -c requirements/gpu.lock '.[gpu]'`"
