from opslot._base.source import method_parameters


class Layer:
    def forward(self, hidden_states, mask=None, **kwargs):
        return hidden_states

    def wrapped(*args, **kwargs):
        return args


def test_method_parameters_are_those_of_a_call():
    parameters = method_parameters(Layer)
    assert list(parameters) == ["hidden_states", "mask", "kwargs"]
    assert parameters["mask"].default is None
    # A wrapper takes self as one of any arguments, which it still takes.
    assert list(method_parameters(Layer, "wrapped")) == ["args", "kwargs"]
