"""torch.distributed.rpc (TensorPipe) between two processes, and its distributed autograd for the gradient."""

import os
import socket

import torch
import torch.distributed.autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing
import work

_net = None


def echo(x):
    return x


def mlp(x):
    global _net
    if _net is None:
        _net = work.torch_mlp()
    return _net(x)


def serve(port):
    join("server", 1, port)
    rpc.shutdown()


def join(name, rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2, rpc_timeout=60)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def gradient(x):
    leaf = x.detach().requires_grad_()
    with torch.distributed.autograd.context() as context:
        loss = (rpc.rpc_sync("server", mlp, (leaf,)) ** 2).sum()
        torch.distributed.autograd.backward(context, [loss])
        return torch.distributed.autograd.get_gradients(context)[leaf]


def main():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = torch.multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    server.start()
    join("client", 0, port)
    x = torch.from_numpy(work.batch())

    def forward():
        with torch.no_grad():
            return rpc.rpc_sync("server", mlp, (x,))

    rows = {
        **work.echoes(lambda x: rpc.rpc_sync("server", echo, (torch.from_numpy(x),)), lambda y: y.numpy()),
        **work.forward(forward, lambda y: y.detach().numpy()),
        **work.gradient(lambda: gradient(x), lambda y: y.numpy()),
    }
    rpc.shutdown()
    server.join(10)
    work.report(rows, "torch")


if __name__ == "__main__":
    main()
