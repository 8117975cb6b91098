"""Keras as in an environment that has its backend and nothing else of what it looks for.

Where TensorFlow and scikit-learn are installed Keras imports them, whatever its backend: seconds, and what is tested
could lean on them unseen. To be imported before Keras is.
"""

import sys

for absent in ("tensorflow", "sklearn"):
    sys.modules.setdefault(absent, None)

import keras  # noqa: E402


def backend():
    return keras.backend.backend()
