"""Loss and gradients of whole models, to compare."""


def results(model, ids, **batch):
    model.zero_grad()
    loss = model(input_ids=ids, use_cache=False, **{"labels": ids, **batch}).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def assert_close(got, wanted):
    assert got.keys() == wanted.keys()
    # One that cancels to nearly nothing is still a sum of terms of the others' size.
    largest = max(x.abs().max() for x in wanted.values())
    for name, x in wanted.items():
        assert (got[name] - x).abs().max() <= 3e-5 * x.abs().max() + 1e-7 * largest, name
