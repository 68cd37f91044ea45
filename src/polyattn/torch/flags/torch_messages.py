"""torch's own messages on why a kernel is not used, as reasons.

torch says why only in warnings, one per kernel, worded for its developers. Each message of
``sdp_utils_cpp.{h,cpp}`` and ``cuda/sdp_utils.cpp`` from 2.9 to 2.13 (and of the source after it)
is known here; one that is not becomes a reason that holds its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from polyattn.selection.capabilities import Reason

__all__ = ["by_backend", "translate"]


@dataclass(frozen=True)
class Message:
    """One message of torch: what it looks like and the reason in it, with the groups filled in."""

    pattern: str
    fact: str
    got: str
    takes: str
    fix: str = ""

    def reason(self, text: str) -> Reason | None:
        """Return the reason if `text` is this message."""
        found = re.search(self.pattern, text, re.DOTALL)
        if found is None:
            return None
        groups = {name: (value or "").strip() for name, value in found.groupdict().items()}
        got, takes = (part.format(**groups).strip() for part in (self.got, self.takes))
        return Reason(self.fact, got, takes, self.fix)


_SIZES = (
    r"Got Query\.size\(-1\): (?P<q>\d+), Key\.size\(-1\): (?P<k>\d+), Value\.size\(-1\): (?P<v>\d+)"
)
_GOT = "query {q}, key {k}, value {v}"
_CUDA = "torch.backends.cuda"
_SHAPES = r"\D*?(?P<got>(?:Query|Key)\W*sizes.*?) instead"

_MESSAGES = (
    # the switches, the build, the machine
    Message(r"^Flash attention has been runtime disabled", "switch",
            f"{_CUDA}.flash_sdp_enabled() is False", "True", f"{_CUDA}.enable_flash_sdp(True)"),
    Message(r"^Memory Efficient attention has been runtime disabled", "switch",
            f"{_CUDA}.mem_efficient_sdp_enabled() is False", "True",
            f"{_CUDA}.enable_mem_efficient_sdp(True)"),
    Message(r"^cuDNN attention has been runtime disabled", "switch",
            f"{_CUDA}.cudnn_sdp_enabled() is False", "True", f"{_CUDA}.enable_cudnn_sdp(True)"),
    Message(r"^Torch was not compiled with (?P<what>.+?)\.?$", "build", "a torch without {what}",
            "a build with it", "install another build of torch"),
    Message(r"requires a CUDA device, which is not available", "machine", "no cuda device here",
            "cuda"),
    Message(r"need to be on cuda device\. Got query on device: (?P<q>\S+?), key on device: "
            r"(?P<k>\S+?)"
            r", value on device: (?P<v>\S+)", "device", _GOT, "cuda", "move the tensors"),
    Message(r"only supports gpu architectures in the range \[sm_?(?P<low>\d+), "
            r"sm_?(?P<high>\d+)\]\. "
            r"Attempting to run on a sm (?P<major>\d+)\.(?P<minor>\d+)", "compute capability",
            "sm_{major}{minor}", "sm_{low} to sm_{high}"),
    Message(r"not compiled for current AMD GPU architecture\. Attempting to run on architecture "
            r"(?P<arch>\S+)", "compute capability", "{arch}", "what this torch was built for"),
    Message(r"on Current AMD GPU is still experimental", "switch",
            "an experimental kernel on this AMD GPU", "kernels that are switched on",
            "set TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"),
    # ranks, shapes, lengths
    Message(r"to be 4 dimensional, but got Query dim: (?P<q>\d+), Key dim: (?P<k>\d+), Value dim: "
            r"(?P<v>\d+)", "rank", _GOT, "4 dims each", "unsqueeze or flatten"),
    Message(r"to have the same batch_size\. " + _SHAPES, "batch", "{got}", "one batch size",
            "expand them"),
    Message(r"to have the same num_heads\. " + _SHAPES, "GQA", "{got}",
            "as many key/value as query heads", "enable_gqa=True"),
    Message(r"require key and value to have the same num_heads and batch_size but got: "
            r"(?P<got>.*?) "
            r"instead", "GQA", "{got}", "as many key as value heads"),
    Message(r"number of heads in key/value must divide number of heads in query\. ?Got input Key "
            r"sizes\(\): (?P<k>\d+), Value sizes\(\): (?P<v>\d+), Query sizes\(\): (?P<q>\d+)",
            "GQA",
            "{q} query heads for {k} and {v}", "a multiple of them"),
    Message(r"do not support zero seq_len_q or seq_len_kv", "key length", "0 queries or keys",
            "1 and more"),
    Message(r"last dimension of the input to have stride 1\. Got Query\.stride\(-1\): "
            r"(?P<q>-?\d+), "
            r"Key\.stride\(-1\): (?P<k>-?\d+), Value\.stride\(-1\): (?P<v>-?\d+)(?:, "
            r"Attn_mask\.stride\(-1\)(?P<mask>: -?\d+))?", "strides", _GOT + "; attn_mask{mask}",
            "contiguous last dims", "call contiguous()"),
    # head dims
    Message(r"requires q,k,v to have the same last dimension(?P<also>.*?)\. Got Query\.size\(-1\): "
            r"(?P<q>\d+), Key\.size\(-1\): (?P=q), Value\.size\(-1\): (?!(?P=q) )(?P<v>\d+)",
            "value dim", "{v} for head dim {q}", "equal ones {also}"),
    Message(r"^For NestedTensor inputs, *(?P<who>.+?) requires q,k,v .* multiple of 8 and less "
            r"than or "
            r"equal to (?P<most>\d+)\. " + _SIZES, "head dim", _GOT,
            "nested: equal ones, multiples of 8, at most {most}", "pad the heads"),
    Message(r"requires q,k,v to have the same last dimension and to be less than or equal to "
            r"(?P<most>\d+)\. " + _SIZES, "head dim", _GOT, "equal ones, at most {most}"),
    Message(r"requires q,k,v to have the same last dimension\. " + _SIZES, "head dim", _GOT,
            "equal ones"),
    Message(r"requires last dimension of inputs to be divisible by (?P<step>\d+)\. " + _SIZES,
            "head dim", _GOT, "multiples of {step}", "pad the heads"),
    Message(r"requires last dimension of inputs to less or equal than (?P<most>\d+)\. " + _SIZES,
            "head dim", _GOT, "at most {most}"),
    Message(r"doesn't support training with head_dim.*head_dim: (?P<got>\d+) on a sm "
            r"(?P<major>\d+)\."
            r"(?P<minor>\d+)", "head dim", "{got} in training on sm_{major}{minor}", "at most 192"),
    Message(r"^head_dim should be no more than (?P<most>\d+)", "head dim", "more",
            "at most {most}"),
    Message(r"^head_dim should be a multiple of 8", "head dim", "another one", "multiples of 8",
            "pad the heads"),
    Message(r"does not support backward with these head dimensions\. Got d_qk: (?P<q>\d+), d_v: "
            r"(?P<v>\d+)", "head dim", "{q} and value dim {v} in training",
            "at most 128, (192, 128) or (256, 256)"),
    Message(r"storage offsets .* aligned to (?P<bytes>\d+) bytes\. Got .*?: (?P<q>\d+), key.*?: "
            r"(?P<k>\d+), value.*?: (?P<v>\d+)", "alignment", _GOT + " bytes off",
            "tensors that begin at multiples of {bytes} bytes", "clone them"),
    Message(r"data pointers.*aligned", "alignment", "data pointers that are not aligned",
            "aligned tensors", "clone them"),
    # dtypes, masks, dropout, determinism
    Message(r"^Expected query, key and value to all be of dtype: \{(?P<takes>.*?)\}\. Got Query "
            r"dtype: "
            r"(?P<q>\S+), Key dtype: (?P<k>\S+), and Value dtype: (?P<v>\S+) instead", "dtype",
            _GOT,
            "{takes}", "cast the inputs"),
    Message(r"does not support non-null attn_mask", "mask", "an attn_mask", "is_causal or no mask",
            "ask sdpa_efficient"),
    Message(r"^Please use the following attn mask shapes: (?P<takes>.*)$", "mask",
            "an attn_mask of another shape", "{takes}"),
    Message(r"requires attn_mask be boolean, or has the same datatype", "mask",
            "an attn_mask of another dtype", "bool or the dtype of the query", "cast the mask"),
    Message(r"does not support the is_causal flag when seqlen_q != seqlen_k\. Got seqlen_q: "
            r"(?P<q>\d+) seqlen_k: (?P<k>\d+)", "mask", "is_causal with T={q}, S={k}",
            "equal lengths"),
    Message(r"^Both fused kernels do not support non-zero dropout", "dropout",
            "a dropout_p above 0",
            "0 on a CPU"),
    Message(r"^cuDNN dropout probability resolution is limited", "dropout", "another dropout_p",
            "multiples of 1/16"),
    Message(r"^(?P<version>\d*) ?cuDNN version does not support drop+out in SDPA", "dropout",
            "a dropout_p above 0 with cuDNN {version}", "0 with cuDNN 9.11 to 9.13",
            "install another cuDNN"),
    Message(r"^Dropout reference is only supported on (?P<least>[\d.]+)", "dropout",
            "a dropout_p above 0 with an older cuDNN", "0 before cuDNN {least}",
            "install a newer cuDNN"),
    Message(r"^cuDNN SDPA is not deterministic", "determinism",
            "torch.use_deterministic_algorithms(True)", "no promise of bitwise equal results"),
    # cuDNN
    Message(r"^SDPA fprop requires cudnn (?P<least>[\d.]+) or higher", "cuDNN", "an older one",
            "{least} and newer", "install a newer cuDNN"),
    Message(r"^(?P<version>\d*) ?cuDNN version too old.*< v(?P<least>[\d.]+)\)", "cuDNN",
            "{version}",
            "{least} and newer", "install a newer cuDNN"),
    Message(r"batch size or num_heads greater than (?P<most>\d+)\. Got batch size: (?P<b>\d+), "
            r"num_heads: (?P<n>\d+)", "grid", "batch {b}, heads {n}", "at most {most} of both"),
    Message(r"^cudnn SDPA does not support key/value sequence length 1", "key length", "1",
            "2 and more"),
    Message(r"^cudnn SDPA does not support query sequence length 1 with dropout", "query length",
            "1 with dropout", "2 and more with dropout"),
    Message(r"^not-multiple-of-64 seq_kv is not supported below (?P<least>[\d.]+)", "key length",
            "another one", "multiples of 64 before cuDNN {least}", "install a newer cuDNN"),
    Message(r"^s_q less than 64 is not supported before cudnn (?P<least>[\d.]+)", "query length",
            "less than 64", "64 and more before cuDNN {least}", "install a newer cuDNN"),
    Message(r"^s_q not a multiple of 64 with padding/dropout is not supported", "query length",
            "another one with dropout", "multiples of 64 with dropout", "install a newer cuDNN"),
    Message(r"^(?P<which>Query|Key|Value) tensor was not in cuDNN-supported (?P<form>\w+) QKV "
            r"layout"
            r"(?P<strides>.*)$", "strides", "{which} {strides}", "cuDNN's {form} layout",
            "call contiguous()"),
    # nested tensors
    Message(r"Nested Tensor inputs|nested tensor support is not enabled", "storage",
            "nested tensors",
            "dense tensors"),
    Message(r"nested tensor support does not support backward|training with (?:broadcasted )?NT "
            r"inputs",
            "backward", "nested tensors that need gradients", "inference only"),
    Message(r"supports nested tensors on (?P<archs>SM .*?)\.?$", "compute capability",
            "nested tensors on another one", "{archs}"),
    Message(r"nested tensor query sequence length <= (?P<least>\d+)", "query length",
            "at most {least} in a nested query", "more"),
    Message(r"have broadcastable (?P<what>batch size|num heads) ?got Query .*? ?(?P<q>\d+), Key "
            r".*? ?"
            r"(?P<k>\d+), Value .*? ?(?P<v>\d+) instead", "storage", "nested, {what}: " + _GOT,
            "sizes that broadcast"),
    Message(r"do not support ragged num_head_dims, (?P<which>\w+)", "storage",
            "a nested {which} with a ragged number of heads", "one number of heads"),
    Message(r"do not support seq_len == 0, (?P<which>\w+)", "storage",
            "a nested {which} with an empty sequence", "1 and more"),
    Message(r"must have a consistent seq_len dim", "storage",
            "nested keys and values of which one broadcasts", "one sequence length in the other"),
    Message(r"^Packed projection for fused kernels does not support sequence_length <= 1",
            "storage",
            "nested sequences of length 1", "2 and more"),
)  # fmt: skip

_ORIGIN = re.compile(r" \(Triggered internally at .*\)\.?$| \(function \w+\)$", re.DOTALL)
_HEADERS = {
    "Memory efficient kernel not used because:": "sdpa_efficient",
    "Flash attention kernel not used because:": "sdpa_flash",
    "cuDNN attention kernel not used because:": "sdpa_cudnn",
}


def translate(text: str) -> Reason:
    """Return torch's message as a reason; one that is not known is kept as it is.

    >>> print(translate("Flash Attention does not support non-null attn_mask."))
    mask: got an attn_mask, takes is_causal or no mask (ask sdpa_efficient)
    >>> translate("Something new.").got
    'Something new.'
    """
    plain = _ORIGIN.sub("", text.strip())
    for message in _MESSAGES:
        reason = message.reason(plain)
        if reason is not None:
            return replace(reason, got=reason.got.removesuffix("; attn_mask"))
    return Reason("torch", plain, "what torch does not say")


def by_backend(texts: Iterable[str]) -> dict[str, list[Reason]]:
    """Sort the warnings that come before "No available kernel" by the kernel they speak of.

    What stands before the first headline belongs to no kernel, and is found under ``""``.

    >>> said = ["Flash attention kernel not used because:", "cuDNN SDPA is not deterministic."]
    >>> [r.fact for r in by_backend(said)["sdpa_flash"]]
    ['determinism']
    """
    found: dict[str, list[Reason]] = {}
    name = ""
    for text in texts:
        plain = _ORIGIN.sub("", text.strip())
        if plain in _HEADERS:
            name = _HEADERS[plain]
            found.setdefault(name, [])
        else:
            found.setdefault(name, []).append(translate(plain))
    return found
