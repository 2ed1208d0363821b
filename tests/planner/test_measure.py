"""Measuring a model: what is counted, and that the model is left as found."""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipetransformer import Pipe, planner
from pipetransformer.pipe.skip import Namespace, pop, skippable, stash
from pipetransformer.planner import Profile, _in_a_row, _saved, _timing
from pipetransformer.planner import measure as planner_measure
from pipetransformer.skip.tracker import current_skip_tracker

SIZES = (1, 4)


class Scale(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x * self.weight


class Pair(nn.Module):
    """Two tensors in, two out; the second are indices."""

    def forward(self, x, ids):
        return x + 1, ids


class Join(nn.Module):
    def forward(self, x, ids):
        return x + ids.to(x.dtype)[:, None]


def measure(model, inputs, **options):
    return planner.profile(
        model, inputs, **{"microbatch_samples": SIZES, "repeats": 1, **options}
    )


def test_the_name_of_a_long_class_is_cut_to_what_a_profile_takes():
    layer = type("L" * 1000, (nn.Identity,), {})()
    measured = measure(nn.Sequential(layer, nn.Linear(3, 1)), torch.randn(8, 3))
    assert measured.layers[0].name == f"0.{'L' * 254}"
    assert Profile.from_json(measured.to_json()) == measured


def test_bytes_and_shapes_of_a_plain_model_are_exact():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    measured = measure(model, torch.randn(8, 3))
    assert measured.microbatch_samples == SIZES
    names = [layer.name for layer in measured.layers]
    assert names == ["0.Linear", "1.ReLU", "2.Linear"]
    assert [x.parameter_bytes for x in measured.layers] == [4 * 20, 0, 4 * 12]
    assert [x.boundary_bytes_per_sample for x in measured.layers] == [20, 20, 8]
    # Saved: the input of the first, the output of the second; the third's input is
    # the same memory again.
    saved = [x.activation_bytes_per_sample for x in measured.layers]
    assert saved == [12, 20, 0]
    assert [x.trainable for x in measured.layers] == [True, False, True]
    assert all(len(x.forward_ns) == len(SIZES) for x in measured.layers)
    assert Profile.from_json(measured.to_json()) == measured


def columns(measured):
    """What each layer saves by row, by call and for all calls."""
    return [
        (
            each.activation_bytes_per_sample,
            each.activation_bytes_per_microbatch,
            each.shared_activation_bytes,
        )
        for each in measured.layers
    ]


class Routed(nn.Module):
    """Works on the rows that a gate chooses: what it saves depends on values."""

    def forward(self, x):
        chosen = [part.tanh() for part in x.split(2 if len(x) > 4 else 1)]
        return torch.cat(chosen)


def test_what_is_saved_once_per_call_or_once_for_all_is_no_part_of_a_row():
    table = Scale(torch.ones(6))  # no buffer, and it takes no gradient
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 6))
    model = nn.Sequential(nn.Linear(3, 3), normed, table, nn.Tanh())
    inputs = torch.randn(16, 3)
    by_size = {
        sizes: columns(measure(model, inputs, microbatch_samples=sizes))
        for sizes in ((2, 4), (4, 16))
    }
    # Inputs; the normed weight and norms, which each call makes; the table; outputs.
    by_call = 4 * (18 + 6)
    expected = [(12, 0, 0), (12, by_call, 0), (0, 0, 24), (24, 0, 0)]
    assert by_size == {(2, 4): expected, (4, 16): expected}
    # Of one size nothing is known but the sum.
    alone = columns(measure(model, inputs, microbatch_samples=(4,)))
    assert alone[1] == (12 + by_call // 4, 0, 0)


def test_calls_that_save_other_numbers_of_tensors_count_by_rows():
    model = nn.Sequential(nn.Linear(3, 6), Routed())
    measured = measure(model, torch.randn(8, 3), microbatch_samples=(4, 8))
    assert columns(measured)[1] == (24, 0, 0)


class Workspace(torch.autograd.Function):
    """Saves one tensor, of which a part is fixed."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.ones(100 + 10 * len(x)))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Uneven(nn.Module):
    """Two parts, of which values decide how many rows each has."""

    def forward(self, x):
        few = (x[:, 0] > 0).nonzero()[:, 0]
        many = (x[:, 0] <= 0).nonzero()[:, 0]
        return torch.cat([x[few].exp(), x[many].exp()])


def test_storages_with_a_fixed_part_lie_on_a_line_through_both_calls():
    class Layer(nn.Module):
        def forward(self, x):
            return Workspace.apply(x)

    model = nn.Sequential(nn.Linear(3, 6), Layer())
    measured = measure(model, torch.randn(16, 3), microbatch_samples=(1, 4, 16))
    assert columns(measured)[1] == (40, 400, 0)
    # Two points are on any line.
    measured = measure(model, torch.randn(16, 3), microbatch_samples=(4, 16))
    assert columns(measured)[1] == (40 + 400 // 16, 0, 0)


def test_sums_that_lie_on_no_line_count_by_rows():
    """As of a layer that drops padding, of which later rows have more."""

    class Layer(nn.Module):
        def forward(self, x):
            kept = x[x[:, 0] > 0]
            return x + Workspace.apply(kept).sum()

    inputs = torch.ones(16, 3)
    inputs[5:] = -1.0  # 1, 4 and 5 rows are kept
    inputs.requires_grad_()
    model = nn.Sequential(nn.Identity(), Layer())
    measured = measure(model, inputs, microbatch_samples=(1, 4, 16))
    assert columns(measured)[1][1:] == (0, 0)


def test_rows_that_values_give_to_one_part_or_another_are_no_fixed_part():
    inputs = torch.ones(16, 3)
    inputs[2:7] = -1.0  # 2 and 2 of 4 rows, 11 and 5 of 16
    model = nn.Sequential(nn.Identity(), Uneven())
    inputs.requires_grad_()
    measured = measure(model, inputs, microbatch_samples=(4, 16))
    by_row, by_call, shared = columns(measured)[1]
    assert (by_call, shared) == (0, 0) and by_row >= 12


def test_without_memory_for_two_calls_at_once_bytes_are_counted_from_one(monkeypatch):
    counted = _saved.layer_bytes

    def short(layers, sample, sizes, **options):
        if len(sizes) > 1:
            raise torch.OutOfMemoryError("for two")
        return counted(layers, sample, sizes, **options)

    monkeypatch.setattr(planner_measure, "layer_bytes", short)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 6))
    model = nn.Sequential(nn.Linear(3, 3), normed)
    measured = measure(model, torch.randn(8, 3), microbatch_samples=(4, 8))
    assert columns(measured)[1] == (12 + 4 * (18 + 6) // 8, 0, 0)


@pytest.mark.parametrize("trains", [True, False])
def test_casts_of_weights_under_autocast_are_shared_where_they_train(trains):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight.requires_grad_(trains)
    with torch.autocast("cpu", torch.bfloat16):
        measured = measure(model, torch.randn(8, 32))
    cast = 2 * 32 * 32
    # The first layer's needs no gradient to its inputs, and keeps those cast.
    assert columns(measured)[0] == (2 * 32, 0, 0)
    by_row = 2 * 32 if trains else 0
    assert columns(measured)[1] == (by_row, *((0, cast) if trains else (cast, 0)))


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_pipeline_saves_what_the_profile_says(num_microbatches):
    """Under autocast, with casts that a stage shares and weights made by each call."""
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    model = nn.Sequential(
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()),
        nn.Sequential(normed, nn.Tanh(), nn.Linear(16, 16)),
    )
    inputs = torch.randn(32, 16)
    kept, state = {}, {p.data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in state:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autocast("cpu", torch.bfloat16):
        measured = measure(model, inputs, microbatch_samples=(4, 16))
        pipe = Pipe(model, chunks=num_microbatches, checkpoint="never")
        assert len(pipe.partitions) == 2
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = pipe(inputs)
    found = sum(size for size, _ in kept.values())
    del output
    predicted = sum(
        32 * by_row + num_microbatches * by_call + shared
        for by_row, by_call, shared in columns(measured)
    )
    assert predicted == found


def test_measuring_leaves_the_model_as_it_was_found():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True)
    )
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)
    model[2].eval()
    before = copy.deepcopy(model.state_dict())
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    inputs = torch.randn(8, 4)
    inputs_before = inputs.clone()
    random_state = torch.get_rng_state()
    measure(model, inputs)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(inputs, inputs_before) and inputs.grad is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[0].weight.grad, torch.full_like(model[0].weight, 7.0))
    assert all(p.grad is None for p in [model[0].bias, *model[1].parameters()])
    assert all(p.requires_grad for p in model.parameters())


class Table(nn.Module):
    """Grows a table of positions when it meets a longer row, as many models do."""

    def __init__(self):
        super().__init__()
        self.length = 2
        self.register_buffer("table", torch.arange(2.0))

    def forward(self, rows):
        if rows.size(1) > self.length:
            self.length = rows.size(1)
            self.register_buffer("table", torch.arange(float(self.length)))
            self.register_buffer("more", torch.ones(1))
            self.seen = True
        return rows + self.table[: rows.size(1)]


def test_what_a_layer_keeps_beside_its_buffers_is_as_it_was_found():
    model = nn.Sequential(Table(), nn.Linear(4, 2))
    rows = torch.randn(8, 4)
    expected = copy.deepcopy(model)(rows)
    table = model[0].table
    measure(model, rows)
    assert model[0].length == 2 and model[0].table is table
    assert set(model[0]._buffers) == {"table"} and not hasattr(model[0], "seen")
    assert torch.equal(model(rows), expected)


class Bank(nn.Module):
    """Keeps rows it has seen in containers, as a layer with a memory bank does."""

    def __init__(self):
        super().__init__()
        self.rows = collections.deque([torch.zeros(4)], maxlen=3)
        self.nested = {"lists": [[1]], "seen": {2}}
        self.counts = collections.defaultdict(int, given=3)
        self.pair = ([], collections.Counter("aab"))
        self.endless = [1]
        self.endless.append(self.endless)

    def forward(self, x):
        self.rows.extend(x.detach())
        self.nested["lists"][0].append(x)
        self.nested["seen"].add(len(x))
        self.nested["new"] = x
        self.counts[len(x)] += 1
        self.pair[0].append(x)
        self.pair[1]["b"] += len(x)
        self.endless.insert(0, x)
        return x


def test_containers_of_a_layer_hold_the_same_objects_as_before():
    bank = Bank()
    rows, nested, pair, counts = bank.rows, bank.nested, bank.pair, bank.counts
    lists, first = nested["lists"], rows[0]
    measure(nn.Sequential(bank, nn.Linear(4, 2)), torch.randn(8, 4))
    assert bank.rows is rows and len(rows) == 1 and rows[0] is first
    assert rows.maxlen == 3
    assert bank.nested is nested and nested["lists"] is lists
    assert nested == {"lists": [[1]], "seen": {2}}
    assert bank.counts is counts and dict(counts) == {"given": 3}
    assert bank.pair is pair and pair == ([], {"a": 2, "b": 1})
    assert len(bank.endless) == 2 and bank.endless[1] is bank.endless


class Force(nn.Module):
    """A layer that takes a gradient in its forward, as a force field does."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 32), nn.Linear(32, 1, bias=False)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.out(torch.tanh(self.inner(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


class Jacobian(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.vmap(torch.func.jacrev(self.inner))(x).sum(1)


@pytest.mark.parametrize(("kind", "least"), [(Force, 2 * 4 * 32), (Jacobian, 16)])
def test_layers_that_take_a_gradient_in_their_forward_are_measured(kind, least):
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 2))
    measured = measure(model, torch.randn(8, 4))
    assert measured.layers[1].activation_bytes_per_sample >= least
    assert measured.layers[2].activation_bytes_per_sample <= 16
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (torch.Tensor.to_sparse, "torch.sparse_coo"),
        (torch.Tensor.to_sparse_csr, "torch.sparse_csr"),
        (torch.nested.as_nested_tensor, "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of prototypes
def test_inputs_that_are_no_dense_tensors_are_refused(made, got):
    text = f"sample: expected strided tensors, got a {got} one; hand over a dense one"
    with pytest.raises(TypeError, match=text):
        measure(nn.Sequential(nn.Linear(4, 2)), (torch.ones(4), made(torch.eye(4))))


def test_compiled_layers_are_measured_and_their_buffers_put_back():
    norm = torch.jit.script(nn.BatchNorm1d(4))
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2))
    measured = measure(model, torch.randn(8, 4), microbatch_samples=(2, 4))
    assert len(measured.layers) == 3
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(norm.running_mean, torch.zeros(4))


