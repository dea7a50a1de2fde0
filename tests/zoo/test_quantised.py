"""Folders of weights in fewer bits: read as what each format's paper says that they stand for, value by value."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zoo
from tests.tiny import drawn, same
from tests.zoo import hf_tiny
from transforms.sharding import make_mesh, sharding_of
from zoo import load
from zoo.adapters import lora
from zoo.config import rows
from zoo.formats import NF4
from zoo.huggingface.config import from_hf
from zoo.huggingface.quantised import fp8
from zoo.huggingface.tensors import Tensor
from zoo.huggingface.weights import shapes
from zoo.quantised import Quantised, quantise, whole

NOISE = np.random.default_rng(0)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _matrix(out, into, value):
    """Form a matrix value by value."""
    return np.array([[value(i, j) for j in range(into)] for i in range(out)], np.float32)


def fp8_blocks(name, out, into):
    weight = NOISE.normal(0, 0.5, (out, into)).astype(ml_dtypes.float8_e4m3fn)
    scale = NOISE.uniform(0.5, 1.5, (-(-out // 32), -(-into // 16))).astype(np.float32)
    held = {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}
    return held, _matrix(out, into, lambda i, j: np.float32(weight[i, j]) * scale[i // 32, j // 16])


def fp8_by_powers_of_two(name, out, into):
    held, _ = fp8_blocks(name, out, into)
    weight = held[f"{name}.weight"]
    scale = np.exp2(NOISE.integers(-3, 3, (-(-out // 32), -(-into // 16)))).astype(np.float32)
    held[f"{name}.weight_scale_inv"] = scale.astype(ml_dtypes.float8_e8m0fnu)
    return held, _matrix(out, into, lambda i, j: np.float32(weight[i, j]) * scale[i // 32, j // 16])


def fp8_rows(name, out, into):
    weight = NOISE.normal(0, 0.5, (out, into)).astype(ml_dtypes.float8_e4m3fn)
    scale = NOISE.uniform(0.5, 1.5, (out, 1)).astype(ml_dtypes.bfloat16)
    held = {f"{name}.weight": weight, f"{name}.weight_scale": scale, f"{name}.input_scale": np.ones(1, np.float32)}
    return held, _matrix(out, into, lambda i, j: np.float32(weight[i, j]) * np.float32(scale[i, 0]))


def int8_rows(name, out, into):
    weight = NOISE.integers(-128, 128, (out, into), np.int8)
    scale = NOISE.uniform(0.001, 0.01, (out, 1)).astype(np.float32)
    held = {f"{name}.weight": weight, f"{name}.weight_scale": scale}
    return held, _matrix(out, into, lambda i, j: np.float32(weight[i, j]) * scale[i, 0])


def _words(values, places=range(8), bits=4):
    """Put eight numbers of four bits into each word of 32, along the last dimension."""
    words = np.zeros((*values.shape[:-1], values.shape[-1] * bits // 32), np.uint32)
    for i, place in enumerate(places):
        words |= values[..., i :: 32 // bits].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def packed(name, out, into):
    values = NOISE.integers(0, 16, (out, into))
    scale = NOISE.uniform(0.01, 0.1, (out, into // 16)).astype(np.float16)
    held = {
        f"{name}.weight_packed": _words(values),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": np.array([out, into], np.int64),
    }
    return held, _matrix(out, into, lambda i, j: (values[i, j] - 8) * np.float32(scale[i, j // 16]))


def packed_with_zeros(name, out, into):
    held, _ = packed(name, out, into)
    zeros, scale = NOISE.integers(0, 16, (out, into // 16)), held[f"{name}.weight_scale"]
    filled = np.pad(zeros, ((0, -out % 8), (0, 0)))  # words go down the outputs here
    held[f"{name}.weight_zero_point"] = np.ascontiguousarray(_words(np.ascontiguousarray(filled.T)).T)
    words = held[f"{name}.weight_packed"].view(np.uint32)
    value = lambda i, j: int(words[i, j // 8] >> np.uint32(4 * (j % 8)) & np.uint32(15)) - zeros[i, j // 16]
    return held, _matrix(out, into, lambda i, j: value(i, j) * np.float32(scale[i, j // 16]))


def packed_by_activation(name, out, into):
    """Inputs of a group stand apart."""
    held, _ = packed_with_zeros(name, out, into)
    index = NOISE.permutation(np.repeat(np.arange(into // 16), 16)).astype(np.int32)
    words, scale = held[f"{name}.weight_packed"].view(np.uint32), held[f"{name}.weight_scale"]
    zeros = held[f"{name}.weight_zero_point"].view(np.uint32)
    four = lambda word, place: int(word >> np.uint32(4 * (place % 8)) & np.uint32(15))
    value = lambda i, j: four(words[i, j // 8], j) - four(zeros[i // 8, index[j]], i)
    held[f"{name}.weight_g_idx"] = index
    return held, _matrix(out, into, lambda i, j: value(i, j) * np.float32(scale[i, index[j]]))


def packed_raggedly(name, out, into):
    """The last group of inputs is smaller than the others."""
    held, _ = packed(name, out, into)
    scale = NOISE.uniform(0.01, 0.1, (out, -(-into // 32))).astype(np.float16)
    words = held[f"{name}.weight_packed"].view(np.uint32)
    value = lambda i, j: int(words[i, j // 8] >> np.uint32(4 * (j % 8)) & np.uint32(15)) - 8
    held[f"{name}.weight_scale"] = scale
    return held, _matrix(out, into, lambda i, j: value(i, j) * np.float32(scale[i, j // 32]))


def packed_in_4_and_8_bits(name, out, into):
    if "down" not in name:
        return packed(name, out, into)
    values, scale = NOISE.integers(0, 256, (out, into)), NOISE.uniform(0.001, 0.01, (out, into // 16))
    held = {
        f"{name}.weight_packed": _words(values, range(4), bits=8),
        f"{name}.weight_scale": scale.astype(np.float32),
        f"{name}.weight_shape": np.array([out, into], np.int64),
    }
    return held, _matrix(out, into, lambda i, j: (values[i, j] - 128) * np.float32(scale[i, j // 16]))


def nvfp4(name, out, into, names=("weight_packed", "weight_scale", "weight_global_scale"), divided=True):
    values = NOISE.integers(0, 16, (out, into))
    scale = NOISE.uniform(50, 400, (out, into // 16)).astype(ml_dtypes.float8_e4m3fn)
    whole = np.float32([NOISE.uniform(1e3, 1e4)])
    numbers = (values[:, ::2] + 16 * values[:, 1::2]).astype(np.uint8)
    held = dict(zip(names, (numbers, scale, whole if divided else 1 / whole), strict=True))
    signed = lambda code: (-1.0 if code & 8 else 1.0) * (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    value = lambda i, j: signed(values[i, j]) * np.float32(scale[i, j // 16]) / whole[0]
    return {f"{name}.{part}": array for part, array in held.items()}, _matrix(out, into, value)


def nvfp4_of_modelopt(name, out, into):
    if "down" in name:  # and others in eight bits
        held, values = fp8_rows(name, out, into)
        return held | {f"{name}.input_scale": np.ones((), np.float32)}, values
    return nvfp4(name, out, into, ("weight", "weight_scale", "weight_scale_2"), divided=False)


def fp8_of_modelopt(name, out, into):
    held, _ = fp8_rows(name, out, into)
    scale = held[f"{name}.weight_scale"] = np.float32(0.375)
    more = {f"{name}.input_scale": np.ones((), np.float32)} | {f"{name}.k_scale": np.ones((), np.float32)}
    return held | more, held[f"{name}.weight"].astype(np.float32) * scale


def int8_with_zeros(name, out, into):
    held, _ = int8_rows(name, out, into)
    held[f"{name}.weight_zero_point"] = zero = NOISE.integers(-128, 128, (out, 1), np.int8)
    weight, scale = held[f"{name}.weight"], held[f"{name}.weight_scale"]
    return held, _matrix(out, into, lambda i, j: (int(weight[i, j]) - int(zero[i, 0])) * scale[i, 0])


def gptq_in_order(name, out, into):
    return gptq(name, out, into, order=lambda index: index)


def gptq_of_one_group(name, out, into):
    return gptq(name, out, into, group=into)


def gptq_of_8_bits(name, out, into):
    return gptq(name, out, into, order=lambda index: index, bits=8)


def gptq_of_8_bits_by_activation(name, out, into):
    return gptq(name, out, into, bits=8)


def gptq_of_4_and_8_bits(name, out, into):
    return gptq(name, out, into, order=lambda index: index, bits=8 if "down" in name else 4)


def gptq_v2(name, out, into):
    return gptq(name, out, into, order=lambda index: index, less=None)


def gptq_by_words(name, out, into):
    return gptq(name, out, into, order=lambda index: index, less="words")


def gptq(name, out, into, order=NOISE.permutation, bits=4, group=16, less="numbers"):
    """Zeros are stored less one: each number, or each word, whose numbers lend to one another."""
    per, most = 32 // bits, 2**bits
    values, zeros = NOISE.integers(0, most, (into, out)), NOISE.integers(0, most, (into // group, out))
    scale = NOISE.uniform(0.01, 0.1, (into // group, out)).astype(np.float16)
    index = order(np.repeat(np.arange(into // group), group)).astype(np.int32)
    stored = _words((zeros - 1) % most if less == "numbers" else zeros, range(per), bits)
    if less == "words":
        ones = np.uint32(sum(1 << bits * place for place in range(per)))
        stored = (stored.view(np.uint32) - ones).view(np.int32)
    held = {
        f"{name}.qweight": np.ascontiguousarray(_words(np.ascontiguousarray(values.T), range(per), bits).T),
        f"{name}.qzeros": stored,
        f"{name}.scales": scale,
        f"{name}.g_idx": index,
    }
    value = lambda i, j: (values[j, i] - zeros[index[j], i]) * np.float32(scale[index[j], i])
    return held, _matrix(out, into, value)


def awq(name, out, into):
    values, zeros = NOISE.integers(0, 16, (into, out)), NOISE.integers(0, 16, (into // 16, out))
    scale = NOISE.uniform(0.01, 0.1, (into // 16, out)).astype(np.float16)
    places = (0, 4, 1, 5, 2, 6, 3, 7)  # the second of eight neighbours is the fifth of the word, and so on
    held = {f"{name}.qweight": _words(values, places), f"{name}.qzeros": _words(zeros, places), f"{name}.scales": scale}
    value = lambda i, j: (values[j, i] - zeros[j // 16, i]) * np.float32(scale[j // 16, i])
    return held, _matrix(out, into, value)


def int8_bitsandbytes(name, out, into):
    weight = NOISE.integers(-127, 128, (out, into), np.int8)
    scale = NOISE.uniform(0.5, 1.5, out).astype(np.float32)
    held = {
        f"{name}.weight": weight,
        f"{name}.SCB": scale,
        f"{name}.weight_format": np.zeros((), np.uint8),
    }
    return held, _matrix(out, into, lambda i, j: weight[i, j] * scale[i] / 127)


def nf4(name, out, into, nested=False, table=None):
    table = np.sort(NOISE.uniform(-1, 1, 16)).astype(np.float32) if table is None else np.array(table, np.float32)
    values = NOISE.integers(0, 16, out * into)
    scale = NOISE.uniform(0.5, 1.5, out * into // 16).astype(np.float32)
    told = {"quant_type": "nf4", "blocksize": 16, "dtype": "bfloat16", "shape": [out, into]}
    held = {
        f"{name}.weight": (values[::2] * 16 + values[1::2]).astype(np.uint8)[:, None],
        f"{name}.weight.absmax": scale,
        f"{name}.weight.quant_map": table,
    }
    if nested:
        outer_table, codes = np.linspace(-1, 1, 256).astype(np.float32), NOISE.integers(0, 256, scale.size)
        outer = NOISE.uniform(0.5, 1.5, -(-scale.size // 8)).astype(np.float32)
        told |= {"nested_blocksize": 8, "nested_offset": 0.25}
        held |= {
            f"{name}.weight.absmax": codes.astype(np.uint8),
            f"{name}.weight.nested_absmax": outer,
            f"{name}.weight.nested_quant_map": outer_table,
        }
        scale = np.array([outer_table[code] * outer[i // 8] + np.float32(0.25) for i, code in enumerate(codes)])
    text = np.frombuffer(json.dumps(told).encode(), np.uint8)
    held[f"{name}.weight.quant_state.bitsandbytes__nf4"] = text.copy()
    return held, _matrix(out, into, lambda i, j: table[values[i * into + j]] * scale[(i * into + j) // 16])


def nested_nf4(name, out, into):
    return nf4(name, out, into, nested=True)


FORMATS = {
    "fp8 by blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 16]}),
    "fp8 by powers of two": (
        fp8_by_powers_of_two,
        {"quant_method": "fp8", "weight_block_size": [32, 16], "scale_fmt": "ue8m0"},
    ),
    "fp8 by rows": (fp8_rows, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "int8 by rows": (int8_rows, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "packed": (
        packed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}},
        },
    ),
    "packed with zeros": (
        packed_with_zeros,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16, "symmetric": False}}},
        },
    ),
    "packed by activation": (
        packed_by_activation,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16, "actorder": "group"}}},
        },
    ),
    "packed raggedly": (
        packed_raggedly,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        },
    ),
    "packed in 4 and 8 bits": (
        packed_in_4_and_8_bits,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "group_size": 16}},
                "group_1": {"weights": {"num_bits": 8, "group_size": 16}, "targets": ["re:.*down_proj"]},
            },
        },
    ),
    "int8 with zeros": (int8_with_zeros, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "nvfp4": (nvfp4, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
    "modelopt's nvfp4": (nvfp4_of_modelopt, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}),
    "modelopt's fp8": (fp8_of_modelopt, {"producer": {"name": "modelopt"}, "quant_algo": "FP8"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}),
    "gptq in order": (gptq_in_order, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}),
    "gptq, which says otherwise": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16}),
    "gptq of one group": (gptq_of_one_group, {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}),
    "gptq of 8 bits": (gptq_of_8_bits, {"quant_method": "gptq", "bits": 8, "group_size": 16}),
    "gptq of 8 bits by activation": (
        gptq_of_8_bits_by_activation,
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "desc_act": True},
    ),
    "gptq of 4 and 8 bits": (
        gptq_of_4_and_8_bits,
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "dynamic": {"+:.*down.*": {"bits": 8}}},
    ),
    "gptq v2": (gptq_v2, {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"}),
    "gptq by words": (
        gptq_by_words,
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "meta": {"quantizer": ["gptqmodel:1.4.0"]}},
    ),
    "auto-round": (
        gptq_in_order,
        {"quant_method": "auto-round", "bits": 4, "group_size": 16, "packing_format": "auto_round:auto_gptq"},
    ),
    "auto-round as awq": (
        awq,
        {"quant_method": "auto-round", "bits": 4, "group_size": 16, "packing_format": "auto_round:auto_awq"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "bitsandbytes int8": (int8_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4, twice": (nested_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


def _rewrite(folder, change, settings, **more):
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    if settings is not None:
        raw["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(raw | more))


@pytest.mark.crossed("kind", "case")
@pytest.mark.parametrize("case", ["llama2", "phi3"])
@pytest.mark.parametrize("kind", FORMATS)
def test_weights_in_fewer_bits_are_what_they_stand_for(kind, case, tmp_path):
    encode, settings = FORMATS[kind]
    plain, quantised = hf_tiny.write(case, tmp_path / "plain"), hf_tiny.write(case, tmp_path / "quantised")
    held, values = {}, {}
    for name, array in load_file(plain / "model.safetensors").items():
        if name.endswith("proj.weight"):
            own, values[name] = encode(name.removesuffix(".weight"), *array.shape)
            held |= own
        else:
            held[name] = array
    _rewrite(plain, lambda tensors: tensors | values, None)
    _rewrite(quantised, lambda _: held, settings)
    ours, expected = load(quantised), load(plain)
    assert ours.embed.dtype == jnp.float32
    for row in rows(ours.config):
        one, other = (eqx.tree_at(lambda m: m.embed, m, m.embed) for m in (ours, expected))
        for part in row.leaf.split("."):
            one, other = getattr(one, part), getattr(other, part)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7, err_msg=row.leaf)


def test_gpt_oss_is_read_in_four_bits(tmp_path):
    """Against the decoder that transformers has, where it is installed, and value by value."""
    plain, quantised = hf_tiny.write("gpt_oss", tmp_path / "plain"), hf_tiny.write("gpt_oss", tmp_path / "quantised")
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    config = from_hf(hf_tiny.CASES["gpt_oss"] | sizes)
    tensors = {
        name: hf_tiny.tensor(name, row.disk_shape(config.dims))
        for row in rows(config)
        for name, _ in row.tensors(config.dims)
    }
    held, values = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, into, out = held.pop(name).shape
        blocks = NOISE.integers(0, 256, (experts, out, into // 32, 16), np.uint8)
        scales = NOISE.integers(122, 128, (experts, out, into // 32), np.uint8)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole = np.zeros((experts, into, out), np.float32)
        for e, i, j in np.ndindex(whole.shape):
            byte = blocks[e, j, i // 32, i % 32 // 2]
            code = byte >> 4 if i % 2 else byte & 15
            whole[e, i, j] = (-1 if code & 8 else 1) * FP4[code & 7] * 2.0 ** (int(scales[e, j, i // 32]) - 127)
        values[name] = whole
        try:
            import torch
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors
        except ImportError:
            continue
        theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        np.testing.assert_array_equal(theirs.numpy(), whole)
    _rewrite(plain, lambda _: values, None, **sizes)
    _rewrite(quantised, lambda _: held, {"quant_method": "mxfp4"}, **sizes)
    assert same(load(quantised), load(plain))
    kept = load(quantised, quantise="as_stored")
    assert kept.layers.gate.values.dtype == jnp.uint8 and not isinstance(kept.layers.q, Quantised)
    assert kept.layers.gate.shape == load(plain).layers.gate.shape
    assert same(_plain(kept), load(plain))
    ids = jnp.asarray(hf_tiny.tokens(), jnp.int32)
    np.testing.assert_allclose(hf_tiny.jit(kept)(ids), hf_tiny.jit(load(plain))(ids), atol=2e-5)
    for abstract, made in zip(
        *(jax.tree.leaves(one) for one in (shapes(quantised, quantise="as_stored"), kept)), strict=True
    ):
        assert (abstract.shape, abstract.dtype) == (made.shape, made.dtype)
    with pytest.raises(ValueError, match="matrices are kept as floats of 8 or 4 bits"):
        zoo.save(kept, tmp_path / "again")
    learned = []
    for model in (kept, load(plain)):
        model = lora.attach(model, ["gate", "down"], rank=2, alpha=4.0, key=jax.random.key(0))
        adapter, frozen = eqx.partition(model, lora.trainable(model))
        loss = lambda adapter, frozen=frozen: hf_tiny.loss_fn(eqx.combine(adapter, frozen))[0]
        learned.append(hf_tiny.jit(jax.grad(loss))(adapter))
    for one, other in zip(*map(jax.tree.leaves, learned), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert float(jnp.abs(learned[0].layers.gate.b).max()) > 1e-4


def test_what_is_decoded_counts_as_the_type_that_the_file_names(tmp_path):
    folder = hf_tiny.write("llama2", tmp_path)
    name = "model.layers.1.self_attn.q_proj"
    own, values = fp8_blocks(name, 48, 48)
    own_settings = FORMATS["fp8 by blocks"][1]
    _rewrite(folder, lambda held: held | own, own_settings, torch_dtype="bfloat16")
    model = load(folder)  # where one layer of a stack is wider, all are
    assert model.layers.q.dtype == jnp.float32
    narrow = load(folder, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(narrow.layers.q[1].reshape(48, 48).T, values.astype(ml_dtypes.bfloat16))


REFUSED = {
    "an unknown method": ({"quant_method": "hqq"}, "quant_method='hqq' is not supported, only 'fp8'"),
    "three bits": ({"quant_method": "gptq", "bits": 3}, "bits=3 is not supported, only 2 or 4 or 8"),
    "a format for one kernel": (
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        "checkpoint_format='marlin' is not supported, only 'gptq' or 'gptq_v2'",
    ),
    "another packing": (
        {"quant_method": "auto-round", "packing_format": "auto_round"},
        "packing_format='auto_round' is not supported, only 'auto_round:auto_gptq' or 'auto_round:auto_awq'",
    ),
    "another kernel's order by its newer name": ({"quant_method": "awq", "format": "gemv"}, "version='gemv' is not"),
    "another kernel's order": ({"quant_method": "awq", "version": "gemv"}, "version='gemv' is not supported"),
    "scales of activations": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        "quant_algo='W4A8_AWQ' is not supported, only 'FP8' or 'NVFP4'",
    ),
    "marlin": ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format='marlin-24' is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name, tmp_path):
    settings, words = REFUSED[name]
    folder = hf_tiny.write("llama2", tmp_path)
    _rewrite(folder, lambda held: held, settings)
    with pytest.raises(ValueError, match=words):
        load(folder)


_GROUP = {"num_bits": 4, "group_size": 16}
CONTRADICTIONS = {
    "larger blocks": (
        "fp8 by blocks",
        {"weight_block_size": [64, 32]},
        r"scale_inv` has shape \[2, 3\].*\[1, 2\] scales",
    ),
    "smaller blocks": ("fp8 by blocks", {"weight_block_size": [16, 16]}, r"has shape \[2, 3\].*or \[3, 3\] scales"),
    "no blocks": ("fp8 by blocks", {"weight_block_size": None}, "whose blocks are rows: mend the settings"),
    "more bits": (
        "packed",
        {"config_groups": {"a": {"weights": _GROUP | {"num_bits": 8}}}},
        "has 6 words of 32 bits for each 48 numbers, .* type=int of num_bits=8: mend",
    ),
    "floats": ("packed", {"config_groups": {"a": {"weights": _GROUP | {"type": "float"}}}}, "type=float of num_bits=4"),
    "larger groups": (
        "packed",
        {"config_groups": {"a": {"weights": _GROUP | {"group_size": 32}}}},
        "q_proj.weight` has scales of 3 groups of 48 inputs, .* group_size=32: mend",
    ),
    "larger groups of gptq": ("gptq", {"group_size": 32}, "scales of 3 groups of 48 inputs, .* group_size=32"),
    "zeros": (
        "packed",
        {"config_groups": {"a": {"weights": _GROUP | {"symmetric": False}}}},
        "q_proj.weight` has no weight_zero_point, .* symmetric=false",
    ),
    "rotations": (
        "packed",
        {"transform_config": {"config_groups": {"R4": {}}}},
        "transform_config, which rotates them",
    ),
    "gaps": ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format='sparse-24-bitmask' is not"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_settings_that_contradict_the_tensors_are_refused_by_name(name, tmp_path):
    kind, change, words = CONTRADICTIONS[name]
    encode, settings = FORMATS[kind]
    folder, module = hf_tiny.write("llama2", tmp_path), "model.layers.1.self_attn.q_proj"
    own, _ = encode(module, 48, 48)
    whole = lambda held: {name: array for name, array in held.items() if name not in own and name != f"{module}.weight"}
    _rewrite(folder, lambda held: whole(held) | own, settings)
    load(folder)
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings | change}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=words):
        load(folder)


def test_groups_of_some_modules_may_be_others_than_the_settings_say_of_all(tmp_path):
    """As GPTQModel tells it of some by name."""
    encode, settings = FORMATS["gptq"]
    folder, module = hf_tiny.write("llama2", tmp_path), "model.layers.1.self_attn.q_proj"
    own, values = encode(module, 48, 48)
    told = settings | {"group_size": 32, "dynamic": {r"+:.*q_proj": {"group_size": 16}, r"-:.*down_proj": {}}}
    _rewrite(folder, lambda held: {k: v for k, v in held.items() if k != f"{module}.weight"} | own, told)
    np.testing.assert_allclose(load(folder).layers.q[1].reshape(48, 48).T, values, rtol=1e-6)


def test_a_matrix_without_one_of_its_parts_is_refused_by_name(tmp_path):
    folder, name = hf_tiny.write("llama2", tmp_path), "model.layers.1.self_attn.q_proj"
    own, _ = awq(name, 48, 48)
    del own[f"{name}.qzeros"]
    _rewrite(folder, lambda held: held | own, FORMATS["awq"][1] | {"zero_point": False})
    with pytest.raises(ValueError, match=f"the folder has no tensor `{name}.qzeros`, without which others"):
        load(folder)


def test_settings_of_model_optimizer_may_be_in_a_file_of_their_own(tmp_path):
    """As NVIDIA's folders had them first."""
    (encode, settings), held = FORMATS["modelopt's fp8"], {}
    folder = hf_tiny.write("llama2", tmp_path)
    for name, array in load_file(folder / "model.safetensors").items():
        held |= encode(name.removesuffix(".weight"), *array.shape)[0] if "proj.weight" in name else {name: array}
    _rewrite(folder, lambda _: held, settings)
    expected = load(folder, quantise="as_stored")
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    told = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(told))
    assert same(load(folder, quantise="as_stored"), expected)


