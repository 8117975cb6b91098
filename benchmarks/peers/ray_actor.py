"""A Ray actor on this machine; large arrays travel through its object store and are not copied out."""

import pathlib

import ray
import work


@ray.remote(num_cpus=1)
class Server:
    def __init__(self):
        self.net = work.torch_mlp()

    def echo(self, x):
        return x

    def mlp(self, x):
        import torch

        with torch.no_grad():
            return self.net(torch.from_numpy(x.copy())).numpy()  # what Ray hands over is read-only


def main():
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(pathlib.Path(__file__).parent)}},
    )
    server = Server.remote()
    x = work.batch()
    rows = {
        **work.echoes(lambda x: ray.get(server.echo.remote(x))),
        **work.forward(lambda: ray.get(server.mlp.remote(x))),
    }
    ray.shutdown()
    work.report(rows, "ray", "torch")


if __name__ == "__main__":
    main()