def test_a_failing_layer_leaves_the_model_as_it_was_found():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(5, 2))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError):
        measure(model, torch.randn(8, 4))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_batch_norm_in_training_mode_gets_two_rows():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert measure(model, torch.randn(8, 4)).microbatch_samples == (2, 4)
    text = "sample: expected at least 2 rows, got 1"
    with pytest.raises(ValueError, match=text):
        measure(model, torch.randn(1, 4))
    assert measure(model.eval(), torch.randn(1, 4)).microbatch_samples == (1,)


def test_sizes_are_cut_to_the_rows_that_are_there():
    measured = measure(
        nn.Sequential(nn.Linear(2, 2)), torch.randn(3, 2), microbatch_samples=(1, 4, 16)
    )
    assert measured.microbatch_samples == (1, 3)


def test_integer_inputs_have_no_input_gradient():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    measured = measure(model, torch.randint(0, 10, (8, 3)))
    assert measured.layers[0].input_grad_ns == (0, 0)
    assert min(measured.layers[1].input_grad_ns) > 0


def test_tuples_are_spread_between_layers():
    model = nn.Sequential(Pair(), Pair(), Join(), nn.Linear(3, 1))
    measured = measure(model, (torch.randn(8, 3), torch.arange(8)))
    assert measured.layers[0].boundary_bytes_per_sample == 12 + 8
    assert measured.layers[2].boundary_bytes_per_sample == 12


