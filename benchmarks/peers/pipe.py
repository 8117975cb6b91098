"""multiprocessing.Pipe: objects pickled through a Unix socket."""

import multiprocessing

import work


def serve(pipe):
    import torch

    net = work.torch_mlp()
    while True:
        verb, x = pipe.recv()
        if verb == "end":
            return
        if verb == "mlp":
            with torch.no_grad():
                x = net(torch.from_numpy(x)).numpy()
        pipe.send(x)


def main():
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    server = context.Process(target=serve, args=(other,), daemon=True)
    server.start()

    def call(verb, x):
        pipe.send((verb, x))
        return pipe.recv()

    x = work.batch()
    rows = {**work.echoes(lambda x: call("echo", x)), **work.forward(lambda: call("mlp", x))}
    pipe.send(("end", None))
    server.join(10)
    work.report(rows, "numpy", "torch")


if __name__ == "__main__":
    main()
