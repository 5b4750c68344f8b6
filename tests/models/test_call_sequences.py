"""Random sequences of user operations on a model: after each step it computes what Transformers' class does.

Bound to eager, loss and gradients are equal bit for bit; under auto they are within a tolerance.
"""

import copy
import io
import pickle
import random
import sys

import pytest
import torch
import transformers
from transformers import AutoConfig

import opslot
from opslot._base.device import DeviceFacts
from opslot._base.errors import ConfigError
from opslot.checkpoint import load_weights, save_weights
from opslot.slots import binding_of
from tests.distributed import tiny
from tests.models.sizes import SIZES

CLASSES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "gemma2": "Gemma2ForCausalLM"}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
# "eager" here is the code of that name of attention and experts, which the references run.
OPS = {"auto": "auto", "eager": {"preset": "eager", "attn_implementation": "eager", "moe_implementation": "eager"}}
BATCH = torch.randint(1, 61, (2, 13), generator=torch.Generator().manual_seed(3))


def original(arch, changes=None, **implementations):
    config = AutoConfig.for_model(arch, **SIZES, **(MOE if "moe" in arch else {}) | (changes or {}))
    torch.manual_seed(0)
    return getattr(transformers, CLASSES[arch])._from_config(config, **implementations).train()


def outputs(model, call=None):
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=BATCH, labels=BATCH, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


class Session:
    """A model, and the steps that it may take."""

    def __init__(self, arch, folder, rng):
        self.arch, self.folder, self.rng = arch, folder, rng
        self.model, self.ops = original(arch), None

    def step_apply(self):
        self.ops = self.rng.choice(["eager", "auto"])
        opslot.apply(self.model, OPS[self.ops])

    def step_restore(self):
        opslot.restore(self.model)
        self.ops = None

    def step_bind(self):
        if self.ops is not None:
            self.ops = self.rng.choice(["eager", "auto"])
            opslot.bind(self.model, OPS[self.ops])

    def step_fail_to_bind(self):
        before = str(opslot.explain(self.model))
        with pytest.raises(opslot._base.errors.OpslotError):
            opslot.apply(self.model, {"rms_norm_implementation": "npu"})
        assert str(opslot.explain(self.model)) == before

    def step_move(self):
        """Pretend that the model was bound on a GPU and now runs on a CPU."""
        if self.ops is None:
            return
        module = sys.modules["opslot.slots.binding"]
        real, module.facts_of = module.facts_of, lambda device: DeviceFacts("gpu", (9, 0), "a GPU")
        try:
            opslot.bind(self.model, OPS[self.ops])
        finally:
            module.facts_of = real
        self.model(input_ids=BATCH)
        assert binding_of(self.model)[1].device.type == "cpu"

    def step_explain(self):
        assert (opslot.explain(self.model).device != "") == (self.ops is not None)

    def step_change_dtype(self):
        self.model.to(torch.float64).to(torch.float32)

    def step_compile(self):
        torch.compiler.reset()
        compiled = torch.compile(self.model, fullgraph=self.ops is not None, backend="eager")
        self.check(outputs(self.model, compiled), "compiled")

    def step_save(self):
        self.model.save_pretrained(self.folder)

    def step_load(self):
        if (self.folder / "config.json").is_file():
            self.ops = self.rng.choice(["eager", "auto"])
            self.model = opslot.build_foundation_model(self.folder, self.folder, ops_implementation=OPS[self.ops])

    def step_load_state_dict(self):
        self.model.load_state_dict({name: value.clone() for name, value in self.model.state_dict().items()})

    def step_deepcopy(self):
        self.model = copy.deepcopy(self.model)

    def step_pickle(self):
        # Transformers' hooks that record router logits are local functions, which can't be pickled.
        fresh = copy.deepcopy(self.model) if not self._records() else None
        if fresh is not None:
            self.model = pickle.loads(pickle.dumps(fresh))

    def step_torch_save(self):
        if not self._records():
            file = io.BytesIO()
            torch.save(self.model, file)
            file.seek(0)
            self.model = torch.load(file, weights_only=False)

    def step_set_attention(self):
        """Select attention with Transformers' API; the next binding selects again."""
        self.model.set_attn_implementation(
            self.rng.choice(["eager", "sdpa"] if self.model._supports_sdpa else ["eager"])
        )
        if self.ops is not None:
            opslot.bind(self.model, OPS[self.ops])

    def _records(self):
        return "moe" in self.arch

    def check(self, found, step):
        expected = self.expected()
        assert found.keys() == expected.keys()
        exact = self.ops == "eager"
        for name in expected:
            if exact and step != "compiled":
                assert torch.equal(found[name], expected[name]), f"{name} after {step}"
            else:
                torch.testing.assert_close(
                    found[name], expected[name], rtol=1e-4, atol=2e-5, msg=f"{name} after {step}"
                )

    def expected(self):
        return REFERENCES[self.arch]


