"""Weights read onto meshes: the same model, where its letters say, and every byte read once."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from transforms.sharding import AXES, make_mesh, sharding_of
from zoo.config import rows
from zoo.huggingface import folder, sharded, tensors

SIZES = {"vocab_size": 64, "num_layers": 2, "embed_dim": 16, "mlp_dim": 32, "num_heads": 4, "head_dim": 4}
CONFIGS = {
    "gemma": zoo.GemmaConfig(**SIZES, num_kv_heads=1, post_norms=True),
    "qwen2": zoo.Qwen2Config(**SIZES, num_kv_heads=2),
    "mixtral": zoo.MixtralConfig(**SIZES, num_kv_heads=2, num_experts=4, experts_per_token=2),
}
FUSED = {  # several parameters in one tensor, or a dimension that the model has not
    "neox": zoo.NeoXConfig(**SIZES, num_kv_heads=4, rotary_fraction=0.5),  # of each head its q, k and v
    "phi3": zoo.Phi3Config(**SIZES, num_kv_heads=2),  # all q, then all k and v
    "gpt_oss": zoo.GptOssConfig(**SIZES, num_kv_heads=2, num_experts=4, experts_per_token=2),  # gate and up by turns
    "ernie4_5_moe": zoo.ErnieMoeConfig(
        **SIZES, num_kv_heads=2, num_experts=4, experts_per_token=2, dense_mlp_dim=32, shared_experts=1
    ),
}
MESHES = {"data": (8,), "data and model": (2, 4), "context": (1, 1, 8), "experts": (1, 2, 1, 4)}


class _Counting:
    """Counts the bytes that are read of tensors."""

    def __init__(self, file, kind):
        self.opened, self.read = folder_open(file, kind), _Counting.read

    def __enter__(self):
        self.opened.__enter__()
        return self

    def __exit__(self, *error):
        return self.opened.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self.opened, name)

    def get_slice(self, name):
        return _CountingSlice(self.opened.get_slice(name))


class _CountingSlice:
    def __init__(self, view):
        self.view = view

    def __getattr__(self, name):
        return getattr(self.view, name)

    def __getitem__(self, index):
        found = self.view[index]
        _Counting.read += found.nbytes
        return found


folder_open = tensors.safe_open


@pytest.fixture
def counting(monkeypatch):
    """The class that counts in `read`."""
    _Counting.read = 0
    monkeypatch.setattr(tensors, "safe_open", _Counting)
    mapped = tensors.mapped

    def counted(file, start, size):
        _Counting.read += size
        return mapped(file, start, size)

    monkeypatch.setattr(tensors, "mapped", counted)
    return _Counting


def _save(name, path, dtype=jnp.float32):
    config = (CONFIGS | FUSED)[name]
    model = zoo.model_class(config).init(config, key=jax.random.key(0), dtype=dtype)
    if name == "ernie4_5_moe":  # which is zero at first
        model = eqx.tree_at(lambda m: m.layers.router_bias, model, replace_fn=lambda bias: bias + jnp.arange(bias.size))
    zoo.save(model, path)
    return model


@pytest.mark.crossed("name", "sizes")
@pytest.mark.parametrize(("name", "sizes"), [(n, s) for s in MESHES.values() for n in CONFIGS])
def test_a_model_is_read_onto_a_mesh_each_byte_once(tmp_path, counting, name, sizes):
    model = _save(name, tmp_path)
    mesh = make_mesh(*sizes)
    loaded = zoo.load(tmp_path, mesh=mesh)
    assert jax.tree.structure(loaded) == jax.tree.structure(model)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(one, other)
    embed = sharding_of(mesh, "V D", loaded.embed.shape)
    assert loaded.embed.sharding.is_equivalent_to(embed, 2)
    assert counting.read == sum(leaf.nbytes for leaf in jax.tree.leaves(model))


@pytest.mark.crossed("name", "sizes")
@pytest.mark.parametrize("sizes", [(2, 4), (1, 2, 1, 4)])
@pytest.mark.parametrize("name", FUSED)
def test_parts_of_tensors_are_read_onto_a_mesh(tmp_path, name, sizes):
    model = _save(name, tmp_path)
    loaded = zoo.load(tmp_path, mesh=make_mesh(*sizes))
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("sets", [True, False], ids=["mesh set", "no mesh set"])
def test_what_lies_on_a_mesh_is_saved_as_what_does_not(tmp_path, sets):
    _save("mixtral", tmp_path / "one")
    mesh = make_mesh(2, 2, 1, 2)
    loaded = zoo.load(tmp_path / "one", mesh=mesh)
    with jax.set_mesh(mesh) if sets else contextlib.nullcontext():
        zoo.save(loaded, tmp_path / "two")
    for one, other in zip(*(jax.tree.leaves(zoo.load(tmp_path / name)) for name in ("one", "two")), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_process_reads_its_own_slices_alone(tmp_path, counting, name):
    model, mesh = _save(name, tmp_path), make_mesh(2, 2, expert=2)
    config, tensors = CONFIGS[name], folder.read_headers(tmp_path)
    mine = mesh.devices.reshape(-1)[:4]  # the first half of the data axis, as one of two processes would have it
    bytes_held = 0
    for row in rows(config):
        shape, names = row.shape(config.dims), list(row.tensors(config.dims))
        index = sharding_of(mesh, row.letters, shape).devices_indices_map(shape)
        held = {tuple(c.indices(s)[:2] for c, s in zip(index[d], shape, strict=True)) for d in mine}
        bytes_held += 4 * sum(np.prod([stop - start for start, stop in bounds]) for bounds in held)
        members = {place[1:]: tensors[tensor] for tensor, place in names if not place or place[0] == 0}
        layer = {bounds[len(row.stack) > 0 :] for bounds in held}
        for _ in range(len({place[0] for _, place in names}) if row.stack else 1):
            found = sharded.read_parts(row, config.dims, members, np.dtype(np.float32), layer)
        whole = np.asarray(sharded_leaf(model, row))
        for bounds, part in found.items():
            np.testing.assert_array_equal(part, whole[0 if row.stack else ...][tuple(slice(*cut) for cut in bounds)])
    assert counting.read == bytes_held < sum(leaf.nbytes for leaf in jax.tree.leaves(model))


def sharded_leaf(model, row):
    for name in row.leaf.split("."):
        model = getattr(model, name)
    return model


def test_parts_of_a_head_are_cut_after_reading(tmp_path):
    model = _save("qwen2", tmp_path)
    mesh = make_mesh(2, 4)
    loaded = zoo.load(tmp_path, mesh=mesh, axes=AXES | {"H": ("model",), "N": (), "K": ()})
    assert loaded.layers.q.sharding.spec[3] == "model"
    np.testing.assert_array_equal(loaded.layers.q, model.layers.q)


def test_bytes_are_checked_where_all_are_read(tmp_path):
    _save("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match="its SHA-256 differs"):
        zoo.load(tmp_path, mesh=make_mesh(2, 4))
