import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Idle threads of the tests' many processes shall not spin on cores that others need; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Triton reads this when it is imported, which collecting any test may do: its kernels then run on the CPU here,
# through the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# What somebody measured on this machine must not decide what the tests see.
os.environ["OPSLOT_PROFILE"] = "off"


def _module(path: str):
    """A module of the tests, which lie in no package that could be imported by name."""
    name = "opslot_test_" + Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator:
    """Triton's interpreter looks for builtins in all of its language at every call of a function, which takes up to a
    quarter of a kernel's time. They are always the same ones."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def names(language) -> list[str]:
        return [name for name, member in inspect.getmembers(language) if is_builtin(member)]

    def patch_builtin(language, *rest) -> None:
        for name in names(language):
            # Within another call of the interpreter it is replaced already.
            if is_builtin(member := getattr(language, name)):
                interpreter._patch_attr(language, name, member, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


@pytest.fixture(scope="session")
def forks() -> Iterator:
    """Starts scripts in processes that have torch, Transformers and opslot imported, but hold no model's classes."""
    processes = _module("forks.py").Forks()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def ranks(forks) -> Iterator:
    """Four processes that run a test's functions as ranks, two of them unless the test says more."""
    pool = _module("distributed/ranks.py").Ranks(4, forks)
    yield pool
    pool.close()


@pytest.fixture
def rank_failed() -> type[Exception]:
    return _module("distributed/ranks.py").RankFailed


@pytest.fixture
def free_port() -> Callable[[], int]:
    return _module("distributed/ranks.py").free_port


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte, and <eos> as number 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={"<eos>": 0, **{c: i for i, c in enumerate(alphabet, 1)}}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)
