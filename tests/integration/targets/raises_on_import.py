"""A user's module that does not import."""

raise RuntimeError("this module is broken on purpose")
