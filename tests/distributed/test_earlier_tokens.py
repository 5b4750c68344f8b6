"""DeepSeek-V4 on two ranks, each with its queries and the keys of all tokens before them, compared with one process."""

import pytest
import torch

import opslot
from opslot._base.errors import ConfigError
from opslot.distributed import init_parallel_state, shard_sequence, sum_over_ranks
from opslot.models._sequence.ulysses import with_ulysses
from opslot.slots import binding_of
from opslot.verify.random_model import random_model, train_step
from opslot.verify.tiny import tiny_config

KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
# Over two rows of 19 tokens, which are padded to 20: a document ends with a rank's shard, one crosses it, and one of a
# single token follows.
BOUNDS = {"whole rows": None, "documents": [0, 3, 10, 19, 27, 30, 37, 38]}


def config_of(**changes):
    config = tiny_config("deepseek_v4")
    config.update({"layer_types": KINDS, "num_hidden_layers": 3, "mlp_layer_types": ["moe"] * 3})
    config.update({"sliding_window": 6, "index_topk": 2, "compress_rates": dict(zip(KINDS[1:], (3, 4), strict=True))})
    config.update(changes)
    return config


def batch_of(config, bounds, length=19):
    ids = torch.randint(2, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).expand_as(ids)
    batch = {"input_ids": ids}
    if bounds is not None:
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        longest = int(cu_seqlens.diff().max())
        positions = torch.cat([torch.arange(n) for n in cu_seqlens.diff()]).view_as(ids)
        batch |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        batch |= {"max_length_q": longest, "max_length_k": longest}
    labels = ids.masked_fill(positions == 0, -100)
    targets = (labels[:, 1:] != -100).sum()
    return batch | {"position_ids": positions, "labels": labels, "num_items_in_batch": targets}


def step(config, kernel, bounds, sizes=None, checkpointing=False):
    """Loss and whole gradients, in one process or over the ranks of `sizes`."""
    model = random_model(config).train()
    opslot.apply(model, {"preset": "eager", "attn_implementation": kernel})
    batch = batch_of(config, bounds)
    if sizes is None:
        return train_step(model, [batch])
    state = init_parallel_state(device_type="cpu", **sizes)
    options = {"activation_checkpointing": "full"} if checkpointing else {}
    opslot.parallelize(model, state, **options)
    values = train_step(model, [shard_sequence(batch, state)])
    values["loss"] = torch.tensor(sum_over_ranks(float(values["loss"]))[0])
    return values


def on_ranks(changes, kernel, bounds, sizes, checkpointing):
    values = step(config_of(**changes), kernel, bounds, sizes, checkpointing)
    return {name: x.numpy() for name, x in values.items()}


def assert_equal(results, wanted):
    for found in results:
        for name, x in wanted.items():
            bound = 1e-5 * float(x.abs().max()) + 1e-8
            torch.testing.assert_close(torch.as_tensor(found[name]), x, rtol=1e-5, atol=bound, msg=name)


@pytest.mark.parametrize(
    ("kernel", "rows", "sizes", "checkpointing"),
    [
        ("eager", "documents", {"sp": 2}, False),
        ("eager", "documents", {"sp": 2, "ep": 2}, True),
        pytest.param("eager", "whole rows", {"sp": 2}, False, marks=pytest.mark.slow),
        pytest.param("triton", "documents", {"sp": 2}, False, marks=pytest.mark.slow),
        pytest.param("triton", "whole rows", {"sp": 2}, False, marks=pytest.mark.slow),
    ],
)
def test_shards_of_sequences_equal_one_process(ranks, kernel, rows, sizes, checkpointing):
    bounds = BOUNDS[rows]
    wanted = step(config_of(), "eager", bounds)
    assert all(x.any() for name, x in wanted.items() if "indexer" not in name)
    for found in ranks.run(on_ranks, {}, kernel, bounds, sizes, checkpointing):
        for name, x in wanted.items():
            torch.testing.assert_close(
                torch.as_tensor(found[name]), x, rtol=1e-5, atol=1e-5 * float(x.abs().max()) + 1e-8, msg=name
            )


@pytest.mark.slow
def test_ranks_need_not_divide_the_heads(ranks):
    changes = {"num_attention_heads": 3, "o_groups": 3}
    wanted = step(config_of(**changes), "eager", None)
    assert_equal(ranks.run(on_ranks, changes, "eager", None, {"sp": 2}, False), wanted)


def parallelize_with_dynamic_frequencies():
    state = init_parallel_state(device_type="cpu", sp=2)
    model = random_model(config_of())
    opslot.apply(model, "eager")
    for module in model.modules():
        if type(module).__name__ == "DeepseekV4CSACompressor":
            module.rotary_emb.rope_type["compress"] = "dynamic"
    with pytest.raises(ConfigError, match="depend on the largest position"):
        opslot.parallelize(model, state)


def test_dynamic_frequencies_of_compressed_keys_raise(ranks):
    ranks.run(parallelize_with_dynamic_frequencies)


def test_pipeline_without_effect_raises():
    model = random_model(tiny_config("deepseek_v4"))
    opslot.apply(model)
    bound = binding_of(model)
    assert bound is not None
    with pytest.raises(ConfigError, match="ulysses_pipeline=2 has no effect on DeepseekV4ForCausalLM"):
        with_ulysses(*bound, pipeline=2)
