"""The alphabet of dims, and the names of mesh axes.

Dims, in docstrings, einsums and shape annotations:

    B batch rows      T query time     S key time      D model        F hidden of the MLP
    N query heads     K key-value heads    G = N / K query heads for each key-value head     H head dim
    V vocabulary      L layers         A accumulation steps      E experts      C capacity of an expert for a row

Mesh axes, outermost first. An axis that a run does not use has size 1.
"""

DATA = "data"  # replicas: rows of the batch are split, parameters are whole
FSDP = "fsdp"  # rows of the batch are split, and so are parameters and optimizer state
EXPERT = "expert"  # experts are split; around them, rows of the batch are, and parameters are whole
STAGE = "stage"  # layers are split, and micro-batches pass from stage to stage; around the layers rows of the batch are split
CONTEXT = "context"  # tokens of a row are split, and attention is a ring; parameters are whole
TENSOR = "tensor"  # heads, MLP hidden and vocabulary are split

# On a TPU `fsdp` is two axes of the mesh, where it spans several dimensions of the torus: this one is inside the other.
FSDP_INNER = "fsdp_inner"

MESH_AXES = (DATA, STAGE, FSDP, EXPERT, CONTEXT, TENSOR)