@skippable(stash="skip")
class Keep(nn.Module):
    """Stashes 4 bytes a row for each of `width` numbers, as integers if asked to."""

    def __init__(self, width, *, whole=False):
        super().__init__()
        self.side = nn.Linear(4, width)
        self.whole = whole

    def forward(self, x):
        side = self.side(x)
        yield stash("skip", side.int() if self.whole else side)
        return x + 1


@skippable(pop="skip")
class Take(nn.Module):
    """Pops, and works on what it popped alone if asked to."""

    def __init__(self, *, alone=False):
        super().__init__()
        self.alone = alone

    def forward(self, x):
        skip = yield pop("skip")
        if skip is None:
            return x
        sums = skip.sum(1, keepdim=True)
        return sums.expand_as(x) if self.alone else x + sums


def test_layers_that_pop_are_measured_several_times_at_every_size():
    inner, outer = Namespace(), Namespace()
    layers = [
        Keep(6).isolate(outer),
        Keep(3).isolate(inner),
        nn.Sequential(nn.Linear(4, 4), Take().isolate(inner)),
        nn.Linear(4, 4),
        Take().isolate(outer),
    ]
    calls, measured = calls_per_layer(layers, torch.randn(4, 4))
    assert calls == [TIMED] * 5
    assert all(min(x.forward_ns) > 0 and min(x.input_grad_ns) > 0 for x in measured)
    found = measure(nn.Sequential(*layers), torch.randn(4, 4), repeats=3)
    assert found.skips == ((0, 4), (1, 2))
    # The output of a layer, and alongside it each skip that goes past its end.
    sizes = [x.boundary_bytes_per_sample for x in found.layers]
    assert sizes == [16 + 24, 16 + 24 + 12, 16 + 24, 16 + 24, 16]
    assert Profile.from_json(found.to_json()) == found


