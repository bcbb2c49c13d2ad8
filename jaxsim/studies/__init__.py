"""One module per `+sweep=NAME`, with `run(job)`; the same names as `conf/sweep`."""