def test_settings_may_be_those_of_the_text_part(tmp_path):
    """As Kimi K2.5's are."""
    folder = hf_tiny.write("gemma3", tmp_path)
    zoo.save(quantise(load(folder), "int8", to_be_saved=True), folder)
    expected = load(folder, quantise="as_stored")
    text = json.loads((folder / "config.json").read_text())
    assert "quantization_config" in text
    raw = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "mm_tokens_per_image": 256}
    (folder / "config.json").write_text(json.dumps(raw))
    assert same(load(folder, quantise="as_stored"), expected)


def test_four_bits_that_do_not_make_equal_groups_are_refused_by_name(tmp_path):
    folder, name = hf_tiny.write("llama2", tmp_path), "model.layers.1.self_attn.q_proj"
    own, _ = nvfp4(name, 48, 48)
    own[f"{name}.weight_scale"] = own[f"{name}.weight_scale"][:40]
    _rewrite(folder, lambda held: held | own, FORMATS["nvfp4"][1])
    with pytest.raises(ValueError, match=rf"`{name}.weight` is U8 \[48, 24\] with scales \[40, 3\], and must be"):
        load(folder)


def test_biases_of_zeros_that_a_model_has_none_of_change_nothing(tmp_path):
    """Early versions of AutoGPTQ wrote them for every matrix."""
    folder, name = hf_tiny.write("llama2", tmp_path), "model.layers.1.self_attn.q_proj"
    own, _ = gptq_in_order(name, 48, 48)
    settings = FORMATS["gptq in order"][1]
    _rewrite(folder, lambda held: held | own, settings)
    plain = load(folder)
    _rewrite(folder, lambda held: held | {f"{name}.bias": np.zeros(48, np.float16)}, settings)
    assert same(load(folder), plain)
    _rewrite(folder, lambda held: held | {f"{name}.bias": np.ones(48, np.float16)}, settings)
    with pytest.raises(ValueError, match=f"unexpected: {name}.bias"):
        load(folder)


