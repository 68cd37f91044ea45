"""Small models in NumPy, made of named modules, whose runs are traced with the real writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyattn.trace import Trace, TraceWriter, read

Array = np.ndarray
F32 = np.float32


class Module:
    """A module: parameters are arrays, children modules, both attributes; `forward` computes."""

    def __init__(self) -> None:
        self.name = ""
        self.trace: TraceWriter | None = None
        self.step = 0
        self.kind = type(self).__name__
        self.change: Callable[..., Any] | None = None  # a fault: changes the output
        self.recorded = True

    def children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list) and value and isinstance(value[0], Module):
                yield from ((f"{name}.{at}", one) for at, one in enumerate(value))

    def modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, child in self.children():
            yield from child.modules(f"{prefix}.{name}".lstrip("."))

    def parameters(self) -> dict[str, Array]:
        found = {}
        for prefix, module in self.modules():
            for name, value in vars(module).items():
                if isinstance(value, np.ndarray):
                    found[f"{prefix}.{name}".lstrip(".")] = value
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = [(f"args[{at}]", value) for at, value in enumerate(args)]
        named += [(f"kwargs.{name}", value) for name, value in kwargs.items()]
        for path, value in named:
            self._add("in", path, value)
        out = self.forward(*args, **kwargs)
        if self.change is not None:
            out = self.change(out, *args)
        self._add("out", "out", out)
        return out

    def _add(self, phase: str, path: str, value: Any) -> None:
        if isinstance(value, tuple):
            for at, one in enumerate(value):
                self._add(phase, f"{path}[{at}]", one)
        elif isinstance(value, np.ndarray) and self.trace is not None and self.recorded:
            self.trace.add(self.name, phase, path, value, cls=self.kind)


class Linear(Module):
    def __init__(self, weight: Array, bias: Array | None = None) -> None:
        super().__init__()
        self.weight = weight
        if bias is not None:
            self.bias = bias

    def forward(self, x: Array) -> Array:
        out = matmul(x, self.weight.T)
        return out + self.bias if hasattr(self, "bias") else out


class Conv1D(Linear):
    """The weight lies transposed."""

    def forward(self, x: Array) -> Array:
        out = matmul(x, self.weight)
        return out + self.bias if hasattr(self, "bias") else out


CHUNKS = 1


def matmul(x: Array, w: Array) -> Array:
    """x @ w, in as many sums as CHUNKS says: another order of summation."""
    if CHUNKS == 1:
        return (x @ w).astype(x.dtype)
    parts = np.array_split(np.arange(w.shape[0]), CHUNKS)
    total = x[..., parts[0]] @ w[parts[0]]
    for part in parts[1:]:
        total = total + x[..., part] @ w[part]
    return total.astype(x.dtype)


class Embedding(Module):
    def __init__(self, weight: Array) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Array) -> Array:
        return self.weight[ids]


class RMSNorm(Module):
    def __init__(self, weight: Array, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Array) -> Array:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + F32(self.eps))
        return (x * scale * self.weight).astype(x.dtype)


class Rope(Module):
    def forward(self, x: Array) -> Array:
        """x: (batch, heads, tokens, dim); halves are rotated."""
        half = x.shape[-1] // 2
        angle = np.arange(x.shape[-2])[:, None] * 100.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Core(Module):
    """Causal attention of (batch, heads, tokens, dim)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None
        self.diagonal = 1

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        scale = self.scale if self.scale is not None else q.shape[-1] ** -0.5
        logits = np.einsum("bhtd,bhsd->bhts", q, k) * F32(scale)
        mask = np.triu(np.ones(logits.shape[-2:], bool), self.diagonal)
        logits = np.where(mask, F32(-1e30), logits)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return np.einsum("bhts,bhsd->bhtd", weights, v).astype(q.dtype)


class GELU(Module):
    def forward(self, x: Array) -> Array:
        inner = F32(0.7978845608) * (x + F32(0.044715) * x**3)
        return (F32(0.5) * x * (1 + np.tanh(inner))).astype(x.dtype)


class Dropout(Module):
    def forward(self, x: Array) -> Array:
        return x


class Attention(Module):
    def __init__(self, rng: np.random.Generator, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (Linear(matrix(rng, dim, dim)) for _ in range(4))
        self.rope_q, self.rope_k = Rope(), Rope()
        self.core = Core()
        self.before_o: Callable[[Array], Array] | None = None

    def forward(self, x: Array) -> Array:
        q, k, v = (self.split(one(x)) for one in (self.q, self.k, self.v))
        out = self.core(self.rope_q(q), self.rope_k(k), v)
        if self.before_o is not None:
            out = self.before_o(out)
        return self.o(self.join(out))

    def split(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    def join(self, x: Array) -> Array:
        return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


class MLP(Module):
    def __init__(self, rng: np.random.Generator, dim: int) -> None:
        super().__init__()
        self.gate, self.up = (
            Linear(matrix(rng, 2 * dim, dim), matrix(rng, 2 * dim)) for _ in range(2)
        )
        self.act = GELU()
        self.down = Linear(matrix(rng, dim, 2 * dim))
        self.join: Callable[[Array, Array], Array] = np.multiply

    def forward(self, x: Array) -> Array:
        return self.down(self.join(self.act(self.gate(x)), self.up(x)))


class Block(Module):
    def __init__(self, rng: np.random.Generator, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(1 + matrix(rng, dim))
        self.attn = Attention(rng, dim, heads)
        self.norm2 = RMSNorm(1 + matrix(rng, dim))
        self.mlp = MLP(rng, dim)
        self.first: Callable[[Array, Array], Array] = np.add
        self.second: Callable[[Array, Array], Array] = np.add

    def forward(self, x: Array) -> Array:
        x = self.first(x, self.attn(self.norm1(x)))
        return self.second(x, self.mlp(self.norm2(x)))


class Transformer(Module):
    def __init__(self, seed: int = 0, layers: int = 4, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.embed = Embedding(matrix(rng, 50, dim) * F32(dim**0.5))
        self.blocks = [Block(rng, dim, heads) for _ in range(layers)]
        self.norm = RMSNorm(1 + matrix(rng, dim))
        self.head = Linear(matrix(rng, 50, dim))

    def forward(self, ids: Array) -> Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def matrix(rng: np.random.Generator, *shape: int) -> Array:
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(F32)


def ids(seed: int = 1, batch: int = 2, tokens: int = 12) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, (batch, tokens)) for _ in range(2)]


def trace(
    model: Module,
    path: Path,
    inputs: Sequence[Array] | None = None,
    *,
    rename: Callable[[str], str] = lambda name: name,
    weights: bool = True,
    **header: Any,
) -> Trace:
    """Run a model on one input a step and return its trace."""
    modules = dict(model.modules())
    header.setdefault("modules", {rename(name): one.kind for name, one in modules.items()})
    owners = {name: name.rpartition(".") for name in model.parameters()} if weights else {}
    params = {
        f"{rename(owner)}.{param}".lstrip("."): model.parameters()[name]
        for name, (owner, _, param) in owners.items()
    }
    with TraceWriter(path, framework="numpy", weights=params, overwrite=True, **header) as writer:
        for name, module in modules.items():
            module.name, module.trace = rename(name), writer
        for step, given in enumerate(inputs if inputs is not None else ids()):
            for module in modules.values():
                module.step = step
            with writer.step(step):
                model(given)
    for module in modules.values():
        module.trace = None
    return read(path)
