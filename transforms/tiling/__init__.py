"""`tile` as a small compiler: a user's function in, a scanned custom-VJP computation out. In reading order:

    api        `tile`, the front door: a call is traced, planned once inside `jax.jit`, and run
    inputs     which arrays of a call are cut, and along which dimension: axes, annotations, Auto meshes
    ir         jaxprs as graphs; placements (Whole, Tiled, Partial), what is known of each value, loops; edits, effects
    rules      one entry per primitive: where a cut dimension goes (sharding propagation, as in GSPMD and Shardy)
    primitives what is true of each primitive wherever it runs: discontinuous, elementwise, copying, ...
    analysis   graph -> facts: propagation, halos, footprint limits, what may not be compared across loops
    passes     graph -> graph: the rewrites that let more be cut, and the driver that tries them in order
    schedule   facts -> loops: loop fission, each result in the latest loop that its readers allow
    lower      loops -> `lax.scan`, and the epilogue of whole values between and after them
    autodiff   derivatives are programs again: the joint graph, residuals, the custom derivative rule
    mesh       what is spread over devices: layouts read from types, unreduced sums, weights gathered once
    report     plans, their tables, the estimate of memory, the choice of n

Imports run one way: api > autodiff, report > lower, passes > schedule > analysis > rules > ir > mesh.layout.
"""
