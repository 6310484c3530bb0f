"""A zoo of tiny models with random weights, one for each class of diffusers that is worth a test.

`ZOO` has the models by name, `build` makes the pipeline of one. All are built from small configurations, without a
network: the modules are the real ones, a few layers deep. Two builds of a model have equal weights.
"""

from zoo.model import ZooModel
from zoo.registry import ZOO, build

__all__ = ["ZOO", "ZooModel", "build"]
