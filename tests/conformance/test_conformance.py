"""Every backend that is here goes through this one suite: a grid, random problems, laws."""

import pytest
import torch
from hypothesis import given, settings

from polyattn import Causal, Dense, DenseBias, Full, Packed, Window
from polyattn.conformance import Case, examine
from polyattn.conformance.check import subject
from polyattn.conformance.dropout import examine_dropout
from polyattn.selection.registry import Available, registry
from polyattn.torch import attention
from tests.conformance.grid import grid
from tests.conformance.strategies import cases

SLOW = {"flex"}  # 20 ms a call outside a compiler: fewer random problems


def _here(device: str) -> list[str]:
    found = []
    for name in registry.names("torch"):
        probed = registry.probe(("torch", name))
        there = isinstance(probed, Available) and device in (probed.devices or {device})
        if there and device in registry["torch", name].capabilities_for(device).devices:
            found.append(name)
    return found


def _each(device: str) -> list[object]:
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return [
        pytest.param(name, device, id=f"{name}-{device}", marks=marks) for name in _here(device)
    ]


BACKENDS = [*_each("cpu"), *(_each("cuda") if torch.cuda.is_available() else [])]
GRID = [
    pytest.param(name, device, case, id=f"{name}-{device}-{label}")
    for name, device in (parameter.values for parameter in BACKENDS)
    for label, case in grid(registry["torch", name].capabilities_for(device))
]


def test_backends_are_here() -> None:
    assert {"reference", "sdpa_flash", "sdpa_math"} <= set(_here("cpu"))


@pytest.mark.parametrize(("name", "device", "case"), GRID)
def test_what_is_declared_is_right(name: str, device: str, case: Case) -> None:
    verdict = examine(subject(case, device), registry["torch", name])
    if verdict.outcome.startswith("refused"):
        backend = registry["torch", name]
        problem = subject(case, device).call.problem
        table = backend.capabilities_for(device).check(problem)
        assert not table, f"generated from the declaration, but refused: {table}"
        pytest.skip(verdict.detail)
    assert verdict.outcome == "right", f"{verdict.detail}\n{case.spec}"


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_random_problems(name: str, device: str) -> None:
    @settings(max_examples=40 if name in SLOW else 250)
    @given(case=cases())
    def check(case: Case) -> None:
        verdict = examine(subject(case, device), registry["torch", name])
        assert not verdict.fails, f"{verdict.outcome}: {verdict.detail}\n{case.spec}"

    check()


FOUND = [
    '{"seed":269192177,"b":1,"t":1,"s":1,"h":40,"v":40,"layout":"BNTH","strides":"oec"}',
    (
        '{"seed":1637780687,"b":1,"t":5,"s":8,"h":17,"v":17,"layout":"BNTH",'
        '"mask":["Segments",false,true],"strides":"ecs","poison":true}'
    ),
    (
        '{"seed":1830189265,"b":1,"t":4,"s":5,"h":40,"v":40,"dtype":"float64","layout":"BNTH",'
        '"mask":["Dense","bnt"],"strides":"oet","poison":true}'
    ),
]


@pytest.mark.parametrize("spec", FOUND)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_what_the_fuzzer_found_stays_right(name: str, device: str, spec: str) -> None:
    verdict = examine(subject(Case.from_spec(spec), device), registry["torch", name])
    assert not verdict.fails, verdict.detail


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_dropout_keeps_its_laws(name: str, device: str) -> None:
    verdict = examine_dropout(registry["torch", name], seed=3, device=device)
    assert not verdict.fails, verdict.detail


