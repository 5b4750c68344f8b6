"""Tiny models and batches, and training steps in one or several processes."""

from __future__ import annotations

from typing import Any

import torch

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def build(
    name: str,
    ops: Any = "eager",
    scale: float = 0.2,
    device: str = "cpu",
    run_dtype: torch.dtype | None = None,
    **changes: Any,
) -> Any:
    """A model of the architecture, the same on every rank.

    `scale` multiplies the weights; `run_dtype` is the dtype of computation if it differs from that of the weights.
    """
    import opslot

    config = config_of(name, **changes)
    torch.manual_seed(7)
    model = opslot.build_foundation_model(config, ops_implementation=ops, run_device=device, run_dtype=run_dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter == 1))
    return model


def config_of(name: str, **changes: Any) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    options = {**COMMON, **(MOE if "moe" in name else {}), **changes}
    return CONFIG_MAPPING[name](**options)


def rows(step: int, count: int = 4, length: int = 12, documents: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Input ids and unevenly masked labels, [count, length]; each sample has documents of the given lengths."""
    g = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(COMMON["vocab_size"], (count, length), generator=g)
    labels = ids.masked_fill(torch.rand(count, length, generator=g) < torch.linspace(0.1, 0.6, count)[:, None], -100)
    batch = {"input_ids": ids, "labels": labels}
    if documents:
        assert sum(documents) == length
        positions = torch.cat([torch.arange(n) for n in documents]).expand(count, -1)
        batch |= {"position_ids": positions, "labels": labels.masked_fill(positions == 0, -100)}
    return batch


def cu_seqlens_of(position_ids: torch.Tensor) -> torch.Tensor:
    """cu_seq_lens of samples whose positions restart with each document."""
    starts = (position_ids == 0).flatten().nonzero().flatten()
    return torch.cat([starts, torch.tensor([position_ids.numel()])]).to(torch.int32)


def train(
    name: str,
    sizes: dict[str, int] | None = None,
    *,
    steps: int = 5,
    micro_batches: int = 1,
    ops: Any = "eager",
    aux_loss: bool = False,
    max_norm: float = 1.0,
    length: int = 12,
    documents: tuple[int, ...] = (),
    one_expert_for_all: bool = False,
    options: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    load: str | None = None,
    save: str | None = None,
    device: str = "cpu",
    lr: float = 1e-2,
    scale: float = 0.2,
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step.

    Args:
        sizes: of the parallel state; None trains in this process alone.
        micro_batches: number of micro batches per step, over all ranks.
        one_expert_for_all: routers are frozen at zero, so all tokens go to the same experts.
        load: folder of a checkpoint to resume from; its steps are not repeated, `steps` counts from the first.
        save: folder for a checkpoint at the end.
        device: with "cuda", each rank uses its own GPU.
    """
    from opslot.distributed import (
        clip_grad_norm,
        get_parallel_state,
        gradient_sync,
        init_parallel_state,
        shard_sequence,
    )
    from opslot.models.parallelize import parallelize

    if sizes is not None:
        init_parallel_state(device_type=device, **sizes)
    state = get_parallel_state()
    changes = {**({"output_router_logits": True} if aux_loss else {}), **(changes or {})}
    model = build(name, ops, scale, device, (options or {}).get("param_dtype"), **changes).to(state.device)
    model.train()
    if one_expert_for_all:
        for layer in model.model.layers:
            layer.mlp.gate.weight.requires_grad_(False).zero_()
    parallelize(model, state, **(options or {}))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    own = micro_batches // state.dp_size
    start = _restore(load, model, optimizer) if load else 0
    history = []
    for step in range(start, steps):
        whole = rows(step, length=length, documents=documents)
        targets = int((whole["labels"][:, 1:] != -100).sum())
        loss = torch.zeros((), device=state.device)
        for i in range(own):
            piece = slice((i * state.dp_size + state.dp_rank), None, micro_batches)
            batch: dict[str, Any] = {key: value[piece] for key, value in whole.items()}
            if documents:
                cu_seqlens, longest = cu_seqlens_of(batch["position_ids"]), max(documents)
                batch |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
                batch |= {"max_length_q": longest, "max_length_k": longest}
            batch = {
                key: value.to(state.device) if isinstance(value, torch.Tensor) else value
                for key, value in shard_sequence(batch, state).items()
            }
            with gradient_sync(model, i == own - 1):
                out = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(targets, device=state.device))
                share = out.loss
                if aux_loss:
                    router = model.config.router_aux_loss_coef * out.aux_loss
                    share = out.loss - router + router / (micro_batches * state.sp)
                share.backward()
            loss += share.detach()
        norm = clip_grad_norm(model.parameters(), max_norm)
        if state.mesh is not None:
            torch.distributed.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.item(), norm.item()))
    if save:
        _save(save, model, optimizer, steps)
    return history


def _save(folder: str, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(step)}
    dcp.save(tensors, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())


def _restore(folder: str, model: Any, optimizer: torch.optim.Optimizer) -> int:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(0)}
    dcp.load(tensors, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(tensors["step"])


def gradients(model: Any) -> dict[str, list[Any]]:
    """The whole gradients of the parameters that are trained; zeros where there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = parameter.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            found[name] = (torch.zeros(parameter.shape) if grad is None else grad).tolist()
    return found


def assert_gradients_close(of_ranks: list[dict[str, list[Any]]], expected: dict[str, list[Any]]) -> None:
    for found in of_ranks:
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            torch.testing.assert_close(torch.tensor(grad), torch.tensor(expected[name]), atol=1e-5, rtol=1e-4, msg=name)


def loss_of(model: Any, state: Any) -> Any:
    """This rank's part of the loss of one batch."""
    from opslot.distributed import shard_sequence

    batch = {name: value[state.dp_rank :: state.dp_size] for name, value in rows(0).items()}
    targets = int((rows(0)["labels"][:, 1:] != -100).sum())
    return model(**shard_sequence(batch, state), use_cache=False, num_items_in_batch=torch.tensor(targets)).loss
