"""Tensors of libraries that NumPy does not know."""

import numpy as np


class OnlyDlpack:
    """A tensor of a library that NumPy knows nothing of."""

    def __init__(self, tensor: np.ndarray):
        self.tensor = tensor

    def __dlpack__(self, **options: object) -> object:
        return self.tensor.__dlpack__()


class OnlyCuda:
    """Names memory as CUDA arrays do."""

    def __init__(self, tensor: np.ndarray, **changes: object):
        face = tensor.__array_interface__
        self.__cuda_array_interface__ = {
            "shape": face["shape"], "typestr": face["typestr"], "data": face["data"], "strides": tensor.strides,
            "version": 3, **changes,
        }
