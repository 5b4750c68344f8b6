import atexit
import fnmatch
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

# Idle threads of the many test processes must not spin on cores that others need. Torch reads this on import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Each pytest-xdist worker has one core, and so do the processes that its tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Names of models that do not exist must not be looked up on the Hugging Face hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Kernel timings measured on this machine must not change which kernels the tests see.
os.environ["OPSLOT_PROFILE"] = "off"

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


UNMATCHED = pytest.StashKey[dict[str, set[str]]]()
COLLECTS_ALL = pytest.StashKey[bool]()


def _module(path: str):
    """A helper module under tests/, which is not an importable package."""
    name = "opslot_test_" + Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests, which the process that starts pytest-xdist workers does not."""
    worker = getattr(config, "workerinput", None)
    if worker is None and config.getoption("numprocesses", None):
        return
    import torch

    # Collecting garbage takes a quarter of the time of importing and collecting the tests.
    gc.disable()
    # Triton reads this on import, which collecting any test may trigger: its kernels then run in the interpreter.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    # The time of a hypothesis example depends on the load of the machine.
    if importlib.util.find_spec("hypothesis"):
        from hypothesis import HealthCheck, settings

        settings.register_profile("busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("busy")
    config.stash[COLLECTS_ALL] = config.args == config.getini("testpaths")
    if worker is not None and config.stash[COLLECTS_ALL]:
        # Each worker starts with other files, so that in a new checkout each file is compiled by one of them.
        files = sorted(map(str, Path(__file__).parent.rglob("test_*.py")))
        start = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = [*files[start:], *files[:start]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list) -> None:
    """Workers that are forks of one process do not import torch, Transformers and opslot each."""
    _module("forks.py").start_workers_as_forks(specs)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.quick(*patterns)`: parameters of the test whose id matches no pattern are slow."""
    if hasattr(config, "workerinput"):
        # The same order in each worker.
        items.sort(key=lambda item: str(item.path))
    unmatched: dict[str, set[str]] = {}
    for item in items:
        if (marker := item.get_closest_marker("quick")) is None:
            continue
        found = {pattern for pattern in marker.args if fnmatch.fnmatchcase(item.callspec.id, pattern)}
        if not found:
            item.add_marker(pytest.mark.slow)
        function = item.nodeid.partition("[")[0]
        unmatched[function] = unmatched.get(function, set(marker.args)) - found
    config.stash[UNMATCHED] = unmatched


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    """Code that ships with checkpoints is imported from `tmp_path`, again in each test."""
    folder = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    monkeypatch.setattr("sys.path", [str(folder), *sys.path])
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def hub(tmp_path) -> Iterator:
    """A local stand-in for the Hugging Face hub, with an empty cache."""
    module = _module("hub.py")
    server = module.Hub(tmp_path / "hub")
    with module.read_from(server.constants):
        yield server
        server.close()


@pytest.fixture
def unmatched_patterns(pytestconfig) -> dict[str, set[str]]:
    """The patterns of `pytest.mark.quick` that match no parameter, of each test that has some."""
    if not pytestconfig.stash[COLLECTS_ALL]:
        pytest.skip("not all parameters were collected")
    return {function: patterns for function, patterns in pytestconfig.stash[UNMATCHED].items() if patterns}


def pytest_collection_finish() -> None:
    """Garbage collection takes a sixth of the tests' time unless it leaves out what was imported."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_sessionfinish() -> None:
    # After pytest, which collects garbage ten times. A fork leaves its memory to the system.
    if "OPSLOT_TEST_WORKER_IS_FORK" not in os.environ:
        atexit.register(_collect_all)


def _collect_all() -> None:
    # Extension modules report what is left at exit as leaked.
    gc.unfreeze()
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def faster_libraries() -> None:
    import torch

    if not torch.cuda.is_available():
        _module("interpreter.py").speed_up()


@pytest.fixture(scope="session")
def forks() -> Iterator:
    """Starts scripts in processes that have imported torch, Transformers and opslot, but no modeling module."""
    processes = _module("forks.py").Forks()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def ranks(forks) -> Iterator:
    """Processes that run functions of a test as ranks; two of them unless the test asks for more."""
    pool = _module("distributed/ranks.py").Ranks(forks)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def forked_workers(forks) -> Iterator[None]:
    """Fork the workers of checks, which is faster than spawning them."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        # CUDA does not survive a fork.
        if not torch.cuda.is_available():
            context = _module("forks.py").Context(forks)
            module = SimpleNamespace(get_context=lambda _: context)
            patch.setattr("opslot.verify.isolated.multiprocessing", module)
        yield


@pytest.fixture
def rank_failed() -> type[Exception]:
    return _module("distributed/ranks.py").RankFailed


@pytest.fixture
def free_port() -> Callable[[], int]:
    return _module("distributed/ranks.py").free_port


@pytest.fixture(scope="session")
def tokenizer():
    """One token per byte; <eos> has index 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={"<eos>": 0, **{c: i for i, c in enumerate(alphabet, 1)}}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)


@pytest.fixture
def moe_config_folder(tmp_path):
    """A folder with the config.json of a tiny Qwen3-MoE."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    return tmp_path
