"""`tile` as a small compiler: a user's function in, a scanned custom-VJP computation out. In reading order:

    api        `tile`, the front door: a call is traced, planned once inside `jax.jit`, and run
    inputs     which arrays of a call are cut, and along which dimension: axes, annotations, Auto meshes
    ir         graphs, and the changes to them; placements (Whole, Tiled, Partial), what is known of each value, loops
    frontend   jaxpr -> graph in canonical form; functions of values -> equations of a graph
    primitives what is true of each primitive wherever it runs: discontinuous, elementwise, copying, ...
    rules      one entry per primitive: where a cut dimension goes (sharding propagation, as in GSPMD and Shardy)
    analysis   graph -> facts: propagation, halos, footprint limits, what may not be compared across loops
    regions    rules of equations with bodies, which are analysed as programs are
    passes     graph -> graph: the rewrites that let more be cut, and the driver that tries them in order
    schedule   facts -> loops: loop fission, each result in the latest loop that its readers allow
    lower      loops -> `lax.scan`, and the epilogue of whole values between and after them
    autodiff   derivatives are programs again: the joint graph, residuals, the custom derivative rule
    mesh       what is spread over devices: unreduced sums, weights gathered once
    report     plans, their tables, the estimate of memory, the choice of n

Imports run one way: api > report > autodiff > lower, passes > schedule > regions > analysis > mesh > rules >
frontend, inputs > ir > primitives.
"""
