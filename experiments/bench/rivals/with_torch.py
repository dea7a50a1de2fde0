"""What runs in environments with PyTorch: `loss(hidden [N D], weights [V D], labels [N])`, as `with_jax` does."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

Tensor = torch.Tensor
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def eager(tokens: int, vocab: int, slices: int) -> Loss:
    return lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y)


def compiled(tokens: int, vocab: int, slices: int) -> Loss:
    return torch.compile(eager(tokens, vocab, slices))


def _chunker(slices: int) -> None:
    options = importlib.import_module("torch._inductor.config").auto_chunker
    options.enable, options.num_chunk = True, slices
    options.output_size_threshold, options.amplify_ratio_threshold = 1024, 0  # whatever the sizes


def auto_chunker(tokens: int, vocab: int, slices: int) -> Loss:
    _chunker(slices)
    return torch.compile(eager(tokens, vocab, slices))


def linear_cross_entropy(tokens: int, vocab: int, slices: int) -> Loss:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=-(-tokens // slices))
    return lambda h, w, y: F.linear_cross_entropy(h, w, y, options=options)


def torchtune(tokens: int, vocab: int, slices: int) -> Loss:
    loss = importlib.import_module("torchtune.modules.loss").CEWithChunkedOutputLoss(num_output_chunks=slices)
    return lambda h, w, y: loss([part @ w.T for part in h[None].tensor_split(slices, dim=1)], y[None])


class _Head(torch.nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def torchtitan(tokens: int, vocab: int, slices: int) -> Loss:
    wrapper = importlib.import_module("torchtitan.components.loss").ChunkedLossWrapper
    chunked = wrapper(wrapper.Config(num_chunks=slices))

    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        chunked.set_lm_head(_Head(w))
        out = chunked(h[None], y[None], torch.tensor(float(tokens)))
        return out[0] if isinstance(out, tuple) else out

    return loss


def trl(tokens: int, vocab: int, slices: int) -> Loss:
    chunked = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    block = -(-vocab // slices)
    return lambda h, w, y: -chunked.apply(h, w, None, y, 1.0, block, None, 1.0, ())[0].mean()


def deepspeed_fused(tokens: int, vocab: int, slices: int) -> Loss:
    fused = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledFusedLogitsLoss

    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        part = lambda head, x, t: F.cross_entropy(head(x).float(), t, reduction="sum") / tokens
        return fused.apply(part, _Head(w), h[None], y[None], None, slices, [], "sum")

    return loss


def liger(tokens: int, vocab: int, slices: int) -> Loss:
    """Its chunked losses have no plain cross-entropy: the base of distillation, with no weight on the teacher."""
    base = importlib.import_module(
        "liger_kernel.chunked_loss.fused_linear_distillation"
    ).LigerFusedLinearDistillationBase

    class CrossEntropy(base):
        @staticmethod
        def distillation_loss_fn(student: Tensor, teacher: Tensor, target: Any = None, **_: Any) -> Tensor:
            return student.sum() * 0.0

        @classmethod
        def forward(cls, ctx: Any, h: Tensor, w: Tensor, th: Tensor, tw: Tensor, y: Tensor, size: int) -> Tensor:
            given = {"student_input": h, "student_weight": w, "teacher_input": th, "teacher_weight": tw, "target": y}
            how = {"weight_hard_loss": 1.0, "weight_soft_loss": 0.0, "compute_ce_loss": True, "compiled": False}
            return super().forward(cls=cls, ctx=ctx, chunk_size=size, **given, **how)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple:
            return (*base.backward(ctx, grad)[:2], None, None, None, None)

    none = torch.zeros(tokens, 1), torch.zeros(vocab, 1)
    return lambda h, w, y: CrossEntropy.apply(h, w, *(x.to(h.dtype) for x in none), y, -(-tokens // slices))


def liger_kernel(tokens: int, vocab: int, slices: int) -> Loss:
    """Its Triton kernel, which chooses the number of slices: some vocab / embed of them."""
    fused = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda h, w, y: fused(w, h, y)


def cce(tokens: int, vocab: int, slices: int) -> Loss:
    """Its Triton kernels, which leave blocks of small probabilities out of the gradients."""
    return importlib.import_module("cut_cross_entropy").linear_cross_entropy


def cce_unfiltered(tokens: int, vocab: int, slices: int) -> Loss:
    fused = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda h, w, y: fused(h, w, y, filter_eps=None)


def _resident(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))


def gradients(*of: Tensor) -> tuple[Tensor, ...]:
    """The gradients of what was differentiated."""
    found = tuple(x.grad for x in of if x.grad is not None)
    if len(found) < len(of):
        raise ValueError("it left an operand without a gradient")
    return found


class Runner:
    """Answers a worker's commands."""

    def __init__(self, build: str):
        self.build = globals()[build]
        self.name = build
        self.gpu = torch.cuda.is_available()  # none is shown to what is to run on a CPU

    out: tuple[Tensor, ...]

    def load(self, inputs: str, dtype: str, slices: int) -> dict:
        h, w, y = (torch.from_numpy(x).to("cuda" if self.gpu else "cpu") for x in np.load(inputs).values())
        kind = getattr(torch, dtype)
        self.h, self.w, self.y = h.to(kind), w.to(kind).T.contiguous(), y.long()
        self.fn = self.build(h.shape[0], w.shape[1], slices)
        del h, w, y
        self.step()  # compiles
        flops = None
        if self.name in ("eager", "torchtune", "torchtitan", "deepspeed_fused"):  # the counter sees all their products
            with FlopCounterMode(display=False) as counter:
                self.step()
            flops = counter.get_total_flops()
        del self.out
        gc.collect()
        risen = (self._of_device if self.gpu else self._of_process)()
        results = self.h.numel() * self.h.element_size() + self.w.numel() * self.w.element_size()
        return {"temporaries": risen - results, "flops": flops}

    def _of_process(self) -> int:
        """How far its resident memory rises in a step."""
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is not resident any more
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the former peak
        before = _resident("VmRSS")
        self.step()
        return _resident("VmHWM") - before

    def _of_device(self) -> int:
        """How far what it holds of the device's memory rises in a step."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        return torch.cuda.max_memory_allocated() - before

    def _wait(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self) -> dict:
        h, w = self.h.detach().requires_grad_(), self.w.detach().requires_grad_()
        self.out = ()  # those of the step before are not kept beside
        began = self._wait()
        loss = self.fn(h, w, self.y)
        loss.backward()
        seconds = self._wait() - began
        self.out = loss.detach(), *gradients(h, w)
        return {"seconds": seconds}

    def results(self, to: str, every: int) -> dict:
        loss, dh, dw = self.out
        loss, dh, dw = (x.double().cpu().numpy() for x in (loss, dh, dw[::every]))
        np.savez(to, loss=loss, dh=dh, dw=dw.T)
        return {}

    def loss(self, name: str, inputs: str, to: str) -> dict:
        """One of `losses`, sliced if the system can: its value, and gradients at a cotangent of 3."""
        own = {"logsumexp": torch.logsumexp, "log_softmax": torch.log_softmax}
        own["cross_entropy"] = lambda z, y, reduction: F.cross_entropy(z, y, reduction=reduction)
        xp = SimpleNamespace(**{**vars(importlib.import_module("array_api_compat.torch")), **own})
        fn = importlib.import_module("losses").LOSSES[name]
        given = {k: torch.from_numpy(v) for k, v in np.load(inputs).items()}
        h, w = given.pop("h").requires_grad_(), given.pop("w").T.contiguous().requires_grad_()
        torch._dynamo.reset()
        value, sliced = getattr(self, f"_loss_of_{self.name}")(lambda z, batch: fn(xp, z, batch), h, w, given)
        (3 * value).backward()
        if self.name == "auto_chunker":  # it says so once the backward pass is compiled
            sliced = importlib.import_module("torch._inductor.metrics").num_auto_chunking > 0
        dh, dw = gradients(h, w)
        np.savez(to, loss=value.detach().numpy(), dh=dh.numpy(), dw=dw.numpy().T)
        return {"sliced": sliced}

    def _loss_of_eager(self, fn: Any, h: Tensor, w: Tensor, batch: dict) -> tuple[Tensor, bool]:
        return fn(F.linear(h, w), batch), False

    def _loss_of_auto_chunker(self, fn: Any, h: Tensor, w: Tensor, batch: dict) -> tuple[Tensor, bool]:
        _chunker(4)
        importlib.import_module("torch._inductor.metrics").reset()
        return torch.compile(lambda h, w: fn(F.linear(h, w), batch))(h, w), False

    def _loss_of_torchtitan(self, fn: Any, h: Tensor, w: Tensor, batch: dict) -> tuple[Tensor, bool]:
        """A sum over the slices of sums divided by the number of tokens: a slice's mean counts for its share."""
        module = importlib.import_module("torchtitan.components.loss")
        wrapper = module.ChunkedLossWrapper
        chunked = wrapper(wrapper.Config(num_chunks=4))

        def of_slice(z: Tensor, at: Tensor, total: Tensor) -> tuple[Tensor, dict]:
            return fn(z[0], {k: v[at[0]] for k, v in batch.items()}) * (at.shape[1] / total), {}

        chunked.loss_fn = of_slice
        chunked.set_lm_head(_Head(w))
        out = chunked(h[None], torch.arange(h.shape[0])[None], torch.tensor(float(h.shape[0])))
        return (out[0] if isinstance(out, tuple) else out), True

    def _loss_of_deepspeed_fused(self, fn: Any, h: Tensor, w: Tensor, batch: dict) -> tuple[Tensor, bool]:
        """By its general interface, which runs every slice again once the cotangent is known; else as torchtitan."""
        tiled = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").SequenceTiledCompute

        def of_slice(h: Tensor, at: Tensor) -> Tensor:
            return fn(F.linear(h[0], w), {k: v[at[0]] for k, v in batch.items()}) * (at.shape[1] / tokens)

        tokens, cut = h.shape[0], ["h", "at"]
        given = h[None], torch.arange(tokens)[None]
        return tiled.apply(of_slice, tokens, 4, cut, [], "h", [w], 0, "sum", *given), True
