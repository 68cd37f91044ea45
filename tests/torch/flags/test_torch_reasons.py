"""torch's own reasons are heard without noise, understood, and added to what explain says."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch.backends.cuda import SDPAParams

from polyattn import Causal, DenseBias
from polyattn.masks import Window
from polyattn.selection import Accepted, Rejected, Selection, Source
from polyattn.selection.capabilities import Reason
from polyattn.torch.admission import admit
from polyattn.torch.flags import torch_messages, torch_reasons


def test_explain_adds_torchs_reasons_to_refusals_only() -> None:
    refused = Rejected((Reason("mask", "Window(2, 0)", "no Window"),))
    chosen = Selection(
        "sdpa_math",
        Source.HEURISTIC,
        decisions={"sdpa_flash": refused, "sdpa_math": Accepted(), "sdpa_efficient": Accepted()},
    )
    said = torch_reasons.by_backend(
        [
            "Memory efficient kernel not used because:",
            (
                "Memory Efficient attention has been runtime disabled. (Triggered internally at "
                "/pytorch/aten/src/ATen/native/transformers/sdp_utils_cpp.h:550.)"
            ),
            "Flash attention kernel not used because:",
            "Flash Attention does not support non-null attn_mask.",
            "cuDNN SDPA is not deterministic.",
        ]
    )
    assert list(said) == ["sdpa_efficient", "sdpa_flash"]
    found = torch_reasons.enriched(chosen, said)
    assert found.decisions["sdpa_efficient"] == Accepted()
    flash = found.decisions["sdpa_flash"]
    assert isinstance(flash, Rejected)
    assert [r.fact for r in flash.reasons] == ["mask", "determinism"]
    assert flash.reasons[0] == refused.reasons[0]
    assert chosen.decisions["sdpa_flash"] == refused, "the selection given is left alone"


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_a_call_is_put_to_torch_as_its_dispatcher_would_see_it(layout: str) -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 2, 8)
    if layout == "BNTH":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    options: dict[str, Any] = {"layout": layout}
    for mask, causal, masked in (
        (None, False, False),
        (Causal(), True, False),
        (Causal("top_left"), True, False),
        (Window(1, 0), False, True),
    ):
        asked = torch_reasons.Asked.of(admit(q, k, k, mask=mask, **options), q, k, k)
        assert asked is not None
        assert asked.query.shape == (2, 6, 4, 8) and asked.key.shape == (2, 2, 4, 8)
        assert (asked.is_causal, asked.attn_mask is not None) == (causal, masked)
        assert asked.enable_gqa
        torch_reasons._as_params(asked)
    bias = torch.zeros(4, 4, requires_grad=True)
    asked = torch_reasons.Asked.of(admit(q, k, k, bias=DenseBias(bias), **options), q, k, k)
    assert asked is not None and asked.attn_mask is not None and asked.attn_mask.requires_grad
    assert asked.attn_mask.stride(-1) == 1


_DIMS = "Got Query.size(-1): 300, Key.size(-1): 64, Value.size(-1): 64 instead."
_SIZES = "[2, 4, 8, 64]"
SAID: dict[str, Reason | str] = {
    "Flash attention has been runtime disabled.": "switch",
    "Memory Efficient attention has been runtime disabled.": "switch",
    "cuDNN attention has been runtime disabled.": "switch",
    "Torch was not compiled with flash attention.": Reason(
        "build", "a torch without flash attention", "a build with it", "install another build of "
        "torch"
    ),
    "Torch was not compiled with cuDNN attention.": "build",
    "Torch was not compiled with memory efficient attention.": "build",
    "flash attention requires a CUDA device, which is not available.": "machine",
    "Mem Efficient attention requires a CUDA device, which is not available.": "machine",
    "cuDNN SDPA requires a CUDA device, which is not available.": "machine",
    "All tensors need to be on cuda device. Got query on device: cpu, key on device: cuda:0, "
    "value on "
    "device: cpu": Reason(
        "device", "query cpu, key cuda:0, value cpu", "cuda", "move the tensors"
    ),
    "Flash attention only supports gpu architectures in the range [sm80, sm121]. Attempting to "
    "run on "
    "a sm 7.5 gpu.": Reason("compute capability", "sm_75", "sm_80 to sm_121"),
    "Mem Efficient Attention only supports gpu architectures in the range [sm50, sm121]. "
    "Attempting "
    "to run on a sm 3.7 gpu.": Reason("compute capability", "sm_37", "sm_50 to sm_121"),
    "cuDNN MHA only supports gpu architectures in the range [sm80, sm121]. Attempting to run on "
    "a sm "
    "7.0 gpu.": Reason("compute capability", "sm_70", "sm_80 to sm_121"),
    "Flash attention was not compiled for current AMD GPU architecture. Attempting to run on "
    "architecture gfx900": Reason("compute capability", "gfx900", "what this torch was built for"),
    "Mem Efficient attention was not compiled for current AMD GPU architecture. Attempting to "
    "run on "
    "architecture gfx900": "compute capability",
    "Flash Efficient attention on Current AMD GPU is still experimental. Enable it with "
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1.": "switch",
    "All fused kernels requires query, key and value to be 4 dimensional, but got Query dim: 3, "
    "Key "
    "dim: 4, Value dim: 4 instead.": Reason(
        "rank", "query 3, key 4, value 4", "4 dims each", "unsqueeze or flatten"
    ),
    "For dense inputs, both fused kernels require query, key and value to have the same "
    "batch_size. "
    f"Query.sizes(): {_SIZES}, Key.sizes(): [1, 4, 8, 64], Value.sizes(): [1, 4, 8, 64] instead. "
    f"To "
    "broadcast dense inputs, try using unsqueeze and expand_to before passing them into the "
    "kernel.":
        Reason("batch", f"Query.sizes(): {_SIZES}, Key.sizes(): [1, 4, 8, 64], Value.sizes(): "
               "[1, 4, 8, 64]", "one batch size", "expand them"),
    "For dense input, both fused kernels require query, key and value to have the same num_heads. "
    f"Query.sizes(): {_SIZES}, Key sizes(): [2, 2, 8, 64], Value sizes(): [2, 2, 8, 64] instead. "
    f"To "
    "broadcast dense inputs, try using unsqueeze and expand_to before passing them into the "
    "kernel.":
        Reason("GQA", f"Query.sizes(): {_SIZES}, Key sizes(): [2, 2, 8, 64], Value sizes(): "
               "[2, 2, 8, 64]", "as many key/value as query heads", "enable_gqa=True"),
    "Both fused kernels require key and value to have the same num_heads and batch_size but got: "
    "Key "
    f"sizes: {_SIZES}, Value sizes: [2, 2, 8, 64], Query sizes: {_SIZES} instead.": Reason(
        "GQA", f"Key sizes: {_SIZES}, Value sizes: [2, 2, 8, 64], Query sizes: {_SIZES}",
        "as many key as value heads",
    ),
    "The number of heads in key/value must divide number of heads in query.Got input Key "
    "sizes(): 3, "
    "Value sizes(): 3, Query sizes(): 4 instead.": Reason(
        "GQA", "4 query heads for 3 and 3", "a multiple of them"
    ),
    "All fused kernels do not support zero seq_len_q or seq_len_kv.": "key length",
    "All fused kernels require the last dimension of the input to have stride 1. Got "
    "Query.stride(-1): 2, Key.stride(-1): 1, Value.stride(-1): 1": Reason(
        "strides", "query 2, key 1, value 1", "contiguous last dims", "call contiguous()"
    ),
    "All fused kernels require the last dimension of the input to have stride 1. Got "
    "Query.stride(-1): 1, Key.stride(-1): 1, Value.stride(-1): 1, Attn_mask.stride(-1): 0 (GPU "
    "backends require attn_mask's last dimension to have stride 1 while the CPU does not).": Reason(
        "strides", "query 1, key 1, value 1; attn_mask: 0", "contiguous last dims",
        "call contiguous()",
    ),
    "For NestedTensor inputs, Flash attention requires q,k,v to have the same last dimension and "
    "to be "
    f"a multiple of 8 and less than or equal to 256. {_DIMS}": Reason(
        "head dim", "query 300, key 64, value 64",
        "nested: equal ones, multiples of 8, at most 256", "pad the heads",
    ),
    "Flash attention requires q,k,v to have the same last dimension and to be less than or equal "
    "to "
    f"256. {_DIMS}": Reason("head dim", "query 300, key 64, value 64", "equal ones, at most 256"),
    "Efficient attention on ROCM requires q,k,v to have the same last dimension and to be less "
    "than or "
    f"equal to 256. {_DIMS}": "head dim",
    f"Flash attention requires q,k,v to have the same last dimension. {_DIMS}": Reason(
        "head dim", "query 300, key 64, value 64", "equal ones"
    ),
    f"Mem efficient attention requires last dimension of inputs to be divisible by 8. {_DIMS}":
        Reason(
        "head dim", "query 300, key 64, value 64", "multiples of 8", "pad the heads"
    ),
    "Mem efficient attention on ROCM requires last dimension of inputs to less or equal than 512. "
    f"{_DIMS} (Note this limit differs among architectures)": Reason(
        "head dim", "query 300, key 64, value 64", "at most 512"
    ),
    "Flash attention currently doesn't support training with head_dim ∈ (192, 224] or (head_dim ∈ "
    "(224, 256] and dropout > 0.0) on gpu architectures in the range[sm86, sm89].Attempting to run "
    "with dropout set to: 0.5and head_dim: 200 on a sm 8.6 gpu.": Reason(
        "head dim", "200 in training on sm_86", "at most 192"
    ),
    "Flash attention requires q,k,v to have the same last dimension. Got Query.size(-1): 8, "
    "Key.size(-1): 8, Value.size(-1): 80 instead.": Reason(
        "value dim", "80 for head dim 8", "equal ones"
    ),
    "Flash attention requires q,k,v to have the same last dimension and to be less than or equal "
    "to 256. Got Query.size(-1): 8, Key.size(-1): 8, Value.size(-1): 4 instead.": Reason(
        "value dim", "4 for head dim 8", "equal ones and to be less than or equal to 256"
    ),
    "Flash attention requires q,k,v to have the same last dimension and to be less than or equal "
    "to 256. Got Query.size(-1): 264, Key.size(-1): 264, Value.size(-1): 264 instead.": Reason(
        "head dim", "query 264, key 264, value 264", "equal ones, at most 256"
    ),
    "head_dim should be no more than 128": Reason("head dim", "more", "at most 128"),
    "head_dim should be a multiple of 8": "head dim",
    "cuDNN SDPA on SM 9.0/10.x does not support backward with these head dimensions. Got d_qk: "
    "160, "
    "d_v: 160": Reason(
        "head dim", "160 and value dim 160 in training", "at most 128, (192, 128) or (256, 256)"
    ),
    "Mem efficient attention on sm80 or newer requires q, k, and v storage offsets * "
    "element_size to "
    "be aligned to 16 bytes. Got query.storage_offset() * element_size % alignment_bytes: 2, "
    "key.storage_offset() * element_size % alignment_bytes: 0, value.storage_offset() * "
    "element_size "
    "% alignment_bytes: 4.": Reason(
        "alignment", "query 2, key 0, value 4 bytes off",
        "tensors that begin at multiples of 16 bytes", "clone them",
    ),
    "Mem efficient attention requires q, k, and v data pointers to be aligned to 16 bytes.":
        "alignment",
    "Expected query, key and value to all be of dtype: {Half, BFloat16}. Got Query dtype: float, "
    "Key "
    "dtype: float, and Value dtype: c10::Half instead.": Reason(
        "dtype", "query float, key float, value c10::Half", "Half, BFloat16", "cast the inputs"
    ),
    "Flash Attention does not support non-null attn_mask.": Reason(
        "mask", "an attn_mask", "is_causal or no mask", "ask sdpa_efficient"
    ),
    "Please use the following attn mask shapes: 2d - ({Q_seq_len, 1}  x {KV_seq_len, 1}); 4d - "
    "({Batch, 1} x {Num_heads, 1} x {Q_seq_len, 1}  x {KV_seq_len, 1})": "mask",
    "Efficient attention on ROCM requires attn_mask be boolean, or has the same datatype as of "
    "q,k,v":
        "mask",
    "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. Got "
    "seqlen_q: 4 "
    "seqlen_k: 8. If you would like to use causal attention with non-square masks, please see "
    "CausalAttnMask.": Reason("mask", "is_causal with T=4, S=8", "equal lengths"),
    "Both fused kernels do not support non-zero dropout.": "dropout",
    "cuDNN dropout probability resolution is limited to 1/16.Use a dropout probability that is a "
    "multiple of 1/16 to select the cuDNN backend": "dropout",
    "91200 cuDNN version does not support droppout in SDPA (9.11 - 9.13).": Reason(
        "dropout", "a dropout_p above 0 with cuDNN 91200", "0 with cuDNN 9.11 to 9.13",
        "install another cuDNN",
    ),
    "Dropout reference is only supported on 8.9.6 onwards.": "dropout",
    "cuDNN SDPA is not deterministic.": "determinism",
    "SDPA fprop requires cudnn 8.9.3 or higher": Reason(
        "cuDNN", "an older one", "8.9.3 and newer", "install a newer cuDNN"
    ),
    "8907 cuDNN version too old to use cuDNN Attention (< v9.0.0)": Reason(
        "cuDNN", "8907", "9.0.0 and newer", "install a newer cuDNN"
    ),
    "cuDNN SDPA does not support batch size or num_heads greater than 65535. Got batch size: "
    "70000, "
    "num_heads: 4": Reason("grid", "batch 70000, heads 4", "at most 65535 of both"),
    "cudnn SDPA does not support key/value sequence length 1.": Reason("key length", "1", "2 and "
    "more"),
    "cudnn SDPA does not support query sequence length 1 with dropout.": "query length",
    "not-multiple-of-64 seq_kv is not supported below 8.9.6": "key length",
    "s_q less than 64 is not supported before cudnn 9.0.0": "query length",
    "s_q not a multiple of 64 with padding/dropout is not supported with cudnn version 9.0.0":
        "query length",
    "Query tensor was not in cuDNN-supported packed QKV layout[64, 8, 1]": Reason(
        "strides", "Query [64, 8, 1]", "cuDNN's packed layout", "call contiguous()"
    ),
    "Value tensor was not in cuDNN-supported unpacked QKV layout[64, 8, 1]": "strides",
    "Both fused kernels of cpp version currently do not support Nested Tensor inputs.": "storage",
    "Experimental cuDNN SDPA nested tensor support is not enabled.": "storage",
    "Experimental cuDNN SDPA nested tensor support does not support backward.": "backward",
    "Memory efficient attention currently doesn't support training with NT inputs.": "backward",
    "Both fused kernels do not support training with broadcasted NT inputs.": "backward",
    "cuDNN SDPA supports nested tensors on SM 9.0, SM 10.0.": Reason(
        "compute capability", "nested tensors on another one", "SM 9.0, SM 10.0"
    ),
    "cuDNN attention does not support nested tensor query sequence length <= 128.": "query length",
    "Both fused kernels require query, key and value to have broadcastable num heads got Query num "
    "heads 4, Key num heads 3, Value num heads 3 instead.": Reason(
        "storage", "nested, num heads: query 4, key 3, value 3", "sizes that broadcast"
    ),
    "Fused kernels do not support ragged num_head_dims, key has a ragged num_heads.": Reason(
        "storage", "a nested key with a ragged number of heads", "one number of heads"
    ),
    "Fused kernels do not support seq_len == 0, value has a seq len of 0.": "storage",
    "For both fused kernels, if one of key/value batch_size requires broadcasting and the other "
    "does "
    "not, then the other must have a consistent seq_len dim.": "storage",
    "Packed projection for fused kernels does not support sequence_length <= 1": "storage",
}  # fmt: skip
ENDINGS = (
    "",
    " (Triggered internally at /pytorch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:422.)",
    " (function check_all_tensors_on_device)",
)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("text", SAID)
def test_every_message_of_torch_is_understood(text: str, ending: str) -> None:
    expected = SAID[text]
    reason = torch_messages.translate(text + ending)
    assert "{" not in reason.got + reason.fix
    if isinstance(expected, Reason):
        assert reason == expected
    else:
        assert reason.fact == expected


def test_no_message_is_known_that_is_not_tested_and_none_is_hidden_by_another() -> None:
    for message in torch_messages._MESSAGES:
        assert any(
            message.reason(text) == torch_messages.translate(text)
            or torch_messages.translate(text).fact == "strides"
            for text in SAID
            if message.reason(text)
        ), message.pattern


def test_an_unknown_message_is_kept_whole() -> None:
    text = "Flash attention takes {only} what it likes: 7."
    reason = torch_messages.translate(text + ENDINGS[1])
    assert (reason.fact, reason.got) == ("torch", text)


# --- hearing torch ---


def test_what_is_warned_of_elsewhere_is_not_taken() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with torch_reasons.hushed() as heard:
            warnings.warn("mine", stacklevel=1)
            other = threading.Thread(target=lambda: warnings.warn("theirs", stacklevel=1))
            other.start()
            other.join()
        warnings.warn("later", stacklevel=1)
    assert heard == ["mine"]
    assert [str(w.message) for w in seen] == ["theirs", "later"]


def test_hearing_works_where_warnings_are_errors_and_leaves_no_filter() -> None:
    before = warnings.filters[:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inner = warnings.filters[:]
        for _ in range(2):  # not once only
            with torch_reasons.hushed() as heard:
                warnings.warn("said", stacklevel=1)
            assert heard == ["said"]
        assert warnings.filters == inner
    assert warnings.filters == before


def test_torch_says_nothing_on_a_build_without_cuda() -> None:
    q = torch.randn(1, 2, 4, 8)
    said = torch_reasons.torch_says(SDPAParams(q, q, q, None, 0.0, False, False))
    if not torch.backends.cuda.is_built():
        assert said == {}
        return
    assert list(said) == ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn"]
    assert [r.fact for r in said["sdpa_flash"]] == ["device"]
    assert all(said.values())


def test_the_checks_of_torch_are_heard_through_a_binding(capfd: pytest.CaptureFixture[str]) -> None:
    """A check that answers with several warnings, as torch's do, and one that fails."""

    def check(_: Any, debug: bool) -> bool:
        warnings.warn("Flash attention has been runtime disabled.", stacklevel=1)
        warnings.warn("cuDNN SDPA is not deterministic.", stacklevel=1)
        return not debug

    def broken(_: Any, debug: bool) -> bool:
        raise RuntimeError("CUDA error: no driver\nmore of it")

    assert [r.fact for r in torch_reasons._asked(check, None)] == ["switch", "determinism"]
    assert torch_reasons._asked(lambda _p, _d: True, None) == []
    assert torch_reasons._asked(lambda _p, _d: False, None) == [torch_reasons._SILENT]
    assert torch_reasons._asked(broken, None) == [
        Reason("machine", "CUDA error: no driver", "a cuda device that answers")
    ]
    assert capfd.readouterr() == ("", "")
