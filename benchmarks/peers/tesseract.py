"""Tesseract, served by a process of its own: ``python tesseract.py json+base64|json+binref``. With base64 also tesseract-jax."""

import os
import pathlib
import sys
import tempfile

import work
from tesseract_core import Tesseract

HERE = pathlib.Path(__file__).parent
RAM = (
    "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
)  # where binref's files are memory, as its authors advise


def under_jax(tesseract):
    import jax
    from tesseract_jax import apply_tesseract

    x = jax.numpy.asarray(work.batch())
    forward = jax.jit(lambda x: apply_tesseract(tesseract, {"x": x})["y"])
    gradient = jax.jit(jax.value_and_grad(lambda x: (apply_tesseract(tesseract, {"x": x})["y"] ** 2).sum()))
    return {
        **work.forward(lambda: jax.block_until_ready(forward(x))),
        **work.gradient(lambda: jax.block_until_ready(gradient(x))[1]),
    }


def main():
    encoding, mode = sys.argv[1], sys.argv[2]
    os.environ["PYTHONPATH"] = str(HERE)
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        more = {"output_path": folder, "experimental_binref_pool": True} if encoding == "json+binref" else {}
        more |= {"python_executable": sys.executable, "startup_timeout": 120.0}  # torch from a cold disk
        with Tesseract.from_source(HERE / "tesseract_api.py", output_format=encoding, **more) as tesseract:
            if mode == "jax":
                rows = under_jax(tesseract)
            else:
                x = work.batch()
                rows = {
                    **work.echoes(
                        lambda x: tesseract.apply({"x": x[None], "echo": True})["y"], lambda y: y[0]
                    ),
                    **work.forward(lambda: tesseract.apply({"x": x})["y"]),
                }
    work.report(rows, "tesseract-core", "tesseract-jax", "torch", "jax")


if __name__ == "__main__":
    main()
