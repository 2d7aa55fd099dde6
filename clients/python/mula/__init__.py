"""Reads the samples of a mula plan: one exact order, resumable on any number of ranks.

Tokenizer converts texts to token ids.

docs/guides/python.md is a tour.
"""

from mula.batch import Batch
from mula.errors import Error
from mula.fingerprints import verify
from mula.stream import Stream
from mula.tokenizer import EncodedBatch, Tokenizer

__version__ = "0.0.0"  # make dist sets the version, from git
__all__ = ["Batch", "EncodedBatch", "Error", "Stream", "Tokenizer", "__version__", "verify"]
