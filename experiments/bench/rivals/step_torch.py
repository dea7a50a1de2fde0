"""What takes training steps of a small Llama and decodes with it, in environments with PyTorch and transformers."""

from __future__ import annotations

import ctypes
import gc
import importlib
import time
from typing import Any

import numpy as np
import torch

_resident: Any = importlib.import_module("with_torch")._resident
AutoModelForCausalLM: Any = importlib.import_module("transformers").AutoModelForCausalLM
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


class Runner:
    """Answers a worker's commands."""

    def __init__(self, build: str):
        self.compiled = build == "compiled"

    def load(self, folder: str, ids: str, dtype: str) -> dict:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.run = torch.compile(self.model) if self.compiled else self.model
        self.ids, self.mixed = torch.from_numpy(np.load(ids)).long(), dtype == "bfloat16"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)
        return {}

    def step(self) -> dict:
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            loss = self.run(self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"seconds": time.perf_counter() - began, "loss": float(loss)}

    def memory(self) -> dict:
        """How far resident memory rises in a step; gradients are among it, as they are for a compiled step."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the former peak
        before = _resident("VmRSS")
        self.step()
        return {"temporaries": _resident("VmHWM") - before}

    def decode(self, folder: str, ids: str, dtype: str, tokens: int) -> dict:
        """Greedy text after each row of ids."""
        if getattr(self, "decoder", None) is None:
            self.decoder = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        prompts = torch.from_numpy(np.load(ids)).long()
        self.decoder.generation_config.eos_token_id = None
        began = time.perf_counter()
        with torch.no_grad():
            how: Any = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
            out = self.decoder.generate(prompts, attention_mask=torch.ones_like(prompts), **how)
        return {"seconds": time.perf_counter() - began, "ids": out[:, prompts.shape[1] :].tolist()}
