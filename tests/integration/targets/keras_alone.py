"""Keras as in an environment that has its backend and nothing else of what it looks for.

Where TensorFlow and scikit-learn are installed Keras imports them, whatever its backend: seconds, and what is tested
could lean on them unseen. To be imported before Keras is.
"""

import sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    """(None in `sys.modules` would do for imports, but Keras also asks whether a name is there.)"""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("tensorflow", "sklearn")
        return None if hidden else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without

import keras  # noqa: E402


def backend():
    return keras.backend.backend()
