"""What is true of each primitive, wherever it runs: a line of words for all that are alike in everything.

A rule (`tiling.rules`) says what a primitive does to a cut; this says what graphs, analyses, meshes and reports ask
beside: outside of rules and passes no primitive is asked for by name. One that is not here has no such property.

    elementwise    its rule is that of all functions of single elements
    fused          compilers make it element by element, or pick it, where its result is read; so are elementwise ones
    view           no memory is needed for the result; neither is it for an alias
    alias          the operand itself, under another name
    cheap          made again for each reader
    in_place       the result is written over an operand
    reducing       reads more than it makes: what it reads may be fused into it
    heavy          copies what it reads, whatever the size of the tile
    beside         along the cut axis, may read rows beside a tile rather than the whole
    shifts         moves rows along the axis: those beside a tile may be handed on by the tile that has them
    nested         has bodies that run as they stand
    picks          takes rows of its first operand
    looks_up       likewise, at places that its second operand holds
    casts          the same numbers in another dtype
    level          of an array of one number everywhere, one of that number
    apart          each result is of the operand of its number alone
    stops          passes no derivative on
    rounds         to so many bits, and cotangents too: no gradient can be scaled afterwards
    names          gives its operand the name by which a policy keeps it

    what runs:
    product        a matrix product
    contracts      sums over dimensions of its operands that its result has not
    lands          likewise, adding rows to an array at places
    steps          a loop of so many steps: constants, what is carried, what is scanned over
    tested         a loop that a test ends
    branches       one of several bodies, chosen by the first operand
    begins         begins with a number, and where JAX does not know that it has no derivative
    platform       the number of the platform that the program is compiled for
    devices        its body runs on each device's share
    gathers        each device gets what all have

    linear, of values that devices hold parts of (`tiling.mesh`):
    flows          JAX types it on parts
    adding         a sum of its operands
    subtracts      the first less the second
    multiplies     a product, element by element
    divides        a quotient
    respreads      spreads its operand over the devices in another way
    equates        asks whether two are equal
    rescales       makes no other spread of the devices than its operand's
    unites         makes the same of what is not, along the axes that it names
    typed          keeps each dimension as it is spread, or sums over it: runs on a tile wherever it runs on the whole.
                   So do those that flow

    for the last bits of its results (`analysis.rounding`):
    discontinuous  a last bit may change the result by more than that (conversions to integers: `rounding`)
    at_zero        not smooth where its operand, of a quotient the divisor, is 0
    pole           infinite there
    at_one         ends where its operand is 1
    at_minus_one   likewise, where it is -1
    one_sided      with a constant 0 as the other operand: not smooth there
    through_zero   0 where an operand is
    copying        the result holds copies of the operand's elements
    moving         the same elements in another order, place or number, up to the sign
    negates        with the other sign
    masks          an operand where a condition says so, 0 or another elsewhere
    agreed         its first operand as the second has it, which nobody computes again: it was told the rest
    stored         its operand as an earlier loop left it
    running        a cumulative sum, or the like
    choosing       each element of the result is one of some operand's, up to its sign, or a part of one
    exact          no rounding enters; nor does it if the primitive moves, copies or is discontinuous
    summing        each element of the result depends on many of the operands'
    rearranges     commutes with what is done to all elements of a product
"""

from __future__ import annotations

