"""GGUF files: written by the package that llama.cpp has, read as Hugging Face's folder of the same model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.config import rows
from zoo.quantised import Quantised, whole

gguf = pytest.importorskip("gguf")
SIZES = dict(vocab_size=96, num_layers=2, embed_dim=64, mlp_dim=96, num_heads=4, num_kv_heads=2, head_dim=16)
MODELS = {
    "llama": zoo.LlamaConfig(**SIZES, rope_theta=5e5),
    "qwen2": zoo.Qwen2Config(**SIZES, tied=True),
    "qwen3": zoo.Qwen3Config(**SIZES),
    "gemma": zoo.GemmaConfig(**SIZES, context_length=64),
    "gemma2": zoo.GemmaConfig(
        **SIZES, post_norms=True, attn_softcap=50.0, final_softcap=30.0, window=4, attention_pattern="LG"
    ),
    "gemma3": zoo.Gemma3Config(**SIZES, window=4),
}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")


def drawn(name):
    """Return a model with norms far from one."""
    model = zoo.model_class(MODELS[name]).init(MODELS[name], key=jax.random.key(0))
    leaves, tree = jax.tree.flatten(model)
    noise = np.random.default_rng(1)
    return jax.tree.unflatten(tree, [leaf + 0.1 * noise.standard_normal(leaf.shape).astype("f4") for leaf in leaves])


def blocks(array, kind):
    """Return what a matrix is in a file, and what that stands for; numbers of the K kinds are any bytes."""
    kind = gguf.GGMLQuantizationType[kind]
    if array.ndim < 2:
        return array, gguf.GGMLQuantizationType.F32, array
    try:
        data = gguf.quants.quantize(array, kind)
    except NotImplementedError:
        width, size = gguf.GGML_QUANT_SIZES[kind]
        noise = np.random.default_rng(array.size)
        data = noise.integers(0, 256, (array.shape[0], array.shape[1] // width, size), np.uint8)
        scale = np.float16(0.01) * np.ones((*data.shape[:2], 1), np.float16)
        where = slice(0, 2) if kind.name == "Q4_K" else slice(-2, None)
        data[..., where] = scale.view(np.uint8)
        if kind.name == "Q4_K":
            data[..., 2:4] = (scale * 0).view(np.uint8)
        data = data.reshape(array.shape[0], -1)
    return data, kind, gguf.quants.dequantize(data, kind).reshape(array.shape)


def write(path, name, model, kind):
    """Write a file as llama.cpp's converter does, and return the same model, of what the file stands for."""
    config, dims = model.config, model.config.dims
    writer = gguf.GGUFWriter(path, name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.embed_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_context_length(config.context_length)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if name in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_softcap)
        writer.add_final_logit_softcapping(config.final_softcap)
    arch = next(arch for arch, called in gguf.MODEL_ARCH_NAMES.items() if called == name)
    table, leaves = gguf.get_tensor_name_map(arch, config.num_layers), {}
    for row in rows(config):
        leaf = model
        for part in row.leaf.split("."):
            leaf = getattr(leaf, part)
        made = np.zeros(leaf.shape, np.float32)
        for theirs, place in row.tensors(dims):
            array = np.zeros(row.disk_shape(dims), np.float32)
            row.write(np.asarray(leaf[place]), array, dims)
            base, _, end = theirs.rpartition(".")
            data, of, stood = array, gguf.GGMLQuantizationType.F32, array
            if "norm" in theirs:
                data = array + ("gemma" in name)
            elif name == "llama" and row.leaf in ("layers.q", "layers.k"):
                heads = config.num_heads if row.leaf.endswith("q") else config.num_kv_heads
                order = np.arange(len(array)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
                data, of, stood = blocks(array[order], kind)
                stood = stood[np.argsort(order)]
            else:
                data, of, stood = blocks(array, kind)
            writer.add_tensor(f"{table.get_name(base)}.{end}", data, raw_dtype=of)
            made[place] = row.turned(stood, dims)
        leaves[row.leaf] = jnp.asarray(made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return type(model).build(config, leaves)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "F32") for name in MODELS), *(("llama", kind) for kind in KINDS[1:5]), ("gemma3", "Q8_0")],
)
def test_a_file_is_read_as_the_folder_that_it_came_from(name, kind, tmp_path):
    expected = write(tmp_path / "model.gguf", name, drawn(name), kind)
    model = zoo.load(tmp_path / "model.gguf", dtype=jnp.float32)
    assert model.config == expected.config
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_of_one_scale_stay_as_they_are(kind, tmp_path):
    expected = write(tmp_path / "model.gguf", "llama", drawn("llama"), kind)
    model = zoo.load(tmp_path / "model.gguf", quantise="as_stored")
    assert isinstance(model.layers.q, Quantised) and model.layers.q.group == 32
    plain = jax.tree.map(whole, model, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_of_several_scales_are_read_by_their_formulas(kind, tmp_path):
    """Value by value, of a model whose rows are whole blocks."""
    config = zoo.LlamaConfig(**SIZES | {"embed_dim": 256, "mlp_dim": 256, "num_heads": 16, "num_layers": 1})
    model = zoo.Llama.init(config, key=jax.random.key(0))
    write(tmp_path / "model.gguf", "llama", model, kind)
    file = gguf.GGUFReader(tmp_path / "model.gguf")
    data = next(tensor for tensor in file.tensors if tensor.name == "blk.0.ffn_up.weight").data
    up = np.asarray(zoo.load(tmp_path / "model.gguf").layers.up[0]).T
    for row in (0, 255):
        block = np.array(data[row])
        np.testing.assert_allclose(up[row], (_q4_k if kind == "Q4_K" else _q6_k)(block), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"layers\.down cannot stay in fewer bits"):
        zoo.load(tmp_path / "model.gguf", quantise="as_stored")


def _q4_k(block):
    """d, dmin; 12 bytes of eight scales and minima of six bits; 128 bytes of four bits, 64 values in 32 of them."""
    d, least = block[:4].view(np.float16).astype(np.float32)
    s, out = block[4:16].astype(int), []
    for j in range(8):
        if j < 4:
            scale, low = s[j] & 63, s[j + 4] & 63
        else:
            scale, low = (s[j + 4] & 15) | (s[j - 4] >> 6 << 4), (s[j + 4] >> 4) | (s[j] >> 6 << 4)
        held = block[16 + 32 * (j // 2) : 48 + 32 * (j // 2)].astype(int)
        out.append(d * scale * (held >> 4 if j % 2 else held & 15) - least * low)
    return np.concatenate(out)


def _q6_k(block):
    """128 bytes of low halves, 64 of two high bits, 16 scales, d."""
    low, high, scale = block[:128].astype(int), block[128:192].astype(int), block[192:208].view(np.int8).astype(int)
    d, out = block[208:].view(np.float16).astype(np.float32)[0], np.zeros(256, np.float32)
    for i in range(256):
        half, rest = divmod(i, 128)
        quarter, place = divmod(rest, 32)
        bits = low[64 * half + place + 32 * (quarter % 2)]
        value = (bits >> 4 if quarter > 1 else bits & 15) | ((high[32 * half + place] >> (2 * quarter) & 3) << 4)
        out[i] = d * scale[i // 16] * (value - 32)
    return out


def test_llama_3s_factors_are_known_again(tmp_path):
    """They are a tensor in the file."""
    model, path = drawn("llama"), tmp_path / "model.gguf"
    base, dim = 5e5, 16
    turns = 8192 * base ** (-2 * np.arange(dim // 2) / dim) / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    original = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer):
        writer.add_tensor("rope_freqs.weight", factors)
        original(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        write(path, "llama", model, "F32")
    scaling = zoo.load(path).config.rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_length) == ("llama3", 8.0, 8192)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "none.gguf").write_bytes(b"words, no numbers" * 9)
    with pytest.raises(ValueError, match="it is damaged, or no GGUF file"):
        zoo.load(tmp_path / "none.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="its architecture is 'rwkv6', and of GGUF files this zoo reads 'llama'"):
        zoo.load(tmp_path / "other.gguf")


def test_transformers_reads_a_file_so_too(tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    pytest.importorskip("accelerate")  # which it needs for that
    write(tmp_path / "model.gguf", "llama", drawn("llama"), "Q8_0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, 96, (2, 7))
    expected = theirs(torch.from_numpy(ids)).logits.detach().numpy()
    logits = zoo.load(tmp_path / "model.gguf")(jnp.asarray(ids, jnp.int32))
    np.testing.assert_allclose(logits, expected, atol=2e-5 * max(1.0, float(np.sqrt((expected**2).mean()))))
