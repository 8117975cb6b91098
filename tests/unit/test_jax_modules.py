"""Modules in the JAX worker against the library itself: Flax linen and nnx, Equinox, plain functions."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import DtypeError, ResidualLostError, UsageError
from gradwire_wire.structures import fill, flatten, positional
from gradwire_workers import jax as engine
from gradwire_workers.jax import store
from gradwire_workers.program import WorkerSite

pytest.importorskip("flax")
pytest.importorskip("equinox")


def _targets() -> Any:
    path = pathlib.Path(__file__).parents[1] / "integration" / "targets" / "jax_modules.py"
    spec = importlib.util.spec_from_file_location("jax_modules", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["jax_modules"] = module
    spec.loader.exec_module(module)
    return module


targets = _targets()
eqx, nn, nnx = targets.eqx, targets.linen, targets.nnx
KINDS = list(targets.MAKERS)
X = np.random.default_rng(0).normal(size=(5, 3))
BAR = np.random.default_rng(1).normal(size=(5, 2))


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def make(kind: str, **settings: Any) -> Any:
    return targets.MAKERS[kind](**{"dtype": "float64", **settings})


def load(obj: Any) -> Any:
    return engine.program(obj, is_module=True)


def site(program: Any, count: int = 1, **facts: Any) -> WorkerSite:
    return WorkerSite(positional(count), **{"training": program.training, **facts})


def call(program: Any, x: Any = X, **facts: Any) -> np.ndarray:
    return np.asarray(program.run(site(program, **facts), (), [x]).tensors[0])


def pull(program: Any, x: Any = X, **facts: Any) -> np.ndarray | None:
    """A forward and its accumulating pullback, as one training step does."""
    where = site(program, accumulate=True, **facts)
    _, kept = program.keep(where, (), [x])
    (bar,), _ = kept.derive(("T", (0,), 1), [BAR], keep=False, accumulate=True)
    return None if bar is None else np.asarray(bar)


def agree(got: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    got, wanted = list(got), list(wanted)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, tolerance, tolerance)


def test_agree_can_fail() -> None:
    for wrong in ([np.zeros(2), np.ones(2)], [np.ones(2) * 1.1], [np.ones(2, "f4")]):
        with pytest.raises(AssertionError):
            agree(wrong, [np.ones(2)])


# ---- Calls and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_and_its_gradients_are_the_librarys(kind: str, train: bool, compile: bool | None) -> None:
    program = load(make(kind))
    assert program.training is True
    program.train(train)
    leaves, run = targets.local_run(make(kind), train)
    (y, moved), pullback = jax.vjp(lambda p, x: run(p, x), leaves, jnp.asarray(X))
    zeros = jax.tree.map(
        lambda m: np.zeros(m.shape, m.dtype if m.dtype == np.float64 else jax.dtypes.float0), moved
    )
    p_bar, x_bar = pullback((jnp.asarray(BAR), zeros))
    agree([call(program, compile=compile)], [y])
    fresh = load(make(kind))
    fresh.train(train)
    agree([pull(fresh, compile=compile)], [x_bar])
    agree(fresh.grads().values(), p_bar)
    if train:
        agree(fresh.buffers().values(), moved)


@pytest.mark.parametrize("kind", KINDS)
def test_r40_statistics_move_once_for_each_training_forward(kind: str) -> None:
    program = load(make(kind))
    before = program.state_dict()

    def moves() -> bool:
        return any((np.asarray(x) != before[n]).any() for n, x in program.state_dict().items())

    program.spec(site(program), [Aval((5, 3), BY_NAME["float64"])])
    program.train(False)
    call(program)
    pull(program)
    assert not moves() and not program.has_moved()
    program.train(True)
    _, kept = program.keep(site(program, accumulate=True), (), [X])
    assert moves() and program.has_moved() and program.functional(False).has_moved()
    assert not program.functional(True).has_moved()  # its statistics are the caller's
    before = program.state_dict()
    for _ in range(2):
        kept.derive(("T", (0,), 1), [BAR], keep=False, accumulate=True)
    kept.derive(("J", (0,)), [X], keep=False, accumulate=False)
    kept.derive(("T", (0,), 1), [BAR], keep=True, accumulate=True)
    assert not moves()


def test_gradients_accumulate_until_they_are_forgotten() -> None:
    program = load(make("plain"))
    pull(program)
    once = program.grads()
    pull(program)
    agree(program.grads().values(), [2 * g for g in once.values()])
    program.optimizer(optax.sgd, {"learning_rate": 0.1}).zero_grad()
    assert set(program.grads().values()) == {None} and list(program.grads()) == list(program.parameters())


@pytest.mark.parametrize("compile", [None, False])
def test_a_first_stage_is_reached_by_its_anchor(compile: bool | None) -> None:
    program = load(make("linen"))
    where = site(program, anchored=True, compile=compile)  # only the pullback's site says that it accumulates
    _, kept = program.keep(where, (), [np.float32(0), np.arange(15).reshape(5, 3) / 7])
    (bar,), _ = kept.derive(("T", (0,), 1), [BAR], keep=False, accumulate=True)
    assert bar is None or not bar.any()
    assert all(np.abs(g).max() > 0 for n, g in program.grads().items() if n != "Dense_0.bias")


def test_pullbacks_that_are_run_whole_accumulate_too() -> None:
    kept, run = load(make("linen")), load(make("linen"))
    for p in (kept, run):
        p.train(False)
    bar = pull(kept)
    where = site(run, accumulate=True)
    agree(run.run(where, (("T", (0,), 1),), [X, BAR]).tensors, [bar])
    agree(run.grads().values(), kept.grads().values())
    rows = load(make("linen"))
    rows.train(False)
    word = (("T", (0,), 1), ("V", (True, True)))
    agree(rows.run(where, word, [X[:, None], BAR[:, None]]).tensors, [bar[:, None]])
    agree(rows.grads().values(), kept.grads().values())


def test_a_forward_that_was_not_to_accumulate_still_may() -> None:
    plain, other = load(make("linen", dropout=0.5)), load(make("linen", dropout=0.5))
    _, kept = plain.keep(site(plain, seed=3), (), [X])
    plain.optimizer(optax.sgd, {"learning_rate": 0.1})
    before = plain.buffers()
    (bar,), _ = kept.derive(("T", (0,), 1), [BAR], keep=False, accumulate=True)
    agree([bar], [pull(other, seed=3)])
    agree(plain.grads().values(), other.grads().values())
    agree(plain.buffers().values(), before.values(), 0)


def test_kept_rows_are_pulled_together() -> None:
    one, rows = load(make("plain")), load(make("plain"))
    for p in (one, rows):
        p.train(False)
    bar = pull(one)
    _, kept = rows.keep_rows(site(rows, accumulate=True), (("V", (True,)),), [X[:, None]])
    found = kept.derive_rows(("T", (0,), 1), (True, True), [BAR[:, None]], np.arange(5))
    agree(found, [bar[:, None]])
    agree(rows.grads().values(), one.grads().values())
    rows.train(True)
    with pytest.raises(UsageError, match="sequential"):
        rows.keep_rows(site(rows), (("V", (True,)),), [X[:, None]])
    with pytest.raises(UsageError, match="sequential"):
        rows.run(site(rows), (("V", (True,)),), [X[:, None]])


def test_second_order_reaches_the_parameters() -> None:
    """A gradient penalty: pulled through a kept pullback, parameters accumulate what the penalty gives them alone."""
    program = load(make("plain"))
    program.train(False)
    leaves, run = targets.local_run(make("plain"), False)

    def penalty(leaves: Any) -> Any:
        x_bar = jax.vjp(lambda x: run(leaves, x)[0], jnp.asarray(X))[1](jnp.asarray(BAR))[0]
        return (x_bar**2).sum()

    where = site(program, accumulate=True)
    _, kept = program.keep(where, (), [X])
    (x_bar,), further = kept.derive(("T", (0,), 1), [BAR], keep=True, accumulate=False)
    further.derive(("T", (0, 1), 1), [2 * np.asarray(x_bar)], keep=False, accumulate=True)
    agree(program.grads().values(), jax.grad(penalty)(leaves))


# ---- Functional form -----------------------------------------------------------------------------------------------


def functional_call(program: Any, *args: Any) -> tuple[WorkerSite, list[Any]]:
    structure, leaves = flatten([list(args), {}], lambda x: isinstance(x, (np.ndarray, jax.Array)))
    return WorkerSite(structure, training=program.training), leaves


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_as_an_argument(kind: str) -> None:
    base = load(make(kind))
    program = base.functional(False)
    params = {n: np.asarray(x) * 1.5 for n, x in base.parameters().items()}
    leaves, run = targets.local_run(make(kind), True)
    scaled = [x * 1.5 for x in leaves]
    y, pullback = jax.vjp(lambda p, x: run(p, x)[0], scaled, jnp.asarray(X))
    where, operands = functional_call(program, params, X)
    result, kept = program.keep(where, (), operands)
    agree(result.tensors, [y])
    p_bar, x_bar = pullback(jnp.asarray(BAR))
    wrt = tuple(range(len(operands)))
    bars, _ = kept.derive(("T", wrt, 1), [BAR], keep=False, accumulate=False)
    agree(bars, [*p_bar, x_bar])
    agree(base.buffers().values(), run(scaled, jnp.asarray(X))[1])
    agree(base.parameters().values(), leaves)
    assert set(base.grads().values()) == {None}


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_as_an_argument_too(kind: str) -> None:
    base = load(make(kind))
    before = base.buffers()
    program = base.functional(True)
    where, operands = functional_call(program, base.parameters(), before, X)
    result = program.run(where, (), operands)
    y, moved = fill(result.structure, list(result.tensors))
    leaves, run = targets.local_run(make(kind), True)
    wanted, wanted_moved = run(leaves, jnp.asarray(X))
    agree([y], [wanted])
    agree(moved.values(), wanted_moved)
    agree(base.buffers().values(), before.values())
    base.train(False)
    where, operands = functional_call(program, base.parameters(), moved, X)
    result = program.run(where, (), operands)
    _, same = fill(result.structure, list(result.tensors))
    agree(same.values(), moved.values())


def test_functional_in_other_words_and_with_some_parameters() -> None:
    base = load(make("plain"))
    base.train(False)
    program = base.functional(False)
    leaves, run = targets.local_run(make("plain"), False)
    some = {"scale": np.asarray(base.parameters()["scale"]) * 2}
    names = list(base.parameters())
    full = [x * 2 if n == "scale" else x for n, x in zip(names, leaves, strict=True)]
    where, (scale, x) = functional_call(program, some, X)
    agree(program.run(where, (), [scale, x]).tensors, [run(full, X)[0]])
    at = names.index("scale")

    def with_scale(s: Any, x: Any) -> Any:
        return run([s if i == at else leaf for i, leaf in enumerate(leaves)], x)[0]

    word = (("J", (0,)),)
    tangent = np.ones_like(scale)
    wanted = jax.jvp(lambda s: with_scale(s, X), (jnp.asarray(scale),), (jnp.asarray(tangent),))[1]
    agree(program.run(where, word, [scale, x, tangent]).tensors, [wanted])
    rows = np.stack([scale, scale * 3])
    batch = program.run(where, (("V", (True, False)),), [rows, x]).tensors
    agree(batch, [jax.vmap(with_scale, (0, None))(rows, X)])
    hessian = jax.hessian(lambda s: (with_scale(s, X) ** 3).sum())(jnp.asarray(scale))
    _, kept = program.keep(where, (), [scale, x])
    y = with_scale(scale, X)
    assert kept.nbytes > 0 and np.isfinite(hessian).all()
    word = (("T", (0,), 1), ("J", (0, 2)))
    second = program.run(
        where,
        word,
        [
            scale,
            x,
            3 * y**2,
            np.eye(6)[0],
            6 * y * jax.jvp(lambda s: with_scale(s, X), (jnp.asarray(scale),), (jnp.eye(6)[0],))[1],
        ],
    ).tensors
    agree(second, [hessian[0]])
    with pytest.raises(UsageError, match=r"no parameter 'scales'.*'scale'"):
        program.run(*_spread(functional_call(program, {"scales": scale}, X)))


def _spread(made: tuple[WorkerSite, list[Any]]) -> tuple[Any, ...]:
    return made[0], (), made[1]


# ---- Random numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_differ_between_calls_and_repeat_by_seed(kind: str, compile: bool | None) -> None:
    program = load(make(kind, dropout=0.5))
    a, b = call(program, compile=compile), call(program, compile=compile)
    assert (a != b).any()
    seeded = [call(program, seed=seed, compile=compile) for seed in (7, 7, 8, 7 + (1 << 40))]
    assert (seeded[0] == seeded[1]).all()
    assert (seeded[0] != seeded[2]).any() and (seeded[0] != seeded[3]).any()
    program.train(False)
    assert (call(program, compile=compile) == call(program, compile=compile)).all()
    assert not any("rng" in name or "key" in name for name in program.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_pullback_share_the_mask(kind: str) -> None:
    """The network is locally linear in its last weights, whose gradient shows the mask that the result shows."""
    program = load(make(kind, dropout=0.5))
    last = next(n for n, x in reversed(program.parameters().items()) if 2 in x.shape and x.ndim == 2)
    weights = np.asarray(program.parameters()[last])
    for _ in range(3):
        result, kept = program.keep(site(program, accumulate=True), (), [X])
        kept.derive(("T", (0,), 1), [BAR], keep=False, accumulate=True)
        shape = np.asarray(program.grads()[last])
        bias = sum(
            np.asarray(x).sum()
            for n, x in program.parameters().items()
            if n.endswith("bias") and x.shape == (2,)
        )
        assert bias == 0 or kind == "equinox"
        offset = np.asarray(program.parameters()["last.bias"]) if kind == "equinox" else 0
        y = np.asarray(result.tensors[0]) - offset
        np.testing.assert_allclose((shape * weights).sum(), (y * BAR).sum(), 1e-9)
        program.optimizer(optax.sgd, {"learning_rate": 0.1}).zero_grad()


def test_seeded_dropout_is_linens_own() -> None:
    module, variables = make("linen", dropout=0.5)
    program = load((module, variables))
    wanted, _ = module.apply(
        variables, X, train=True, rngs={"dropout": jax.random.key(5)}, mutable=["batch_stats"]
    )
    agree([call(program, seed=5)], [wanted])


def test_a_new_seed_compiles_nothing_anew() -> None:
    traces = []

    def apply(params: Any, x: Any, key: Any) -> Any:
        traces.append(1)
        return params * x + jax.random.normal(key)

    program = load((apply, jnp.ones(3)))
    for seed in range(4):
        call(program, seed=seed)
    assert len(traces) == 1


# ---- State ---------------------------------------------------------------------------------------------------------


def test_names_are_paths() -> None:
    names = {kind: (list(load(make(kind)).parameters()), list(load(make(kind)).buffers())) for kind in KINDS}
    assert {"Dense_0.kernel", "BatchNorm_0.scale", "Dense_1.bias"} <= set(names["linen"][0])
    assert names["linen"][1] == ["batch_stats.BatchNorm_0.mean", "batch_stats.BatchNorm_0.var"]
    assert {"first.kernel", "norm.scale", "last.bias"} <= set(names["nnx"][0])
    assert names["nnx"][1] == ["norm.mean", "norm.var"]
    assert {"first.weight", "norm.bias", "last.bias"} <= set(names["equinox"][0])
    assert names["equinox"][1] and all(n.startswith("state.") for n in names["equinox"][1])
    assert names["plain"] == (["scale", "shift", "weights.0", "weights.1"], ["state.mean", "state.var"])
    assert list(load(targets.make_bound()).parameters()) == names["linen"][0]
    module, variables = targets.make_linen()
    assert list(load((module.apply, variables)).buffers()) == names["linen"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_round(kind: str) -> None:
    one, other = load(make(kind, seed=0)), load(make(kind, seed=1))
    call(one)
    other.load_state_dict({n: np.asarray(x) for n, x in one.state_dict().items()})
    assert other.generation == 1
    for p in (one, other):
        p.train(False)
    assert (call(one) == call(other)).all()
    other.train(True)
    call(other)  # weak types and the like are as they were


def test_what_is_loaded_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """`jnp.array` and `jnp.asarray` compile a program for each shape and dtype: seconds for a model's state."""
    arrays = {f"w{i}": np.full((3, 97 + i), i, np.float32) for i in range(3)}
    with jax.log_compiles():
        program = load((lambda params, x: x, arrays))
        program.load_state_dict(program.state_dict())
        program.load_state_dict(arrays)
        assert "Compiling" not in caplog.text
        jnp.zeros_like(program.parameters()["w1"])[0].sum()
        assert "Compiling" in caplog.text
    arrays["w1"][:] = 7  # what was given is not kept
    assert (np.asarray(program.parameters()["w1"]) == 1).all()


