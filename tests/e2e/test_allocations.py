"""A step of the native engine takes no memory: everything it needs is there once the model is loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.frontend.tokenizer_cache import convert_file
from tests.frontend.random_model import random_model

# Stands before the C library's allocator and counts calls that come from between two addresses.
_COUNTER = r"""
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static uintptr_t begin, end;
static atomic_long calls;

void count_between(uintptr_t from, uintptr_t to) { begin = from; end = to; }
long counted(void) { return atomic_load(&calls); }

#define SEE { uintptr_t at = (uintptr_t)__builtin_return_address(0); \
              if (at >= begin && at < end) atomic_fetch_add(&calls, 1); }
void* malloc(size_t n) { SEE return __libc_malloc(n); }
void* calloc(size_t n, size_t m) { SEE return __libc_calloc(n, m); }
void* realloc(void* p, size_t n) { SEE return __libc_realloc(p, n); }
void* memalign(size_t a, size_t n) { SEE return __libc_memalign(a, n); }
void* aligned_alloc(size_t a, size_t n) { SEE return __libc_memalign(a, n); }
int posix_memalign(void** p, size_t a, size_t n) { SEE return (*p = __libc_memalign(a, n)) ? 0 : 12; }
/* operator new and new[], plain and aligned: their callers' addresses, not the C++ library's */
void* _Znwm(size_t n) { SEE void* p = __libc_malloc(n ? n : 1); if (!p) abort(); return p; }
void* _Znam(size_t n) { SEE void* p = __libc_malloc(n ? n : 1); if (!p) abort(); return p; }
void* _ZnwmSt11align_val_t(size_t n, size_t a) { SEE return __libc_memalign(a, n); }
void* _ZnamSt11align_val_t(size_t n, size_t a) { SEE return __libc_memalign(a, n); }
"""

_PROGRAM = r"""
import ctypes, re, sys
from pathlib import Path
from headrace.backend.cpu import _native

counter = ctypes.CDLL(sys.argv[1])
counter.count_between.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
counter.counted.restype = ctypes.c_long
lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/_native." in line]
counter.count_between(int(lines[0].split("-")[0], 16), int(re.split("[- ]", lines[-1])[1], 16))

from headrace import LLM, SamplingParams

before = counter.counted()
sizes = {"max_model_len": 512, "kv_cache_memory_bytes": 64 * 2**20, "max_num_batched_tokens": 64}
tiny = {"quantization": sys.argv[3], "threads": 2} if sys.argv[3] else {"threads": 1}
llm = LLM(sys.argv[2], **tiny, **sizes)
loading = counter.counted() - before

def work(salt):
    prompts = [f"{salt} {number} " + "a long prompt in chunks " * (number * 9) for number in range(4)]
    kinds = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(n=3, seed=1, top_p=0.9, max_tokens=20, ignore_eos=True),
        SamplingParams(top_k=50, min_p=0.01, logprobs=5, max_tokens=20, ignore_eos=True),
        SamplingParams(presence_penalty=1, repetition_penalty=1.2, logit_bias={5: 2.0}, max_tokens=20),
    ]
    llm.generate(prompts, kinds, use_tqdm=False)

work("warm up")
steps, before = llm.stats().num_steps, counter.counted()
work("again")
work("and again")
print(loading, llm.stats().num_steps - steps, counter.counted() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and stands before glibc's malloc")
@pytest.mark.parametrize(
    "quantization",
    ["", pytest.param("int4", marks=pytest.mark.native), pytest.param("int8", marks=pytest.mark.native)],
    ids=["smollm2-135m", "tiny, int4", "tiny, int8"],
)
def test_steps_allocate_nothing(quantization: str, smollm2_path: Path, tmp_path: Path) -> None:
    """Prefill in chunks, decode, every kind of sampling: the native module calls neither malloc nor new.

    SmolLM2 on the best path of the CPU, and on all of them a model with its vocabulary and hardly any layers.
    """
    model = smollm2_path
    if quantization:
        tokenizer = convert_file(smollm2_path)["tokenizer.json"]
        model = random_model(tmp_path / "model", 49152, tokenizer)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "counter.c", tmp_path / "counter.so"
    source.write_text(_COUNTER)
    built = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-fno-builtin", "-o", str(library), str(source)],
        capture_output=True,
        text=True,
    )
    if built.returncode:
        pytest.skip(f"not glibc: {built.stderr[:200]}")
    program = [sys.executable, "-c", _PROGRAM, str(library), str(model), quantization]
    ran = subprocess.run(
        ["env", f"LD_PRELOAD={library}", *program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    loading, steps, allocations = map(int, ran.stdout.split())
    assert loading > 0, "what loading allocates must be seen, or nothing is proven"
    assert steps > 40
    assert allocations == 0
