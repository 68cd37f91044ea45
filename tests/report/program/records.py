"""Records to report on, each made up of values."""

from collections import Counter
from dataclasses import replace

from polyattn.integrations.program.asked import Case, Gain, Passed, Process, Ran, Record, Unseen
from polyattn.problem import MaskFacts, Problem

HARM = ", by `polyattn bench harm --record` on AMD EPYC with AVX2 (family 25), 2 cores, 2 threads"
HOSTILE = "</script><img src=x onerror=window.hit=1>\u202etxt\n"


def problem(q_len=256, mask="Causal('top_left')", **changes):
    facts = None if mask is None else MaskFacts(mask, frozenset({"Causal"}), "top_left")
    return Problem(
        batch=1, q_len=q_len, kv_len=q_len, heads=8, kv_heads=8, head_dim=64, layout="BNTH",
        mask=facts, **changes,
    )  # fmt: skip


def ran(backend="native_cpu", why="1.6 x torch's kernel on causal problems" + HARM, process=0):
    return Ran(backend, "0.1.0", "HEURISTIC", why, None, process)


def case(on, refused=None, **changes):
    """A case with its calls by what they ran on."""
    on = Counter(on)
    return Case(
        problem(**changes), None, (False,) * 3, None, on.total(), on,
        refused or {"sdpa_cudnn": "device: got cpu, takes cuda"},
    )  # fmt: skip


def one_process():
    return Record(
        [case({ran(): 12})], [], ("train.py",), [Process("the program", "the program", 1, 0)]
    )


def many():
    """Ranks with workers, several reasons, things out of sight, and gains."""
    processes = [
        Process("rank 0", "rank", 11, 10, "ended", 2),
        Process("rank 1", "rank", 12, 10, "cut short", 2),
        *(Process(f"DataLoader worker {at}", "DataLoader worker", 20 + at, 11) for at in range(4)),
        Process("torchrun", "torchrun", 10, 9),
        Process("server.py", "server.py", 13, 9, "running"),
    ]
    small = "1.41 x torch's kernel on small (some 20 us) problems (1.16 - 1.66)" + HARM
    cases = [
        case({ran(): 1000, ran(process=1): 1000}),
        case({ran(why=small, process=at): 50 for at in range(2, 6)}, q_len=8, mask=None),
        case({ran("sdpa_math", "asked for", 1): 7}, {"flex": "compiles"}, q_len=31, grad=True),
    ]
    return Record(
        cases,
        [
            Passed("inputs of 2, 2 and 2 dims", "(64, 64), (64, 64), (64, 64)", 3, 0),
            Passed("inputs of 2, 2 and 2 dims", "(32, 32), (32, 32), (32, 32)", 2, 1),
            Passed("transformers' eager attention of llama", "", 48, 7),
        ],
        ("train.py", "--steps", "3"),
        processes,
        [
            Unseen("python -I tool.py", "python -I reads no PYTHONPATH", 2),
            Unseen("GPTJModel", "GPTJAttention is attention written out in transformers", 1, 7),
        ],
        [
            Gain(0, "native_cpu", (1.0e-3, 1.1e-3, 1.2e-3), (2.0e-3, 2.1e-3, 2.2e-3), 2, 0.3),
            Gain(1, "native_cpu", (50e-6, 60e-6, 70e-6), (60e-6, 60e-6, 60e-6), 1, 0.0),
            Gain(2, "sdpa_math", note="not measured: 60 s were used up"),
        ],
        "cpu:AMD EPYC AVX2 threads=2, torch=2.13.0",
    )


def hostile():
    found = many()
    return replace(
        found,
        program=(HOSTILE, "x" * 5000),
        passed=[Passed(HOSTILE, HOSTILE, 3)],
        processes=[replace(one, name=HOSTILE) for one in found.processes],
        unseen=[Unseen(HOSTILE, "y" * 5000)],
        machine=HOSTILE,
        cases=[replace(one, refused={HOSTILE: "z" * 5000}) for one in found.cases],
    )


def long(classes=700):
    made = []
    for at in range(classes):
        kind = replace(
            case({ran(): at + 1}), problem=problem().with_(head_dim=at + 1, value_dim=at + 1)
        )
        made.append(kind)
    return Record(made, [], ("x.py",), [Process("the program", "the program", 1, 0)])
