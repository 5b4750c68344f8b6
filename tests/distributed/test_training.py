"""Five steps on two ranks compared with one process: losses and gradient norms, for all axes."""

import pytest
import torch

from tests.distributed import tiny

# With and without biases and norms of heads. Other architectures have the slots of Qwen3 (tests/models).
DENSE = ["qwen2", "qwen3"]
SIZES = {"fsdp": {}, "sp": {"sp": 2}, "ep": {"ep": 2}, "sp and ep": {"sp": 2, "ep": 2}, "hsdp": {"dp_replicate": 2}}


def on_ranks(name, sizes, kwargs):
    return tiny.train(name, sizes, **kwargs)


_alone = {}


def train_alone(name, kwargs):
    """The result of one process, computed once for all meshes."""
    key = name, repr(sorted(kwargs.items()))
    if key not in _alone:
        _alone[key] = torch.tensor(tiny.train(name, **kwargs))
    return _alone[key]


def check(ranks, name, sizes, world=2, **kwargs):
    expected = train_alone(name, {k: v for k, v in kwargs.items() if k != "options"})
    assert expected[0, 1] > 1e-2
    for found in ranks.run(on_ranks, name, sizes, kwargs, world=world):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)


@pytest.mark.quick("fsdp-qwen3", "sp-qwen2")
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("axis", ["fsdp", "sp"])
def test_dense_equals_one_process(ranks, name, axis):
    check(ranks, name, SIZES[axis], micro_batches=2)


@pytest.mark.quick("eager-ep", "auto-sp and ep")
@pytest.mark.parametrize("axis", list(SIZES))
@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_experts_equal_one_process(ranks, axis, ops):
    check(ranks, "qwen3_moe", SIZES[axis], micro_batches=2, ops=ops, aux_loss=ops == "eager")


GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHARED = {"shared_expert_intermediate_size": 16}
MOE = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v3": {**GROUPS, **MLA, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4},
    "qwen2_moe": SHARED,
    "qwen3_5_moe_text": {**SHARED, **HYBRID, "num_experts": 4},
    "glm4_moe": {**GROUPS, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 0},
}


@pytest.mark.quick("gpt_oss")
@pytest.mark.parametrize("name", list(MOE))
def test_experts_of_each_architecture_equal_one_process(ranks, name):
    """Biases of experts, routers with groups, and shared experts with or without a gate; the plan is the default."""
    changes = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, **MOE[name]}
    ops = {"preset": "eager", "moe_implementation": "grouped_mm"}
    check(ranks, name, SIZES["ep"], steps=2, micro_batches=2, ops=ops, changes=changes)


ATTENTION = ["eager", "sdpa"]


@pytest.mark.quick("sdpa")
@pytest.mark.parametrize("attention", ATTENTION)
def test_documents_across_rank_boundaries(ranks, attention):
    ops = {"preset": "eager", "attn_implementation": attention}
    check(ranks, "qwen3", SIZES["sp"], steps=2, micro_batches=2, ops=ops, documents=(2, 7, 3))


@pytest.mark.quick("eager")
@pytest.mark.parametrize("attention", ATTENTION)
def test_padded_length(ranks, attention):
    ops = {"preset": "eager", "attn_implementation": attention}
    check(ranks, "qwen3", SIZES["sp"], steps=2, ops=ops, length=11)


@pytest.mark.quick("sdpa")
@pytest.mark.parametrize("attention", ATTENTION)
def test_sliding_window(ranks, attention):
    changes = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ops = {"preset": "eager", "attn_implementation": attention}
    check(ranks, "qwen2", SIZES["sp"], steps=2, ops=ops, changes=changes)


SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
# name -> (changes, whether Transformers' eager attention separates documents)
KINDS = {
    "gpt_oss": (SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}, False),
    "gemma2": (SLIDING | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0}, True),
    "gemma3_text": (SLIDING | {"query_pre_attn_scalar": 8}, True),
    "olmo3": (SLIDING, True),
    "mimo_v2_flash": (SLIDING | EXPERTS | {"v_head_dim": 4, "n_routed_experts": 4}, True),
    "deepseek_v3": (
        EXPERTS
        | {"n_routed_experts": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 8}
        | {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
        True,
    ),
    "llama4_text": (
        {"attention_chunk_size": 3, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
        True,
    ),
}

# Kernels of queries, keys and values before attention.
KERNELS = {"deepseek_v3": {"expand_kv_implementation": "triton", "rotary_pos_emb_implementation": "triton"}}


@pytest.mark.quick("gpt_oss", "gemma2", "deepseek_v3", "llama4_text")
@pytest.mark.parametrize("name", KINDS)
def test_sequences_of_every_kind_of_attention(ranks, name):
    """Sinks, softcap, windows, chunks, and values narrower than keys."""
    changes, packs = KINDS[name]
    documents = (2, 7, 3) if packs else ()
    ops = {"preset": "eager", **KERNELS.get(name, {})}
    options = {"ulysses_pipeline": 2}
    check(ranks, name, SIZES["sp"], steps=2, changes=changes, documents=documents, ops=ops, options=options)


def test_ulysses_pipeline(ranks):
    changes = {"num_key_value_heads": 4}
    check(ranks, "qwen3", SIZES["sp"], steps=2, ops="auto", changes=changes, options={"ulysses_pipeline": 2})


@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("name", [*DENSE, "qwen3_moe"])
def test_ulysses_overlap(ranks, name):
    """Equal to no overlap bit for bit, except for rounding where heads are repeated (here with recomputation)."""
    kwargs = {"steps": 2, "micro_batches": 2, "documents": (2, 7, 3)}
    plain = ranks.run(on_ranks, name, SIZES["sp"], kwargs)
    assert ranks.run(on_ranks, name, SIZES["sp"], {**kwargs, "options": {"ulysses_overlap": True}}) == plain
    kwargs |= {"changes": {"num_key_value_heads": 1}}
    check(ranks, name, SIZES["sp"], **kwargs, options={"ulysses_overlap": True, "activation_checkpointing": True})


def overlapped():
    """Order of projections and of starts and waits of their all-to-alls, forward and backward."""
    from opslot.distributed import _collectives, init_parallel_state, shard_sequence
    from opslot.models.parallelize import parallelize

    state = init_parallel_state(device_type="cpu", sp=2)
    model = parallelize(tiny.build("qwen3", num_hidden_layers=1), state, ulysses_overlap=True)
    seen = []
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        model.get_submodule(f"model.layers.0.self_attn.{name}").register_forward_hook(lambda *_, n=name: seen.append(n))
    start, wait = _collectives._Transfer.start, _collectives._Transfer.wait
    try:
        _collectives._Transfer.start = lambda self, x: (seen.append("start"), start(self, x))[1]
        _collectives._Transfer.wait = lambda self: (seen.append("wait"), wait(self))[1]
        batch = shard_sequence(tiny.rows(0), state)
        loss = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(30)).loss
        forward, seen[:] = list(seen), []
        loss.backward()
    finally:
        _collectives._Transfer.start, _collectives._Transfer.wait = start, wait
    return forward, seen


def test_all_to_all_starts_before_the_next_projection(ranks):
    for forward, backward in ranks.run(overlapped):
        # The hook that starts the all-to-all of a projection runs before the hook of this test.
        started = ["q_proj", "start", "k_proj", "start", "start", "v_proj"]
        assert forward == [*started, "wait", "wait", "wait", "o_proj"]
        assert backward == ["start"] * 3 + ["wait"] * 3


def wrong_options(case):
    from opslot.distributed import init_parallel_state, shard_sequence
    from opslot.models.parallelize import parallelize

    state = init_parallel_state(device_type="cpu", sp=2)
    model = tiny.build("qwen3")
    if case == "no projections":
        for layer in model.model.layers:
            layer.self_attn.k_proj = None
    pipeline = 2 if case == "pipeline" else 1
    parallelize(model, state, ulysses_overlap=True, ulysses_pipeline=pipeline)
    if case == "changed":
        model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda m, a, out: out + 1)
        model(**shard_sequence({"input_ids": tiny.rows(0)["input_ids"]}, state), use_cache=False)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no projections", r"Qwen3ForCausalLM has no attention with q_proj, k_proj.*\n  hint: set ulysses_overlap to"),
        ("pipeline", r"cannot be taken in 2 chunks\n  hint: set ulysses_pipeline to 1"),
        (
            "changed",
            r"the query was changed between its projection.*\n  hint: set ulysses_overlap to False",
        ),
    ],
)
def test_unsupported_overlap_raises(ranks, rank_failed, case, message):
    with pytest.raises(rank_failed, match=message):
        ranks.run(wrong_options, case)


def without(entry):
    from opslot.distributed import init_parallel_state, shard_sequence
    from opslot.models.parallelize import parallelize

    state = init_parallel_state(device_type="cpu", sp=2)
    model = parallelize(tiny.build("qwen3"), state)
    whole = {**shard_sequence(tiny.rows(0), state), "num_items_in_batch": torch.tensor(30)}
    model(**{name: value for name, value in whole.items() if name != entry})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("position_ids", "each rank would count from 0"),
        ("shift_labels", "the last token of each shard would have no label"),
        ("num_items_in_batch", "each rank would average over its own tokens"),
    ],
)
def test_local_sequence_without_sharding_raises(ranks, rank_failed, entry, message):
    """Without an error, positions would be wrong, labels missing at shard boundaries, and means summed over ranks."""
    with pytest.raises(rank_failed, match=rf"without {entry}, so {message}\n  hint: .*shard_sequence"):
        ranks.run(without, entry)


def generate_from_shards(use_cache):
    from opslot.distributed import init_parallel_state
    from opslot.models.parallelize import parallelize

    model = parallelize(tiny.build("qwen3"), init_parallel_state(device_type="cpu", sp=2))
    with torch.no_grad():
        model.generate(tiny.rows(0)["input_ids"], max_new_tokens=2, pad_token_id=0, use_cache=use_cache)