def test_a_wrong_state_changes_nothing() -> None:
    program = load(make("linen"))
    before = program.state_dict()
    good = {n: np.asarray(x) + 1 for n, x in before.items()}
    bias = good["Dense_0.bias"]
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {n: x for n, x in good.items() if n != "Dense_0.bias"},
            UsageError,
            r'Missing key\(s\).*"Dense_0.bias"',
        ),
        ({**good, "Dense_9.bias": bias}, UsageError, r'Unexpected key\(s\).*"Dense_9.bias"'),
        ({**good, "Dense_0.bias": bias[:2]}, UsageError, "size mismatch for Dense_0.bias"),
        ({**good, "Dense_0.bias": bias.astype(complex)}, DtypeError, "Dense_0.bias is float64"),
    ]
    for state, error, message in wrong:
        with pytest.raises(error, match=message):
            program.load_state_dict(state)
    with pytest.raises(UsageError, match="size mismatch"):
        program.load_state_dict({"Dense_0.kernel": bias[:2], "Dense_0.bias": bias}, strict=False)
    assert all((before[n] == x).all() for n, x in program.state_dict().items()) and program.generation == 0
    program.load_state_dict({"Dense_0.bias": bias.astype(np.float32), "unknown": bias}, strict=False)
    agree([program.parameters()["Dense_0.bias"]], [bias], 1e-6)
    memory = bias.copy()
    program.load_state_dict({"Dense_0.bias": memory}, strict=False)
    memory[:] = 99
    assert (np.asarray(program.parameters()["Dense_0.bias"]) == bias).all()


