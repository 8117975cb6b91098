"""pyzmq as one would write it: DEALER and ROUTER over ipc, a msgpack header, the array as a frame that is not copied."""

import multiprocessing
import tempfile

import msgpack
import numpy as np
import work
import zmq


def serve(address):
    import torch

    net = work.torch_mlp()
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    while True:
        who, header, body = socket.recv_multipart(copy=False)
        verb, dtype, shape = msgpack.unpackb(header.buffer)
        x = np.frombuffer(body.buffer, dtype).reshape(shape)
        if verb == "end":
            return
        if verb == "mlp":
            with torch.no_grad():
                x = net(torch.from_numpy(x.copy())).numpy()
        socket.send_multipart([who, msgpack.packb([verb, x.dtype.str, x.shape]), x], copy=False)


def main():
    with tempfile.TemporaryDirectory(prefix="p") as folder:
        address = f"ipc://{folder}/s"
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(address,), daemon=True)
        server.start()
        socket = zmq.Context().socket(zmq.DEALER)
        socket.connect(address)

        def call(verb, x):
            socket.send_multipart([msgpack.packb([verb, x.dtype.str, x.shape]), x], copy=False)
            header, body = socket.recv_multipart(copy=False)
            _, dtype, shape = msgpack.unpackb(header.buffer)
            return np.frombuffer(body.buffer, dtype).reshape(shape)

        x = work.batch()
        rows = {**work.echoes(lambda x: call("echo", x)), **work.forward(lambda: call("mlp", x))}
        socket.send_multipart([msgpack.packb(["end", "<f4", [0]]), b""])
        server.join(10)
    work.report(rows, "pyzmq", "msgpack", "torch")


if __name__ == "__main__":
    main()