@pytest.mark.parametrize(("use_cache", "found"), [(True, "a cache"), (False, "logits_to_keep")])
def test_generation_from_shards_raises(ranks, rank_failed, use_cache, found):
    """Each rank would attend to the prompt on the other one as to a part of its own sequence."""
    with pytest.raises(rank_failed, match=f"found: {found}, which generate passes\n  hint: generate with a model"):
        ranks.run(generate_from_shards, use_cache)


def log_probs(sizes):
    """Those of global sequences [B, S]."""
    import opslot
    from opslot.distributed import get_parallel_state, init_parallel_state, shard_sequence

    state = init_parallel_state(device_type="cpu", **sizes) if sizes else get_parallel_state()
    model = opslot.parallelize(tiny.build("qwen3"), state)
    own = model(**shard_sequence(tiny.rows(0), state), return_log_probs=True, use_cache=False).log_probs
    return own.tolist()


def test_log_probs_of_shards_need_no_count_of_labels(ranks):
    found = torch.cat([torch.tensor(own) for own in ranks.run(log_probs, {"sp": 2})], 1)
    torch.testing.assert_close(found, torch.tensor(log_probs({})), rtol=1e-5, atol=1e-5)


def logged_warnings():
    """Log records for a model on two ranks: no labels, labels and num_items, labels in evaluation, only labels."""
    import logging

    from opslot.distributed import init_parallel_state
    from opslot.models.parallelize import _warn_once, parallelize

    # Other tests ran in this process.
    _warn_once.cache_clear()
    model = parallelize(tiny.build("qwen3"), init_parallel_state(device_type="cpu"))
    batch, counts, lines = tiny.rows(0), [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("opslot").addHandler(handler)
    try:
        for labels, count, grad in (
            (None, None, True),
            (0, 30, True),
            (0, None, False),
            (0, None, True),
            (0, None, True),
        ):
            given = {} if labels is None else {"labels": batch["labels"]}
            with torch.set_grad_enabled(grad):
                model(
                    input_ids=batch["input_ids"],
                    num_items_in_batch=None if count is None else torch.tensor(count),
                    use_cache=False,
                    **given,
                )
            counts.append(len(lines))
    finally:
        logging.getLogger("opslot").removeHandler(handler)
    return counts, lines


def test_mean_losses_warn_once(ranks):
    for counts, lines in ranks.run(logged_warnings):
        assert counts == [0, 0, 0, 1, 1]
        assert "Qwen3ForCausalLM is trained on several ranks" in lines[0]
        assert "pass num_items_in_batch" in lines[0]


@pytest.mark.quick("11")
@pytest.mark.parametrize("length", [11, 12])
def test_aux_loss_ignores_padding(ranks, length):
    check(ranks, "qwen3_moe", SIZES["sp"], length=length, aux_loss=True)


def test_fewer_key_value_heads_than_ranks(ranks):
    check(ranks, "qwen3", SIZES["sp"], steps=2, changes={"num_key_value_heads": 1})


@pytest.mark.quick("sp and ep")
@pytest.mark.parametrize("axis", ["fsdp", "sp", "ep", "sp and ep"])
def test_gradient_accumulation_and_activation_checkpointing(ranks, axis):
    check(
        ranks,
        "qwen3_moe",
        SIZES[axis],
        steps=2,
        micro_batches=4,
        ops="auto",
        aux_loss=True,
        options={"activation_checkpointing": True},
    )


@pytest.mark.quick("auto")
@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_rank_without_tokens(ranks, ops):
    changes = {"num_experts_per_tok": 1}
    check(ranks, "qwen3_moe", SIZES["ep"], micro_batches=2, ops=ops, one_expert_for_all=True, changes=changes)


def test_tied_embeddings(ranks):
    check(ranks, "qwen3", SIZES["fsdp"], micro_batches=2, ops="auto", changes={"tie_word_embeddings": True})


@pytest.mark.quick("fsdp-qwen3_moe")
@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_moe"])
@pytest.mark.parametrize("axis", ["fsdp", "sp"])
def test_fused_loss(ranks, name, axis):
    """It reads the head's weight, which has an FSDP group separate from the root."""
    ops = {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss"}
    check(ranks, name, SIZES[axis], micro_batches=4, ops=ops, aux_loss="moe" in name)


def test_cpu_offload(ranks):
    check(ranks, "qwen3_moe", SIZES["ep"], steps=2, micro_batches=2, options={"cpu_offload": True})


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"ep": 2}, marks=pytest.mark.slow),
        {"dp_replicate": 2, "ep": 2},
        pytest.param({"sp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"sp": 2, "ep": 4}, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2, "sp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_four_ranks_equal_one_process(ranks, sizes):
    """Experts sharded within their ep rank, HSDP, and combined axes."""
    check(ranks, "qwen3_moe", sizes, world=4, steps=3, micro_batches=4, ops="auto", aux_loss=True)