TABLE = """
dynamic_update_slice                                    | choosing exact in_place
layout_constraint pvary relayout xla_metadata_value     | alias
agreed                                                  | agreed
cumulative                                              | running
optimization_barrier                                    | exact apart
copy                                                    | alias moving rescales typed rearranges level
name                                                    | alias moving typed names
named                                                   | alias moving typed
stop_gradient                                           | alias moving typed stops
copy_p                                                  | alias moving typed rearranges level
chosen cummax cummin scan_part shifted scatter-max scatter-min
scatter_max scatter_min                                 | copying
reduce_max reduce_min                                   | copying typed reducing
approx_top_k top_k                                      | discontinuous copying
sort                                                    | discontinuous copying in_place
argmax argmin                                           | discontinuous reducing
bitcast_convert_type                                    | discontinuous view
asinh atan atan2 bessel_i0e bessel_i1e clz cosh digamma
erfc igamma igamma_grad_a igammac lgamma mulhi
nan_to_num philox2x32 philox4x32 polygamma polynomial
sinh tan threefry4x32 zeta                              | elementwise
reduce_precision                                        | elementwise rounds
acos acosh asin atanh erf_inv
regularized_incomplete_beta                             | elementwise at_one
cbrt                                                    | elementwise at_zero
log2                                                    | elementwise at_zero pole
log pow rsqrt                                           | elementwise at_zero pole typed
sqrt                                                    | elementwise at_zero typed
ceil eq_to floor le_to lt_to nextafter population_count
rem round                                               | elementwise discontinuous
ge gt le lt ne sign                                     | elementwise discontinuous typed
eq                                                      | elementwise discontinuous typed equates
conj shift_left shift_right_arithmetic
shift_right_logical xor                                 | elementwise exact
and is_finite not or                                    | elementwise exact typed
clamp                                                   | elementwise one_sided choosing exact
abs                                                     | elementwise through_zero choosing exact typed
integer_pow square                                      | elementwise through_zero typed
cos erf exp exp2 expm1 logistic one_minus_square sin
tanh                                                    | elementwise typed
log1p                                                   | elementwise at_minus_one typed
random_bits random_fold_in
random_split random_unwrap random_wrap threefry2x32     | exact
reduce_window_max reduce_window_min                     | exact beside
stored                                                  | exact stored
reduce_and reduce_or                                    | exact reducing
reshard                                                 | flows rescales respreads
add add_any                                             | fused adding flows
div                                                     | fused at_zero pole through_zero rescales typed divides
concatenate                                             | fused choosing exact beside
pad                                                     | fused choosing exact beside shifts
stack                                                   | choosing exact
reduce_window_sum                                       | beside
split                                                   | fused copying beside
rev                                                     | fused copying moving
dynamic_slice                                           | fused copying picks
slice                                                   | fused copying picks beside
gather                                                  | fused copying picks looks_up
complex imag real                                       | fused choosing exact
iota                                                    | fused exact cheap
broadcast_in_dim                                        | fused moving flows cheap level
transpose                                               | fused moving flows rescales rearranges
max min                                                 | fused one_sided through_zero choosing exact typed
select_n                                                | fused through_zero choosing exact rescales typed masks
convert_element_type                                    | fused through_zero flows rescales cheap rearranges casts level
neg                                                     | fused through_zero moving rescales typed negates
mul                                                     | fused through_zero rescales typed multiplies
sub                                                     | fused typed subtracts
triangular_solve tridiagonal_solve                      | heavy
scatter                                                 | in_place
reduce reduce_window                                    | begins
reshape                                                 | moving flows rescales view rearranges level
squeeze                                                 | moving flows rescales view rearranges
expand_dims                                             | moving view
cond                                                    | nested branches
scan                                                    | nested steps
shard_map                                               | nested devices
while                                                   | nested tested
platform_index                                          | platform
cumsum ragged_dot_general                               | summing
reduce_sum                                              | summing flows reducing contracts
conv_general_dilated                                    | summing heavy beside
scatter-add                                             | summing in_place lands
reduce_prod                                             | summing reducing
dot_general                                             | summing typed product contracts
custom_jvp_call custom_vjp_call mesh_cast               | typed
all_gather                                              | unites gathers
all_gather_invariant all_gather_reduced                 | gathers
pmax pmin psum                                          | unites
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


def has(name: str, word: str) -> bool:
    """Whether a primitive has a property."""
    return word in PROPERTIES.get(name, ())


# ------------------------------------------------------------------------------------------- calls, and linear operands

# Call-like primitives whose body may stand in their place (that of `tiled` is in `lower.atomic`).
CALLS = "jit pjit closed_call core_call call composite eval_jaxpr xla_metadata_call tiled".split()
# The same, but with a derivative rule of their own: inlined once no derivative is to be taken any more.
CUSTOM_CALLS = "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call linear_call remat_opt".split()
# Equinox's and Lineax's own, with rules for everything; what they compute is a program of others.
IMPLEMENTED = ("maybe_set", "vprim", "linear_solve")
SOLVE = "custom_linear_solve"  # the same, with several bodies
NAMED = "named"  # its operand; the cotangent has a name
LINEAR = "tiled_linear"  # a derivative of a `tile` within, whose body is a function
SCAN = "scan"
# jax.checkpoint's names in the versions of JAX.
REMAT = ("remat2", "checkpoint", "remat")

# Linear, in partial sums (`rules.linear`) as in cotangents: in each operand that is listed by itself, ...
PRODUCTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(["mul", "dot_general", "conv_general_dilated"], (0, 1)),
    **dict.fromkeys(["div", "dynamic_slice", "gather"], (0,)),
    "triangular_solve": (1,),
    **dict.fromkeys(["dot_product_attention_bwd", "dot_product_attention_bwd_wrapper"], (12,)),
}
# ... and in these together: those that do not depend on a cotangent are 0.
SUMS: dict[str, slice] = {
    **dict.fromkeys(
        """neg convert_element_type copy copy_p reshape transpose broadcast_in_dim squeeze reduce_sum slice rev cumsum
        real imag conj stop_gradient name add sub add_any concatenate pad split stack unstack reshard mesh_cast
        layout_constraint relayout xla_metadata_value nonbatchable nondifferentiable_backward nontraceable""".split(),
        slice(None),
    ),
    "select_n": slice(1, None),
    "dynamic_update_slice": slice(0, 2),
    **dict.fromkeys(["scatter-add", "scatter-sub"], slice(0, None, 2)),
}


def summed(name: str, count: int) -> set[int]:
    """Which of its `count` operands a primitive is linear in together."""
    return {*range(count)[SUMS.get(name, slice(0))]}
