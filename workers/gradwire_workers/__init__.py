"""The worker's side: a loop that runs user code on its main thread, and one package per framework.

Lent by the broker to environments gradwire is not installed in. Pure Python 3.9+.
"""
