"""Primitives that no tile goes through, and primitives that run on whole operands alone: each with its reason."""

from __future__ import annotations

from transforms.tiling.rules import complete, of_nothing, refuse, register

refuse(
    *"""accum_grad_in_ref addupdate box_get box_set broadcast_to core_map create_linear empty_ref free_ref freeze get
    log_extend log_read masked_load masked_swap new_box new_log new_ref pin run_state swap unpin""".split(),
    reason="reads or writes a mutable array, and tiles have an order of their own",
)
refuse(
    *"""delay get_global jaxpr_call masked_store multiple_of num_programs program_id reciprocal run_scoped
    semaphore_read semaphore_signal semaphore_wait with_memory_space_constraint""".split(),
    reason="belongs inside a kernel",
)
refuse("after_all", reason="puts side effects in an order, and tiles have one of their own")
refuse("check", reason="is a check that `jax.experimental.checkify` must turn into a value first")
refuse("dim_as_value", "dimension_size", "shape_assertion", reason="computes with shapes that are not numbers yet")
refuse(
    *"custom_jvp_call_jaxpr custom_lin stage unreachable zeros_like".split(),
    reason="stands for something that cannot be run",
)
refuse(
    *"""all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start pbroadcast_done
    pbroadcast_start ppermute_done ppermute_start precv psend psum_done psum_invariant_start psum_start
    reduce_scatter_done reduce_scatter_start unreduced_psum_start unreduced_reduce_scatter_start""".split(),
    reason="is half of a transfer between devices",
)

complete("pure_callback", "ffi_call", "call_exported", reason="is a function of whole arrays that JAX cannot look into")
complete(
    *"""call_hi_primitive call_hi_primitive_linearized cudnn_fusion custom_partitioning dot_product_attention_fp8_bwd
    dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper mpmd_map
    scaled_matmul scaled_matmul_wrapper""".split(),
    reason="is a kernel that was written for whole arrays",
)
complete(
    *"""bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_spdot_general
    bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense
    coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec csr_spmm
    csr_spmv csr_todense spsolve todense""".split(),
    reason="works on a sparse array, whose parts are not slices",
)
complete("scaled_dot", reason="multiplies blocks that share a scale")
complete("from_edtype", "to_edtype", reason="changes to or from a dtype that is not a number's")
complete("tie", reason="ties two arrays together")
complete("inspect_sharding", reason="shows the sharding of the whole array")


register("axis_index", "create_token", "empty", "empty2", "iota_2x32_shape", "platform_index", push=of_nothing)