def test_modules_without_modes() -> None:
    program = load(targets.make_mlp())
    assert program.training is None
    program.train(True)
    assert program.training is None
    assert call(program, np.ones(3, np.float32)).shape == (2,)
    pair = load(targets.make_dense())
    assert set(pair.parameters()) == {"w", "b"} and pair.training is None
    assert call(pair, np.ones((1, 3))).shape == (1, 2)
    assert load(initialised(Quiet())).training is None


class NoisyNnx(nnx.Module):
    def __init__(self) -> None:
        self.rngs = nnx.Rngs(0)

    def __call__(self, x: Any) -> Any:
        return x + jax.random.normal(self.rngs.noise(), x.shape)


class NoisyCallNnx(nnx.Module):
    def __call__(self, x: Any, rngs: Any) -> Any:
        return x + jax.random.normal(rngs.noise(), x.shape)


class NoisyEquinox(eqx.Module):
    def __call__(self, x: Any, *, key: Any = None) -> Any:
        return x if key is None else x + jax.random.normal(key, x.shape)


class NoisyLinen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + jax.random.normal(self.make_rng("dropout"), x.shape)


class Around(nn.Module):
    """Draws by what it makes when it is called."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return NoisyLinen()(x)


class Quiet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.LayerNorm()(nn.relu(nn.Dense(3)(x)))


def initialised(module: Any) -> Any:
    return module, module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.ones((2, 3)))


@pytest.mark.parametrize(
    "make_obj",
    [
        NoisyNnx,
        NoisyCallNnx,
        NoisyEquinox,
        lambda: eqx.nn.Sequential([eqx.nn.Lambda(jnp.tanh), NoisyEquinox()]),
        lambda: initialised(NoisyLinen()),
        lambda: initialised(Around()),
        lambda: initialised(nn.Sequential([nn.Dense(3), nn.Dropout(0.5, deterministic=False)])),
        lambda: ((lambda p, x, key: x * p + jax.random.normal(key, x.shape)), jnp.ones(3)),
    ],
)
def test_what_is_random_is_in_training_mode_for_no_two_of_its_calls_are_one(make_obj: Any) -> None:
    program = load(make_obj())
    assert program.training is True
    assert (call(program) != call(program)).any()
    program.train(False)
    assert program.training is False


class CachingLinen(nn.Module):
    """One step of decoding, with dropout, so that it is used in evaluation mode."""

    @nn.compact
    def __call__(self, x: Any, deterministic: bool = True) -> Any:
        past = self.variable("cache", "past", jnp.zeros, 3)
        other = self.variable("other", "count", jnp.zeros, ())
        if not deterministic:
            other.value += 1
        if not self.is_initializing():
            past.value += nn.Dropout(0.5)(x, deterministic=deterministic).sum(0)
        return x + past.value


class CachingNnx(nnx.Module):
    def __init__(self) -> None:
        self.past, self.count = nnx.Cache(jnp.zeros(3)), nnx.Variable(jnp.zeros(()))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        self.past[...] += self.drop(x).sum(0)
        return x + self.past


@pytest.mark.filterwarnings("ignore:CachingNnx writes to count")
@pytest.mark.parametrize("make_obj", [lambda: initialised(CachingLinen()), CachingNnx])
def test_caches_of_flax_move_in_evaluation_mode_as_well(make_obj: Any) -> None:
    """And nothing else does: who decodes has no dropout."""
    program = load(make_obj())
    program.train(False)
    assert program.moves_in_evaluation and not load(initialised(Quiet())).moves_in_evaluation
    for step in (1, 2, 3):
        if step == 2:
            program.spec(site(program), [Aval(X.shape, BY_NAME["float64"])])
        agree([call(program)], [X + step * X.sum(0)], 1e-6)
    state = program.state_dict()
    assert sorted(abs(np.asarray(x)).sum() > 0 for x in state.values()) == [False, True]
    assert program.has_moved()


def test_what_flax_would_keep_in_evaluation_mode_and_is_lost_here_is_told_once() -> None:
    program = load(CachingNnx())
    program.train(False)
    with pytest.warns(UserWarning, match="CachingNnx writes to count in evaluation mode.*nnx.Cache") as told:
        program.spec(site(program), [Aval(X.shape, BY_NAME["float64"])])
        call(program)
        call(program)
    assert len(told) == 1


def test_the_mode_a_module_comes_in() -> None:
    module = targets.make_nnx()
    module.eval()
    assert load(module).training is False
    program = load(make("linen"))
    structure, leaves = flatten([[X], {"train": False}], lambda x: isinstance(x, np.ndarray))
    with pytest.raises(UsageError, match=r"train=False in the call.*training mode.*remote.eval"):
        program.run(WorkerSite(structure, training=True), (), leaves)
    program.train(False)
    assert program.run(WorkerSite(structure, training=False), (), leaves).tensors[0].shape == (5, 2)


def test_what_a_factory_may_not_return() -> None:
    module = targets.make_linen()[0]
    for wrong, message in [
        (module, "linen module without variables"),
        ((module, 3), "what module.init"),
        ((lambda key, shape: None, lambda params, x: x), r"init needs nothing but a key.*\(apply, params\)"),
        ((1, 2), r"\(int, int\) is no module.*return one of"),
        ({"w": 1}, "a dict cannot be called.*return one of"),
    ]:
        with pytest.raises(UsageError, match=message):
            load(wrong)
    with pytest.raises(UsageError, match=r"plain JAX callable has no state.*\(apply, params\)"):
        load(lambda x: x).parameters()


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_in_the_state_goes_on(make_key: Any) -> None:
    """Were a typed key no state, each call would draw the first one's mask again."""

    def apply(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        now, later = jax.random.split(state["key"])
        return x * params * jax.random.bernoulli(now, shape=x.shape), {"key": later}

    program, state, found = load((apply, jnp.ones(3), {"key": make_key(0)})), {"key": make_key(0)}, []
    for _ in range(3):
        found.append(call(program))
        wanted, state = apply(jnp.ones(3), state, X)
        agree(found[-1:], [np.asarray(wanted)])
    assert (found[0] != found[1]).any()
    saved = {name: np.asarray(x) for name, x in program.state_dict().items()}
    later = [call(program), program.load_state_dict(saved), call(program)]
    agree(later[:1], later[2:], 0)


def test_state_that_changes_its_shape_is_refused() -> None:
    program = load((lambda p, s, x: (x, jnp.concatenate([s, s])), jnp.ones(1), jnp.zeros(2)))
    with pytest.raises(UsageError, match="state keeps its shape"):
        call(program)
    widening = (lambda p, s, x: (x * s[0], s + x[0, :2]), jnp.ones(1), jnp.zeros(2, "float32"))
    widened, another = load(widening), load(widening)
    where = site(widened)
    results = [np.asarray(widened.run(where, (), [X]).tensors[0]) for _ in range(2)]
    assert widened.buffers()["state.value"].dtype == np.float64
    agree(results, [X * 0, X * X[0, 0]])
    another.load_state_dict({name: np.asarray(x) for name, x in widened.state_dict().items()})
    agree([call(another)], [call(widened)], 0)
    with pytest.raises(UsageError, match=r"must return \(result, state\)"):
        call(load((lambda p, s, x: x, jnp.ones(1), jnp.zeros(2))))


# ---- Optimizers ----------------------------------------------------------------------------------------------------


def locally_trained(kind: str, transformation: Any, steps: int) -> Any:
    """The same training by the library and optax alone."""
    obj = make(kind)
    leaves, run = targets.local_run(obj, True)
    state = transformation.init(leaves)
    for _ in range(steps):
        bars = jax.vjp(lambda p: run(p, X)[0], leaves)[1](jnp.asarray(BAR))[0]
        updates, state = transformation.update(bars, state, leaves)
        leaves = optax.apply_updates(leaves, updates)
    return leaves


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_optaxs(kind: str) -> None:
    program = load(make(kind))
    settings = {"weight_decay": 0.1, "eps": 1e-4}  # a gradient that is zero but for rounding must not decide
    optimizer = program.optimizer(optax.adamw, {"learning_rate": 0.01, **settings})
    for _ in range(5):
        optimizer.zero_grad()
        pull(program)
        optimizer.step()
    agree(program.parameters().values(), locally_trained(kind, optax.adamw(0.01, **settings), 5))
    assert program.generation == 5


def test_clipping_schedules_and_the_users_own_chain() -> None:
    rate = optax.cosine_decay_schedule(0.1, 4)
    wanted = locally_trained("plain", optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(rate)), 4)
    program = load(make("plain"))
    optimizer = program.optimizer(optax.sgd, {"lr": 0.5})
    optimizer.schedule(optax.cosine_decay_schedule, {"init_value": 0.1, "decay_steps": 4})
    for _ in range(4):
        optimizer.zero_grad()
        pull(program)
        norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in program.grads().values()))
        assert optimizer.step(0.5) == pytest.approx(norm)
    agree(program.parameters().values(), wanted)
    own = load(make("plain"))
    optimizer = own.optimizer(targets.make_optimizer, {"learning_rate": 0.1, "clip": 0.2})
    pull(own)
    optimizer.step()
    agree(own.parameters().values(), locally_trained("plain", targets.make_optimizer(0.1, 0.2), 1))


