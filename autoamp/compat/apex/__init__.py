"""What scripts find as ``apex`` where none is installed: its names, carried out by autoamp.

The files of this folder are imported as ``apex`` and ``apex.amp``, never as parts of autoamp
(`standins`), so that what is pickled names Apex.
"""

from . import amp, fp16_utils, normalization, optimizers, parallel

__all__ = ["amp", "fp16_utils", "normalization", "optimizers", "parallel"]
