"""The shortest way for codes and pages: what it gives, refuses and leaves to the careful one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn import (
    Causal,
    Chunked,
    Dense,
    DenseBias,
    InvalidProblem,
    Padding,
    Unsupported,
    Window,
    use_backend,
)
from polyattn.backends.native_cpu.torch import bare_kernel
from polyattn.backends.native_cpu.torch.calls import Constants
from polyattn.errors import SettingsError
from polyattn.native import module
from polyattn.problem import Problem
from polyattn.selection import scopes
from polyattn.selection.registry import Available
from polyattn.torch import (
    attention,
    paged_attention,
    quantize_kv,
    quantized_attention,
    scaled_dot_product_attention,
)
from polyattn.torch.dropin import torch_sdpa

pytestmark = [
    pytest.mark.skipif(
        not isinstance(module.status(), Available), reason="the native kernels are not built here"
    ),
    pytest.mark.skipif(bare_kernel.EXCHANGE is None, reason="this torch has no C exchange"),
]


MASKS = [None, Causal(), Window(7), Padding(None, torch.tensor([20, 41])), 0]


class Counted:
    """A call of the extension that counts what it has not handed to the careful way."""

    def __init__(self, made: Any, parts: tuple[Any, ...], found: list[int]) -> None:
        careful, *others = parts
        self._found, self._left = found, 0
        self._made, self._own = made, None

        def left(*arguments: Any) -> Any:
            self._left += 1
            return careful(*arguments)

        self._call = made((left, *others))

    def __call__(self, *arguments: Any) -> Any:
        before = self._left
        out = (self._own or self._call)(*arguments)
        if self._left == before:
            self._found.append(1)
        return out

    def bound_to(self, mask: Any) -> Counted:
        self._own = self._call.bound_to(mask)
        return self

    def on_arrays(self, wrap: Any, adds: bool) -> Counted | None:
        self._own = self._call.on_arrays(wrap, adds)
        return None if self._own is None else self


@pytest.fixture(params=["extension", "python"])
def ran(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the calls answered the shortest way, by the extension's class and by the function."""
    found: list[int] = []
    native = module.load()
    run, made = native.forward_tensors, native.BareCall

    def counted(*arguments: Any) -> None:
        run(*arguments)
        found.append(1)

    if request.param == "python":
        monkeypatch.delattr(native, "BareCall")
        monkeypatch.setattr(native, "forward_tensors", counted)
    else:
        monkeypatch.setattr(native, "BareCall", lambda parts: Counted(made, parts, found))
    scopes.invalidate()
    yield found
    monkeypatch.undo()
    scopes.invalidate()