REFERENCES = {}


@pytest.fixture(scope="module", autouse=True)
def references():
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    for arch in CLASSES:
        kwargs = eager if "moe" in arch else {"attn_implementation": "eager"}
        REFERENCES[arch] = outputs(original(arch, **kwargs))
    yield
    REFERENCES.clear()


@pytest.mark.quick("qwen3-0", "qwen3_moe-1", "gemma2-2")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("arch", CLASSES)
def test_random_sequence_of_calls(arch, seed, tmp_path):
    rng = random.Random(f"{arch} {seed}")
    session = Session(arch, tmp_path, rng)
    steps = sorted(name for name in dir(session) if name.startswith("step_"))
    if seed != 0:
        # Compiling takes most of the time.
        steps.remove("step_compile")
    taken = []
    for _ in range(12):
        taken.append(rng.choice(steps))
        getattr(session, taken[-1])()
        session.check(outputs(session.model), " ".join(name.removeprefix("step_") for name in taken))
    opslot.restore(session.model)
    assert type(session.model) is getattr(transformers, CLASSES[arch])


class ParallelSession(Session):
    """A parallelized model, and the steps that it may take on each rank."""

    def __init__(self, arch, folder, rng, model):
        self.arch, self.folder, self.rng, self.model, self.ops = arch, folder, rng, model, "auto"
        self.call = model
        names = "bind compile explain fail_to_bind fail_to_restore load_state_dict move_to_its_device save_and_load"
        self.steps = [getattr(self, f"step_{name}") for name in names.split()]

    def step_compile(self):
        """The next call is compiled."""
        torch.compiler.reset()
        self.call = torch.compile(self.model, backend="eager")

    def step_fail_to_restore(self):
        with pytest.raises(ConfigError, match="is parallelized"):
            opslot.restore(self.model)

    def step_move_to_its_device(self):
        self.model.to("cpu")

    def step_save_and_load(self):
        save_weights(self.model, self.folder)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        load_weights(self.model, self.folder)


def parallel_sequence(name, sizes, seed, folder):
    """Steps of a `ParallelSession` in any order; after each, gradients are compared with those of one process."""
    from opslot.distributed import init_parallel_state, shard_sequence

    rng = random.Random(seed)
    changes = {"output_router_logits": True} if "moe" in name else {}
    rows = tiny.rows(0)
    targets = torch.tensor(int((rows["labels"][:, 1:] != -100).sum()))
    alone = tiny.build(name, "eager", **changes)
    router = alone.config.router_aux_loss_coef if "moe" in name else 0.0
    out = alone(**rows, use_cache=False, num_items_in_batch=targets)
    (out.loss - router * (out.aux_loss if router else 0.0)).backward()
    expected = {n: p.grad for n, p in alone.named_parameters()}
    state = init_parallel_state(device_type="cpu", **sizes)
    model = opslot.parallelize(tiny.build(name, rng.choice(["eager", "auto"]), **changes), state)
    session = ParallelSession(name, folder, rng, model)
    batch = shard_sequence({key: value[state.dp_rank :: state.dp_size] for key, value in rows.items()}, state)
    steps = [*rng.sample(session.steps, len(session.steps)), session.step_bind]
    if "ep" in sizes:
        # Compiling takes most of the time.
        steps.remove(session.step_compile)
    for step in steps:
        step()
        model.zero_grad()
        out = session.call(**batch, use_cache=False, num_items_in_batch=targets)
        session.call = model
        (out.loss - router * (out.aux_loss if router else 0.0)).backward()
        for key, value in model.named_parameters():
            torch.testing.assert_close(value.grad.full_tensor(), expected[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.quick("qwen3_moe-sizes1")
@pytest.mark.parametrize(("name", "sizes"), [("qwen3", {"sp": 2}), ("qwen3_moe", {"ep": 2}), ("qwen3_moe", {"sp": 2})])
def test_random_sequence_of_calls_on_two_ranks(ranks, name, sizes, tmp_path):
    ranks.run(parallel_sequence, name, sizes, 1, tmp_path)


def test_mixture_of_experts_without_router_logits_is_pickled_and_saved():
    model = original("qwen3_moe", changes={"output_router_logits": False})
    opslot.apply(model, "eager")
    expected = outputs(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        found = outputs(other)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert str(opslot.explain(other)) == str(opslot.explain(model))