def test_options_are_set_and_a_new_rate_compiles_nothing() -> None:
    program = load(make("plain"))
    made = []

    def counted(learning_rate: float, momentum: float = 0.0) -> Any:
        made.append(learning_rate)
        return optax.sgd(learning_rate, momentum=momentum)

    optimizer = program.optimizer(counted, {"learning_rate": 1.0})
    pull(program)
    optimizer.step()
    for rate in (0.5, 0.25, 0.125):
        before = program.parameters()
        optimizer.set({"lr": rate})
        traced = len(made)
        optimizer.step()
        assert rate == 0.5 or len(made) == traced
        agree([before["shift"] - program.parameters()["shift"]], [rate * program.grads()["shift"]])
    with pytest.raises(UsageError, match="nesterov"):
        optimizer.set({"nesterov": True})
    optimizer.set({"momentum": 0.5})
    optimizer.step()


OWN_TREES = {
    "linen": lambda obj: obj[1]["params"],
    "nnx": lambda obj: nnx.state(obj, nnx.Param),
    "equinox": lambda obj: eqx.filter(obj[0], eqx.is_inexact_array),
    "plain": lambda obj: obj[1],
}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_are_given_the_librarys_own_tree(kind: str) -> None:
    program, seen = load(make(kind)), []

    def target(learning_rate: float) -> Any:
        def still(params: Any) -> Any:
            """By path, as weight decay is kept from biases."""
            seen.append(params)
            return jax.tree_util.tree_map_with_path(lambda path, x: "bias" in str(path[-2:]), params)

        return optax.chain(optax.sgd(learning_rate), optax.masked(optax.set_to_zero(), still))

    optimizer = program.optimizer(target, {"learning_rate": 0.1})
    assert jax.tree.structure(seen[0]) == jax.tree.structure(OWN_TREES[kind](make(kind)))
    agree(jax.tree.leaves(seen[0]), jax.tree.leaves(OWN_TREES[kind](make(kind))), 0)
    first, *others = before = program.parameters()
    groups = [{"names": [first], "learning_rate": 0.0}, {"names": others}]
    pull(program)
    for made, stays in (
        (optimizer, []),
        (program.optimizer(target, {"learning_rate": 0.1}, groups), [first]),
    ):
        before = program.parameters()
        made.step()
        moved = [n for n, x in program.parameters().items() if (np.asarray(x) != before[n]).any()]
        has_gradient = [n for n, x in program.grads().items() if np.asarray(x).any()]
        assert moved == [n for n in has_gradient if "bias" not in n and n not in stays]
    made.load_state_dict(made.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_may_go_by_names(kind: str) -> None:
    program = load(make(kind))
    first, *others = names = list(program.parameters())
    settings = {"learning_rate": 0.0, "weight_decay": 1.0, "mask": {n: n == first for n in names}}
    for groups in (None, [{"names": [first]}, {"names": others}]):
        optimizer = program.optimizer(decayed, settings, groups)
        before = program.parameters()
        pull(program)
        optimizer.step()
        moved = [n for n, x in program.parameters().items() if (np.asarray(x) != before[n]).any()]
        assert moved == [first] or not np.asarray(before[first]).any()


def decayed(learning_rate: float, weight_decay: float, mask: Any) -> Any:
    return optax.chain(optax.sgd(learning_rate), optax.add_decayed_weights(-weight_decay / 2, mask))


def test_a_rate_that_is_set_ends_a_schedule() -> None:
    program = load(make("plain"))
    optimizer = program.optimizer(optax.sgd, {"learning_rate": 1.0})
    optimizer.schedule(optax.constant_schedule, {"value": 0.25})
    pull(program)
    for rate in (0.25, 0.5):
        before = program.parameters()
        optimizer.step()
        agree([before["shift"] - program.parameters()["shift"]], [rate * program.grads()["shift"]])
        optimizer.set({"lr": 0.5})


def test_a_schedule_overrides_no_rates_of_groups() -> None:
    program = load(make("plain"))
    first, *others = program.parameters()
    groups = [{"names": [first], "lr": 0.001}, {"names": others}]
    optimizer = program.optimizer(optax.sgd, {"learning_rate": 0.1}, groups)
    with pytest.raises(UsageError, match="groups have some of their own"):
        optimizer.schedule(optax.constant_schedule, {"value": 0.25})
    optimizer.set({"lr": 0.1})
    optimizer.schedule(optax.constant_schedule, {"value": 0.25})


def injected(learning_rate: float, momentum: float = 0.5) -> Any:
    """Its state has the options."""
    return optax.inject_hyperparams(optax.sgd)(learning_rate, momentum=momentum)


def test_what_a_state_has_of_an_option_changes_with_it() -> None:
    one, other = load(make("plain")), load(make("plain"))
    settings = {"learning_rate": 0.1, "momentum": 0.5}
    a, b = one.optimizer(injected, settings), other.optimizer(optax.sgd, settings)
    changes: list[Callable[[Any], None]] = [
        lambda optimizer: None,
        lambda optimizer: optimizer.set({"lr": 0.02}),
        lambda optimizer: optimizer.schedule(
            optax.exponential_decay, {"init_value": 0.3, "transition_steps": 1, "decay_rate": 0.5}
        ),
        lambda optimizer: optimizer.set({"momentum": 0.9}),
        lambda optimizer: optimizer.set({"lr": 0.05}),
        lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda optimizer: optimizer.set({"lr": 0.2}),
    ]
    for change in changes:
        for program, optimizer in ((one, a), (other, b)):
            change(optimizer)
            for _ in range(2):
                optimizer.zero_grad()
                pull(program)
                optimizer.step()
    agree(one.parameters().values(), other.parameters().values())


def halved(count: Any) -> Any:
    """In a dtype of its own, as optax's have where JAX has 64 bits."""
    return jnp.asarray(0.25, jnp.float16) / (count + 1)


def test_a_state_that_a_schedule_of_another_dtype_moved_can_be_loaded() -> None:
    one, other = load(make("plain")), load(make("plain"))
    optimizer, wanted = (p.optimizer(injected, {"learning_rate": 0.1}) for p in (one, other))
    for own in (optimizer, wanted):
        own.schedule(lambda: halved, {})
    for step in range(4):
        if step == 2:
            saved, optimizer = optimizer.state_dict(), one.optimizer(injected, {"learning_rate": 0.3})
            optimizer.schedule(lambda: halved, {})
            optimizer.load_state_dict(saved)
        for program, own in ((one, optimizer), (other, wanted)):
            own.zero_grad()
            pull(program)
            own.step()
    agree(one.parameters().values(), other.parameters().values())


def warmed_up(learning_rate: float) -> Any:
    """Looks at the rate: that of a schedule's peak is compared with nought."""
    return optax.sgd(optax.warmup_cosine_decay_schedule(0.0, learning_rate, 2, 6))


def test_a_target_may_look_at_its_rate() -> None:
    program, other = load(make("plain")), load(make("plain"))
    optimizer = program.optimizer(warmed_up, {"learning_rate": 0.1})
    wanted = other.optimizer(optax.sgd, {"learning_rate": 0.1})
    for peak in (0.1, 0.1, 0.1, 0.7):
        optimizer.set({"lr": peak})
        wanted.set(
            {"lr": float(optax.warmup_cosine_decay_schedule(0.0, peak, 2, 6)(wanted.state_dict()["steps"]))}
        )
        for p, own in ((program, optimizer), (other, wanted)):
            own.zero_grad()
            pull(p)
            own.step()
    agree(program.parameters().values(), other.parameters().values(), 1e-6)  # of a schedule in float32
    optimizer.schedule(optax.linear_schedule, {"init_value": 0.1, "end_value": 0.2, "transition_steps": 3})
    with pytest.raises(UsageError, match="warmed_up looks at the value of its learning_rate"):
        optimizer.step()
    optimizer.set({"lr": 0.1})
    optimizer.step()


def test_groups_and_frozen_parts() -> None:
    program = load(make("plain"))
    program.requires_grad(False, ["shift"])
    assert program.frozen() == ["shift"]
    groups = [{"names": ["weights.0"], "learning_rate": 0.0}, {"names": ["scale", "shift"]}]
    optimizer = program.optimizer(optax.sgd, {"learning_rate": 0.1}, groups)
    before = program.parameters()
    pull(program)
    assert program.grads()["shift"] is None and program.grads()["scale"] is not None
    optimizer.step()
    moved = {n for n, x in program.parameters().items() if (np.asarray(x) != before[n]).any()}
    assert moved == {"scale"}
    program.requires_grad(True, ["shift"])
    pull(program)
    assert program.grads()["shift"] is not None
    with pytest.raises(UsageError, match="more than one group"):
        program.optimizer(optax.sgd, {"learning_rate": 0.1}, [groups[0], groups[0]])


def test_a_kept_forward_outlives_freezing() -> None:
    program, other = load(make("plain")), load(make("plain"))
    where = site(program, accumulate=True)
    _, kept = program.keep(where, (), [X])
    program.requires_grad(False, ["shift"])
    kept.derive(("T", (0,), 1), [BAR], keep=False, accumulate=True)
    kept.derive(("J", (0,)), [X], keep=False, accumulate=False)
    pull(other)
    wanted = {**other.grads(), "shift": None}
    assert program.grads()["shift"] is None
    agree(*([g for g in x.values() if g is not None] for x in (program.grads(), wanted)))


def noisy(learning_rate: float) -> Any:
    """Its state has a typed key."""
    return optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(learning_rate))


