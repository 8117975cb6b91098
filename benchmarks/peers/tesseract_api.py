"""The model as a Tesseract: its schema, its forward, and its vector-Jacobian product."""

import torch
import work
from pydantic import BaseModel
from tesseract_core.runtime import Array, Differentiable, Float32, ShapeDType

net = work.torch_mlp()


class InputSchema(BaseModel):
    x: Differentiable[Array[(None, None), Float32]]
    echo: bool = False


class OutputSchema(BaseModel):
    y: Differentiable[Array[(None, None), Float32]]


def apply(inputs: InputSchema) -> OutputSchema:
    if inputs.echo:
        return OutputSchema(y=inputs.x)
    with torch.no_grad():
        return OutputSchema(y=net(torch.from_numpy(inputs.x.copy())).numpy())


def vector_jacobian_product(inputs, vjp_inputs, vjp_outputs, cotangent_vector):
    x = torch.from_numpy(inputs.x.copy()).requires_grad_()
    (bar,) = torch.autograd.grad(net(x), x, torch.from_numpy(cotangent_vector["y"].copy()))
    return {"x": bar.numpy()}


def abstract_eval(abstract_inputs):
    batch = abstract_inputs.x.shape[0]
    width = abstract_inputs.x.shape[1] if abstract_inputs.echo else work.WIDTHS[-1]
    return {"y": ShapeDType(shape=(batch, width), dtype="float32")}