def careful(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a call the careful way."""
    scopes.invalidate()
    with monkeypatch.context() as here:
        here.setattr(bare_kernel, "_are_plain", lambda *tensors: False)
        try:
            return call()
        finally:
            scopes.invalidate()


def codes_of(layout: str, dtype: str, keys: int) -> tuple[Tensor, ...]:
    torch.manual_seed(keys)
    shape = (2, keys, 2, 32) if layout == "BTNH" else (2, 2, keys, 32)
    pairs = [quantize_kv(torch.randn(shape), dtype=dtype, block_size=16, layout=layout)
             for _ in range(2)]  # fmt: skip
    (k, k_scales), (v, v_scales) = pairs
    return k, v, k_scales, v_scales


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 70])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_codes(
    layout: str, dtype: str, rows: int, mask: Any, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = codes_of(layout, dtype, 41)
    mask = Dense(torch.rand(2, 1, 1, 41) > 0.3) if mask == 0 else mask
    q = torch.randn((2, rows, 4, 32) if layout == "BTNH" else (2, 4, rows, 32)).bfloat16()
    call = lambda: quantized_attention(  # noqa: E731
        q, *given, block_size=16, mask=mask, layout=layout, backend="native_cpu"
    )
    short = call()
    assert len(ran) == 1
    long = careful(call, monkeypatch)
    assert len(ran) == 1
    assert torch.equal(short, long) and short.stride() == long.stride()


def test_scales_of_any_strides_count_as_they_lie(ran: list[int]) -> None:
    k, v, k_scales, v_scales = codes_of("BTNH", "int8", 48)
    q = torch.randn(2, 1, 4, 32)
    call = lambda *scales: quantized_attention(  # noqa: E731
        q, k, v, *scales, block_size=16, mask=None, backend="native_cpu"
    )
    expected = call(k_scales, v_scales)
    wide = torch.zeros(2, 4, 9)
    wide[:, 1::2, 3:6] = k_scales
    turned = v_scales.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for scales in ((wide[:, 1::2, 3:6], v_scales), (k_scales, turned)):
        assert torch.equal(call(*scales), expected)
    assert len(ran) == 2  # those whose scales of a head do not lie side by side go the other way
    negated = torch._neg_view(-k_scales)
    assert torch.equal(call(negated, v_scales), expected)
    assert torch.equal(call(k_scales[:1, :1].expand(2, 2, 3), v_scales),
                       call(k_scales[:1, :1].expand(2, 2, 3).clone(), v_scales))  # fmt: skip


@pytest.mark.parametrize("size", [48, 1 << 40, 1 << 80])
def test_a_block_may_be_longer_than_all_keys(size: int, ran: list[int]) -> None:
    k, v, k_scales, v_scales = codes_of("BTNH", "int8", 48)
    q, one = torch.randn(2, 1, 4, 32), (k_scales[..., :1], v_scales[..., :1])
    call = lambda block: quantized_attention(  # noqa: E731
        q, k, v, *one, block_size=block, mask=None, backend="native_cpu"
    )
    assert torch.equal(call(size), call(48)) and len(ran) == 2


def test_wrong_scales_are_said(ran: list[int]) -> None:
    k, v, k_scales, v_scales = codes_of("BTNH", "int8", 48)
    q = torch.randn(2, 1, 4, 32)
    call = lambda *scales: quantized_attention(  # noqa: E731
        q, k, v, *scales, block_size=16, mask=None, backend="native_cpu"
    )
    call(k_scales, v_scales)
    for wrong in (k_scales[..., :2], k_scales[:1], k_scales.double(), k_scales.unsqueeze(0)):
        for scales in ((wrong, v_scales), (v_scales, wrong)):
            with pytest.raises(InvalidProblem, match=r"got .*expected"):
                call(*scales)
    assert len(ran) == 1


@pytest.mark.parametrize("kind", [BufferError, RuntimeError, ValueError])
def test_what_a_torch_cannot_tell_of_its_tensors_goes_the_careful_way(
    kind: type[Exception], ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v, k_scales, v_scales = codes_of("BTNH", "float8_e4m3fn", 48)
    q = torch.randn(2, 1, 4, 32)
    call = lambda: quantized_attention(  # noqa: E731
        q, k, v, k_scales, v_scales, block_size=16, mask=None, backend="native_cpu"
    )
    expected, before = call(), len(ran)

    def refuses(*arguments: Any) -> None:
        raise kind("float8 types are not supported by dlpack")

    monkeypatch.setattr(bare_kernel, "_arrays_of", lambda problem: refuses)
    scopes.invalidate()
    assert torch.equal(call(), expected)
    assert len(ran) == before == 1


def test_what_is_no_complaint_of_the_reader_is_raised(
    ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise KeyError("not one of these")

    monkeypatch.setattr(bare_kernel, "_arrays_of", lambda problem: fails)
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(KeyError, match="not one of these"):
        attention(q, q, q, backend="native_cpu")


def test_transforms_are_refused(ran: list[int]) -> None:
    k, v, k_scales, v_scales = codes_of("BTNH", "int8", 48)
    call = lambda q: quantized_attention(  # noqa: E731
        q, k, v, k_scales, v_scales, block_size=16, mask=None, backend="native_cpu"
    )
    q = torch.randn(2, 1, 4, 32)
    call(q)
    with pytest.raises(Unsupported):
        torch.func.jvp(call, (q,), (q,))
    assert len(ran) == 1


def paged_inputs(layout: str, rows: int = 1) -> tuple[Tensor, ...]:
    torch.manual_seed(5)
    pages = torch.randn((9, 16, 2, 32) if layout == "BTNH" else (9, 2, 16, 32)).bfloat16()
    values = torch.randn_like(pages)
    table, lengths = torch.tensor([[5, 0, 8], [3, 7, 1]]), torch.tensor([33, 0])
    q = torch.randn((2, rows, 4, 32) if layout == "BTNH" else (2, 4, rows, 32)).bfloat16()
    return q, pages, values, table, lengths


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "mask"), [(1, Causal()), (1, None), (3, None)], ids=str)
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_pages(
    layout: str, rows: int, mask: Any, integers: Any, ran: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q, pages, values, table, lengths = paged_inputs(layout, rows)
    wide = torch.full((2, 7), -1, dtype=integers)  # a table of more columns, as servers keep
    wide[:, 2:5] = table
    apart = torch.zeros(2, 3, dtype=integers)
    apart[:, 1] = lengths
    for where in (
        (table.to(integers), lengths.to(integers)),
        (wide[:, 2:5], lengths.to(integers)),
        (table.to(integers), apart[:, 1]),
        (table.to(integers).t().contiguous().t(), lengths.to(integers)),
        (table[:1].to(integers).expand(2, 3), lengths.to(integers)),
    ):
        call = lambda where=where: paged_attention(  # noqa: E731
            q, pages, values, *where, mask=mask, layout=layout, backend="native_cpu"
        )
        before = len(ran)
        short = call()
        apart_int64 = integers == torch.int64 and where[1].stride(0) != 1
        assert len(ran) == before + (not apart_int64)
        long = careful(call, monkeypatch)
        assert torch.equal(short, long) and short.stride() == long.stride()
        assert (short[1] == 0).all()


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize(
    "mask",
    [Causal(), Window(4), Causal() & Window(9), Chunked(16), ~Causal(), Window(8, 8)],
    ids=str,
)
def test_bands_end_at_each_sequences_last_key(mask: Any, rows: int, ran: list[int]) -> None:
    q, pages, values, table, _ = paged_inputs("BTNH", rows)
    for lengths in (torch.tensor([33, 0]), torch.tensor([2, 48]), torch.tensor([41, 17])):
        call = lambda backend, q, pages, values, lengths=lengths: paged_attention(  # noqa: E731
            q, pages, values, table, lengths, mask=mask, return_lse=True, backend=backend
        )
        wanted = call("reference", q.double(), pages.double(), values.double())
        for given, bound in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
            inputs = [x.to(given) for x in (q, pages, values)]
            out, lse = call("native_cpu", *inputs)
            alone = paged_attention(*inputs, table, lengths, mask=mask, backend="native_cpu")
            for one in (out, alone):
                assert (one - wanted[0]).abs().max() <= bound
            assert torch.allclose(lse.double(), wanted[1], atol=2e-6 if bound < 1e-3 else 1e-2)
    assert len(ran) == 6


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_wrong_pages_are_said(integers: Any, ran: list[int]) -> None:
    q, pages, values, table, lengths = paged_inputs("BTNH")
    call = lambda table, lengths: paged_attention(  # noqa: E731
        q, pages, values, table.to(integers), lengths.to(integers), backend="native_cpu"
    )
    call(table, lengths)
    beyond = table.clone()
    beyond[0, 2] = 9  # the third page of a sequence of 33 keys
    for where in (
        (beyond, lengths),
        (table - 4, lengths),
        (table, lengths + 16),
        (table, lengths - 1),
    ):
        with pytest.raises(InvalidProblem, match=r"got .*expected|got a block table"):
            call(*where)
    beyond[0, 2], beyond[1] = 8, 99  # of a sequence without keys nothing is read
    call(beyond, lengths)
    assert len(ran) == 2


def _plain(dtype: torch.dtype, layout: str, keys: int) -> list[Tensor]:
    torch.manual_seed(keys)
    counts = (3, keys, keys)
    shapes = [(2, n, 4, 16) if layout == "BTNH" else (2, 4, n, 16) for n in counts]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"mask": Causal("bottom_right")}, {"mask": Window(4)}, {"softcap": 2.0},
        {"mask": Padding(None, torch.tensor([20, 41]))}, {"scale": 0.25},
        {"mask": Dense(torch.arange(41) % 3 > 0)}, {"bias": DenseBias(torch.linspace(-1, 1, 41))},
    ],
    ids=lambda options: " ".join(options) or "plain",
)  # fmt: skip
def test_plain_tensors(
    options: dict[str, Any], layout: str, dtype: torch.dtype, ran: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q, k, v = _plain(dtype, layout, 41)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    for given in (q, turned, q[:1].expand(2, -1, -1, -1)):
        call = lambda given=given: attention(  # noqa: E731
            given, k, v, layout=layout, backend="native_cpu", **options
        )
        before = len(ran)
        short = call()
        assert len(ran) == before + 1
        with monkeypatch.context() as here:
            here.setattr(bare_kernel, "is_lazy_copy", lambda x: True)
            scopes.invalidate()
            long = call()
            scopes.invalidate()
        assert len(ran) == before + 1
        assert torch.equal(short, long) and short.stride() == long.stride()


@pytest.mark.parametrize("rows", [1, 9, 70])
@pytest.mark.parametrize("kind", ["booleans", "numbers", "zeros and -inf"])
def test_arrays_as_masks_of_torchs_signature(kind: str, rows: int, ran: list[int]) -> None:
    torch.manual_seed(rows)
    q, k, v = (torch.randn(2, 4, n, 16) for n in (rows, 71, 71))
    allowed = torch.rand(2, 1, rows, 71) > 0.3
    masks = {
        "booleans": allowed, "numbers": torch.randn(2, 1, rows, 71),
        "zeros and -inf": torch.where(allowed, 0.0, -torch.inf),
    }  # fmt: skip
    mask = masks[kind]
    given = [mask, mask[:, :, :1].expand(-1, 4, rows, -1), mask.repeat(1, 4, 1, 1), mask[1, 0],
             mask.mT.contiguous().mT, torch._lazy_clone(mask.clone())]  # fmt: skip
    if kind == "numbers":
        given += [torch._neg_view(mask), torch.nn.Parameter(mask, requires_grad=False)]
    with use_backend("native_cpu"):
        for one in given:
            for _ in range(3):
                out = scaled_dot_product_attention(q, k, v, one)
            assert torch.allclose(out, torch_sdpa(q, k, v, one.clone()), atol=1e-5)
    assert len(ran) >= 15


def test_the_form_follows_the_environment_and_threads_follow_torch(
    ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = _plain(torch.float32, "BTNH", 41)
    call = lambda: attention(q, k, v, backend="native_cpu")  # noqa: E731
    expected = call()
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", "generic")
    generic = call()
    assert torch.allclose(generic, expected, atol=1e-5)
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", "no such")
    with pytest.raises(SettingsError, match="no such"):
        call()
    monkeypatch.delenv("POLYATTN_NATIVE_ISA")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(call(), expected)
    finally:
        torch.set_num_threads(threads)
    assert len(ran) == 3


class _Sub(Tensor):
    pass


def test_who_else_wants_to_know_of_a_call_is_heard_and_wrong_calls_are_said() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    heard: list[tuple[Any, ...]] = []

    def careful(*arguments: Any) -> str:
        heard.append(arguments[3:])
        return "careful"

    q, k, v = _plain(torch.float32, "BTNH", 9)
    run = native_class()(parts_for(careful))
    assert torch.is_tensor(run(q, k, v)) and heard == []
    for other in (q.as_subclass(_Sub), None, 3):
        assert run(other, k, v) == "careful"
    with Mode():
        assert run(q, k, v) == "careful"
    assert run(q, k.double(), v, "mask", "bias") == "careful"
    assert run.bound_to("own")(q, k[0], v, None, None, "sinks") == "careful"
    assert heard[-2:] == [("mask", "bias", None), ("own", None, "sinks")]
    for wrong in ((), (q, k), (q, k, v, *range(5))):
        with pytest.raises(TypeError, match="expected q, k, v"):
            run(*wrong)
    with pytest.raises(TypeError, match="expected q, k, v"):
        run(q, k, v, mask=None)
    for parts in ((), ("too", "few"), tuple(range(24))):
        with pytest.raises(ValueError, match="another version"):
            native_class()(parts)


def native_class() -> Any:
    return module.load().BareCall


def parts_for(careful: Any) -> tuple[Any, ...]:
    """Return what the kernel of a plain problem hands to the extension, but for `careful`."""
    made: list[tuple[Any, ...]] = []
    problem = Problem(batch=2, q_len=3, kv_len=9, heads=4, kv_heads=4, head_dim=16, dtype="float32")
    with pytest.MonkeyPatch.context() as here:
        here.setattr(module.load(), "BareCall", made.append)
        bare_kernel.bare_kernel(problem, Constants("BTNH", 0.25, 0.0), careful)
    return made[0]