def test_gradient_of_a_popped_skip_counts_as_one_of_an_input():
    layers = [Keep(4), nn.Linear(4, 4), Take(alone=True)]
    _, found = calls_per_layer(layers, torch.randn(4, 4))
    assert min(found[2].input_grad_ns) > 0, "only the skip carries a gradient"


def test_stashed_gradient_is_part_of_the_stashing_layers_backward(monkeypatch):
    timed = []

    def watch(fn):
        with Additions((5, 4)) as additions:
            result = fn()
        timed.append(additions.count)
        return 1000, result

    monkeypatch.setattr(_timing, "stopwatch", lambda device: watch)
    measure(nn.Sequential(Keep(5), Take()), torch.randn(4, 4), repeats=1)
    # The weight's gradient comes by way of the skip; see the order of calls below.
    assert timed[:10] == 2 * [0, 0, 0, 1, 0]


def test_skips_without_gradient_and_skips_of_none_are_measured():
    class Nothing(nn.Module):
        def forward(self, x):
            yield stash("skip", None)
            return x * 2

    whole = nn.Sequential(Keep(2, whole=True), nn.Linear(4, 4), Take())
    found = measure(whole, torch.randn(4, 4))
    assert found.layers[0].boundary_bytes_per_sample == 16 + 8
    none = nn.Sequential(skippable(stash="skip")(Nothing)(), nn.Linear(4, 4), Take())
    found = measure(none, torch.randn(4, 4))
    assert [x.boundary_bytes_per_sample for x in found.layers] == [16, 16, 16]


