"""Compiled models check position_ids inside their one graph."""

import pytest
import torch

from tests.models.test_packed_calls import LENGTHS, packed, positions, with_kernels


@pytest.fixture(autouse=True)
def without_compiled_code():
    torch._dynamo.reset()


@pytest.mark.quick("*-bert-auto", "*-openai-gpt-auto")
@pytest.mark.parametrize(
    ("arch", "ops"),
    [("openai-gpt", "auto"), ("bert", "eager"), ("bert", "auto"), ("bart", "eager"), ("hunyuan_vl", "eager")],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_positions_that_restart_raise_in_models_that_would_mix_documents(arch, ops, mode):
    compiled = torch.compile(with_kernels(arch, ops), fullgraph=True, backend="eager")
    ids = packed(compiled)["input_ids"]
    with mode():
        compiled(input_ids=ids, position_ids=torch.arange(sum(LENGTHS))[None])
        with pytest.raises(RuntimeError, match="cannot keep packed documents apart: position_ids restart"):
            compiled(input_ids=ids, position_ids=positions())


def test_positions_that_restart_raise_where_a_cache_is_made():
    compiled = torch.compile(with_kernels("llama", "auto"), fullgraph=True, backend="eager")
    ids = packed(compiled)["input_ids"]
    with torch.no_grad():
        compiled(input_ids=ids, position_ids=torch.arange(sum(LENGTHS))[None])
        with pytest.raises(
            RuntimeError, match=r"LlamaForCausalLM cannot keep .* a cache is made: pass use_cache=False"
        ):
            compiled(input_ids=ids, position_ids=positions())
        found = compiled(input_ids=ids, position_ids=positions(), use_cache=False).logits
        alone = [compiled(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_boundaries_that_positions_do_not_have_raise():
    compiled = torch.compile(with_kernels("llama"), fullgraph=True, backend="eager")
    batch = packed(compiled, use_cache=False)
    compiled(**batch, position_ids=positions())
    with pytest.raises(RuntimeError, match="do not restart where documents of cu_seq_lens_q start"):
        compiled(**batch, position_ids=torch.arange(sum(LENGTHS))[None])
