"""One row for each primitive that has a rule: a function of cut arrays, one of whose equations is the primitive.

A row serves twice: with its arrays cut, and with the same arrays whole but read tile by tile (where the rule can pull).
"""

from tests.transforms.rows.algebra import LINALG, PRODUCT, REDUCTION, WINDOW
from tests.transforms.rows.elementwise import BITS, FLOAT, SPECIAL
from tests.transforms.rows.shape import INDEXING, SHAPE, SLICING

GROUPS = {
    "float": FLOAT,
    "special": SPECIAL,
    "bits": BITS,
    "shape": SHAPE,
    "slicing": SLICING,
    "indexing": INDEXING,
    "reduction": REDUCTION,
    "product": PRODUCT,
    "window": WINDOW,
    "linalg": LINALG,
}
# Rules whose cases are tests of their own in test_rules.py and test_collective.py; of those that XLA:CPU cannot run or
# that JAX does not differentiate, test_primitives.py knows that they are there.
APART = """
iota custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call linear_call remat_opt custom_linear_solve
debug_callback debug_print io_callback
all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast pmax pmin ppermute preduced psum
psum_invariant pvary reduce_scatter reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin unreduced_psum
unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p reshard sharding_constraint
scan while cond shard_map pallas_call running anchor carried begun cumulative
scan_part shifted chosen witness snapped agreed stored
nonbatchable nondifferentiable_backward nontraceable select_if_vmap unvmap_all unvmap_any unvmap_max
dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd dot_product_attention_bwd_wrapper
create_token empty empty2 iota_2x32_shape platform_index relayout select_and_scatter cholesky_update
""".split()
