"""Stock transformers on a kvd daemon: a cache, an attention function, and calibrations.

client = kvd.connect("/run/kvd/region.sock")
cache = kvd.transformers.KvdCache(model, client, codec="kivi-4")
model.generate(**inputs, past_key_values=cache)
"""

from .attention import register
from .cache import KvdCache
from .calibration import calibrate, dump_rows
from .support import SUPPORTED_MODELS

__all__ = ["SUPPORTED_MODELS", "KvdCache", "calibrate", "dump_rows", "register"]
