"""What is true of each primitive, wherever it runs: a line of words for all that are alike in everything.

A rule (`tiling.rules`) says what a primitive does to a cut; this says what analyses, meshes and reports ask beside. A
primitive that is not here has none of these properties.

    elementwise    its rule is that of all functions of single elements
    fused          compilers make it element by element, or pick it, where its result is read; so are elementwise ones
    view           no memory is needed for the result; neither is it for an alias
    alias          the operand itself, under another name
    cheap          made again for each reader
    in_place       the result is written over an operand
    reducing       reads more than it makes: what it reads may be fused into it
    heavy          copies what it reads, whatever the size of the tile
    nested         has bodies that run as they stand
    picks          takes rows of its first operand

    linear, of values that devices hold parts of (`tiling.mesh`):
    flows          JAX types it on parts
    adding         a sum of its operands
    rescales       makes no other spread of the devices than its operand's
    typed          keeps each dimension as it is spread, or sums over it: runs on a tile wherever it runs on the whole.
                   So do those that flow

    for the last bits of its results (`analysis.rounding`):
    discontinuous  a last bit may change the result by more than that (conversions to integers: `rounding`)
    at_zero        not smooth where its operand, of a quotient the divisor, is 0
    at_one         ends where its operand is 1
    one_sided      with a constant 0 as the other operand: not smooth there
    through_zero   0 where an operand is
    copying        the result holds copies of the operand's elements
    moving         the same elements in another order, place or number; `neg` up to the sign
    choosing       each element of the result is one of some operand's
    exact          no rounding enters; nor does it if the primitive moves, copies or is discontinuous
    summing        each element of the result depends on many of the operands'
    rearranges     commutes with what is done to all elements of a product
"""

from __future__ import annotations

TABLE = """
dynamic_update_slice                                               | choosing exact in_place
layout_constraint relayout xla_metadata_value                      | alias
copy                                                               | alias moving rescales typed rearranges
name stop_gradient                                                 | alias moving typed
copy_p                                                             | alias moving typed rearranges
chosen cummax cummin scan_part scatter-max scatter-min scatter_max
scatter_min                                                        | copying
reduce_max reduce_min                                              | copying typed reducing
approx_top_k top_k                                                 | discontinuous copying
sort                                                               | discontinuous copying in_place
argmax argmin                                                      | discontinuous reducing
bitcast_convert_type                                               | discontinuous view
asinh atan atan2 bessel_i0e bessel_i1e clz cosh digamma erfc
igamma igamma_grad_a igammac lgamma mulhi nan_to_num philox2x32
philox4x32 polygamma polynomial reduce_precision
regularized_incomplete_beta sinh tan threefry4x32 zeta             | elementwise
acos acosh asin atanh erf_inv                                      | elementwise at_one
cbrt log2                                                          | elementwise at_zero
log pow rsqrt sqrt                                                 | elementwise at_zero typed
ceil eq_to floor le_to lt_to nextafter population_count rem round  | elementwise discontinuous
eq ge gt le lt ne sign                                             | elementwise discontinuous typed
conj shift_left shift_right_arithmetic shift_right_logical xor     | elementwise exact
and is_finite not or                                               | elementwise exact typed
clamp                                                              | elementwise one_sided choosing exact
abs                                                                | elementwise through_zero exact typed
integer_pow square                                                 | elementwise through_zero typed
cos erf exp exp2 expm1 log1p logistic one_minus_square sin tanh    | elementwise typed
optimization_barrier random_bits random_fold_in random_split
random_unwrap random_wrap reduce_window_max reduce_window_min
stored threefry2x32                                                | exact
reduce_and reduce_or                                               | exact reducing
reshard                                                            | flows rescales
add add_any                                                        | fused adding flows
div                                                                | fused at_zero through_zero rescales typed
concatenate pad                                                    | fused choosing exact
split                                                              | fused copying
rev                                                                | fused copying moving
dynamic_slice gather slice                                         | fused copying picks
complex imag real                                                  | fused exact
iota                                                               | fused exact cheap
broadcast_in_dim                                                   | fused moving flows cheap
transpose                                                          | fused moving flows rescales rearranges
max min                                                            | fused one_sided through_zero choosing exact typed
select_n                                                           | fused through_zero choosing exact rescales typed
convert_element_type                                               | fused through_zero flows rescales cheap rearranges
neg                                                                | fused through_zero moving rescales typed
mul                                                                | fused through_zero rescales typed
sub                                                                | fused typed
triangular_solve tridiagonal_solve                                 | heavy
scatter                                                            | in_place
reshape squeeze                                                    | moving flows rescales view rearranges
expand_dims                                                        | moving view
cond scan shard_map while                                          | nested
cumsum ragged_dot_general                                          | summing
reduce_sum                                                         | summing flows reducing
conv_general_dilated                                               | summing heavy
scatter-add                                                        | summing in_place
reduce_prod                                                        | summing reducing
dot_general                                                        | summing typed
custom_jvp_call custom_vjp_call mesh_cast                          | typed
"""


def _read(table: str) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    names: list[str] = []
    for line in table.splitlines():
        left, bar, words = line.partition("|")
        names += left.split()
        if bar:
            found |= dict.fromkeys(names, frozenset(words.split()))
            names = []
    return found


PROPERTIES = _read(TABLE)


def having(*words: str) -> frozenset[str]:
    """The primitives that have one of these properties."""
    return frozenset(name for name, known in PROPERTIES.items() if known.intersection(words))
