"""`tile` as a small compiler: a user's function in, a scanned custom-VJP computation out.

    api        `tile`, `TiledFunction`: the front door
    call       one call -> a planned `Program`, under `jax.jit`
    inputs     which arrays are cut, and where (axes, annotations, Auto meshes)
    ir         the graph, placements (Whole, Tiled, Partial), facts, loops, edits, value numbering
    rules      one entry per primitive: where a cut dimension goes (sharding propagation, as in GSPMD and Shardy)
    analysis   graph -> facts: propagation, halos, footprint limits, what may not be compared across loops
    passes     graph -> graph: the ordered list and its driver
    schedule   facts -> loops: loop fission, each result in the latest loop that its readers allow
    lower      loops -> `lax.scan`, and the epilogue between them
    autodiff   derivatives are programs again: the joint graph, residuals, the custom derivative rule
    mesh       what is spread over devices; sums left unreduced, weights gathered once
    report     plans, tables, estimates of memory, the choice of n

Read in this order, from `ir` on. `passes` and `schedule` stand on `analysis`, that on `rules`, those on `ir`.
"""