def _random(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def _dtype(name: str, device: str) -> torch.dtype:
    dtypes = registry["torch", name].capabilities_for(device).dtypes
    return torch.float32 if "float32" in dtypes else getattr(torch, sorted(dtypes)[0])


def _close(a: torch.Tensor, b: torch.Tensor, room: float = 0.0) -> None:
    room = room or 8 * max(torch.finfo(x.dtype).eps for x in (a, b))
    assert torch.allclose(a.float(), b.float(), rtol=room, atol=room), (a - b).abs().max()


@pytest.fixture
def qkv(name: str, device: str) -> tuple[torch.Tensor, ...]:
    dtype = _dtype(name, device)
    shapes = ((2, 17, 2, 24), (2, 29, 2, 24), (2, 29, 2, 24))
    return tuple(_random(device, *shape, dtype=dtype) + i for i, shape in enumerate(shapes))


def _attend(name: str, qkv: tuple[torch.Tensor, ...], **options: object) -> torch.Tensor:
    from polyattn import Unsupported

    try:
        return attention(*qkv, backend=name, **options)
    except Unsupported as error:
        pytest.skip(str(error).splitlines()[2])


@pytest.mark.parametrize(("name", "device"), BACKENDS)
class TestLaws:
    def test_full_is_no_mask(self, name: str, device: str, qkv: tuple[torch.Tensor, ...]) -> None:
        assert torch.equal(_attend(name, qkv, mask=Full()), _attend(name, qkv))

    def test_causal_is_a_window_without_right(
        self, name: str, device: str, qkv: tuple[torch.Tensor, ...]
    ) -> None:
        causal = _attend(name, qkv, mask=Causal())
        _close(causal, _attend(name, qkv, mask=Window(right=0)))

    def test_order_of_keys_does_not_matter(
        self, name: str, device: str, qkv: tuple[torch.Tensor, ...]
    ) -> None:
        q, k, v = qkv
        order = torch.arange(28, -1, -1, device=device)
        seen = _random(device, 17, 29) > 0
        out = _attend(name, qkv, mask=Dense(seen))
        _close(out, _attend(name, (q, k[:, order], v[:, order]), mask=Dense(seen[:, order])))

    def test_layouts_agree(self, name: str, device: str, qkv: tuple[torch.Tensor, ...]) -> None:
        swapped = tuple(x.transpose(1, 2) for x in qkv)
        _close(_attend(name, qkv), _attend(name, swapped, layout="BNTH").transpose(1, 2))

    def test_packed_is_each_sequence_by_itself(
        self, name: str, device: str, qkv: tuple[torch.Tensor, ...]
    ) -> None:
        q, k, v = (x[0] for x in qkv)
        cu_q, cu_k = [0, 5, 5, 17], [0, 9, 12, 29]
        mask = Packed(cu_q, cu_k) & Causal()
        packed = _attend(name, (q, k, v), mask=mask, layout="packed")
        for i in range(3):
            rows, keys = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
            alone = _attend(name, (q[None, rows], k[None, keys], v[None, keys]), mask=Causal())
            _close(packed[rows], alone[0])

    def test_groups_are_repeated_heads(
        self, name: str, device: str, qkv: tuple[torch.Tensor, ...]
    ) -> None:
        q, k, v = qkv
        q = torch.cat([q, q.flip(1)], 2)
        grouped = _attend(name, (q, k, v))
        repeated = (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
        _close(grouped, _attend(name, repeated))

    def test_parts_of_the_keys_merge(
        self, name: str, device: str, qkv: tuple[torch.Tensor, ...]
    ) -> None:
        q, k, v = qkv
        whole = _attend(name, qkv, return_lse=True)
        parts = [
            _attend(name, (q, k[:, piece], v[:, piece]), return_lse=True)
            for piece in (slice(0, 10), slice(10, 29))
        ]
        lses = torch.stack([lse for _, lse in parts])
        weights = torch.exp(lses - lses.logsumexp(0)).transpose(2, 3).unsqueeze(-1)
        _close(sum(w * out for w, (out, _) in zip(weights, parts, strict=True)), whole[0])
        half = qkv[0].dtype in (torch.float16, torch.bfloat16)  # fast exponentials: see `tolerance`
        _close(lses.logsumexp(0), whole[1], 2.0**-11 if half else 0.0)

    def test_a_constant_bias_moves_the_lse_alone(
        self, name: str, device: str, qkv: tuple[torch.Tensor, ...]
    ) -> None:
        out, lse = _attend(name, qkv, return_lse=True)
        bias = DenseBias(torch.full((1, 1, 1, 1), 2.0, device=device, dtype=qkv[0].dtype))
        moved, moved_lse = _attend(name, qkv, bias=bias, return_lse=True)
        _close(moved, out)
        half = qkv[0].dtype in (torch.float16, torch.bfloat16)
        _close(moved_lse, lse + 2, 2.0**-11 if half else 0.0)