def test_layers_of_equal_skips_are_timed_once():
    namespaces = Namespace(), Namespace()
    layers = [Keep(4).isolate(n) for n in namespaces]
    layers += [Take().isolate(n) for n in reversed(namespaces)]
    calls, _ = calls_per_layer(layers, torch.randn(4, 4))
    assert calls == [TIMED, KNOWN, TIMED, KNOWN]
    layers = [Keep(size).isolate(n) for size, n in zip((4, 9), namespaces, strict=True)]
    layers += [Take().isolate(n) for n in namespaces]
    calls, _ = calls_per_layer(layers, torch.randn(4, 4))
    assert calls == [TIMED] * 4, "popped skips of other shapes"


def test_half_a_pair_is_refused_before_anything_is_measured():
    text = "skips: expected each name stashed once and popped once behind it"
    with pytest.raises(TypeError, match=text):
        measure(nn.Sequential(nn.Linear(4, 4), Take()), torch.randn(4, 4))


def test_measuring_leaves_no_skip_in_the_thread():
    before = len(current_skip_tracker())
    with pytest.raises(RuntimeError):
        fails = nn.Sequential(nn.Linear(5, 5), Take())
        measure(nn.Sequential(Keep(4), fails), torch.randn(4, 4))
    assert len(current_skip_tracker()) == before


def test_dict_inputs_are_keywords_of_the_first_layer():
    measured = measure(
        nn.Sequential(Join(), nn.Linear(3, 1)),
        {"ids": torch.arange(8), "x": torch.randn(8, 3)},
    )
    assert len(measured.layers) == 2


class Wrap(nn.Module):
    def forward(self, x):
        return {"hidden": x, "name": "wrapped"}


class Unwrap(nn.Module):
    def forward(self, given):
        return given["hidden"] * 2


def test_a_dict_between_layers_is_one_argument():
    model = nn.Sequential(nn.Linear(4, 3), Wrap(), Unwrap(), nn.Linear(3, 1))
    measured = measure(model, torch.randn(8, 4))
    assert [x.boundary_bytes_per_sample for x in measured.layers] == [12, 12, 12, 4]


@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.UserDict])
def test_a_mapping_that_is_no_dict_is_refused(kind):
    class Own(nn.Module):
        def forward(self, x):
            return [kind(hidden=x)]

    text = f"layer Own: expected tensors in .* plain dicts, got {kind.__name__}"
    with pytest.raises(TypeError, match=text):
        measure(nn.Sequential(nn.Linear(4, 3), Own()), torch.randn(8, 4))


def test_text_without_tensors_is_refused():
    text = "a tensor with rows in it, got tuple of str; collate_fn turns text into"
    with pytest.raises(TypeError, match=text):
        measure(nn.Sequential(nn.Linear(4, 3)), ("some", "text"))


def test_layers_that_share_a_parameter_are_tied_and_counted_once():
    weight = nn.Parameter(torch.ones(4))
    model = nn.Sequential(Scale(weight), nn.Linear(4, 4), Scale(weight))
    measured = measure(model, torch.randn(4, 4))
    assert measured.tied_layers == ((0, 2),)
    assert [x.parameter_bytes for x in measured.layers] == [16, 80, 0]
    assert measured.layers[2].trainable


def test_layers_the_user_froze_are_not_trainable():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    measured = measure(model, torch.randn(4, 4))
    assert [x.trainable for x in measured.layers] == [False, True]
    assert measured.layers[0].weight_grad_ns == (0, 0)


def test_measuring_works_where_gradients_are_off():
    model = nn.Sequential(nn.Linear(4, 4))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            measured = measure(model, torch.randn(4, 4))
        assert min(measured.layers[0].input_grad_ns) > 0


