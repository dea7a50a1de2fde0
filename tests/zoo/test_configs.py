"""Configs: what is refused, what is derived, and the checkpoints in `conf/model`."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from zoo.accounting import count_params
from zoo.config import Chunk, RopeScaling, RopeType
from zoo.families import FAMILIES, GemmaConfig
from zoo.huggingface.config import from_hf, to_hf

CONF = Path(__file__).parents[2] / "conf" / "model"
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "num_layers": 3,
    "embed_dim": 48,
    "mlp_dim": 80,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
PUBLISHED = {
    "ernie4_5_0_3b": 360_748_032,
    "glm4_9b": 9_400_279_040,
    "exaone4_1_2b": 1_279_391_488,
    "exaone4_32b": 32_003_216_384,
    "hunyuan_7b": 7_504_568_320,
    "minimax_m2_230b_a10b": 228_689_764_864,
    "llama4_scout_109b_a17b": 107_769_861_120,
    "mobilellm_r1_950m": 949_685_760,
    "llama4_maverick_400b_a17b": 400_711_848_960,
    "command_r": 34_980_831_232,
    "gemma2b": 2_506_172_416,
    "gemma7b": 8_537_680_896,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "gemma3n_e2b": 4_435_182_688,
    "gemma3n_e4b": 6_835_235_568,
    "gemma4_e2b": 4_628_569_379,
    "gemma4_e4b": 7_463_013_418,
    "gemma4_12b": 11_907_350_320,
    "gemma4_31b": 30_697_345_340,
    "gemma4_26b_a4b": 25_233_141_790,
    "ministral3_8b": 8_489_553_920,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "mistral_7b_v3": 7_248_023_552,
    "mistral_nemo_12b": 12_247_782_400,
    "mistral_small_24b": 23_572_403_200,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen2_0_5b": 494_032_768,
    "qwen2_1_5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2_72b": 72_706_203_648,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_coder_480b_a35b": 480_154_875_392,
    "smollm3_3b": 3_075_098_624,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "olmo3_7b": 7_298_011_136,
    "command_r7b": 8_028_033_024,
    "granite4_micro": 3_402_836_480,
    "gpt2": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "pythia_160m": 162_322_944,
    "pythia_1_4b": 1_414_647_808,
    "neox_20b": 20_554_567_680,
    "opt_125m": 125_239_296,
    "opt_6_7b": 6_658_473_984,
    "stablelm_3b": 2_795_443_200,
    "stablelm2_1_6b": 1_644_515_328,
    "stablelm2_12b": 12_143_185_920,
    "minitron_4b": 4_190_509_056,
    "starcoder2_3b": 3_030_371_328,
    "starcoder2_15b": 15_957_889_024,
    "phi3_mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "granite3_1_2b": 2_533_531_648,
    "granite3_1_8b": 8_170_848_256,
    "olmoe_1b_7b": 6_919_161_856,
    "qwen1_5_moe_a2_7b": 14_315_784_192,
    "gpt_oss_20b": 20_914_757_184,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_419_200,
    "glm4_7_flash": 29_943_393_920,
    "mistral_small4_119b": 118_972_826_624,
    "kimi_k2": 1_026_408_232_448,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "granite3_1_1b_a400m": 1_334_628_352,
    "granite3_1_3b_a800m": 3_298_793_472,
    "granite4_h_1b": 1_461_538_368,
    "granite4_h_micro": 3_191_396_096,
    "granite4_h_tiny": 6_939_037_248,
    "granite4_h_small": 32_207_337_984,
    "lfm2_350m": 354_483_968,
    "lfm2_700m": 742_489_344,
    "lfm2_1_2b": 1_170_340_608,
    "lfm2_2_6b": 2_569_272_320,
    "lfm2_8b_a1b": 8_339_930_560,
    "qwen3_5_27b": 26_895_998_464,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "glm4_5_air_106b_a12b": 106_852_251_264,
    "glm4_5_355b_a32b": 352_797_829_024,
    "dots_llm1_142b_a14b": 142_774_381_696,
    "cwm_32b": 32_581_097_472,
    "afm_4_5b": 4_619_184_640,
    "helium1_preview_2b": 2_172_643_840,
    "ministral_8b": 8_019_808_256,
    "ernie4_5_21b_a3b": 21_825_437_888,
    "modernbert_base": 149_014_272,
    "modernbert_large": 394_781_696,
    "gpt_oss_120b": 116_829_156_672,
}


def read(name: str) -> tuple[Any, str]:
    """Return the config of a YAML file, and its first line."""
    text = (CONF / f"{name}.yaml").read_text()
    fields = yaml.safe_load(text)
    family, own = fields.pop("defaults")
    assert family.startswith("schema/") and own == "_self_"
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    if scaling := fields.pop("rope_scaling", None):
        fields["rope_scaling"] = RopeScaling(**scaling | {"rope_type": RopeType(scaling["rope_type"])})
    return FAMILIES[family.removeprefix("schema/")](**fields), text.splitlines()[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_checkpoints_have_the_published_number_of_parameters(name):
    config, comment = read(name)
    assert count_params(config) == PUBLISHED[name]
    assert comment.startswith("# https://huggingface.co/")


def test_every_checkpoint_is_checked_and_there_are_thirty():
    named = {path.stem for path in CONF.glob("*.yaml") if "huggingface.co" in path.read_text()}
    assert named == set(PUBLISHED) and len(named) >= 30


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_first_comment_states_the_exact_number_of_parameters(path):
    config, comment = read(path.stem)
    assert comment.endswith(f": {count_params(config):,} parameters")


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("gemma2_")])
def test_gemma_2_checkpoints_have_caps_windows_and_sandwich_norms(name):
    config, _ = read(name)
    assert (config.attn_softcap, config.final_softcap, config.window, config.post_norms) == (50.0, 30.0, 4096, True)
    assert config.query_scale == {"gemma2_27b": 1 / 12}.get(name, 1 / 16)


def test_windows_are_on_even_layers():
    assert GemmaConfig(**SMALL, window=4).layer_windows == (4, None, 4)
    assert GemmaConfig(**SMALL).layer_windows == (None, None, None)


def test_query_scale_defaults_to_the_head_size():
    assert GemmaConfig(**SMALL).query_scale == 0.25
    assert GemmaConfig(**SMALL, query_scalar=64.0).query_scale == 0.125


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"window": 0}, "window=0 must be positive"),
        ({"attn_softcap": -1.0}, "attn_softcap=-1.0 must be positive"),
        ({"norm_eps": float("nan")}, "norm_eps=nan must be positive"),
    ],
)
def test_impossible_values_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        GemmaConfig(**(SMALL | change))


def test_a_head_is_odd_where_its_part_that_turns_is_even():
    raw = to_hf(read("deepseek_v3")[0], "float32") | {"qk_nope_head_dim": 9, "qk_rope_head_dim": 10}
    assert from_hf(raw).head_dim == 19
    with pytest.raises(ValueError, match="head_dim=19 must be even"):
        from_hf(raw | {"qk_nope_head_dim": 10, "qk_rope_head_dim": 9})


def test_dense_layers_come_first_or_are_refused():
    raw = to_hf(read("glm4_7_flash")[0], "float32")
    assert from_hf(raw | {"mlp_layer_types": None}) == from_hf(raw)
    assert (
        from_hf(raw | {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 44, "first_k_dense_replace": 3}).first_dense == 3
    )
    kinds = [{"mlp_layer_types": kinds} for kinds in (["sparse"] * 46 + ["dense"], "dense", 3)]
    for told in (*kinds, {"first_k_dense_replace": 2}):
        with pytest.raises(ValueError, match="is not supported, only"):
            from_hf(raw | told)


@pytest.mark.parametrize(
    ("name", "told", "why"),
    [
        ("minimax_m2_230b_a10b", {"attn_type_list": [0] * 62}, "`attn_type_list`=.* only attention to all"),
        ("minimax_m2_230b_a10b", {"rotary_dim": "x", "partial_rotary_factor": ...}, "`rotary_dim`='x' is not an int"),
        ("minimax_m2_230b_a10b", {"rotary_dim": 7, "partial_rotary_factor": ...}, "rotary_fraction=.* is 7 dimensions"),
        (
            "llama4_scout_109b_a17b",
            {"layer_types": ["sliding_attention"] * 48},
            "`layer_types`=.* is not supported, only",
        ),
        ("llama4_scout_109b_a17b", {"attention_chunk_size": None}, "and there is no `attention_chunk_size`"),
        ("llama4_scout_109b_a17b", {"attn_temperature_tuning": "on"}, "`attn_temperature_tuning`='on' is neither"),
        ("llama4_scout_109b_a17b", {"moe_layers": [48]}, "is not a list of layers, from 0 to 47"),
        ("llama4_scout_109b_a17b", {"moe_layers": None, "interleave_moe_layer_step": 49}, "has no layer with experts"),
        ("llama4_scout_109b_a17b", {"no_rope_layers": [1] * 47}, "is not a list of 48 times 0 or 1"),
        (
            "hunyuan_7b",
            {"rope_scaling": {"type": "dynamic", "alpha": "x", "factor": 1.0}},
            "`rope_scaling.alpha`='x' is",
        ),
        (
            "hunyuan_7b",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling.rope_type=yarn is not supported",
        ),
        ("hunyuan_7b", {"use_qk_norm": False}, "`use_qk_norm`=False is not supported, only True"),
        ("granite4_h_tiny", {"layer_types": ["mamba"] * 40}, "gives num_layers=40 no layer of attention"),
        ("granite4_h_tiny", {"layer_types": ["mamba"] * 39 + ["conv"]}, "only 40 of mamba and attention and linear_"),
        ("granite4_h_tiny", {"mamba_d_head": 32}, "`mamba_n_heads`=48 times `mamba_d_head`=32 is not `mamba_expand`=2"),
        ("granite4_h_tiny", {"mamba_n_groups": 5}, "mamba_heads=48 must be a multiple of mamba_groups=5"),
        ("granite4_h_tiny", {"mamba_proj_bias": True}, "`mamba_proj_bias`=True is not supported, only False"),
        ("granite4_h_tiny", {"time_step_limit": [0.0, 1.0]}, "`time_step_limit`=.* is not supported, only"),
        ("granite4_h_tiny", {"num_experts_per_tok": 65}, "experts_per_token=65 must be from 1 to 64"),
        ("lfm2_350m", {"block_ff_dim": "wide"}, "`block_ff_dim`='wide' is not an integer"),
        (
            "lfm2_350m",
            {"block_auto_adjust_ff_dim": True, "block_multiple_of": 0},
            "`block_multiple_of`=0 is not positive",
        ),
        ("lfm2_350m", {"conv_bias": True}, "`conv_bias`=True is not supported, only False"),
        ("lfm2_350m", {"layer_types": ["conv"] * 15 + ["mamba"]}, "only 16 of conv and full_attention"),
        ("lfm2_350m", {"layer_types": ["conv"] * 16}, "gives num_layers=16 no layer of attention"),
        ("lfm2_350m", {"layer_types": ["full_attention"] * 16}, "gives num_layers=16 no layer of convolution"),
        ("qwen3_next_80b_a3b", {"layer_types": ["full_attention"] * 48}, "gives num_layers=48 no layer of the delta"),
        ("lfm2_8b_a1b", {"num_dense_layers": 24}, "first_dense=24 must be from 0 to 23"),
        ("exaone4_32b", {"sliding_window_pattern": "LX", "layer_types": ...}, "neither a number nor letters L, G"),
        ("exaone4_32b", {"sliding_window_pattern": 0, "layer_types": ...}, "neither a number nor letters L, G"),
        (
            "ernie4_5_21b_a3b",
            {"moe_layer_end_index": 20},
            "`moe_layer_end_index`=20 is not supported, only the last of",
        ),
        ("ernie4_5_21b_a3b", {"moe_layer_interval": 2}, "`moe_layer_interval`=2 is not supported, only 1"),
        ("ernie4_5_21b_a3b", {"use_bias": True}, "`use_bias`=True is not supported, only False"),
        ("dots_llm1_142b_a14b", {"sliding_window": 4096, "max_window_layers": 30}, "`layer_types`=.* is not supported"),
        ("dots_llm1_142b_a14b", {"layer_types": ["full_attention"] * 3}, "`layer_types`=.* is not supported"),
    ],
)
def test_what_files_say_otherwise_is_refused_by_name(name, told, why):
    """A value of `...`: the file does not have the key."""
    raw = {k: v for k, v in (to_hf(read(name)[0], "float32") | told).items() if v is not ...}
    raw["rope_parameters"] = {}
    with pytest.raises(ValueError, match=why):
        from_hf(raw)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ernie4_5_21b_a3b", {"moe_layer_end_index": -1, "moe_capacity": [64, 64, 64], "moe_gate": "topk"}),
        ("ernie4_5_21b_a3b", {"moe_layer_end_index": 27, "moe_use_aux_free": True, "num_nextn_predict_layers": 1}),
        ("dots_llm1_142b_a14b", {"scoring_func": "noaux_tc", "sliding_window": 4096, "max_window_layers": 62}),
        ("dots_llm1_142b_a14b", {"layer_types": ["full_attention"] * 62, "moe_layer_freq": 1}),
        ("cwm_32b", {"layer_types": None, "mlp_bias": False, "pretraining_tp": 1}),
        ("afm_4_5b", {"hidden_act": ..., "num_hidden_layers": 36, "pretraining_tp": 1}),
        ("helium1_preview_2b", {"rms_norm_eps": ..., "attention_bias": False, "mlp_bias": None}),
    ],
)
def test_what_files_say_beside_changes_nothing(name, told):
    raw = to_hf(config := read(name)[0], "float32")
    assert from_hf({k: v for k, v in (raw | told).items() if v is not ...}) == config


@pytest.mark.parametrize(
    ("told", "why"),
    [({"attention_bias": True}, "attention_bias=True is of GLM"), ({"qk_norm": False}, "qk_norm=False is of GLM")],
)
def test_what_is_of_another_family_is_refused(told, why):
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(read("dots_llm1_142b_a14b")[0], **told)
    with pytest.raises(ValueError, match="shared_experts=-1 must be zero or more"):
        dataclasses.replace(read("dots_llm1_142b_a14b")[0], shared_experts=-1)


def test_layers_of_exaone_are_told_by_numbers_or_letters():
    config = read("exaone4_32b")[0]
    raw = {k: v for k, v in to_hf(config, "float32").items() if k != "layer_types"}
    for pattern in (4, "LLLG"):
        assert from_hf(raw | {"sliding_window_pattern": pattern}) == config
    everywhere = from_hf(raw | {"sliding_window": None})
    assert everywhere.attention_pattern == "G" and None not in everywhere.layer_ropes


def test_all_impossible_values_are_named_at_once():
    with pytest.raises(ValueError, match=r"num_layers=0.*mlp_dim=-1.*head_dim=7.*final_softcap=0\.0"):
        dataclasses.replace(GemmaConfig(**SMALL), num_layers=0, mlp_dim=-1, final_softcap=0.0, head_dim=7)


def test_a_chunk_is_no_window_of_its_length():
    for other, alike in ((Chunk(4), True), (4, False), (Chunk(5), False)):
        assert (Chunk(4) == other, other == Chunk(4), Chunk(4) != other) == (alike, alike, not alike)
    assert len({Chunk(4), Chunk(4), 4}) == 2


def test_configs_are_frozen_and_hashable():
    config = GemmaConfig(**SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 1  # ty: ignore[invalid-assignment]
    assert hash(config) == hash(GemmaConfig(**SMALL))


def test_configs_tables_and_accounting_do_not_import_jax():
    code = "import sys, zoo.accounting, zoo.families, zoo.huggingface.config; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_unknown_names_of_the_package_are_refused_with_the_known_ones():
    import zoo

    with pytest.raises(
        AttributeError,
        match=r"no attribute `Gemini`; it has AbstractMixture, ArceeConfig, .* GPT2Config, Gemma, Gemma3Config",
    ):
        zoo.Gemini  # noqa: B018