# --- kept in fewer bits, and written --------------------------------------------------------------------------------

SIZES = dict(vocab_size=64, num_layers=2, embed_dim=64, mlp_dim=128, num_heads=4, num_kv_heads=2, head_dim=32)
GROUPS = {"int8": None, "int4": 32, "nf4": 64}


def _plain(model):
    """Return a model whose matrices are all arrays."""
    return jax.tree.map(whole, model, is_leaf=lambda leaf: isinstance(leaf, Quantised))


def _same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


MODELS = {
    "llama": zoo.LlamaConfig(**SIZES),
    "phi3": zoo.Phi3Config(**SIZES),
    "mixtral": zoo.MixtralConfig(**SIZES, num_experts=3, experts_per_token=2),
}


@pytest.mark.parametrize(
    ("kind", "family"), [*((kind, "llama") for kind in GROUPS), ("int4", "phi3"), ("nf4", "phi3"), ("int8", "mixtral")]
)
def test_what_is_written_in_fewer_bits_is_read_so(kind, family, tmp_path):
    """Kept, to the bit; read as what it stands for, the same numbers; and its shapes are told from headers alone."""
    model = quantise(drawn(MODELS[family], jnp.bfloat16 if family == "phi3" else jnp.float32), kind, group=GROUPS[kind])
    zoo.save(model, tmp_path, shard_bytes=2**16)
    kept = load(tmp_path, quantise="as_stored")
    _same(kept, model)
    assert eqx.tree_equal(shapes(tmp_path, quantise="as_stored"), eqx.filter_eval_shape(lambda: kept))
    _same(load(tmp_path), _plain(model))
    zoo.save(kept, tmp_path / "again")
    _same(load(tmp_path / "again", quantise="as_stored"), model)


