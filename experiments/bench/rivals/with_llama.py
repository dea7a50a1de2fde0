"""What runs in the environment with llama.cpp: greedy answers to many texts at once, and to one after the other."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

library: Any = importlib.import_module("llama_cpp")
BATCH = 2048  # places of a batch


class Runner:
    """Answers a worker's commands."""

    def __init__(self, build: str):
        library.llama_backend_init()

    def load(self, file: str, rows: int, length: int, tokens: int) -> dict:
        self.tokens = tokens
        self.model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
        self.vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        self.one, self.many = self._context(1, length), self._context(rows, length)
        return {}

    def _context(self, rows: int, length: int):
        how = library.llama_context_default_params()
        how.n_ctx, how.n_batch, how.n_seq_max = length * rows, BATCH, rows
        how.n_threads = how.n_threads_batch = os.cpu_count()
        how.type_k = how.type_v = 0  # float32
        return library.llama_init_from_model(self.model, how)

    def together(self, prompts: list[list[int]]) -> dict:
        return {"ids": self._greedy(self.many, prompts)}

    def alone(self, prompts: list[list[int]]) -> dict:
        return {"ids": [self._greedy(self.one, [prompt])[0] for prompt in prompts]}

    def _greedy(self, context, prompts: list[list[int]]) -> list[list[int]]:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        batch = library.llama_batch_init(BATCH, 0, len(prompts))
        found: list[list[int]] = [[] for _ in prompts]
        asked = [list(enumerate(prompt)) for prompt in prompts]  # (position, id) of each text
        for _ in range(self.tokens):
            batch.n_tokens, last = 0, []
            for text, places in enumerate(asked):
                for position, token in places:
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at], batch.logits[at] = token, position, position == places[-1][0]
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, text
                    batch.n_tokens += 1
                last.append(batch.n_tokens - 1)
            if library.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for text, at in enumerate(last):
                logits = np.ctypeslib.as_array(library.llama_get_logits_ith(context, at), (self.vocab,))
                found[text].append(int(logits.argmax()))
            asked = [[(len(prompts[text]) + len(ids) - 1, ids[-1])] for text, ids in enumerate(found)]
        library.llama_batch_free(batch)
        return found