@pytest.mark.parametrize(
    ("model", "inputs", "options", "error", "text"),
    [
        (
            nn.Linear(2, 2),
            torch.zeros(4, 2),
            {},
            TypeError,
            "model: expected an nn.Sequential, got Linear",
        ),
        (
            nn.Sequential(),
            torch.zeros(4, 2),
            {},
            ValueError,
            "model: expected at least one layer, got none",
        ),
        (
            nn.Sequential(nn.Linear(2, 2)),
            "text",
            {},
            TypeError,
            "sample: expected a tensor with rows in it, got str",
        ),
        (
            nn.Sequential(nn.Linear(2, 2)),
            torch.zeros(0, 2),
            {},
            ValueError,
            "sample: expected at least 1 rows, got 0",
        ),
        (
            nn.Sequential(nn.Linear(2, 2)),
            torch.zeros(4, 2),
            {"microbatch_samples": (4, 1)},
            ValueError,
            r"microbatch_samples: expected increasing sizes from 1, got \[4, 1\]",
        ),
        (
            nn.Sequential(nn.Linear(2, 2)),
            torch.zeros(4, 2),
            {"repeats": 0},
            ValueError,
            "repeats: expected at least 1, got 0",
        ),
    ],
)
def test_measuring_refuses_malformed_input(model, inputs, options, error, text):
    with pytest.raises(error, match=text):
        measure(model, inputs, **options)


class Power(nn.Module):
    """Multiplies by its weight `rounds` times."""

    def __init__(self, rounds, width=4, note=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.rounds = rounds
        self.note = note

    def forward(self, x):
        for _ in range(self.rounds):
            x = x * self.weight
        return x


class Additions(TorchDispatchMode):
    """Counts in-place additions of gradients of this shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add_.Tensor and args[0].shape == self.shape:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_adding_up_weight_gradients_is_timed_with_them_alone(monkeypatch):
    timed = []

    def watch(fn):
        with Additions((5, 3)) as additions:
            result = fn()
        timed.append(additions.count)
        return 1000 * (1 + additions.count), result

    monkeypatch.setattr(_timing, "stopwatch", lambda device: watch)
    monkeypatch.setattr(_in_a_row, "stopwatch", lambda device: lambda fn: (0, fn()))
    model = nn.Sequential(nn.Linear(3, 5))
    layer = measure(model, torch.randn(4, 3), microbatch_samples=(4,)).layers[0]
    # Forward and backward, to the inputs; the same, to all; forward alone; twice.
    assert timed == 2 * [0, 0, 0, 1, 0]
    assert (layer.input_grad_ns, layer.weight_grad_ns) == ((1000,), (1000,))
    assert model[0].weight.grad is None


def test_sparse_and_missing_weight_gradients_are_measured():
    class Half(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), Half(4, 4))
    found = measure(model, torch.arange(8)).layers
    assert [layer.trainable for layer in found] == [True, True]
    assert all(p.grad is None for p in model.parameters())


def calls_per_layer(layers, inputs):
    """Measure with one size and two repeats; count each layer's calls."""
    calls = [0] * len(layers)

    def count(index):
        def hook(*_):
            calls[index] += 1

        return hook

    for index, layer in enumerate(layers):
        layer.register_forward_hook(count(index))
    sizes = (len(inputs),)
    measured = measure(
        nn.Sequential(*layers), inputs, microbatch_samples=sizes, repeats=2
    )
    return calls, measured.layers


# One run warms up, two are timed, three forwards each; one more counts the bytes. Of
# all layers in a row one run warms up, two are timed, with two forwards each.
TIMED, KNOWN = 3 * 3 + 1 + 5, 1 + 1 + 5


def test_layers_that_do_the_same_work_are_timed_once_and_cost_the_same():
    layers = [Power(3), Power(3), Power(9), Power(3)]
    calls, measured = calls_per_layer(layers, torch.randn(4, 4))
    assert calls == [TIMED, KNOWN, TIMED, KNOWN]
    first, second, third, fourth = measured
    for same in (second, fourth):
        assert same.forward_ns == first.forward_ns
        assert same.input_grad_ns == first.input_grad_ns
        assert same.weight_grad_ns == first.weight_grad_ns
        assert same.forward_only_ns == first.forward_only_ns
    assert third.name == "2.Power"


@pytest.mark.parametrize(
    "other",
    [
        Power(3, note=["a list"]),
        Power(3, note=True),
        Power(3).requires_grad_(False),
        Power(3).eval(),
        Power(3).double(),
        nn.Sequential(Power(3)),
    ],
    ids=["object", "setting", "frozen", "eval", "dtype", "class"],
)
def test_layers_that_may_differ_are_timed_apart(other):
    calls, _ = calls_per_layer([Power(3), other], torch.randn(4, 4))
    assert calls == [TIMED, TIMED]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, "a"], [1, "a"]),
        ({"rank": 8, "of": (1, {2})}, {"rank": 8, "of": (1, {2})}),
        ({"target_name": "layer.1.query"}, {"target_name": "layer.2.query"}),
    ],
    ids=["list", "dict", "name of a module"],
)
def test_settings_in_containers_are_compared_by_what_they_hold(one, other):
    calls, _ = calls_per_layer(
        [Power(3, note=one), Power(3, note=other)], torch.randn(4, 4)
    )
    assert calls == [TIMED, KNOWN]