@pytest.mark.parametrize("target", [optax.adam, noisy])
def test_an_optimizers_state_goes_round(target: Any) -> None:
    one, other = load(make("plain")), load(make("plain"))
    settings = {"learning_rate": 0.1}
    a, b = one.optimizer(target, settings), other.optimizer(target, {"learning_rate": 9.0})
    pull(one)
    a.step()
    other.load_state_dict({n: np.asarray(x) for n, x in one.state_dict().items()})
    b.load_state_dict(a.state_dict())
    for p, optimizer in ((one, a), (other, b)):
        optimizer.zero_grad()
        pull(p)
        optimizer.step()
    agree(one.parameters().values(), other.parameters().values(), 0)
    before = b.state_dict()
    for wrong in (
        {},
        {**before, "state": []},
        {**before, "state": [{"count": np.zeros(3)}]},
        {**before, "options": [{"weight_decay": 0.1}]},  # of adamw, whose arrays have the same names
        {**before, "options": [None]},
        {**before, "steps": None},
    ):
        with pytest.raises(UsageError, match="nothing was loaded"):
            b.load_state_dict(wrong)
        assert b.state_dict()["options"] == before["options"]
    sgd = other.optimizer(optax.sgd, settings)
    with pytest.raises(UsageError, match="nothing was loaded"):
        sgd.load_state_dict(before)


