"""A JAX program trains a classifier of sentences on top of a pre-trained encoder that runs in a torch worker.

The encoder's process and environment have torch and transformers; this program's have JAX. At first the encoder
is frozen and each sentence is embedded once; with ``--finetune N`` both are trained together for N further steps, the
head by this program and the encoder by an optimizer of torch, through one ``jax.value_and_grad``.
"""

from __future__ import annotations

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import gradwire as gw

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def read_sentences(path: pathlib.Path) -> tuple[list[str], np.ndarray, list[str]]:
    """Sentences, their labels (n,) int32, and the names of the labels. One ``label<tab>sentence`` a line."""
    rows = [line.split("\t", 1) for line in path.read_text().splitlines()]
    names = sorted({label for label, _ in rows})
    return [text for _, text in rows], np.array([names.index(label) for label, _ in rows], np.int32), names


def split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices for training and for testing: every fourth sentence is for testing."""
    places = np.arange(len(labels))
    return places[places % 4 != 3], places[places % 4 == 3]


def make_head(classes: int, width: int) -> dict[str, jax.Array]:
    return {"weight": jnp.zeros((width, classes)), "bias": jnp.zeros(classes)}


def logits_of(head: dict[str, jax.Array], embeddings: jax.Array) -> jax.Array:
    return 10 * embeddings @ head["weight"] + head["bias"]  # of length 1, they are small numbers


def cross_entropy(logits: jax.Array, labels: np.ndarray) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def accuracy(head: dict[str, jax.Array], embeddings: jax.Array, labels: np.ndarray) -> float:
    return float((logits_of(head, embeddings).argmax(1) == labels).mean())


def train_head(
    head: dict[str, jax.Array], embeddings: jax.Array, labels: np.ndarray, steps: int
) -> dict[str, jax.Array]:
    """Gradient descent on the head alone."""

    @jax.jit
    def step(head: dict[str, jax.Array]) -> dict[str, jax.Array]:
        gradient = jax.grad(lambda h: cross_entropy(logits_of(h, embeddings), labels))(head)
        return jax.tree.map(lambda p, g: p - 0.5 * g, head, gradient)

    for _ in range(steps):
        head = step(head)
    return head


def finetune(
    encoder: gw.Remote, head: dict[str, jax.Array], tokens: list[np.ndarray], labels: np.ndarray, steps: int
) -> tuple[dict[str, jax.Array], list[float]]:
    """Head and encoder together; returns the head and the loss at each step."""
    encode, anchor = gw.jax.functional(encoder, owner="worker")
    optimizer = encoder.optimizer("torch.optim:AdamW", lr=2e-5)

    @jax.jit
    def gradients(head: dict[str, jax.Array], anchor: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        def loss(head: dict[str, jax.Array], anchor: jax.Array) -> jax.Array:
            return cross_entropy(logits_of(head, encode(anchor, *tokens)), labels)

        value, (gradient, _) = jax.value_and_grad(loss, (0, 1))(head, anchor)
        return value, gradient

    losses = []
    for _ in range(steps):
        value, gradient = gradients(head, anchor)
        optimizer.step()
        optimizer.zero_grad()
        head = jax.tree.map(lambda p, g: p - 0.5 * g, head, gradient)
        losses.append(float(value))
    return head, losses


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--python", default=str(ROOT / ".envs/sentences/bin/python"))
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--finetune", type=int, default=0)
    options.add_argument("--save-embeddings", type=pathlib.Path)
    chosen = options.parse_args()

    sentences, labels, names = read_sentences(HERE / "sentences.tsv")
    training, testing = split(labels)
    with gw.connect() as bridge:
        worker = bridge.worker(
            "torch", python=chosen.python, path=[HERE], threads=1, env={"TQDM_DISABLE": "1"}
        )
        encoder = worker.module("encoder:make_encoder")
        tokens = worker.function("encoder:tokenize")(sentences)
        embeddings = encoder.options(family="jax")(*tokens)
        print(f"{len(sentences)} sentences, embedded by a torch worker: {embeddings.shape}")
        head = train_head(
            make_head(len(names), embeddings.shape[1]), embeddings[training], labels[training], chosen.steps
        )
        print(
            f"head alone: accuracy on new sentences {accuracy(head, embeddings[testing], labels[testing]):.3f}"
        )
        if chosen.save_embeddings:
            np.save(chosen.save_embeddings, embeddings)
        if chosen.finetune:
            some = [t[training] for t in tokens]
            head, losses = finetune(encoder, head, some, labels[training], chosen.finetune)
            embeddings = encoder.options(family="jax")(*tokens)
            print(
                f"both together: loss {losses[0]:.4f} -> {losses[-1]:.4f}, accuracy {accuracy(head, embeddings[testing], labels[testing]):.3f}"
            )


if __name__ == "__main__":
    main()