@pytest.mark.parametrize(
    ("one", "other"),
    [([1], [2]), ([1], (1,)), ([1], [True]), ({"a": 1}, {"b": 1}), ([[]], [[0]])],
    ids=repr,
)
def test_settings_in_containers_that_differ_are_told_apart(one, other):
    calls, _ = calls_per_layer(
        [Power(3, note=one), Power(3, note=other)], torch.randn(4, 4)
    )
    assert calls == [TIMED, TIMED]


def test_containers_without_end_are_told_apart():
    one, other = [], []
    one.append(one)
    other.append(other)
    calls, _ = calls_per_layer(
        [Power(3, note=one), Power(3, note=other)], torch.randn(4, 4)
    )
    assert calls == [TIMED, TIMED]


def test_the_number_of_a_layer_is_no_setting():
    first, second, third = Power(3), Power(3), Power(3)
    first.layer_idx, second.layer_idx, third.width_idx = 0, 1, 1
    calls, _ = calls_per_layer([first, second], torch.randn(4, 4))
    assert calls == [TIMED, KNOWN]
    first.width_idx = 0
    calls, _ = calls_per_layer([first, third], torch.randn(4, 4))
    assert calls == [TIMED, TIMED]


def test_a_module_used_twice_in_a_layer_counts_twice():
    inner = Power(3)
    layers = [
        nn.Sequential(inner, nn.ReLU(), inner),
        nn.Sequential(Power(3), nn.ReLU()),
    ]
    calls, _ = calls_per_layer(layers, torch.randn(4, 4))
    assert calls == [TIMED, TIMED]


def test_layers_that_do_not_know_their_shape_yet_are_timed_apart():
    layers = [nn.LazyLinear(4), nn.LazyLinear(4)]
    calls, measured = calls_per_layer(layers, torch.randn(4, 4))
    assert calls == [TIMED, TIMED]
    assert [layer.parameter_bytes for layer in measured] == [80, 80]


def test_layers_called_with_another_shape_are_timed_apart():
    layers = [nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.ReLU()]
    calls, _ = calls_per_layer(layers, torch.randn(4, 4))
    assert calls == [TIMED, TIMED, TIMED, KNOWN]


class _Forming(nn.Module):
    """Hands on what `form` makes of its input."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        return self.form(x)


@pytest.mark.parametrize(
    ("form", "ends", "twice"),
    [
        (lambda x: x * 1, (1, 2), False),
        (lambda x: (x, 2.0), (1, 2), True),
        (lambda x: (x, 2.0), (2,), False),  # no boundary behind the tuple
        (lambda x: (x, 2.0), (0, 9), False),  # none at all
    ],
)
def test_all_rows_are_run_twice_only_where_more_than_a_tensor_is_handed_on(
    form, ends, twice
):
    class Taken(nn.Module):
        def forward(self, x, factor=1.0):
            return x * factor

    model = nn.Sequential(_Forming(form), Taken(), nn.Linear(4, 4))
    rows = set()
    model[0].register_forward_pre_hook(lambda _, args: rows.add(len(args[0])))
    planner.check_layers(model, torch.rand(6, 4), boundaries=ends)
    assert max(rows) == (12 if twice else 2)


def test_layers_that_are_compiled_are_measured_without_a_part_of_this():
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in "abc"))
    for layer in layers:
        layer.compile(backend="aot_eager")
    found = planner.profile(layers, torch.randn(16, 4))
    assert all(layer.activation_bytes_per_sample > 0 for layer in found.layers)
    assert not counters["graph_break"]