def test_optimizers_that_cannot_be() -> None:
    program = load(make("plain"))
    for target, kwargs, message in [
        (optax.adam, {"learning_rat": 1.0}, "learning_rat.*there are learning_rate"),
        (optax.adam, {}, "learning_rate"),
        (3, {}, "optax:adam"),
        (len, {"obj": []}, "positional only"),
        (dict, {}, "init and update"),
    ]:
        with pytest.raises(UsageError, match=message):
            program.optimizer(target, kwargs)
    optimizer = program.optimizer(optax.adam, {"learning_rate": 0.1})
    with pytest.raises(UsageError, match="no gradient accumulated"):
        optimizer.step()
    assert program.generation == 0
    with pytest.raises(UsageError, match="makes no schedule"):
        optimizer.schedule(dict, {})
    with pytest.raises(UsageError, match="decay_step"):
        optimizer.schedule(optax.cosine_decay_schedule, {"init_value": 1.0, "decay_step": 3})
    pull(program)
    with pytest.raises(UsageError, match="positive"):
        optimizer.step(-1.0)
    assert program.generation == 0
    lbfgs = program.optimizer(optax.lbfgs, {})
    with pytest.raises(UsageError, match=r"evaluate the loss itself.*linesearch=None.*functional"):
        lbfgs.step()
    assert program.generation == 0


