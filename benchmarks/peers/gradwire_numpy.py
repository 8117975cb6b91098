"""gradwire: numpy caller, torch worker."""

import pathlib

import work

import gradwire as gw

x = work.batch()
with gw.connect() as bridge:
    worker = bridge.worker("torch", path=[pathlib.Path(__file__).parent], threads=1)
    echo, net = worker.function("targets:echo"), worker.module("work:torch_mlp").eval()

    def gradient():
        y, pullback = net.vjp(x)
        return pullback(2 * y)[0]

    rows = {**work.echoes(echo), **work.forward(lambda: net(x)), **work.gradient(gradient)}
work.report(rows, "pyzmq", "numpy", "torch")