def test_blocks_of_a_matrix_that_is_narrower_are_blocks(tmp_path):
    """One column of scales, and fewer than rows."""
    weight, scale = NOISE.normal(size=(70, 10)).astype(ml_dtypes.float8_e4m3fn), np.float32([[2.0], [0.5], [4.0]])
    held = {"weight": weight, "scale": scale, "rows": np.ones((70, 1), np.float32)}
    expected = weight.astype(np.float32) * np.repeat(scale, 32, axis=0)[:70]
    np.testing.assert_array_equal(fp8.scaled(weight, scale, [32, 16]), expected)
    np.testing.assert_array_equal(fp8.scaled(weight, held["rows"], [32, 16]), weight.astype(np.float32))
    tensor = lambda name, kind: Tensor(tmp_path, name, held[name].shape, kind, None, 0)
    kept = fp8.kept(tensor("weight", "F8_E4M3"), tensor("scale", "F32"), [32, 16])
    assert kept is not None and kept.groups == 1
    values, scales = kept.read(weight, scale)
    np.testing.assert_array_equal(values.astype(np.float32) * scales, expected)


@pytest.mark.parametrize(
    "kind",
    [
        *("fp8 by blocks", "fp8 by powers of two", "fp8 by rows", "nvfp4", "modelopt's nvfp4", "modelopt's fp8"),
        *("gptq in order", "awq", "int8 by rows", "packed", "packed with zeros"),
        *("bitsandbytes int8", "nf4", "gptq of one group", "gptq of 8 bits", "gptq of 4 and 8 bits", "gptq by words"),
        *("int8 with zeros", "packed in 4 and 8 bits", "gptq", "gptq of 8 bits by activation", "packed by activation"),
    ],
)
def test_folders_of_others_stay_in_fewer_bits(kind, tmp_path):
    """In what is kept stands what is read, for matrices apart (Llama) and several in one tensor (Phi 3)."""
    encode, settings = FORMATS[kind]
    for case in ("llama2", "phi3"):
        folder, held = hf_tiny.write(case, tmp_path / case), {}
        for name, array in load_file(folder / "model.safetensors").items():
            of = (lambda *how: nf4(*how, table=NF4)) if kind == "nf4" else encode
            held |= of(name.removesuffix(".weight"), *array.shape)[0] if "proj.weight" in name else {name: array}
        _rewrite(folder, lambda _, held=held: held, settings)
        kept = load(folder, quantise="as_stored")
        assert isinstance(kept.layers.q, Quantised) and not isinstance(kept.embed, Quantised)
        for one, other in zip(jax.tree.leaves(_plain(kept)), jax.tree.leaves(load(folder)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
        if kind.startswith("fp8") or "nvfp4" in kind:
            assert kept.layers.q.values.dtype == (jnp.uint8 if "nvfp4" in kind else jnp.float8_e4m3fn)
            with pytest.raises(ValueError, match="matrices are kept as floats of 8 or 4 bits, with zeros"):
                zoo.save(kept, tmp_path / "again")


@pytest.mark.crossed("kind", "sizes")
@pytest.mark.parametrize("sizes", [{"data": 4, "model": 2}, {"data": 8}], ids=str)
@pytest.mark.parametrize("kind", ["gptq", "packed by activation"])
def test_inputs_of_a_group_that_stand_apart_are_put_back_on_a_mesh_too(kind, sizes, tmp_path):
    encode, settings = FORMATS[kind]
    folder, held = hf_tiny.write("llama2", tmp_path), {}
    for name, array in load_file(folder / "model.safetensors").items():
        held |= encode(name.removesuffix(".weight"), *array.shape)[0] if "proj.weight" in name else {name: array}
    _rewrite(folder, lambda _: held, settings)
    alone, ids = load(folder, quantise="as_stored"), hf_tiny.tokens()[:, :8]
    assert alone.layers.down.order.shape == (3, 80)
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        spread = load(folder, quantise="as_stored", mesh=mesh)
        ids = np.tile(ids, (4, 1))
        ids = jax.device_put(ids, sharding_of(mesh, "B S", ids.shape))
        logits = jax.jit(lambda model, ids: model(ids))(spread, ids)
    np.testing.assert_allclose(np.asarray(logits)[:2], alone(jnp.asarray(np.asarray(ids)[:2])), atol=2e-5)


def test_stacks_of_which_only_some_layers_are_in_few_bits_are_read_whole_and_named(tmp_path):
    """As folders are that leave the first and the last layers as they were."""
    encode, settings = FORMATS["awq"]
    folder, held = hf_tiny.write("llama2", tmp_path), {}
    for name, array in load_file(folder / "model.safetensors").items():
        few = "proj.weight" in name and ("layers.1." in name or "up_proj" in name)
        held |= encode(name.removesuffix(".weight"), *array.shape)[0] if few else {name: array}
    _rewrite(folder, lambda _: held, settings)
    words = (
        r"layers.q, .*layers.down cannot stay in fewer bits: .*all layers alike. They are read as the 50,688 numbers"
    )
    with pytest.warns(UserWarning, match=words):
        kept = load(folder, quantise="as_stored")
    assert isinstance(kept.layers.up, Quantised) and not isinstance(kept.layers.gate, Quantised)
    for one, other in zip(jax.tree.leaves(_plain(kept)), jax.tree.leaves(load(folder)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    with pytest.warns(UserWarning, match=words):
        assert eqx.tree_equal(shapes(folder, quantise="as_stored"), eqx.filter_eval_shape(lambda: kept))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "packed raggedly",
            "layers.q, layers.k.* cannot stay in fewer bits: only floats of 8 bits, integers of 8 or 4, nf4",
        ),
        (None, "its weights are not in fewer bits"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(kind, words, tmp_path):
    folder = hf_tiny.write("llama2", tmp_path)
    if kind is not None:
        encode, settings = FORMATS[kind]
        change = lambda held: {
            new: part
            for name, array in held.items()
            for new, part in (
                encode(name.removesuffix(".weight"), *array.shape)[0].items()
                if name.endswith("proj.weight")
                else [(name, array)]
            )
        }
        _rewrite(folder, change, settings)
    with pytest.raises(ValueError, match=words):
        load(folder, quantise="as_stored")


@pytest.mark.crossed("kind", "dtype")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", GROUPS)
def test_transformers_reads_what_is_written(kind, dtype, tmp_path):
    """Its logits, with its own readers of these formats, where they are installed."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes" if kind == "nf4" else "compressed_tensors")
    model = quantise(drawn(MODELS["llama"], dtype), kind, group=GROUPS[kind])
    zoo.save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    ids = np.random.default_rng(0).integers(0, 64, (2, 7))
    expected = theirs(torch.from_numpy(ids)).logits.detach().float().numpy()
    for ours in (load(tmp_path, quantise="as_stored"), load(tmp_path)):
        logits = ours(jnp.asarray(ids, jnp.int32))
        np.testing.assert_allclose(logits, expected, atol=1e-5 if dtype == "float32" else 3e-2)