# ---- Generations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [None, False])
def test_r42_a_pullback_after_a_step_is_that_of_its_forward(compile: bool | None) -> None:
    program, other = load(make("linen")), load(make("linen"))
    optimizer = program.optimizer(optax.sgd, {"learning_rate": 0.5})
    where = site(program, accumulate=True, compile=compile)
    _, kept = program.keep(where, (), [X])
    pull(program)
    optimizer.step()
    program.load_state_dict({n: np.asarray(x) * 0 for n, x in program.state_dict().items()})
    optimizer.zero_grad()
    (bar,), _ = kept.derive(("T", (0,), 1), [BAR], keep=False, accumulate=True)
    agree([bar], [pull(other)])
    agree(program.grads().values(), other.grads().values())
    (tangent,), _ = kept.derive(("J", (0,)), [X], keep=False, accumulate=False)
    again = load(make("linen"))
    (wanted,) = again.run(site(again), (("J", (0,)),), [X, X]).tensors
    agree([tangent], [wanted])


def test_former_parameters_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept forwards of compiled programs are never released, and each holds the parameters of its generation."""
    monkeypatch.setattr(store, "FORMER", 2000)
    program = load(make("plain"))
    optimizer = program.optimizer(optax.sgd, {"learning_rate": 0.1})
    kept = []
    for _ in range(8):
        kept.append(program.keep(site(program, accumulate=True), (), [X])[1])
        kept[-1].derive(("T", (0,), 1), [BAR], keep=False, accumulate=True)
        optimizer.step()
    kept[-1].derive(("T", (0,), 1), [BAR], keep=False, accumulate=True)
    with pytest.raises(ResidualLostError, match="Run the forward again"):
        kept[0].derive(("T", (0,), 1), [BAR], keep=False, accumulate=True)


def test_no_residual_has_a_copy_of_the_weights() -> None:
    weights = jnp.ones((200, 200))
    program = load((lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"], {"w": weights}))
    for accumulate in (True, False):
        _, kept = program.keep(site(program, accumulate=accumulate), (), [np.ones((2, 200))])
        assert kept.nbytes < weights.nbytes / 10


# ---- Isolation -----------------------------------------------------------------------------------------------------

PLAIN = """
import sys, numpy as np, jax.numpy as jnp
from gradwire_workers import jax as engine
from gradwire_workers.program import WorkerSite
from gradwire_wire.structures import positional
p = engine.program((lambda p, x: p["w"] * x, {"w": jnp.ones(2)}), is_module=True)
p.run(WorkerSite(positional(1)), (), [np.ones(2, np.float32)])
print(sorted({"flax", "equinox", "optax", "torch"} & set(sys.modules)))
"""


def test_no_library_is_imported_that_the_users_code_did_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
